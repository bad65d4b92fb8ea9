"""Workers that join a running router, leave it, come back as another one, or may not join."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from kvflow.http.authorization import Keys
from kvflow.protocols.wire.messages import WIRE_VERSION
from kvflow.router import membership
from kvflow.serve.http import operations
from kvflow.serve.launch import joining
from kvflow.testing.pair import until
from tests.fakes.servers import Client, Front, answers, serving, stream_of
from tests.fakes.service import BODY, FakeService, Meeting, Role

KEY = "sesame"
OPERATOR: dict[str, Any] = {"keys": Keys(admin=KEY), "retry_timeout_s": 0}


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """A router that workers can join, and that knows none of them."""
    async with Front([], [], **OPERATOR) as made:
        yield made


async def leave(front: Front, path: str, status: int = 202) -> Any:
    answer = await front.call("DELETE", path)
    assert answer.status == status, answer
    return answer.json


async def test_workers_join_an_empty_router_and_leave_it(
    front: Front, prefill: Role, decode: Role
) -> None:
    error = (await front.get("/health", status=503))["error"]
    assert error["code"] == "no_workers"
    assert "no prefill worker is known; no decode worker is known" in error["message"]
    await front.refused(503, "/generate", BODY)
    path = ""
    for worker in (prefill, decode):
        role = worker.service.role
        accepted = await front.join(worker, worker_type=role)
        path = f"/workers/{accepted['worker_id']}"
        told = {"status": "accepted", "url": worker.url, "location": path}
        assert accepted | told == accepted
        found = await front.get(path)
        assert found | {"worker_type": role, "is_healthy": True, "load": 0} == found
    assert (await front.post("/generate", BODY))["output_ids"] == [2, 3, 4]
    found = await front.get("/workers")
    assert found["total"] == 2
    assert found["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 0}
    await leave(front, path)
    await leave(front, path, 404)
    await front.get(path, status=404)
    error = await front.refused(503, "/generate", BODY)
    assert error["message"] == "no decode worker is up (0 known)"


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_worker_that_leaves_is_forgotten_when_its_last_request_is_answered(
    front: Front, prefill: Role, decode: Role, comes_back: bool
) -> None:
    await front.join(prefill)
    path = (await front.join(decode))["location"]
    decode.service.gate.clear()
    held = asyncio.create_task(front.post("/generate", BODY))
    await decode.begun()
    for _ in range(2):  # a drain that is asked for twice is one
        accepted = await leave(front, path)
        told = "it gets no more requests, and has left when 1 are answered"
        assert accepted["message"] == told
    found = await front.get(path)
    leaving = {"leaving": True, "load": 1, "reason": "it leaves this router"}
    assert found | leaving == found
    await front.refused(503, "/generate", BODY)
    await front.get("/health", status=503)
    if comes_back:
        assert (await front.join(decode))["location"] == path
    decode.service.gate.set()
    await asyncio.wait_for(held, 20)
    await front.get(path, status=200 if comes_back else 404)
    await front.post("/generate", BODY, status=200 if comes_back else 503)


async def test_joining_twice_is_joining_once(front: Front, prefill: Role) -> None:
    urls = (prefill.url + slash for slash in ("", "/", ""))
    accepted = await asyncio.gather(
        *(front.post("/workers", {"url": url}, status=202) for url in urls)
    )
    assert len({answer["worker_id"] for answer in accepted}) == 1
    assert len(front.router.workers.all) == 1


@pytest.mark.parametrize(
    ("document", "status", "said"),
    [
        ({"url": "nonsense"}, 400, "url: 'nonsense' is not the http:// or https:// URL of a"),
        ({"url": "ftp://h:1"}, 400, "'ftp://h:1' is not"),
        ({"url": "http://h:99999"}, 400, "'http://h:99999' is not"),
        ({"url": "http://"}, 400, "'http://' is not"),
        ({"url": "http://h/?x=1"}, 400, "is not the http"),
        ({"worker_type": "prefill"}, 400, "url"),
        ({"url": 3}, 400, "url"),
        ({"url": "http://h", "worker_type": "regular"}, 400, "'regular' is not prefill or decode"),
        ({"url": "http://127.0.0.1:1"}, 502, "http://127.0.0.1:1: Cannot connect"),
    ],
)
async def test_what_cannot_join_is_told_why(
    front: Front, document: Any, status: int, said: str
) -> None:
    error = await front.refused(status, "/workers", document)
    assert said in error["message"]
    assert front.router.workers.all == []


async def elsewhere(_: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    ("handler", "status", "said"),
    [
        (stream_of(None), 502, "Server disconnected"),
        (answers("<html>"), 502, "malformed"),
        (answers("[" * 100_000), 502, "maximum recursion depth"),
        (elsewhere, 502, "/server_info answered 302"),
        (answers('{"role": "router"}'), 409, "its disaggregation_mode is None"),
    ],
    ids=["hangs up", "no JSON", "nested", "elsewhere", "a router"],
)
async def test_a_server_of_another_kind_cannot_join(
    front: Front, handler: Any, status: int, said: str
) -> None:
    async with serving(web.get("/server_info", handler)) as server:
        told = await front.turned_away(status, server)
    assert said in told
    assert not told.endswith(": "), "a colon that no reason follows"
    assert front.router.workers.all == []


async def test_a_worker_of_another_role_or_model_is_a_conflict(
    front: Front, prefill: Role, decode: Role
) -> None:
    told = await front.turned_away(409, prefill, worker_type="decode")
    assert told == f"{prefill.url} is a prefill worker, not a decode worker"
    await front.join(prefill)
    told = await front.turned_away(409, prefill, worker_type="decode")
    assert "is here as a prefill worker, not as decode" in told
    decode.service.fingerprint = "another model"
    told = await front.turned_away(409, decode)
    assert "has another model than the workers here: it serves 'fake' (another model)" in told
    assert len(front.router.workers.all) == 1


async def test_a_worker_that_comes_back_with_another_model_is_left_out_while_others_have_the_first(
    front: Front, prefill: Role, decode: Role
) -> None:
    await front.join(prefill)
    await front.join(decode)
    decode.service.fingerprint = "another model"
    worker = await front.checked(decode)
    reason = "it has another model now: fingerprint 'another model' instead of 'fake model'"
    assert (worker.up, worker.reason) == (False, reason)
    prefill.service.fingerprint = "another model"  # the whole fleet moves on
    prefill.service.unavailable_reason = "restarting"
    await front.checked(prefill)
    assert (await front.checked(decode)).up


async def test_a_worker_that_answers_nonsense_is_down_and_is_asked_again(
    front: Front, decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.join(decode)
    monkeypatch.setattr(operations, "json_response", lambda _: web.Response(text="[" * 100_000))
    worker = await front.checked(decode)
    assert not worker.up and "maximum recursion depth" in worker.reason
    monkeypatch.undo()
    assert (await front.checked(decode)).up


async def test_no_more_workers_than_a_router_watches(
    front: Front, prefill: Role, decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_WORKERS", 1)
    await front.join(prefill)
    assert "workers of this router" in await front.turned_away(503, decode)
    await front.join(prefill)  # it is there


async def test_a_worker_that_has_switched_its_role_gets_the_other_leg(
    front: Front, meeting: Meeting, prefill: Role, decode: Role, spare: Role
) -> None:
    """It refuses the leg of its old role, so the router looks again, and finds the new one."""
    for worker in (prefill, decode, spare):
        await front.join(worker)
    front.worker(decode).served = -9  # the next one to be used
    turned = decode.at_rest_before(FakeService("prefill", meeting))
    await decode.role_switch.switch("prefill")
    assert (await front.post("/generate", BODY))["output_ids"] == [2, 3, 4]
    assert turned.requests == decode.service.requests == []
    found = front.worker(decode)
    await until(lambda: found.role == "prefill")
    assert (found.up, found.bootstrap_port, found.incarnation) == (True, 9001, f"{0xDEF:016x}")
    front.router.workers.leave(front.worker(prefill))
    await front.post("/generate", BODY)
    assert len(turned.requests) == 1


async def test_a_request_that_waits_for_a_role_is_served_when_a_worker_switches_to_it(
    meeting: Meeting, decode: Role, spare: Role
) -> None:
    """No worker has come up: the one that switches was up all the time."""
    decode.at_rest_before(FakeService("prefill", meeting))
    async with Front([], [decode, spare], retry_timeout_s=30) as front:
        asking = asyncio.create_task(front.post("/generate", BODY))
        await until(lambda: front.router.waiting)
        await decode.role_switch.switch("prefill")
        await front.checked(decode)
        await asyncio.wait_for(asking, 20)


async def test_a_router_that_is_told_the_first_role_of_a_worker_takes_the_one_it_has(
    meeting: Meeting, prefill: Role, decode: Role
) -> None:
    decode.at_rest_before(FakeService("prefill", meeting))
    await decode.role_switch.switch("prefill")
    async with Front([prefill], [decode]) as front:
        found = [(worker.role, worker.up) for worker in front.router.workers.all]
    assert found == [("prefill", True)] * 2


@asynccontextmanager
async def member(router: Client, role: Role) -> AsyncIterator[None]:
    def identity() -> joining.WorkerIdentity:
        return joining.WorkerIdentity(role.pipeline.service.role, role.incarnation, None)

    async with joining.member_of([router.url], role.url, identity, KEY):
        yield


async def until_up(front: Front, count: int) -> None:
    await until(lambda: sum(worker.up for worker in front.router.workers.all) == count)


async def test_a_worker_joins_by_itself_and_leaves_when_it_ends(front: Front, decode: Role) -> None:
    async with member(front, decode):
        await until_up(front, 1)
        assert front.worker(decode).role == "decode"
    assert front.router.workers.all == []


async def test_a_router_that_was_restarted_is_joined_again_but_not_by_who_has_begun_to_drain(
    front: Front, decode: Role, prefill: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "JOIN_EVERY_S", 0.01)
    answering = [front]

    async def to_router(http: web.Request) -> web.StreamResponse:
        answer = await answering[-1].call(http.method, http.path, data=await http.read())
        return web.Response(body=answer.body, status=answer.status)

    async with (
        Front([], [], **OPERATOR) as second,
        serving(web.route("*", "/{path:.*}", to_router)) as address,
        member(address, prefill),
    ):
        async with member(address, decode):
            await until_up(front, 2)
        answering.append(second)
        await until_up(second, 1)
        assert second.router.workers.all[0].role == "prefill"


@pytest.mark.parametrize("router_is_first", [True, False])
async def test_a_member_that_switches_its_role_leaves_and_joins_again(
    front: Front,
    meeting: Meeting,
    decode: Role,
    monkeypatch: pytest.MonkeyPatch,
    router_is_first: bool,
) -> None:
    """Routers that keep the role they were told want it so."""
    monkeypatch.setattr(joining, "JOIN_EVERY_S", 0.01)
    decode.at_rest_before(FakeService("prefill", meeting))
    told = joining.WorkerIdentity("decode", decode.incarnation, None)
    async with joining.member_of([front.url], decode.url, lambda: told, KEY):
        await until_up(front, 1)
        first = front.worker(decode)
        await decode.role_switch.switch("prefill")
        if router_is_first:
            assert (await front.checked(decode)).incarnation == f"{0xDEF:016x}"
        told = joining.WorkerIdentity("prefill", f"{0xDEF:016x}", 9001)
        await until(lambda: first not in front.router.workers.all)
        await until_up(front, 1)
        assert front.worker(decode).role == "prefill"
    assert front.router.workers.all == []


async def test_an_operator_who_removes_a_worker_is_obeyed_until_it_is_another_one(
    front: Front, decode: Role
) -> None:
    mine = {"worker_type": "decode", "incarnation": decode.incarnation}
    await leave(front, (await front.join(decode, **mine))["location"])
    assert "was told to leave" in await front.turned_away(409, decode, **mine)
    decode.service.incarnation += 1  # it has been restarted
    await leave(front, (await front.join(decode, incarnation=decode.incarnation))["location"])
    await leave(front, (await front.join(decode))["location"])  # the operator's own word


async def test_a_worker_that_cannot_join_says_so_once_and_tries_on(
    decode: Role, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "JOIN_EVERY_S", 0.001)
    asked = asyncio.Queue[str]()

    async def refuse(http: web.Request) -> web.Response:
        asked.put_nowait(http.method)
        return web.json_response(
            {"error": {"message": "no key here", "code": "forbidden"}}, status=403
        )

    async with serving(web.post("/workers", refuse)) as server, member(server, decode):
        for _ in range(3):
            assert await asyncio.wait_for(asked.get(), 20) == "POST"
    lines = [line for line in caplog.messages if "cannot join" in line]
    assert lines == [f"cannot join the router {server.url}, trying on: 403: no key here"]


async def test_a_worker_that_stays_down_is_logged_again_for_another_reason(
    decode: Role, prefill: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """A reason that differs in its numbers alone is no other one: those change at every check."""
    pages, stopped = "3 pages in quarantine", "the engine has stopped"
    async with Front([prefill], [decode]) as front:
        for reason in (pages, "4 pages in quarantine", stopped, stopped):
            decode.service.unavailable_reason = reason
            assert reason in (await front.checked(decode)).reason
        lines = [text.partition("is down: ")[2] for text in caplog.messages if "is down" in text]
        assert [line.rpartition(": ")[2] for line in lines] == [pages, stopped]
        front.worker(decode).mark_lost("connection reset by peer", 0.0)
        assert stopped in front.worker(decode).reason, "a lost request says less than a check"


Started = Callable[..., Awaitable[Role]]


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    async with AsyncExitStack() as stack:
        meeting = Meeting()

        async def start(role: str, model: str = "a", plane: str = "fake", wire: int = 3) -> Role:
            made = Role(FakeService(role, meeting))
            made.service.fingerprint, made.service.data_plane = model, plane
            made.app.middlewares.append(_says_its_wire_version(wire))
            return await stack.enter_async_context(made)

        yield start


def _says_its_wire_version(version: int) -> Any:
    @web.middleware
    async def changed(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if request.path != "/server_info":
            return answer
        assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
        return web.json_response({**json.loads(answer.body), "wire_version": version})

    return changed


def served_by(*roles: Role) -> list[int]:
    return [len(role.service.requests) for role in roles]


async def test_static_workers_of_another_model_than_most_are_left_out(started: Started) -> None:
    """A request was answered by one model or the other, as the policy had it."""
    prefill, stray = await started("prefill", "b"), await started("prefill", "a")
    decode = await started("decode", "b")
    async with Front([stray, prefill], [decode], retry_timeout_s=0) as front:
        for _ in range(4):
            await front.post("/generate", BODY)
        assert served_by(stray, prefill, decode) == [0, 4, 4]
        reason = front.worker(stray).reason
        assert reason == "it serves 'fake' (a), and other workers here 'fake' (b)"
        assert not (await front.checked(stray)).up, "while the others serve theirs"
        listed = (await front.get("/workers"))["workers"]
        [entry] = [one for one in listed if one["url"] == stray.url]
        assert (entry["is_healthy"], entry["reason"]) == (False, reason)


async def test_a_worker_of_another_model_that_was_there_first_does_not_keep_out_a_pair(
    started: Started,
) -> None:
    stray, *pair = [await started(*of) for of in (("prefill",), ("prefill", "b"), ("decode", "b"))]
    for role in pair:
        role.service.unavailable_reason = "loading"
    async with Front([stray, pair[0]], [pair[1]], retry_timeout_s=0) as front:
        assert front.worker(stray).up
        for role in pair:
            role.service.unavailable_reason = ""
        for role in pair:
            assert (await front.checked(role)).up
        await front.post("/generate", BODY)
        assert served_by(*pair) == [1, 1]
        assert front.router.workers.trouble(front.worker(stray)) == (
            "no decode here fits it: it has model fingerprint 'a' and not 'b'"
        )
        assert not (await front.checked(stray)).up


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ({"wire": 3}, {"wire": 4}, "it has wire version 3 and not 4"),
        ({"plane": "local"}, {"plane": "mooncake"}, "it has data plane 'local' and not 'mooncake'"),
    ],
)
async def test_only_workers_that_fit_serve_a_request_together(
    started: Started, old: dict[str, Any], new: dict[str, Any], part: str
) -> None:
    """While a fleet is upgraded there are both: half of the requests failed, at the link."""
    roles = [await started(name, **of) for name in ("prefill", "decode") for of in (old, new)]
    async with Front(roles[:2], roles[2:], retry_timeout_s=0) as front:
        for _ in range(6):
            await front.post("/generate", BODY)
        before = served_by(*roles)
        assert before[:2] == before[2:] and all(before)
        roles[2].service.unavailable_reason = "its machine is off"
        await front.checked(roles[2])
        assert part in front.router.workers.trouble(front.worker(roles[0]))
        for _ in range(4):
            await front.post("/generate", BODY)
        assert served_by(*roles) == [before[0], before[1] + 4, before[2], before[3] + 4]
        front.worker(roles[1]).mark_down("it restarts")  # nobody fits anybody
        error = await front.refused(503, "/generate", BODY)
        assert part.rpartition(" and not ")[0].removeprefix("it has ") in error["message"]
        assert part in (await front.get("/health", status=503))["error"]["message"]
        await front.checked(roles[1])
        await front.post("/generate", BODY)


async def test_a_joining_worker_that_fits_nobody_is_told_so(front: Front, started: Started) -> None:
    await front.join(await started("prefill", wire=3))
    accepted = await front.join(await started("decode", wire=4))
    assert accepted["message"] == "no prefill here fits it: it has wire version 4 and not 3"
    await front.refused(503, "/generate", BODY)
    assert (await front.join(await started("prefill", wire=4)))["message"] == "it gets requests"
    await front.post("/generate", BODY)


async def test_a_worker_says_its_wire_version(front: Front, decode: Role) -> None:
    await front.join(decode)
    identity = front.worker(decode).identity
    assert identity is not None
    assert (identity.wire_version, identity.data_plane) == (WIRE_VERSION, "fake")
