"""POST /switch_role: when a worker may, what changes, and what a failed start leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvflow.http.authorization import Keys
from kvflow.http.errors import ConflictError
from kvflow.protocols.errors import MisuseError
from kvflow.serve.http import role_switch
from kvflow.testing.pair import until
from tests.fakes.service import FakeService, Meeting, Role, RunningFake, body

AT_REST = {"pages_free": 4, "pages_at_rest": True, "rooms_by_state": {}, "running": 0, "waiting": 0}


@pytest.fixture
async def decode(meeting: Meeting) -> AsyncIterator[Role]:
    async with Role(FakeService("decode", meeting), keys=Keys(admin="sesame")) as role:
        role.at_rest_before(FakeService("prefill", meeting))
        yield role


async def switch(decode: Role, **given: Any) -> Any:
    return await decode.post("/switch_role", {"role": "prefill", **given})


async def refused(decode: Role, status: int, **given: Any) -> str:
    error = await decode.refused(status, "/switch_role", {"role": "prefill", **given})
    return str(error["message"])


async def test_a_decode_becomes_a_prefill(decode: Role) -> None:
    info = await decode.get("/server_info")
    before = {"started_as": "decode", "switching_to": None, "last_switch": None}
    assert info | before == info
    old = decode.role_switch._running
    answer = await switch(decode)
    switched = {"role": "prefill", "switched": True, "incarnation": f"{0xDEF:016x}"}
    assert answer | switched == answer
    assert isinstance(old, RunningFake) and old.closed
    info = await decode.get("/server_info")
    after = {
        "role": "prefill",
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": 9001,
        "started_as": "decode",
        "draining": False,
    }
    assert info | after == info
    assert (info["last_switch"]["ok"], info["last_switch"]["error"]) == (True, None)
    assert (await decode.get("/health"))["status"] == "ok"
    done = await decode.post("/generate", body())
    assert done["output_ids"] == [3]  # one token: a prefill answers
    assert "kvflow_decode_steps_total" not in await decode.metrics()
    answer = await switch(decode)
    assert (answer["switched"], answer["seconds"]) == (False, None)  # it is one


@pytest.mark.parametrize(
    "error",
    [MisuseError("port 8998 on h is in use"), OSError("no memory"), ValueError("a bug")],
    ids=repr,
)
async def test_a_role_that_does_not_start_leaves_the_old_one(
    decode: Role, meeting: Meeting, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    decode.other = error
    said = f"this worker cannot serve as prefill, and serves as decode again: {error}"
    assert await refused(decode, 500) == said
    traced = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert traced == ([error] if isinstance(error, ValueError) else []), (
        "only a bug is worth its traceback"
    )
    info = await decode.get("/server_info")
    assert (info["role"], info["switching_to"]) == ("decode", None)
    assert info["last_switch"]["error"] == said
    assert (await decode.get("/health"))["status"] == "ok"
    meeting.come(7)
    assert (await decode.post("/generate", body()))["output_ids"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rooms_by_state": {"transferring": 2, "success": 1}}, "3 open rooms"),
        ({"quarantine_pages": 7}, "7 pages in quarantine"),
        ({"quarantine_pages": 7, "pages_at_rest": False}, "7 pages in quarantine"),
        ({"pinned_pages": 5}, "5 pages that writes still read"),
        ({"waiting": 2, "running": 1}, "3 requests"),
        ({"pages_at_rest": False, "pages_free": 1}, "3 pages in use"),
    ],
)
async def test_a_worker_that_is_not_at_rest_keeps_its_role(
    decode: Role, changes: dict[str, Any], said: str
) -> None:
    decode.service.changed_report = {**AT_REST, **changes}
    for drain_timeout_s, after in ((0, ""), (0.02, " after 0.02 s (drain_timeout_s)")):
        message = await refused(decode, 409, drain_timeout_s=drain_timeout_s)
        assert message == f"this worker is not idle{after}: {said}"
        assert not decode.pipeline.draining
    assert decode.role_switch.role == "decode"


async def test_a_worker_that_cannot_serve_keeps_its_role(decode: Role) -> None:
    decode.service.unavailable_reason = "the engine has stopped"
    assert await refused(decode, 409) == "this worker is not idle: the engine has stopped"


async def test_a_switch_waits_for_what_is_no_request_and_holds_up_nothing(decode: Role) -> None:
    decode.service.changed_report = {**AT_REST, "quarantine_pages": 2}

    def prove() -> None:
        decode.service.changed_report = AT_REST

    asyncio.get_running_loop().call_later(0.02, prove)
    await switch(decode, drain_timeout_s=20)


async def test_a_drain_lets_what_runs_end_and_refuses_what_comes(
    decode: Role, meeting: Meeting
) -> None:
    decode.service.gate.clear()
    meeting.come(7)
    held = asyncio.create_task(decode.post("/generate", body()))
    await decode.begun()
    assert await refused(decode, 409) == "this worker is not idle: 1 requests"
    switching = asyncio.create_task(switch(decode, drain_timeout_s=60))
    await until(lambda: decode.pipeline.draining)
    reason = "this worker switches from decode to prefill"
    assert (await decode.get("/health", status=503))["error"]["message"] == reason
    assert (await decode.get("/server_info"))["switching_to"] == "prefill"
    error = await decode.refused(503, "/generate", body(bootstrap_room=8))
    told = {"type": "service_unavailable", "code": "shutdown", "message": reason}
    assert error | told == error
    assert await refused(decode, 409) == "a switch to prefill is under way"
    decode.service.gate.set()
    assert (await asyncio.wait_for(held, 20))["output_ids"] == [3, 4, 5]
    await asyncio.wait_for(switching, 20)


async def test_a_caller_that_leaves_does_not_stop_a_switch(decode: Role) -> None:
    started, may_start, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    other = decode.other
    assert isinstance(other, RunningFake)

    async def slowly(role: str) -> RunningFake:
        started.set()
        await may_start.wait()
        return other

    switching = role_switch.RoleSwitch(decode.pipeline, RunningFake(decode.service, None), slowly)
    asking = asyncio.create_task(switching.switch("prefill"))
    await started.wait()
    asking.cancel()
    await asyncio.wait([asking])
    assert switching.describe()["switching_to"] == "prefill"
    may_start.set()
    assert switching._switching is not None
    switching._switching.add_done_callback(lambda _: ended.set())
    await asyncio.wait_for(ended.wait(), 20)
    assert (switching.role, decode.pipeline.draining) == ("prefill", False)
    assert decode.pipeline.service is other.service


async def test_a_server_that_is_stopped_in_mid_switch_does_not_come_back(decode: Role) -> None:
    started = asyncio.Event()

    async def never(role: str) -> RunningFake:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    running = RunningFake(decode.service, None)
    switching = role_switch.RoleSwitch(decode.pipeline, running, never)
    asking = asyncio.create_task(switching.switch("prefill"))
    await started.wait()
    decode.pipeline.stop()
    await switching.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert running.closed and decode.pipeline.draining and switching.role == "decode"
    with pytest.raises(ConflictError, match="this server is shutting down"):
        await switching.switch("prefill")


async def test_an_old_role_that_ends_in_disorder_changes_nothing(
    decode: Role, caplog: pytest.LogCaptureFixture
) -> None:
    class Disorderly(RunningFake):
        async def close(self) -> None:
            raise MisuseError("cannot close")

    async def start(role: str) -> RunningFake:
        assert isinstance(decode.other, RunningFake)
        return decode.other

    switching = role_switch.RoleSwitch(decode.pipeline, Disorderly(decode.service, None), start)
    assert (await switching.switch("prefill"))["switched"]
    assert "the old role, decode, has not ended in order" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"role": "router"}, "role"),
        ({"role": None}, "role"),
        ({"drain_timeout_s": -1}, "drain_timeout_s"),
        ({"drain_timeout_s": "soon"}, "drain_timeout_s"),
    ],
)
async def test_bad_bodies_name_the_field(decode: Role, given: Any, said: str) -> None:
    assert said in await refused(decode, 400, **given)
