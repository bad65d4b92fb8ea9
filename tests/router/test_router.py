"""The router: pairs, the least loaded worker, legs that fail, and clients that leave."""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import pytest

from kvflow.http.app import MAX_BODY_BYTES
from kvflow.http.errors import RequestError
from kvflow.http.large_bodies import MAX_REST_BYTES
from kvflow.http.model_length import MAX_MODEL_LEN_HEADER
from kvflow.protocols.errors import Cause, Code
from kvflow.router import legs, pairs
from kvflow.router.kvflow_engine import KvflowEngine
from kvflow.router.router import Router
from kvflow.router.workers import Worker
from tests.fakes.servers import Front
from tests.fakes.service import BODY, CHAT, FakeService, Meeting, Role, body


async def test_both_legs_get_the_same_room_and_decode_answers(
    front: Front, prefill: Role, decode: Role
) -> None:
    answer = await front.call("POST", "/generate", BODY)
    room = int(answer.headers["X-Kvflow-Room"])
    assert answer.json["output_ids"] == [2, 3, 4]
    [first], [second] = prefill.service.requests, decode.service.requests
    assert first.room == second.room == room and 0 <= room < 1 << 63
    assert second.prefill == "127.0.0.1:8998"


async def test_a_client_cannot_choose_the_meeting(front: Front, decode: Role) -> None:
    await front.post(
        "/generate", {**BODY, "bootstrap_host": "evil", "bootstrap_room": 1, "bootstrap_port": 1}
    )
    assert decode.service.requests[0].prefill == "127.0.0.1:8998"


async def test_streams_come_through_event_by_event(front: Front, decode: Role) -> None:
    decode.service.gate.clear()
    async with front.opened("/generate", {**BODY, "stream": True}) as answer:
        first = await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 20)
        assert json.loads(first.removeprefix(b"data: "))["output_ids"] == [2]
        decode.service.gate.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_several_rooms_for_several_completions(front: Front, decode: Role) -> None:
    document = {"text": ["w1", "w2"], "sampling_params": {"max_new_tokens": 1, "n": 2}}
    answers = await front.post("/generate", document)
    assert [answer["output_ids"] for answer in answers] == [[2], [2], [3], [3]]
    assert len({request.room for request in decode.service.requests}) == 4


@pytest.mark.parametrize(
    ("path", "body", "rooms"),
    [
        ("/generate", b'{"text": "w1"}', 1),
        ("/generate", b'{"text": ["w1", "w2"]}', 2),
        ("/generate", b'{"input_ids": [1, 2, 3]}', 1),
        ("/generate", b'{"input_ids": [[1], [2], [3]], "sampling_params": {"n": 2}}', 6),
        ("/generate", b'{"text": ["w1", "w2"], "sampling_params": [{"n": 2}, {"n": 2}]}', 4),
        ("/generate", b'{"text": "w1", "sampling_params": []}', 1),
        ("/v1/completions", b'{"prompt": [[1], [2]], "n": 3}', 6),
        ("/v1/chat/completions", b'{"messages": [{}], "n": 3}', 3),
        # These routes ignore the fields.
        ("/generate", b'{"text": "w1", "n": 3, "prompt": ["a", "b"]}', 1),
        ("/v1/completions", b'{"prompt": "a", "text": ["w1"], "sampling_params": {"n": 3}}', 1),
        ("/v1/chat/completions", b'{"messages": [{}], "prompt": ["a"], "sampling_params": 4}', 1),
        ("/v1/responses", b'{"input": "a", "n": 3}', 1),
        ("/v1/messages", b'{"messages": [{}], "n": "x", "text": ["a", "b"]}', 1),
    ],
)
def test_every_choice_of_every_prompt_has_a_room(path: str, body: bytes, rooms: int) -> None:
    completion = KvflowEngine().read(path, body)
    assert completion._prompts * completion._choices == rooms


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"prompt": "a", "n": -1}', "n"),
        ("/v1/chat/completions", b'{"n": "2"}', "n"),
        ("/v1/chat/completions", b'{"n": 1000000}', "n"),
        ("/generate", b'{"text": "a", "sampling_params": {"n": 257}}', "sampling_params.n"),
    ],
)
def test_a_number_of_choices_that_cannot_be_names_its_field(
    path: str, body: bytes, param: str
) -> None:
    with pytest.raises(RequestError, match=f"{param}: .* is outside 1..256 completions") as caught:
        KvflowEngine().read(path, body)
    assert caught.value.param == param


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_field_that_a_route_lacks_needs_no_rooms(
    path: str, front: Front, decode: Role
) -> None:
    """Workers ignore it, as every field that FIELDS.md does not list."""
    chat = {"messages": CHAT} if path == "/v1/messages" else {"input": CHAT}
    limit = {"max_tokens": 3} if path == "/v1/messages" else {"max_output_tokens": 3}
    for more in ({"n": 2}, {"n": "two"}, {"input_ids": ["w1", "w2"], "sampling_params": {"n": 2}}):
        await front.post(path, {**chat, **limit, **more})
    assert len({request.room for request in decode.service.requests}) == 3


