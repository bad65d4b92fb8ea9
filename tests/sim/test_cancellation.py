"""The tool that cancels at one chosen wait does so there, and nowhere else."""

from __future__ import annotations

import asyncio

import pytest

from kvflow.testing.cancellation import Steps, stepping


async def three_waits(seen: list[str]) -> str:
    try:
        seen.append("zero")
        await asyncio.sleep(0)
        seen.append("one")
        await asyncio.shield(asyncio.ensure_future(asyncio.sleep(0.001)))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        await done  # no wait
        seen.append("two")
        await asyncio.Event().wait() if "for ever" in seen else await asyncio.sleep(0)
        return "end"
    except asyncio.CancelledError:
        seen.append("cancelled")
        await asyncio.sleep(0)
        seen.append("cleaned")
        raise


@pytest.mark.parametrize("at", range(4))
async def test_one_wait_is_cancelled(at: int) -> None:
    seen: list[str] = []
    steps = Steps(three_waits(seen), at)
    (result,) = await asyncio.gather(steps.task(), return_exceptions=True)
    if at == 3:
        assert result == "end" and steps.waits == 3 and "cancelled" not in seen
    else:
        assert isinstance(result, asyncio.CancelledError) and steps.waits == at + 2
        assert seen == [*["zero", "one", "two"][: at + 1], "cancelled", "cleaned"]


async def test_and_the_next_one_in_the_clean_up() -> None:
    seen: list[str] = []
    steps = Steps(three_waits(seen), 1, 2)
    await asyncio.gather(steps.task(), return_exceptions=True)
    assert seen == ["zero", "one", "cancelled"] and steps.waits == 3


async def test_a_wait_is_cancelled_late_if_it_lasts() -> None:
    seen = ["for ever"]
    task = Steps(three_waits(seen), 0, 2, after_s=0.5).task()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and seen == ["for ever", "zero", "one", "two", "cancelled", "cleaned"]


async def test_errors_of_the_work_are_its_own() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Steps(fails(), 5)


async def test_the_first_task_of_a_name_is_stepped() -> None:
    seen: list[list[str]] = [[], [], []]
    with stepping("three_waits", 1) as found:
        tasks = [asyncio.create_task(three_waits(one)) for one in seen[:2]]
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (
        [task.cancelled() for task in tasks] == [True, False]
        and len(found) == 1
        and found[0].waits == 3
    )
    after = asyncio.create_task(three_waits(seen[2]))
    assert await after == "end"
