"""Workers that join a running router, leave it, come back as something else, or should not have
been named.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from kvflow.http.authorization import Keys
from kvflow.protocols.wire.messages import WIRE_VERSION
from kvflow.router import membership
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.workers import Worker
from kvflow.serve.http import operations
from kvflow.serve.launch import joining
from tests.server.fake_service import FakeService, Meeting, Role, RunningFake, Server, served

BODY = {"text": "w1", "sampling_params": {"max_new_tokens": 3}}
KEY = "sesame"


class Front:
    """A router that workers can join, and its operator."""

    def __init__(self, router: Router, server: Server, session: aiohttp.ClientSession) -> None:
        self.router, self.server, self._session = router, server, session

    async def call(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        async with self._session.request(
            method, self.server.make_url(path), json=document
        ) as answer:
            return answer.status, json.loads(await answer.read())

    async def join(self, worker: Server | str, **more: Any) -> tuple[int, Any]:
        url = worker if isinstance(worker, str) else worker.url
        return await self.call("POST", "/workers", {"url": url, **more})

    async def ask(self) -> tuple[int, Any]:
        return await self.call("POST", "/generate", BODY)

    def worker(self, server: Server) -> Worker:
        return next(worker for worker in self.router.workers.all if worker.url == server.url)

    async def checked(self, server: Server) -> Worker:
        """As after the next background check."""
        worker = self.worker(server)
        await self.router.workers._check(worker)
        return worker


@asynccontextmanager
async def routed(
    *prefills: Server, decodes: tuple[Server, ...] = (), key: str = KEY, retry_s: float = 0
) -> AsyncIterator[Front]:
    urls = [server.url for server in prefills], [server.url for server in decodes]
    router = Router(*urls, keys=Keys(admin=key), retry_timeout_s=retry_s, poll_s=3600)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        await router.start()
        async with (
            served(router_app(router)) as server,
            aiohttp.ClientSession(headers=headers) as session,
        ):
            yield Front(router, server, session)
    finally:
        await router.close()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    """A router that knows nobody."""
    async with routed() as made:
        yield made


async def test_workers_join_an_empty_router_and_leave_it(
    front: Front, prefill_server: Server, decode_server: Server
) -> None:
    status, told = await front.call("GET", "/health")
    assert (status, told["error"]["code"]) == (503, "no_workers")
    assert "no prefill worker is known; no decode worker is known" in told["error"]["message"]
    assert (await front.ask())[0] == 503
    path = ""
    for server, role in ((prefill_server, "prefill"), (decode_server, "decode")):
        status, accepted = await front.join(server, worker_type=role)
        assert (status, accepted["status"], accepted["url"]) == (202, "accepted", server.url)
        path = f"/workers/{accepted['worker_id']}"
        assert accepted["location"] == path
        status, found = await front.call("GET", path)
        assert (status, found["worker_type"], found["is_healthy"], found["load"]) == (
            200,
            role,
            True,
            0,
        )
    status, answer = await front.ask()
    assert (status, answer["output_ids"]) == (200, [2, 3, 4])
    found = (await front.call("GET", "/workers"))[1]
    assert found["total"] == 2
    assert found["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 0}
    assert (await front.call("DELETE", path))[0] == 202
    assert (await front.call("DELETE", path))[0] == (await front.call("GET", path))[0] == 404
    status, answer = await front.ask()
    assert (status, answer["error"]["message"]) == (503, "no decode worker is up (0 known)")


async def test_a_worker_that_leaves_is_forgotten_when_its_last_request_is_answered(
    front: Front, prefill_server: Server, decode: Role, decode_server: Server
) -> None:
    await front.join(prefill_server)
    path = f"/workers/{(await front.join(decode_server))[1]['worker_id']}"
    decode.service.gate.clear()
    held = asyncio.create_task(front.ask())
    await asyncio.wait_for(decode.service.started.wait(), 5)
    for _ in range(2):  # a drain that is asked for twice is one
        status, accepted = await front.call("DELETE", path)
        assert (status, accepted["message"]) == (
            202,
            "it gets no more requests, and has left when 1 are answered",
        )
    found = (await front.call("GET", path))[1]
    assert (found["leaving"], found["load"], found["reason"]) == (True, 1, "it leaves this router")
    assert (await front.ask())[0] == 503
    assert (await front.call("GET", "/health"))[0] == 503
    decode.service.gate.set()
    assert (await asyncio.wait_for(held, 5))[0] == 200
    assert (await front.call("GET", path))[0] == 404


async def test_a_worker_that_leaves_may_stay(
    front: Front, prefill_server: Server, decode: Role, decode_server: Server
) -> None:
    await front.join(prefill_server)
    first = (await front.join(decode_server))[1]["worker_id"]
    decode.service.gate.clear()
    held = asyncio.create_task(front.ask())
    await asyncio.wait_for(decode.service.started.wait(), 5)
    await front.call("DELETE", f"/workers/{first}")
    status, again = await front.join(decode_server)
    assert (status, again["worker_id"]) == (202, first)
    decode.service.gate.set()
    assert (await asyncio.wait_for(held, 5))[0] == 200
    assert (await front.ask())[0] == 200


async def test_joining_twice_is_joining_once(front: Front, prefill_server: Server) -> None:
    answers = await asyncio.gather(
        *(front.join(prefill_server.url + slash) for slash in ("", "/", ""))
    )
    assert {status for status, _ in answers} == {202}
    assert len({answer["worker_id"] for _, answer in answers}) == 1
    assert len(front.router.workers.all) == 1


@pytest.mark.parametrize(
    ("document", "status", "said"),
    [
        (
            {"url": "nonsense"},
            400,
            "url: 'nonsense' is not the http:// or https:// URL of a worker",
        ),
        ({"url": "ftp://h:1"}, 400, "'ftp://h:1' is not"),
        ({"url": "http://h:99999"}, 400, "'http://h:99999' is not"),
        ({"url": "http://"}, 400, "'http://' is not"),
        ({"url": "http://h/?x=1"}, 400, "is not the http"),
        ({"worker_type": "prefill"}, 400, "url"),
        ({"url": 3}, 400, "url"),
        (
            {"url": "http://h", "worker_type": "regular"},
            400,
            "worker_type: 'regular' is not prefill or decode",
        ),
        ({"url": "http://127.0.0.1:1"}, 502, "http://127.0.0.1:1: Cannot connect"),
    ],
)
async def test_what_cannot_join_is_told_why(
    front: Front, document: Any, status: int, said: str
) -> None:
    answer = await front.call("POST", "/workers", document)
    assert answer[0] == status, answer
    assert said in answer[1]["error"]["message"]
    assert front.router.workers.all == []


async def test_a_server_that_hangs_up_cannot_join(front: Front) -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", hang_up)])
    async with served(app) as server:
        status, answer = await front.join(server)
    assert (status, answer["error"]["message"]) == (502, f"{server.url}: Server disconnected")


async def test_a_server_of_another_kind_cannot_join(front: Front) -> None:
    async def not_json(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def nested(_: web.Request) -> web.Response:
        return web.Response(text="[" * 100_000)

    async def elsewhere(_: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async def router(_: web.Request) -> web.Response:
        return web.json_response({"role": "router"})

    for handler, status, said in (
        (not_json, 502, "malformed"),
        (nested, 502, "maximum recursion depth"),
        (elsewhere, 502, "/server_info answered 302"),
        (router, 409, "its disaggregation_mode is None"),
    ):
        app = web.Application()
        app.add_routes([web.get("/server_info", handler)])
        async with served(app) as server:
            found, answer = await front.join(server)
            assert found == status and said in answer["error"]["message"], answer
            assert not answer["error"]["message"].endswith(": "), "a colon that no reason follows"
    assert front.router.workers.all == []


async def test_a_worker_of_another_role_or_model_is_a_conflict(
    front: Front, prefill: Role, prefill_server: Server, decode: Role, decode_server: Server
) -> None:
    status, answer = await front.join(prefill_server, worker_type="decode")
    assert (status, answer["error"]["message"]) == (
        409,
        f"{prefill_server.url} is a prefill worker, not a decode worker",
    )
    await front.join(prefill_server)
    status, answer = await front.join(prefill_server, worker_type="decode")
    assert (
        status == 409 and "is here as a prefill worker, not as decode" in answer["error"]["message"]
    )
    decode.service.fingerprint = "another model"
    status, answer = await front.join(decode_server)
    assert status == 409
    assert (
        "has another model than the workers here: it serves 'fake' (another model)"
        in answer["error"]["message"]
    )
    assert len(front.router.workers.all) == 1


async def test_a_worker_that_comes_back_with_another_model_is_left_out_while_others_have_the_first(
    front: Front, prefill: Role, prefill_server: Server, decode: Role, decode_server: Server
) -> None:
    await front.join(prefill_server)
    await front.join(decode_server)
    decode.service.fingerprint = "another model"
    worker = await front.checked(decode_server)
    assert not worker.up
    assert (
        worker.reason
        == "it has another model now: fingerprint 'another model' instead of 'fake model'"
    )
    prefill.service.fingerprint = "another model"  # the whole fleet moves on
    prefill.service.unavailable_reason = "restarting"
    await front.checked(prefill_server)
    assert (await front.checked(decode_server)).up


async def test_a_worker_that_answers_nonsense_is_down_and_is_asked_again(
    front: Front, decode: Role, decode_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await front.join(decode_server)
    monkeypatch.setattr(operations, "json_response", lambda _: web.Response(text="[" * 100_000))
    worker = await front.checked(decode_server)
    assert not worker.up and "maximum recursion depth" in worker.reason
    monkeypatch.undo()
    assert (await front.checked(decode_server)).up


async def test_without_a_key_nobody_joins_or_leaves(
    prefill_server: Server, decode_server: Server
) -> None:
    async with routed(prefill_server, decodes=(decode_server,), key="") as front:
        status, answer = await front.join(decode_server)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        worker = front.worker(decode_server)
        assert (await front.call("DELETE", f"/workers/{worker.id}"))[0] == 403
        assert (await front.call("GET", "/workers"))[1]["total"] == 2
        assert (await front.ask())[0] == 200


async def test_the_wrong_key_is_401(front: Front, prefill_server: Server) -> None:
    async with aiohttp.ClientSession() as stranger:
        for method, path in (("POST", "/workers"), ("GET", "/workers"), ("DELETE", "/workers/x")):
            async with stranger.request(
                method, front.server.make_url(path), json={"url": prefill_server.url}
            ) as answer:
                assert answer.status == 401


async def test_no_more_workers_than_a_router_watches(
    front: Front, prefill_server: Server, decode_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MAX_WORKERS", 1)
    assert (await front.join(prefill_server))[0] == 202
    status, answer = await front.join(decode_server)
    assert status == 503 and "workers of this router" in answer["error"]["message"]
    assert (await front.join(prefill_server))[0] == 202  # it is there


async def test_a_worker_that_has_switched_its_role_gets_the_other_leg(
    front: Front, meeting: Meeting, prefill_server: Server, decode: Role, decode_server: Server
) -> None:
    """It refuses the leg of its old role, so the router looks again, and finds the new one."""
    spare = Role(FakeService("decode", meeting))
    async with served(spare.app) as spare_server:
        await front.join(prefill_server)
        await front.join(decode_server)
        front.worker(decode_server).served = -9  # the next one to be used
        await front.join(spare_server)
        turned = FakeService("prefill", meeting)
        turned.incarnation = 0xDEF
        decode.other = RunningFake(turned, 9001)
        decode.service.changed_report = AT_REST
        await decode.role_switch.switch("prefill")
        status, answer = await front.ask()
        assert (status, answer["output_ids"]) == (200, [2, 3, 4])
        assert turned.requests == decode.service.requests == []
        async with asyncio.timeout(5):
            while (worker := front.worker(decode_server)).role == "decode":
                await asyncio.sleep(0.005)
        assert (worker.up, worker.bootstrap_port, worker.incarnation) == (
            True,
            9001,
            f"{0xDEF:016x}",
        )
        front.router.workers.leave(front.worker(prefill_server))
        assert (await front.ask())[0] == 200
        assert len(turned.requests) == 1


AT_REST = {"pages_free": 4, "pages_at_rest": True, "rooms_by_state": {}, "running": 0, "waiting": 0}


async def test_a_request_that_waits_for_a_role_is_served_when_a_worker_switches_to_it(
    meeting: Meeting, decode: Role, decode_server: Server
) -> None:
    """No worker has come up: the one that switches was up all the time."""
    decode.other = RunningFake(FakeService("prefill", meeting), 9001)
    decode.service.changed_report = AT_REST
    spare = Role(FakeService("decode", meeting))
    async with (
        served(spare.app) as spare_server,
        routed(decodes=(decode_server, spare_server), retry_s=30) as front,
    ):
        asking = asyncio.create_task(front.ask())
        async with asyncio.timeout(5):
            while not front.router.waiting:
                await asyncio.sleep(0.005)
        await decode.role_switch.switch("prefill")
        await front.checked(decode_server)
        assert (await asyncio.wait_for(asking, 5))[0] == 200


async def test_a_router_that_is_told_the_first_role_of_a_worker_takes_the_one_it_has(
    meeting: Meeting, prefill_server: Server, decode: Role, decode_server: Server
) -> None:
    """A router that is restarted with the flags it always had."""
    decode.other = RunningFake(FakeService("prefill", meeting), 9001)
    decode.service.changed_report = AT_REST
    await decode.role_switch.switch("prefill")
    async with routed(prefill_server, decodes=(decode_server,)) as front:
        assert [(worker.role, worker.up) for worker in front.router.workers.all] == [
            ("prefill", True)
        ] * 2


@asynccontextmanager
async def member(front_url: str, worker: Server, role: Role) -> AsyncIterator[None]:
    """The worker joins by itself."""

    def identity() -> joining.WorkerIdentity:
        return joining.WorkerIdentity(
            role.pipeline.service.role, f"{role.service.incarnation:016x}", None
        )

    async with joining.member_of([front_url], worker.url, identity, KEY):
        yield


async def until_up(front: Front, count: int) -> None:
    async with asyncio.timeout(5):
        while sum(worker.up for worker in front.router.workers.all) != count:
            await asyncio.sleep(0.005)


async def test_a_worker_joins_by_itself_and_leaves_when_it_ends(
    front: Front, decode: Role, decode_server: Server
) -> None:
    async with member(front.server.url, decode_server, decode):
        await until_up(front, 1)
        assert front.worker(decode_server).role == "decode"
    assert front.router.workers.all == []


async def test_a_router_that_was_restarted_is_joined_again_but_not_by_who_has_begun_to_drain(
    decode: Role,
    decode_server: Server,
    prefill: Role,
    prefill_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "JOIN_EVERY_S", 0.01)
    key = {"Authorization": f"Bearer {KEY}"}
    routers: list[Router] = [Router([], [], keys=Keys(admin=KEY), poll_s=3600) for _ in range(2)]

    answering: list[Server] = []

    async def to_router(http: web.Request) -> web.StreamResponse:
        """The address of a router, whichever answers there."""
        async with aiohttp.ClientSession(headers=key) as session:
            url = f"{answering[-1].url}{http.path}"
            async with session.request(http.method, url, data=await http.read()) as answer:
                return web.Response(body=await answer.read(), status=answer.status)

    address = web.Application()
    address.add_routes([web.route("*", "/{path:.*}", to_router)])
    first, second = routers
    try:
        async with (
            aiohttp.ClientSession() as session,
            served(router_app(first)) as one,
            served(router_app(second)) as other,
            served(address) as fixed,
        ):
            answering.append(one)
            async with member(fixed.url, prefill_server, prefill):
                async with member(fixed.url, decode_server, decode):
                    await until_up(Front(first, one, session), 2)
                answering.append(other)
                await until_up(Front(second, other, session), 1)
                assert second.workers.all[0].role == "prefill"
    finally:
        for router in routers:
            await router.close()


@pytest.mark.parametrize("router_is_first", [True, False])
async def test_a_member_that_switches_its_role_leaves_and_joins_again(
    front: Front,
    meeting: Meeting,
    decode: Role,
    decode_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    router_is_first: bool,
) -> None:
    """Routers that keep the role they were told want it so.

    Whether the router has seen the new one by then or not.
    """
    monkeypatch.setattr(joining, "JOIN_EVERY_S", 0.01)
    turned = FakeService("prefill", meeting)
    turned.incarnation = 0xDEF
    decode.other, decode.service.changed_report = RunningFake(turned, 9001), AT_REST
    told = joining.WorkerIdentity("decode", f"{decode.service.incarnation:016x}", None)
    async with joining.member_of([front.server.url], decode_server.url, lambda: told, KEY):
        await until_up(front, 1)
        first = front.worker(decode_server)
        await decode.role_switch.switch("prefill")
        if router_is_first:
            assert (await front.checked(decode_server)).incarnation == f"{0xDEF:016x}"
        told = joining.WorkerIdentity("prefill", f"{0xDEF:016x}", 9001)
        async with asyncio.timeout(5):
            while first in front.router.workers.all:
                await asyncio.sleep(0.005)
        await until_up(front, 1)
        assert front.worker(decode_server).role == "prefill"
    assert front.router.workers.all == []


async def test_an_operator_who_removes_a_worker_is_obeyed_until_it_is_another_one(
    front: Front, decode: Role, decode_server: Server
) -> None:
    mine = f"{decode.service.incarnation:016x}"
    accepted = (await front.join(decode_server, worker_type="decode", incarnation=mine))[1]
    await front.call("DELETE", accepted["location"])
    status, answer = await front.join(decode_server, worker_type="decode", incarnation=mine)
    assert status == 409 and "was told to leave" in answer["error"]["message"]
    decode.service.incarnation += 1  # it has been restarted
    status, _ = await front.join(decode_server, incarnation=f"{decode.service.incarnation:016x}")
    assert status == 202
    await front.call("DELETE", f"/workers/{front.worker(decode_server).id}")
    assert (await front.join(decode_server))[0] == 202  # the operator's own word
    await front.call("DELETE", f"/workers/{front.worker(decode_server).id}")


async def test_a_worker_that_cannot_join_says_so_once_and_tries_on(
    decode: Role,
    decode_server: Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(joining, "JOIN_EVERY_S", 0.001)
    asked = asyncio.Queue[str]()

    async def refuse(http: web.Request) -> web.Response:
        asked.put_nowait(http.method)
        return web.json_response(
            {"error": {"message": "no key here", "code": "forbidden"}}, status=403
        )

    app = web.Application()
    app.add_routes([web.post("/workers", refuse)])
    async with served(app) as server, member(server.url, decode_server, decode):
        for _ in range(3):
            assert await asyncio.wait_for(asked.get(), 5) == "POST"
    lines = [line for line in caplog.messages if "cannot join" in line]
    assert lines == [f"cannot join the router {server.url}, trying on: 403: no key here"]


async def test_a_worker_that_stays_down_is_logged_again_for_another_reason(
    decode: Role, decode_server: Server, prefill_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A reason that differs in its numbers alone is no other one: those change at every check."""
    reasons = [
        "3 pages in quarantine",
        "4 pages in quarantine",
        "the engine has stopped",
        "the engine has stopped",
    ]
    async with routed(prefill_server, decodes=(decode_server,)) as front:
        for reason in reasons:
            decode.service.unavailable_reason = reason
            assert reason in (await front.checked(decode_server)).reason
        lines = [text.partition("is down: ")[2] for text in caplog.messages if "is down" in text]
        assert [line.rpartition(": ")[2] for line in lines] == [reasons[0], reasons[2]]
        front.worker(decode_server).mark_lost("connection reset by peer", 0.0)
        assert reasons[2] in front.worker(decode_server).reason, (
            "requests of before it was down say less than a check"
        )


