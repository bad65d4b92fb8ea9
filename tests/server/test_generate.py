"""POST /generate on a decode: bodies, answers, streams, errors, a client that leaves."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from kvflow.protocols.errors import Cause, Code
from kvflow.serve.http.generation_requests import _rendezvous, rooms_of
from kvflow.serve.http.schemas import Rendezvous
from tests.server.fake_service import FakeService, Meeting, Role, Server, served

META = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


def body(**changes: Any) -> dict[str, Any]:
    return {
        "text": "w1 w2",
        "sampling_params": {"max_new_tokens": 3, "temperature": 0},
        **META,
        **changes,
    }


async def post(
    session: aiohttp.ClientSession, server: Server, document: Any, path: str = "/generate"
) -> tuple[int, Any]:
    async with session.post(server.make_url(path), json=document) as answer:
        return answer.status, json.loads(await answer.read())


async def events(answer: aiohttp.ClientResponse) -> list[str]:
    text = (await answer.read()).decode()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]


@pytest.fixture(autouse=True)
async def met(meeting: Meeting) -> None:
    for room in range(7, 12):
        meeting.of(room).set_result(None)


async def test_text_in_text_and_ids_out(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    status, answer = await post(session, decode_server, body(rid="r1"))
    assert status == 200
    assert answer["output_ids"] == [3, 4, 5]
    assert answer["text"].split() == ["w3", "w4", "w5"]
    assert answer["meta_info"] == {
        "id": "r1",
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "finish_reason": {"type": "length", "length": 3},
    }
    request = decode.service.requests[0]
    assert (request.room, request.prefill, list(request.prompt)) == (7, "127.0.0.1:8998", [1, 2])


async def test_fields_of_other_programs_are_accepted(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    extra = {
        "log_metrics": True,
        "no_logs": False,
        "session_params": None,
        "return_hidden_states": False,
        "lora_path": None,
    }
    sampling = {
        "max_new_tokens": 1,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "regex": None,
        "min_p": 0.0,
    }
    status, _ = await post(
        session, decode_server, body(**extra, sampling_params=sampling, bootstrap_port=None)
    )
    assert status == 200


async def test_a_stream_repeats_the_cumulative_text(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    async with session.post(decode_server.make_url("/generate"), json=body(stream=True)) as answer:
        assert answer.content_type == "text/event-stream"
        lines = await events(answer)
    assert lines[-1] == "[DONE]"
    seen = [json.loads(line) for line in lines[:-1]]
    assert all(event["output_ids"] == [3, 4, 5][: len(event["output_ids"])] for event in seen)
    assert seen[-1]["output_ids"] == [3, 4, 5]
    assert [event["meta_info"]["finish_reason"] is None for event in seen] == [True] * (
        len(seen) - 1
    ) + [False]
    assert all(
        later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(seen)
    )


async def test_several_prompts_and_choices_use_their_own_rooms(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    document = {
        "input_ids": [[1], [5]],
        "sampling_params": {"max_new_tokens": 2, "n": 2, "sampling_seed": 40},
        "bootstrap_host": ["127.0.0.1"] * 4,
        "bootstrap_port": [1, 2, 3, None],
        "bootstrap_room": [7, 8, 9, 10],
    }
    status, answer = await post(session, decode_server, document)
    assert status == 200
    assert [one["output_ids"] for one in answer] == [[2, 3], [2, 3], [6, 7], [6, 7]]
    requests = sorted(decode.service.requests, key=lambda request: request.room)
    assert [request.prefill for request in requests] == [
        "127.0.0.1:1",
        "127.0.0.1:2",
        "127.0.0.1:3",
        "127.0.0.1:8998",
    ]
    assert [request.params.seed for request in requests] == [40, 41, 40, 41]


async def test_two_choices_of_one_prompt_are_a_list(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    document = body(
        sampling_params={"max_new_tokens": 1, "n": 2}, bootstrap_room=[7, 8], rid=["a", "b"]
    )
    status, answer = await post(session, decode_server, document)
    assert status == 200
    assert [(one["meta_info"]["id"], one["output_ids"]) for one in answer] == [
        ("a", [3]),
        ("b", [3]),
    ]


async def test_prompts_may_have_sampling_of_their_own(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    document = body(
        text=["w1", "w5"],
        sampling_params=[
            {"max_new_tokens": 1, "temperature": 0},
            {"max_new_tokens": 2, "sampling_seed": 3},
        ],
        return_logprob=[False, True],
        top_logprobs_num=[0, 1],
        bootstrap_room=[7, 8],
    )
    status, answers = await post(session, decode_server, document)
    assert status == 200
    assert [answer["output_ids"] for answer in answers] == [[2], [6, 7]]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [False, True]
    assert [request.params.seed for request in decode.service.requests] == [None, 3]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ([{}], "sampling_params"),
        ([{}, {}, {}], "sampling_params"),
        ([{"n": 1}, {"n": 2}], None),
        ([{}, {"regex": "a"}], "sampling_params[1].regex"),
        ([{}, {"top_p": 2}], "sampling_params[1].top_p"),
        ([{}, 5], "sampling_params[1]"),
    ],
)
async def test_lists_of_sampling_that_do_not_fit(
    decode_server: Server, session: aiohttp.ClientSession, sampling: Any, param: str | None
) -> None:
    document = body(text=["w1", "w5"], sampling_params=sampling, bootstrap_room=[7, 8])
    status, answer = await post(session, decode_server, document)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_logprobs_with_text(decode_server: Server, session: aiohttp.ClientSession) -> None:
    document = body(return_logprob=True, top_logprobs_num=1, return_text_in_logprobs=True)
    _, answer = await post(session, decode_server, document)
    assert answer["meta_info"]["output_token_logprobs"][0] == [-0.5, 3, "w3"]
    assert answer["meta_info"]["output_top_logprobs"][0] == [[-0.5, 3, "w3"]]


async def test_logprobs(decode_server: Server, session: aiohttp.ClientSession) -> None:
    _, answer = await post(session, decode_server, body(return_logprob=True, top_logprobs_num=2))
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.5, 3, None], [-0.5, 4, None], [-0.5, 5, None]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 3, None], [-1.5, 4, None]]


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        ({"stop": "w5", "max_new_tokens": 9}, ["w3", "w4"], {"type": "stop", "matched": "w5"}),
        (
            {"stop_token_ids": [5], "max_new_tokens": 9},
            ["w3", "w4"],
            {"type": "stop", "matched": 5},
        ),
    ],
)
async def test_stops(
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
    sampling: Any,
    text: list[str],
    reason: Any,
) -> None:
    status, answer = await post(session, decode_server, body(sampling_params=sampling))
    assert status == 200
    assert answer["text"].split() == text
    assert answer["meta_info"]["finish_reason"] == reason
    # The engine's iterator was closed.
    assert await asyncio.wait_for(decode.service.ended.get(), 5) == 7


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"text": None}, "neither text nor input_ids is given"),
        ({"text": 5}, "text"),
        ({"input_ids": [1]}, "text and input_ids are both given"),
        ({"text": None, "input_ids": [1, [2]]}, "token ids"),
        ({"text": None, "input_ids": []}, "empty"),
        (
            {"text": None, "input_ids": [100]},
            "token id 100 is outside the model's vocabulary, 0..99",
        ),
        ({"text": None, "input_ids": [-1]}, "input_ids"),
        ({"text": None, "input_ids": [1] * 128}, "asked for 128, limit 127"),
        (
            {"text": None, "input_ids": [1] * 60, "sampling_params": {"max_new_tokens": 6}},
            "asked for 66, limit 65",
        ),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 127}}, "asked for 129, limit 128"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"sampling_params": []}, "sampling_params"),
        ({"bootstrap_room": None}, "bootstrap_room is missing"),
        ({"bootstrap_room": -1}, "bootstrap_room: -1 is not an unsigned 64-bit integer"),
        (
            {"bootstrap_room": 1 << 64},
            "bootstrap_room: 18446744073709551616 is not an unsigned 64-bit integer",
        ),
        ({"text": ["w1", "w2"], "bootstrap_room": [7, 7]}, "bootstrap_room: 7 is given twice"),
        ({"bootstrap_room": [1, 2]}, "2 entries for 1"),
        ({"bootstrap_host": "a/b"}, "bootstrap_host: 'a/b' is not a host name or IP address"),
        ({"bootstrap_host": "x" * 64}, "x' is not a host name"),
        ({"bootstrap_host": "[::1"}, "bootstrap_host: '[::1' is not a host name"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
    ],
)
async def test_bad_bodies_are_400_and_name_the_field(
    decode_server: Server, session: aiohttp.ClientSession, changes: dict[str, Any], part: str
) -> None:
    status, answer = await post(session, decode_server, body(**changes))
    assert status == 400
    assert set(answer["error"]) == {"type", "code", "param", "message"}
    assert part in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"nope", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"text": NaN}']
)
async def test_malformed_json_is_400(
    decode_server: Server, session: aiohttp.ClientSession, raw: bytes
) -> None:
    async with session.post(decode_server.make_url("/generate"), data=raw) as answer:
        assert answer.status == 400
        assert "error" in json.loads(await answer.read())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.CAPACITY, 503),
        (Code.REFUSED, 502),
        (Code.RENDEZVOUS, 504),
        (Code.DEADLINE, 504),
        (Code.PEER_LOST, 502),
        (Code.TRANSFER_ERROR, 502),
        (Code.ENGINE_ERROR, 500),
        (Code.PROMPT_MISMATCH, 400),
        (Code.SHUTDOWN, 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_room_that_fails_before_its_first_token_is_a_status(
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
    code: Code,
    status: int,
    stream: bool,
) -> None:
    decode.service.failure = Cause(code, "because")
    async with session.post(
        decode_server.make_url("/generate"), json=body(stream=stream)
    ) as answer:
        assert answer.status == status
        assert ("Retry-After" in answer.headers) == (status == 503)
        error = json.loads(await answer.read())["error"]
    assert error["code"] == code
    assert "because" in error["message"]


async def test_a_failure_after_the_first_token_is_the_last_event(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    decode.service.fail_after = 1
    async with session.post(decode_server.make_url("/generate"), json=body(stream=True)) as answer:
        assert answer.status == 200
        lines = await events(answer)
    assert json.loads(lines[0])["output_ids"] == [3]
    assert json.loads(lines[-1])["error"]["code"] == "engine_error"
    assert len(lines) == 2


async def test_silence_in_a_stream_is_filled_with_empty_lines(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    decode.service.gate.clear()
    async with session.post(decode_server.make_url("/generate"), json=body(stream=True)) as answer:
        seen = b""
        while not seen.endswith(b"\n\n" + 2 * b"\n\n"):
            seen += await asyncio.wait_for(answer.content.readany(), 5)
        decode.service.gate.set()
        seen += await answer.read()
    assert seen.endswith(b"data: [DONE]\n\n")
    # As clients read it that know nothing of comments.
    lines = [line for line in seen.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_room(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession, stream: bool
) -> None:
    decode.service.gate.clear()
    request = asyncio.create_task(post(session, decode_server, body(stream=stream)))
    await asyncio.wait_for(decode.service.started.wait(), 5)
    request.cancel()
    assert await asyncio.wait_for(decode.service.ended.get(), 5) == 7
    await asyncio.wait_for(decode.pipeline.idle.wait(), 5)
    assert decode.pipeline.running == 0


async def test_a_refused_prefill_tells_the_other_leg(
    prefill: Role, prefill_server: Server, session: aiohttp.ClientSession
) -> None:
    status, _ = await post(session, prefill_server, body(input_ids=[1]))
    assert status == 400
    [(room, cause)] = prefill.service.refused
    assert room == 7
    assert cause.code is Code.BAD_REQUEST


async def test_prefill_answers_with_the_first_token(
    prefill: Role, prefill_server: Server, session: aiohttp.ClientSession
) -> None:
    status, answer = await post(session, prefill_server, body(bootstrap_room=99))
    assert status == 200
    assert answer["output_ids"] == [3]


async def test_prefill_holds_only_the_prompt(
    prefill_server: Server, session: aiohttp.ClientSession
) -> None:
    document = body(
        text=None, input_ids=[1] * 60, sampling_params={"max_new_tokens": 60}, bootstrap_room=98
    )
    status, _ = await post(session, prefill_server, document)
    assert status == 200


async def test_a_stream_that_takes_too_long_says_so_and_ends(
    meeting: Meeting, session: aiohttp.ClientSession
) -> None:
    decode = Role(FakeService("decode", meeting), request_timeout_s=0.3)
    decode.service.gate.clear()
    async with (
        served(decode.app) as server,
        session.post(server.make_url("/generate"), json=body(stream=True)) as answer,
    ):
        lines = await events(answer)
    assert json.loads(lines[0])["output_ids"] == [3]
    assert json.loads(lines[-1])["error"]["code"] == "deadline"
    assert len(lines) == 2
    assert await decode.service.ended.get() == 7


async def test_a_body_that_cannot_be_read_still_ends_its_room(
    prefill: Role, prefill_server: Server, session: aiohttp.ClientSession
) -> None:
    """The other leg may have a good one, and waits."""
    status, answer = await post(session, prefill_server, body(sampling_params={"temperature": -1}))
    assert status == 400
    ((room, cause),) = prefill.service.refused
    assert (room, cause.code) == (7, Code.BAD_REQUEST)
    assert cause.text == answer["error"]["message"]


@pytest.mark.parametrize("host", ["x" * 10_000, "x" * 64, "a..b", "h\0", "", "[h]"])
async def test_a_malformed_host_is_refused_and_never_dialled(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession, host: str
) -> None:
    """Neither for the request nor, where another field is bad, to tell the other leg."""
    for changes in ({}, {"sampling_params": {"temperature": -1}}):
        status, _ = await post(session, decode_server, body(bootstrap_host=host, **changes))
        assert status == 400
    assert (decode.service.requests, decode.service.refused) == ([], [])


@pytest.mark.parametrize(
    ("host", "address"),
    [
        *(
            ("::1", "[::1]:8998"),
            ("[::1]", "[::1]:8998"),
            ("fe80::1%eth0.100", "[fe80::1%eth0.100]:8998"),
        ),
        *(("kv_0.example.", "kv_0.example.:8998"), ("10.0.0.1", "10.0.0.1:8998")),
    ],
)
async def test_a_host_of_any_form_becomes_the_address_of_a_registry(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession, host: str, address: str
) -> None:
    assert (await post(session, decode_server, body(bootstrap_host=host)))[0] == 200
    assert decode.service.requests[0].prefill == address


def test_a_prefill_that_takes_any_free_port_serves_bodies_that_name_a_host_alone() -> None:
    """`--disaggregation-bootstrap-port 0`: only decode asks the registry,
    a prefill needs the room.
    """
    assert rooms_of(Rendezvous(bootstrap_host="127.0.0.1", bootstrap_room=7), 0) == [
        (7, "127.0.0.1:0", None)
    ]


async def test_a_body_that_does_not_come(
    decode_server: Server, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflow.http.app.BODY_TIMEOUT_S", 0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", decode_server.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_a_body_in_a_coding_it_is_not_in(
    decode_server: Server, session: aiohttp.ClientSession
) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with session.post(
        decode_server.make_url("/generate"), data=b"no gzip", headers=headers
    ) as answer:
        assert answer.status == 400
        assert "cannot be read" in await answer.text()


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/generate", {"rid": "x" * 513}),
        (
            "/generate",
            {"rid": ["short", "x" * 70_000], "text": ["w1", "w2"], "bootstrap_room": [7, 8]},
        ),
        ("/v1/completions", {"prompt": "w1", "rid": ["x" * 70_000]}),
        ("/v1/completions", {"prompt": "w1", "request_id": "x" * 513}),
    ],
)
async def test_an_id_that_every_event_would_repeat_is_short(
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
    path: str,
    changes: dict[str, Any],
) -> None:
    """An id of 4 MB took the event loop a second for 64 streams of 30 tokens."""
    status, answer = await post(session, decode_server, {**META, "text": "w1", **changes}, path)
    assert (status, answer["error"]["param"]) == (
        400,
        "request_id" if "request_id" in changes else "rid",
    )
    assert "limit 512" in answer["error"]["message"]
    assert decode.service.refused and not decode.service.requests
    assert (await post(session, decode_server, body(rid="x" * 512)))[0] == 200


@pytest.mark.parametrize("first", [5, (1 << 64) - 1])
def test_choices_of_a_body_with_one_room_have_rooms_of_their_own(first: int) -> None:
    body: Any = SimpleNamespace(bootstrap_room=first, bootstrap_host=None, bootstrap_port=None)
    rooms = [_rendezvous(body, index, 4, 8998)[0] for index in range(4)]
    assert rooms[0] == first and len(set(rooms)) == 4 and all(0 <= room < 1 << 64 for room in rooms)
    assert [_rendezvous(body, index, 4, 8998)[0] for index in range(4)] == rooms, "at both legs"


async def test_each_text_of_a_list_has_an_id_of_its_own(
    decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    one = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    status, alone = await post(session, decode_server, body(**one))
    assert status == 200
    status, listed = await post(
        session,
        decode_server,
        body(**one, text=["w1", "w2"], bootstrap_room=[8, 9], bootstrap_host=None),
    )
    assert status == 200, listed
    ids = [answer["meta_info"]["id"] for answer in listed]
    assert len({alone["meta_info"]["id"], *ids}) == 3
    assert [one_id.rpartition("-")[2] for one_id in ids] == ["0", "1"]


@pytest.mark.parametrize(
    ("given", "named"),
    [({"text": "w1 " * 200}, "text"), ({"text": None, "input_ids": [1] * 200}, "input_ids")],
)
async def test_a_prompt_that_is_too_long_is_named_as_it_came(
    decode_server: Server, session: aiohttp.ClientSession, given: dict[str, Any], named: str
) -> None:
    status, answer = await post(session, decode_server, body(**given))
    assert (status, answer["error"]["param"]) == (400, named), answer
