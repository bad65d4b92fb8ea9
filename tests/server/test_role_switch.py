"""POST /switch_role: when it may be, what it changes, and what is left when the new role does not
start.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvflow.http.authorization import Keys
from kvflow.http.errors import ConflictError
from kvflow.protocols.errors import MisuseError
from kvflow.serve.http import role_switch
from tests.server.fake_service import FakeService, Meeting, Role, RunningFake, Server

AT_REST = {"pages_free": 4, "pages_at_rest": True, "rooms_by_state": {}, "running": 0, "waiting": 0}
KEY = "sesame"


@pytest.fixture
async def decode(meeting: Meeting) -> Role:
    """At rest, with a prefill that it could become."""
    role = Role(FakeService("decode", meeting), keys=Keys(admin=KEY))
    role.service.changed_report = AT_REST
    turned = FakeService("prefill", meeting)
    turned.incarnation = 0xDEF
    role.other = RunningFake(turned, 9001)
    return role


@pytest.fixture
async def session() -> Any:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as made:
        yield made


async def switch(session: aiohttp.ClientSession, server: Server, **body: Any) -> tuple[int, Any]:
    async with session.post(
        server.make_url("/switch_role"), json={"role": "prefill", **body}
    ) as answer:
        return answer.status, json.loads(await answer.read())


async def get(session: aiohttp.ClientSession, server: Server, path: str) -> Any:
    async with session.get(server.make_url(path)) as answer:
        return json.loads(await answer.read())


async def test_a_decode_becomes_a_prefill(
    decode: Role, decode_server: Server, meeting: Meeting, session: aiohttp.ClientSession
) -> None:
    before = await get(session, decode_server, "/server_info")
    assert (before["started_as"], before["switching_to"], before["last_switch"]) == (
        "decode",
        None,
        None,
    )
    old = decode.role_switch._running
    status, answer = await switch(session, decode_server)
    assert (status, answer["role"], answer["switched"], answer["incarnation"]) == (
        200,
        "prefill",
        True,
        f"{0xDEF:016x}",
    )
    assert isinstance(old, RunningFake) and old.closed
    info = await get(session, decode_server, "/server_info")
    assert (info["role"], info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == (
        "prefill",
        "prefill",
        9001,
    )
    assert (info["started_as"], info["draining"]) == ("decode", False)
    assert (info["last_switch"]["ok"], info["last_switch"]["error"]) == (True, None)
    assert (await get(session, decode_server, "/health"))["status"] == "ok"
    body = {
        "text": "w1",
        "bootstrap_room": 5,
        "bootstrap_host": "h",
        "sampling_params": {"max_new_tokens": 3},
    }
    async with session.post(decode_server.make_url("/generate"), json=body) as done:
        assert (await done.json())["output_ids"] == [2]  # one token: a prefill answers
    async with session.get(decode_server.make_url("/metrics")) as metrics:
        assert "kvflow_decode_steps_total" not in await metrics.text()
    status, answer = await switch(session, decode_server)
    assert (status, answer["switched"], answer["seconds"]) == (200, False, None)  # it is one


async def test_a_role_that_does_not_start_leaves_the_old_one(
    decode: Role,
    decode_server: Server,
    meeting: Meeting,
    session: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for error in (
        MisuseError("port 8998 on h is in use"),
        OSError("no memory"),
        ValueError("a bug"),
    ):
        decode.other = error
        caplog.clear()
        status, answer = await switch(session, decode_server)
        text = f"this worker cannot serve as prefill, and serves as decode again: {error}"
        assert (status, answer["error"]["message"]) == (500, text)
        traced = [record.exc_info[1] for record in caplog.records if record.exc_info]
        assert traced == ([error] if isinstance(error, ValueError) else []), (
            "only a bug is worth its traceback"
        )
        info = await get(session, decode_server, "/server_info")
        assert (info["role"], info["switching_to"], info["last_switch"]["error"]) == (
            "decode",
            None,
            text,
        )
        assert (await get(session, decode_server, "/health"))["status"] == "ok"
    meeting.of(1).set_result(None)
    body = {
        "text": "w1",
        "bootstrap_room": 1,
        "bootstrap_host": "h",
        "sampling_params": {"max_new_tokens": 3},
    }
    async with session.post(decode_server.make_url("/generate"), json=body) as done:
        assert (await done.json())["output_ids"] == [2, 3, 4]


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
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
    changes: dict[str, Any],
    said: str,
) -> None:
    decode.service.changed_report = {**AT_REST, **changes}
    for drain_timeout_s, after in ((0, ""), (0.02, " after 0.02 s (drain_timeout_s)")):
        status, answer = await switch(session, decode_server, drain_timeout_s=drain_timeout_s)
        assert (status, answer["error"]["message"]) == (
            409,
            f"this worker is not idle{after}: {said}",
        )
        assert not decode.pipeline.draining
    assert decode.role_switch.role == "decode"


async def test_a_worker_that_cannot_serve_keeps_its_role(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    decode.service.unavailable_reason = "the engine has stopped"
    status, answer = await switch(session, decode_server)
    assert (status, answer["error"]["message"]) == (
        409,
        "this worker is not idle: the engine has stopped",
    )


async def test_a_switch_waits_for_what_is_no_request_and_holds_up_nothing(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    decode.service.changed_report = {**AT_REST, "quarantine_pages": 2}

    def prove() -> None:
        decode.service.changed_report = AT_REST

    asyncio.get_running_loop().call_later(0.02, prove)
    assert (await switch(session, decode_server, drain_timeout_s=20))[0] == 200


async def test_a_drain_lets_what_runs_end_and_refuses_what_comes(
    decode: Role, decode_server: Server, meeting: Meeting, session: aiohttp.ClientSession
) -> None:
    decode.service.gate.clear()
    body = {
        "text": "w1",
        "bootstrap_room": 1,
        "bootstrap_host": "h",
        "sampling_params": {"max_new_tokens": 3},
    }
    meeting.of(1).set_result(None)
    held = asyncio.create_task(session.post(decode_server.make_url("/generate"), json=body))
    await asyncio.wait_for(decode.service.started.wait(), 5)
    status, answer = await switch(session, decode_server)
    assert (status, answer["error"]["message"]) == (409, "this worker is not idle: 1 requests")
    switching = asyncio.create_task(switch(session, decode_server, drain_timeout_s=60))
    async with asyncio.timeout(5):
        while not decode.pipeline.draining:
            await asyncio.sleep(0)
    reason = "this worker switches from decode to prefill"
    assert (await get(session, decode_server, "/health"))["error"]["message"] == reason
    assert (await get(session, decode_server, "/server_info"))["switching_to"] == "prefill"
    async with session.post(
        decode_server.make_url("/generate"), json={**body, "bootstrap_room": 2}
    ) as refused:
        assert refused.status == 503
        assert (await refused.json())["error"] | {"param": None} == {
            "type": "service_unavailable",
            "code": "shutdown",
            "param": None,
            "message": reason,
        }
    status, answer = await switch(session, decode_server)
    assert (status, answer["error"]["message"]) == (409, "a switch to prefill is under way")
    decode.service.gate.set()
    assert (await (await asyncio.wait_for(held, 5)).json())["output_ids"] == [2, 3, 4]
    assert (await asyncio.wait_for(switching, 5))[0] == 200


async def test_a_caller_that_leaves_does_not_stop_a_switch(
    decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()
    may_start = asyncio.Event()
    ended = asyncio.Event()
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
    await asyncio.wait_for(ended.wait(), 5)
    assert (switching.role, decode.pipeline.service, decode.pipeline.draining) == (
        "prefill",
        other.service,
        False,
    )


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
    ("body", "said"),
    [
        ({"role": "router"}, "role"),
        ({"role": None}, "role"),
        ({"drain_timeout_s": -1}, "drain_timeout_s"),
        ({"drain_timeout_s": "soon"}, "drain_timeout_s"),
    ],
)
async def test_bad_bodies_name_the_field(
    decode_server: Server, session: aiohttp.ClientSession, body: Any, said: str
) -> None:
    status, answer = await switch(session, decode_server, **body)
    assert status == 400 and said in answer["error"]["message"]
