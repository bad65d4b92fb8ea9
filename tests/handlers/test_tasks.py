"""A fence that fails is asked again; a task that ends by surprise is logged and counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvflow.protocols.commands import Linked
from kvflow.protocols.errors import Code
from kvflow.protocols.ports import PlaneAddress
from kvflow.testing.pair import Pair, pair, until
from tests.handlers.scenes import PROMPT, code_of, finish, known, midway


def few_descriptors(p: Pair, times: int) -> list[int]:
    """Let the fences of every plane fail at first."""
    failed: list[int] = []
    for node in p.nodes:
        plane = p.plane(node)
        fence, left = plane.fence, iter(range(times))

        async def failing(writer: PlaneAddress, fence: object = fence, left: object = left) -> None:
            for i in left:  # type: ignore[attr-defined]
                failed.append(i)
                raise OSError(24, "Too many open files")
            await fence(writer)  # type: ignore[operator]

        plane.fence = failing  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize("dies", ["prefill", "decode"])
async def test_a_fence_that_fails_is_asked_again(
    dies: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as p:
        failed = few_descriptors(p, 2)
        source, target = await midway(p)
        await until(lambda: len(failed) == 4)
        assert p.prefill.counts.handler_errors == p.decode.counts.handler_errors == 2
        assert "cannot watch" in caplog.text and "Too many open files" in caplog.text
        await p.crash(p.prefill if dies == "prefill" else p.decode)
        assert (
            await code_of(target.landed() if dies == "prefill" else source.done()) is Code.PEER_LOST
        )
        if dies == "prefill":
            await until(p.decode.pool.pages.at_rest)
        else:
            await until(lambda: not known(p.prefill))


async def test_a_task_that_ends_by_surprise_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        raise ZeroDivisionError

    async with pair() as p:
        counts = p.decode.counts
        task = p.decode.shell.spawn(work(), "kvflow-worker")
        await until(task.done)
        await until(lambda: counts.handler_errors == 1)
        [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "kvflow-worker" in record.getMessage() and record.exc_info


async def test_a_node_closes_whose_task_has_ended_in_the_same_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Python 3.12 has it: `gather` returns at once where everything has ended."""
    gather = asyncio.gather

    def at_once(*tasks: asyncio.Future[Any], **options: Any) -> asyncio.Future[Any]:
        if tasks and all(task.done() for task in tasks):
            ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ended.set_result([None for _ in tasks])
            asked.append(len(tasks))
            assert len(asked) < 10, "it asks again and again, and no callback ever runs"
            return ended
        return gather(*tasks, **options)

    async def work() -> None:
        """Ends with its first step."""

    asked: list[int] = []
    monkeypatch.setattr(asyncio, "gather", at_once)
    async with pair() as p:
        shell = p.decode.shell
        await shell.stop()
        shell.spawn(work(), "ends at once")
        await asyncio.sleep(0)  # it has ended, and the callbacks of that come in the next turn
        await shell.stop()


async def test_a_command_that_fails_takes_no_other_with_it(
    p: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    shell = p.decode.shell
    run = shell.runners[Linked]
    failed: list[Linked] = []

    def failing(command: Linked) -> None:
        if not failed:
            failed.append(command)
            raise ZeroDivisionError
        run(command)

    shell.runners[Linked] = failing
    first, second = p.decode.room(7, "sim", PROMPT), p.decode.room(8, "sim", PROMPT)
    source = p.prefill.room(8, PROMPT)
    await source.matched()  # both were linked in one turn
    assert failed and shell.counts.handler_errors == 1 and "Linked" in caplog.text
    first.close()
    await finish(p, source, second)
    shell.counts.handler_errors = 0