@pytest.mark.parametrize("longest", [False, True], ids=["many short values", "one long value"])
async def test_workers_take_what_their_router_takes(front: Front, longest: bool) -> None:
    """The rooms of many completions make a body larger; `user` is a field without a reader."""
    limit = MAX_BODY_BYTES if longest else MAX_REST_BYTES
    least = {"prompt": "w1", "n": 128, "max_tokens": 1}

    def sized(size: int) -> io.BytesIO:
        user = "x" if longest else ["x", *["y" * 200] * ((size - 100) // 204)]
        short = json.dumps({**least, "user": user}).encode()
        return io.BytesIO(short.replace(b'x"', b"x" * (size - len(short) + 1) + b'"', 1))

    headers = {"Content-Type": "application/json"}
    for size, wanted in ((limit, 200), (limit + 1, 413 if longest else 400), (limit, 200)):
        await front.post("/v1/completions", data=sized(size), headers=headers, status=wanted)
    assert [(worker.up, worker.served) for worker in front.router.workers.all] == [(True, 2)] * 2


async def test_the_least_loaded_worker_gets_the_request(
    prefill: Role, decode: Role, spare: Role
) -> None:
    async with Front([prefill], [decode, spare]) as front:
        decode.service.gate.clear()
        held = asyncio.create_task(front.post("/generate", BODY))
        await decode.begun()
        for _ in range(3):
            await front.post("/generate", BODY)
        assert (len(decode.service.requests), len(spare.service.requests)) == (1, 3)
        decode.service.gate.set()
        await asyncio.wait_for(held, 20)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_when_a_leg_is_refused_the_other_one_is_dropped(
    front: Front, prefill: Role, decode: Role, name: str, stream: bool
) -> None:
    refusing, other = (prefill, decode) if name == "prefill" else (decode, prefill)
    refusing.service.gate.clear()
    refusing.service.failure = Cause(Code.CAPACITY, f"{name} is full")
    other.service.gate.clear()
    body = {**BODY, "stream": stream}
    asking = asyncio.create_task(front.refused(503, "/generate", body))
    await other.begun()  # one that has not begun is dropped, too
    refusing.service.gate.set()
    assert f"{name} is full" in (await asking)["message"]
    await other.over(other.service.requests[0].room)


async def test_prefills_echo_of_decodes_failure_does_not_hide_it(
    front: Front, prefill: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "ROOT_CAUSE_WAIT_S", 0.05)
    prefill.service.failure = Cause(Code.CLIENT_GONE, "decode aborted")
    error = await front.refused(502, "/generate", BODY)
    assert error["message"] == "decode ended the room and gave no reason within 0.05 s"


@pytest.mark.parametrize("held", ["prefill", "decode"])
async def test_a_client_that_leaves_drops_both_legs(
    front: Front, prefill: Role, decode: Role, held: str
) -> None:
    (prefill if held == "prefill" else decode).service.gate.clear()
    request = asyncio.create_task(front.events("/generate", BODY))
    for role in (prefill, decode):
        await role.begun()
    request.cancel()
    for role in (prefill, decode):
        await role.over(role.service.requests[0].room)


async def test_a_worker_that_is_gone_is_left_out_and_another_one_serves(
    prefill: Role, decode: Role, spare: Role
) -> None:
    async with Front([prefill], [decode, spare]) as front:
        await decode.stop()
        for _ in range(3):
            await front.post("/generate", BODY)
        found = await front.get("/server_info")
    assert [worker["up"] for worker in found.pop("workers")] == [True, False, True]
    assert found == {
        "role": "router",
        "served_model_name": "fake",
        "max_model_len": 65,
        "draining": False,
        "running": 0,
        "waiting": 0,
    }


async def test_nobody_left_is_a_clear_error(front: Front, prefill: Role) -> None:
    await prefill.stop()
    error = await front.refused(502, "/generate", BODY)
    assert error["message"].startswith(f"prefill {prefill.url}: cannot be reached (")
    # A failed check gives the same reason as the failed request.
    for check in (False, True):
        if check:
            await front.checked(prefill)
        error = await front.refused(503, "/generate", BODY)
        told = f"no prefill worker is up (1 known): {prefill.url}: cannot be reached ("
        assert error["message"].startswith(told)
    await front.get("/health", status=503)


async def test_workers_of_the_wrong_role_are_not_used(prefill: Role, decode: Role) -> None:
    async with Front([decode], [prefill]) as front:
        error = (await front.get("/health", status=503))["error"]
    reason = "it is not a prefill worker: its disaggregation_mode is 'decode'"
    assert reason in error["message"]


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"\xff", b'{"n": "x", "prompt": "a"}', b'{"prompt": [[1]], "n": 100000}']
)
async def test_bodies_that_cannot_be_routed_are_400(front: Front, raw: bytes) -> None:
    await front.refused(400, "/v1/completions", data=raw)


