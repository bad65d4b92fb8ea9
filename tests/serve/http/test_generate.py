"""POST /generate on a decode: bodies, answers, streams, errors, a client that leaves."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.protocols.errors import Cause, Code
from kvflow.serve.http.generation_requests import _rendezvous, rooms_of
from kvflow.serve.http.schemas import Rendezvous
from tests.fakes.service import META, FakeService, Meeting, Role, body

pytestmark = pytest.mark.usefixtures("met")


async def test_text_in_text_and_ids_out(decode: Role) -> None:
    answer = await decode.post("/generate", body(rid="r1"))
    assert answer.pop("text").split() == ["w3", "w4", "w5"]
    assert answer == {
        "output_ids": [3, 4, 5],
        "meta_info": {
            "id": "r1",
            "prompt_tokens": 2,
            "completion_tokens": 3,
            "cached_tokens": 0,
            "finish_reason": {"type": "length", "length": 3},
        },
    }
    request = decode.service.requests[0]
    assert (request.room, request.prefill, list(request.prompt)) == (7, "127.0.0.1:8998", [1, 2])


async def test_fields_of_other_programs_are_accepted(decode: Role) -> None:
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
    await decode.post("/generate", body(**extra, sampling_params=sampling, bootstrap_port=None))


async def test_a_stream_repeats_the_cumulative_text(decode: Role) -> None:
    seen = await decode.events("/generate", body())
    assert all(event["output_ids"] == [3, 4, 5][: len(event["output_ids"])] for event in seen)
    assert seen[-1]["output_ids"] == [3, 4, 5]
    reasons = [event["meta_info"]["finish_reason"] for event in seen]
    assert reasons == [None] * (len(seen) - 1) + [{"type": "length", "length": 3}]
    for earlier, later in itertools.pairwise(seen):
        assert later["text"].startswith(earlier["text"])


async def test_several_prompts_and_choices_use_their_own_rooms(decode: Role) -> None:
    document = {
        "input_ids": [[1], [5]],
        "sampling_params": {"max_new_tokens": 2, "n": 2, "sampling_seed": 40},
        "bootstrap_host": ["127.0.0.1"] * 4,
        "bootstrap_port": [1, 2, 3, None],
        "bootstrap_room": [7, 8, 9, 10],
    }
    answer = await decode.post("/generate", document)
    assert [one["output_ids"] for one in answer] == [[2, 3], [2, 3], [6, 7], [6, 7]]
    requests = sorted(decode.service.requests, key=lambda request: request.room or 0)
    assert [request.prefill for request in requests] == [
        f"127.0.0.1:{port}" for port in (1, 2, 3, 8998)
    ]
    assert [request.params.seed for request in requests] == [40, 41, 40, 41]


async def test_two_choices_of_one_prompt_are_a_list(decode: Role) -> None:
    document = body(
        sampling_params={"max_new_tokens": 1, "n": 2}, bootstrap_room=[7, 8], rid=["a", "b"]
    )
    answers = await decode.post("/generate", document)
    found = [(one["meta_info"]["id"], one["output_ids"]) for one in answers]
    assert found == [("a", [3]), ("b", [3])]


async def test_prompts_may_have_sampling_of_their_own(decode: Role) -> None:
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
    answers = await decode.post("/generate", document)
    assert [answer["output_ids"] for answer in answers] == [[2], [6, 7]]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [False, True]
    assert [request.params.seed for request in decode.service.requests] == [None, 3]


@pytest.mark.parametrize("texts", [False, True])
async def test_logprobs_have_texts_on_request(decode: Role, texts: bool) -> None:
    answer = await decode.post(
        "/generate",
        body(return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=texts),
    )
    three, four, five, six = ("w3", "w4", "w5", "w6") if texts else (None,) * 4
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.5, 3, three], [-0.5, 4, four], [-0.5, 5, five]]
    assert meta["output_top_logprobs"] == [
        [[-0.5, 3, three], [-1.5, 4, four]],
        [[-0.5, 4, four], [-1.5, 5, five]],
        [[-0.5, 5, five], [-1.5, 6, six]],
    ]


@pytest.mark.parametrize(("field", "what"), [("stop", "w5"), ("stop_token_ids", 5)])
async def test_what_ends_an_answer_is_told_and_closes_the_iterator_of_the_engine(
    decode: Role, field: str, what: Any
) -> None:
    sampling = {field: [what], "max_new_tokens": 9}
    answer = await decode.post("/generate", body(sampling_params=sampling))
    assert answer["text"].split() == ["w3", "w4"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": what}
    await decode.over(7)


TWO = {"text": ["w1", "w5"], "bootstrap_room": [7, 8]}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({**TWO, "sampling_params": [{}]}, "sampling_params"),
        ({**TWO, "sampling_params": [{}, {}, {}]}, "sampling_params"),
        ({**TWO, "sampling_params": [{"n": 1}, {"n": 2}]}, None),
        ({**TWO, "sampling_params": [{}, {"stop_regex": "a"}]}, "sampling_params[1].stop_regex"),
        ({**TWO, "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
        ({**TWO, "sampling_params": [{}, 5]}, "sampling_params[1]"),
        ({"text": "w1 " * 200}, "text"),
        ({"text": None, "input_ids": [1] * 200}, "input_ids"),
    ],
)
async def test_what_does_not_fit_is_named_as_it_came(
    decode: Role, changes: dict[str, Any], param: str | None
) -> None:
    assert (await decode.refused(400, "/generate", body(**changes)))["param"] == param


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"text": None}, "neither text nor input_ids is given"),
        ({"text": 5}, "text"),
        ({"input_ids": [1]}, "text and input_ids are both given"),
        ({"text": None, "input_ids": [1, [2]]}, "token ids"),
        ({"text": None, "input_ids": []}, "empty"),
        ({"text": None, "input_ids": [100]}, "token id 100 is outside the model's vocabulary"),
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
        ({"sampling_params": {"stop_regex": "a+"}}, "sampling_params.stop_regex"),
        ({"sampling_params": []}, "sampling_params"),
        ({"bootstrap_room": None}, "bootstrap_room is missing"),
        ({"bootstrap_room": -1}, "bootstrap_room: -1 is not an unsigned 64-bit integer"),
        ({"bootstrap_room": 1 << 64}, f"bootstrap_room: {1 << 64} is not an unsigned 64-bit"),
        ({"text": ["w1", "w2"], "bootstrap_room": [7, 7]}, "bootstrap_room: 7 is given twice"),
        ({"bootstrap_room": [1, 2]}, "2 entries for 1"),
        ({"bootstrap_host": "a/b"}, "bootstrap_host: 'a/b' is not a host name or IP address"),
        ({"bootstrap_host": "x" * 64}, "x' is not a host name"),
        ({"bootstrap_host": "[::1"}, "bootstrap_host: '[::1' is not a host name"),
        ({"bootstrap_port": 0}, "bootstrap_port"),
    ],
)
async def test_bad_bodies_are_400_and_name_the_field(
    decode: Role, changes: dict[str, Any], part: str
) -> None:
    error = await decode.refused(400, "/generate", body(**changes))
    assert part in error["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"nope", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"text": NaN}']
)
async def test_malformed_json_is_400(decode: Role, raw: bytes) -> None:
    await decode.refused(400, "/generate", data=raw)


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
    decode: Role, code: Code, status: int, stream: bool
) -> None:
    decode.service.failure = Cause(code, "because")
    answer = await decode.call("POST", "/generate", body(stream=stream))
    assert (answer.status, "Retry-After" in answer.headers) == (status, status == 503)
    error = answer.json["error"]
    assert error["code"] == code and "because" in error["message"]


@pytest.mark.parametrize("failing", ["engine_error", "deadline"])
async def test_a_failure_after_the_first_token_is_the_last_event(
    meeting: Meeting, failing: str
) -> None:
    # The limit must not come before the first token.
    limit_s = 3.0 if failing == "deadline" else 600.0
    async with Role(FakeService("decode", meeting), request_timeout_s=limit_s) as decode:
        if failing == "engine_error":
            decode.service.fail_after = 1
        else:
            decode.service.gate.clear()
        first, last = await decode.events("/generate", body())
        assert first["output_ids"] == [3]
        assert last["error"]["code"] == failing
        await decode.over(7)


async def test_silence_in_a_stream_is_filled_with_empty_lines(decode: Role) -> None:
    decode.service.gate.clear()
    async with decode.opened("/generate", body(stream=True)) as answer:
        seen = b""
        while not seen.endswith(b"\n\n" + 2 * b"\n\n"):
            seen += await asyncio.wait_for(answer.content.readany(), 20)
        decode.service.gate.set()
        seen += await answer.read()
    assert seen.endswith(b"data: [DONE]\n\n")
    # As clients read it that know nothing of comments.
    lines = [line for line in seen.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_room(decode: Role, stream: bool) -> None:
    decode.service.gate.clear()
    request = asyncio.create_task(decode.post("/generate", body(stream=stream)))
    await decode.begun()
    request.cancel()
    await decode.over(7)


@pytest.mark.parametrize("changes", [{"input_ids": [1]}, {"sampling_params": {"temperature": -1}}])
async def test_a_refused_prefill_tells_the_other_leg(prefill: Role, changes: Any) -> None:
    """Also of a body that cannot be read: the other leg may have a good one, and waits."""
    await prefill.refuses("/generate", body(**changes))


async def test_prefill_answers_with_the_first_token(prefill: Role) -> None:
    answer = await prefill.post("/generate", body(bootstrap_room=99))
    assert answer["output_ids"] == [3]


async def test_prefill_holds_only_the_prompt(prefill: Role) -> None:
    document = body(
        text=None, input_ids=[1] * 60, sampling_params={"max_new_tokens": 60}, bootstrap_room=98
    )
    await prefill.post("/generate", document)


@pytest.mark.parametrize("host", ["x" * 10_000, "x" * 64, "a..b", "h\0", "", "[h]"])
async def test_a_malformed_host_is_refused_and_never_dialled(decode: Role, host: str) -> None:
    """Neither for the request nor, where another field is bad, to tell the other leg."""
    for changes in ({}, {"sampling_params": {"temperature": -1}}):
        await decode.refused(400, "/generate", body(bootstrap_host=host, **changes))
    assert (decode.service.requests, decode.service.refused) == ([], [])


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "[::1]:8998"),
        ("[::1]", "[::1]:8998"),
        ("fe80::1%eth0.100", "[fe80::1%eth0.100]:8998"),
        ("kv_0.example.", "kv_0.example.:8998"),
        ("10.0.0.1", "10.0.0.1:8998"),
    ],
)
async def test_a_host_of_any_form_becomes_the_address_of_a_registry(
    decode: Role, host: str, address: str
) -> None:
    await decode.post("/generate", body(bootstrap_host=host))
    assert decode.service.requests[0].prefill == address


def test_a_prefill_that_takes_any_free_port_serves_bodies_that_name_a_host_alone() -> None:
    assert rooms_of(Rendezvous(bootstrap_host="127.0.0.1", bootstrap_room=7), 0) == [
        (7, "127.0.0.1:0", None)
    ]


async def test_a_body_that_does_not_come(decode: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflow.http.app.BODY_TIMEOUT_S", 0.01)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    assert (await decode.exchanged(head)).startswith(b"HTTP/1.1 408 ")


async def test_a_body_in_a_coding_it_is_not_in(decode: Role) -> None:
    given = {"data": b"no gzip", "headers": {"Content-Encoding": "gzip"}}
    error = await decode.refused(400, "/generate", **given)
    assert "cannot be read" in error["message"]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/generate", {"rid": "x" * 513}),
        ("/generate", {**TWO, "rid": ["short", "x" * 70_000]}),
        ("/v1/completions", {"prompt": "w1", "rid": ["x" * 70_000]}),
        ("/v1/completions", {"prompt": "w1", "request_id": "x" * 513}),
    ],
)
async def test_an_id_that_every_event_would_repeat_is_short(
    decode: Role, path: str, changes: dict[str, Any]
) -> None:
    """An id of 4 MB took the event loop a second for 64 streams of 30 tokens."""
    error = await decode.refused(400, path, {**META, "text": "w1", **changes})
    assert error["param"] == ("request_id" if "request_id" in changes else "rid")
    assert "limit 512" in error["message"]
    assert decode.service.refused and not decode.service.requests
    await decode.post("/generate", body(rid="x" * 512))


@pytest.mark.parametrize("first", [5, (1 << 64) - 1])
def test_choices_of_a_body_with_one_room_have_rooms_of_their_own(first: int) -> None:
    body: Any = SimpleNamespace(bootstrap_room=first, bootstrap_host=None, bootstrap_port=None)
    rooms = [_rendezvous(body, index, 4, 8998)[0] for index in range(4)]
    assert rooms[0] == first and len(set(rooms)) == 4 and all(0 <= room < 1 << 64 for room in rooms)
    assert [_rendezvous(body, index, 4, 8998)[0] for index in range(4)] == rooms, "at both legs"


async def test_each_text_of_a_list_has_an_id_of_its_own(decode: Role) -> None:
    one = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    alone = await decode.post("/generate", body(**one))
    listed = await decode.post(
        "/generate", body(**one, text=["w1", "w2"], bootstrap_room=[8, 9], bootstrap_host=None)
    )
    ids = [answer["meta_info"]["id"] for answer in listed]
    assert len({alone["meta_info"]["id"], *ids}) == 3
    assert [one_id.rpartition("-")[2] for one_id in ids] == ["0", "1"]
