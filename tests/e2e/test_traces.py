"""The trace of one request through a real fleet, as a collector gets it from the real exporter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import aiohttp
import pytest

from tests.e2e.fleet import generate, running
from tests.otlp import CLIENT, SERVER, Collector, Received

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOKENS = 24
# Clocks of two processes agree up to what a busy machine does between reading both of them.
SKEW_NS = 500_000_000
STAGES = ("bootstrap", "allocation", "transfer", "first token", "generation")


def one_of(spans: Sequence[Received], service: str, name: str) -> Received:
    (found,) = (one for one in spans if (one.service, one.name) == (f"kvflow-{service}", name))
    return found


def tree_of(spans: Sequence[Received], parent: str, since_ns: int, depth: int = 0) -> list[str]:
    """The spans below `parent`, one a line, with milliseconds since `since_ns`."""
    lines = []
    for one in sorted(spans, key=lambda one: one.began_ns):
        if one.parent == parent:
            began_ms, ended_ms = ((at - since_ns) / 1e6 for at in (one.began_ns, one.ended_ns))
            name = f"{'  ' * depth}{one.name}"
            lines.append(f"{one.service:15} {name:22} {began_ms:8.2f} {ended_ms:8.2f}")
            lines += tree_of(spans, one.id, since_ns, depth + 1)
    return lines


async def test_all_spans_of_a_request_and_its_times_add_up() -> None:
    async with (
        Collector() as collector,
        running(otlp_endpoint=collector.url) as fleet,
        aiohttp.ClientSession(headers={"traceparent": f"00-{TRACE}-{CALLER}-01"}) as session,
    ):
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        status, _ = await generate(session, fleet.url, stream=True, sampling_params=sampling)
        assert status == 200
        spans = await collector.until(14)
    router = one_of(spans, "router", "POST /generate")
    print(*tree_of(spans, CALLER, router.began_ns), sep="\n")
    assert {one.trace for one in spans} == {TRACE}
    assert (router.parent, router.kind, router.failed) == (CALLER, SERVER, False)
    _children_are_within(spans, router)
    for role in ("prefill", "decode"):
        leg = one_of(spans, "router", f"{role} leg")
        work = one_of(spans, role, "POST /generate")
        assert (leg.parent, leg.kind) == (router.id, CLIENT)
        assert (work.parent, work.kind) == (leg.id, SERVER)
        assert leg.attributes["http.response.status_code"] == 200
        below = {one.name for one in spans if one.parent == work.id}
        steps = {"prefill steps"} if role == "prefill" else {"allocation", *STAGES[3:]}
        assert below == {"queue", "bootstrap", "transfer", *steps}
    _times_add_up(spans, router)
    _attributes(spans)


def _children_are_within(spans: Sequence[Received], root: Received) -> None:
    by_id = {one.id: one for one in spans}
    for one in spans:
        assert one.began_ns <= one.ended_ns
        if one is not root:
            parent = by_id[one.parent]
            skew = 0 if one.service == parent.service else SKEW_NS
            assert parent.began_ns - skew <= one.began_ns, one
            assert one.ended_ns <= parent.ended_ns + skew, one


def _times_add_up(spans: Sequence[Received], router: Received) -> None:
    """Decode's stages follow each other, and end with the first token, and with the last one."""
    stages = [one_of(spans, "decode", name) for name in STAGES]
    for before, after in itertools.pairwise(stages):
        assert after.began_ns == before.ended_ns, (before, after)
    work = one_of(spans, "decode", "POST /generate")
    first_ns = stages[3].ended_ns
    took = [one.ended_ns - one.began_ns for one in stages[:4]]
    before_room_ns = stages[0].began_ns - work.began_ns
    assert sum(took) + before_room_ns == first_ns - work.began_ns
    # The router relays the first token after decode made it, and before the last one.
    assert first_ns <= router.events["first token"] + SKEW_NS
    assert router.events["first token"] <= router.ended_ns
    steps, moved = (one_of(spans, "prefill", name) for name in ("prefill steps", "transfer"))
    # What decode waits for is prefill's queue, steps and writes.
    assert stages[2].began_ns - SKEW_NS <= steps.began_ns
    assert moved.ended_ns <= one_of(spans, "prefill", "POST /generate").ended_ns


def _attributes(spans: Sequence[Received]) -> None:
    decode = one_of(spans, "decode", "POST /generate").attributes
    prompt = decode["gen_ai.usage.input_tokens"]
    assert prompt > 0
    wanted = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "kvflow",
        "gen_ai.request.max_tokens": TOKENS,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.stream": True,
        "gen_ai.usage.output_tokens": TOKENS,
        "http.response.status_code": 200,
    }
    assert wanted.items() <= decode.items()
    steps = one_of(spans, "prefill", "prefill steps").attributes
    assert steps["kvflow.steps"] >= 1 and steps["gen_ai.usage.input_tokens"] == prompt
    assert steps["kvflow.steps_seconds"] > 0
    generation = one_of(spans, "decode", "generation").attributes
    assert generation["gen_ai.usage.output_tokens"] == TOKENS
    assert generation["gen_ai.response.finish_reasons"] == ["length"]
    rooms = [one.attributes["kvflow.rooms"] for one in spans if one.kind == SERVER]
    assert rooms == [rooms[0]] * 3 and len(rooms[0]) == 1
    assert {generation["kvflow.room"]} == set(rooms[0])