async def test_fan_out_and_proxied_routes(front: Front, decode: Role) -> None:
    await front.post("/generate", BODY)
    room = decode.service.requests[0].room
    assert set(await front.get(f"/rooms/{room}")) == {"prefill", "decode"}
    assert len(await front.get("/get_load")) == 2
    assert (await front.get("/model_info"))["model_path"] == "fake/model"
    assert (await front.call("POST", "/flush_cache")).status == 200
    await front.get("/rooms/1", status=404)


async def test_the_smallest_worker_decides_the_length_that_the_router_tells(
    meeting: Meeting, decode: Role
) -> None:
    small = FakeService("prefill", meeting, pool_tokens=32)
    async with Role(small) as prefill, Front([prefill], [decode]) as front:
        assert (await prefill.get("/v1/models"))["data"][0]["max_model_len"] == 33
        assert (await decode.get("/v1/models"))["data"][0]["max_model_len"] == 65
        listed = (await front.get("/v1/models"))["data"][0]
        assert listed["max_model_len"] == 33 and listed["id"] == "fake"
        assert (await front.get("/v1/models/fake"))["max_model_len"] == 33
        assert (await front.get("/model_info"))["max_context_length"] == 33
        assert (await front.get("/server_info"))["max_model_len"] == 33
        assert (await front.post("/tokenize", {"prompt": "w1"}))["max_model_len"] == 33
        # Whoever asks a worker itself cannot make it promise more.
        for said, told in (("9", 9), ("99", 65), ("-1", 65), ("x", 65), ("9" * 5000, 65)):
            answer = await decode.get("/v1/models", headers={MAX_MODEL_LEN_HEADER: said})
            assert answer["data"][0]["max_model_len"] == told


async def test_a_failed_write_followed_by_a_cancellation_still_drops_both_legs(
    prefill: Role, decode: Role
) -> None:
    """The order of events when a client leaves a full connection."""
    workers = Worker("prefill", prefill.url), Worker("decode", decode.url)
    raw = json.dumps(body(stream=True)).encode()
    decode.service.gate.clear()

    async def handler(session: aiohttp.ClientSession) -> None:
        json_body = {"Content-Type": "application/json"}
        first, second = (legs.Leg(session, one, "/generate", raw, json_body) for one in workers)
        async with pairs.together(first, second, {}) as both:
            await both.answer()
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            raise ConnectionResetError

    async with aiohttp.ClientSession() as session:
        with pytest.raises((ConnectionResetError, asyncio.CancelledError)):
            await asyncio.create_task(handler(session))
        assert [worker.running for worker in workers] == [0, 0]
        await decode.over(7)


async def test_a_request_may_take_longer_than_any_limit_of_its_connection() -> None:
    router = Router(["http://127.0.0.1:1"], ["http://127.0.0.1:2"])
    timeout = router._session.timeout
    assert (timeout.total, timeout.sock_read) == (None, None) and timeout.sock_connect
    await router.close()