@pytest.fixture
async def fleet_of() -> AsyncIterator[Any]:
    """Starts fake workers that differ in their model, their data plane or their wire version."""
    async with AsyncExitStack() as stack:
        meeting = Meeting()

        async def start(
            role: str, model: str = "a", plane: str = "fake", wire: int = 3
        ) -> tuple[Server, FakeService]:
            service = FakeService(role, meeting)
            service.fingerprint, service.data_plane = model, plane
            app = Role(service).app
            app.middlewares.append(_says_its_wire_version(wire))
            return await stack.enter_async_context(served(app)), service

        yield start


def _says_its_wire_version(version: int) -> Any:
    @web.middleware
    async def changed(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await handler(request)
        if (
            request.path != "/server_info"
            or not isinstance(answer, web.Response)
            or not isinstance(answer.body, bytes)
        ):
            return answer
        return web.json_response({**json.loads(answer.body), "wire_version": version})

    return changed


def served_by(services: list[FakeService]) -> list[int]:
    return [len(service.requests) for service in services]


async def test_static_workers_of_another_model_than_most_are_left_out(fleet_of: Any) -> None:
    """A request was answered by one model or the other, as the policy had it."""
    (p, prefill), (other, stray), (d, decode) = (
        await fleet_of("prefill", "b"),
        await fleet_of("prefill", "a"),
        await fleet_of("decode", "b"),
    )
    async with routed(other, p, decodes=(d,)) as front:
        assert [(await front.ask())[0] for _ in range(4)] == [200] * 4
        assert served_by([stray, prefill, decode]) == [0, 4, 4]
        reason = front.worker(other).reason
        assert reason == "it serves 'fake' (a), and other workers here 'fake' (b)"
        assert not (await front.checked(other)).up, "while the others serve theirs"
        entry = next(
            one
            for one in (await front.call("GET", "/workers"))[1]["workers"]
            if one["url"] == other.url
        )
        assert (entry["is_healthy"], entry["reason"]) == (False, reason)


async def test_a_worker_of_another_model_that_was_there_first_does_not_keep_out_a_pair(
    fleet_of: Any,
) -> None:
    (stray, _), (p, prefill), (d, decode) = (
        await fleet_of("prefill", "a"),
        await fleet_of("prefill", "b"),
        await fleet_of("decode", "b"),
    )
    prefill.unavailable_reason = decode.unavailable_reason = "loading"
    async with routed(stray, p, decodes=(d,)) as front:
        assert front.worker(stray).up
        prefill.unavailable_reason = decode.unavailable_reason = ""
        for server in (p, d):
            assert (await front.checked(server)).up
        assert (await front.ask())[0] == 200 and served_by([prefill, decode]) == [1, 1]
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
    fleet_of: Any, old: dict[str, Any], new: dict[str, Any], part: str
) -> None:
    """While a fleet is upgraded there are both: half of the requests failed, at the link."""
    workers = [
        await fleet_of(role, **traits) for role in ("prefill", "decode") for traits in (old, new)
    ]
    servers, services = [server for server, _ in workers], [service for _, service in workers]
    async with routed(*servers[:2], decodes=tuple(servers[2:])) as front:
        for _ in range(6):
            assert (await front.ask())[0] == 200
        prefill_old, prefill_new, decode_old, decode_new = served_by(services)
        assert (
            (prefill_old, prefill_new) == (decode_old, decode_new) and prefill_old and prefill_new
        )
        services[2].unavailable_reason = "its machine is off"
        await front.checked(servers[2])
        assert part in front.router.workers.trouble(front.worker(servers[0]))
        before = served_by(services)
        for _ in range(4):
            assert (await front.ask())[0] == 200
        assert served_by(services) == [before[0], before[1] + 4, before[2], before[3] + 4]
        front.worker(servers[1]).mark_down("it restarts")  # nobody fits anybody
        status, answer = await front.ask()
        assert (
            status == 503
            and part.rpartition(" and not ")[0].removeprefix("it has ")
            in answer["error"]["message"]
        )
        status, answer = await front.call("GET", "/health")
        assert status == 503 and part in answer["error"]["message"]
        await front.checked(servers[1])
        assert (await front.ask())[0] == 200


async def test_a_joining_worker_that_fits_nobody_is_told_so(front: Front, fleet_of: Any) -> None:
    assert (await front.join((await fleet_of("prefill", wire=3))[0]))[0] == 202
    server, _ = await fleet_of("decode", wire=4)
    status, answer = await front.join(server)
    assert (status, answer["message"]) == (
        202,
        "no prefill here fits it: it has wire version 4 and not 3",
    )
    assert (await front.ask())[0] == 503
    assert (await front.join((await fleet_of("prefill", wire=4))[0]))[1][
        "message"
    ] == "it gets requests"
    assert (await front.ask())[0] == 200


async def test_a_worker_says_its_wire_version(front: Front, decode_server: Server) -> None:
    await front.join(decode_server)
    identity = front.worker(decode_server).identity
    assert identity is not None and (identity.wire_version, identity.data_plane) == (
        WIRE_VERSION,
        "fake",
    )
