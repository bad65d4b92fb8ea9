"""GET /engine_metrics: the metrics of all workers in one valid exposition."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from kvflow.router import worker_metrics
from kvflow.router.worker_metrics import PATH, Exposition, merged
from tests.fakes.servers import Front, Handler, Server, answers, labelled, samples_of, serving
from tests.fakes.service import BODY, Role

SCRAPED = "kvflow_router_worker_scraped"
FAILURES = "kvflow_router_worker_scrape_failures_total"


async def exposition_of(front: Front) -> str:
    answer = await front.call("GET", PATH)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text


async def test_every_sample_of_every_worker_with_its_role_and_address(
    front: Front, prefill: Role, decode: Role
) -> None:
    await front.post("/generate", BODY)
    own = {
        role: {(s.name, *sorted(s.labels.items())) for s in samples_of(await role.metrics())}
        for role in (prefill, decode)
    }
    text = await exposition_of(front)
    for role in (prefill, decode):
        name = role.service.role
        found = [
            s for s in samples_of(text) if s.labels["worker"] == role.url and s.name != SCRAPED
        ]
        assert {s.labels["role"] for s in found} == {name}
        bare = {
            (s.name, *sorted((k, v) for k, v in s.labels.items() if k not in ("role", "worker")))
            for s in found
        }
        # A request before the scrape may have added a series; none is lost.
        assert own[role] <= bare
    served = labelled(text, "kvflow_generated_tokens_total")
    assert served["decode", decode.url] == 3
    assert labelled(text, SCRAPED) == {("prefill", prefill.url): 1, ("decode", decode.url): 1}


async def test_a_family_has_one_head_and_keeps_its_type(front: Front) -> None:
    text = await exposition_of(front)
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) > 40
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds["kvflow_requests"] == "counter"
    assert kinds["kvflow_transfer_bytes"] == "counter"
    assert kinds["kvflow_completion_seconds"] == "histogram"
    assert kinds["kvflow_pages"] == "gauge"


async def not_text(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"kvflow_pages \xff\n")


async def elsewhere(http: web.Request) -> web.StreamResponse:
    if not http.query:
        raise web.HTTPFound("/metrics?again=1")
    return web.Response(text="kvflow_pages 3\n")


BROKEN: dict[str, tuple[Handler | None, str]] = {
    "labels": (answers("kvflow_pages{owner= 3\n"), "malformed"),
    "value": (answers("kvflow_pages three\n"), "malformed"),
    "bytes": (not_text, "malformed"),
    "status": (answers("gone", status=503), "status"),
    "redirect": (elsewhere, "status"),
    "nobody": (None, "unreachable"),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_worker_without_a_good_answer_is_left_out_and_counted(
    prefill: Role, broken: str
) -> None:
    handler, reason = BROKEN[broken]
    async with (
        serving(web.get("/metrics", handler or answers())) as worker,
        Front([prefill], [worker], retry_timeout_s=0) as front,
    ):
        if handler is None:
            await worker.stop()
        await _left_out(front, prefill, worker, reason)


async def _left_out(front: Front, prefill: Role, worker: Server, reason: str) -> None:
    text = await exposition_of(front)
    assert labelled(text, SCRAPED) == {("prefill", prefill.url): 1, ("decode", worker.url): 0}
    assert {s.labels["worker"] for s in samples_of(text, "kvflow_pages")} == {prefill.url}
    assert labelled(await front.metrics(), FAILURES) == {(reason, "decode"): 1}


async def test_an_exposition_without_end_is_cut_off(
    prefill: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(http: web.Request) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(http)
        while True:
            await out.write(b"x 1\n" * 10_000)

    monkeypatch.setattr(worker_metrics, "MAX_EXPOSITION_BYTES", 1 << 20)
    async with (
        serving(web.get("/metrics", endless)) as worker,
        Front([prefill], [worker], retry_timeout_s=0) as front,
    ):
        await _left_out(front, prefill, worker, "malformed")


async def test_a_silent_worker_costs_a_bounded_time(
    prefill: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def silent(_: web.Request) -> web.StreamResponse:
        await never.wait()
        return web.Response()

    monkeypatch.setattr(worker_metrics, "SCRAPE_TIMEOUT_S", 0.5)
    async with (
        serving(web.get("/metrics", silent)) as worker,
        Front([prefill], [worker], retry_timeout_s=0) as front,
    ):
        # On a machine that stands still, the limit may end the scrape of the other one, too.
        assert labelled(await exposition_of(front), SCRAPED)["decode", worker.url] == 0
        failures = labelled(await front.metrics(), FAILURES)
        assert failures["timeout", "decode"] == 1


@pytest.mark.parametrize(("fresh_s", "scrapes"), [(3600.0, 1), (0.0, 2)])
async def test_callers_share_one_scrape_and_one_that_leaves_ends_it_for_none(
    prefill: Role, monkeypatch: pytest.MonkeyPatch, fresh_s: float, scrapes: int
) -> None:
    monkeypatch.setattr(worker_metrics, "FRESH_S", fresh_s)
    asked, go = [], asyncio.Event()

    async def counted(_: web.Request) -> web.StreamResponse:
        asked.append(1)
        await go.wait()
        return web.Response(text="kvflow_pages 1\n")

    async with (
        serving(web.get("/metrics", counted)) as worker,
        Front([prefill], [worker], retry_timeout_s=0) as front,
    ):
        metrics = front.router.worker_metrics
        first, second = (asyncio.create_task(metrics.response()) for _ in range(2))
        async with asyncio.timeout(20):
            while not asked:
                await asyncio.sleep(0.01)
        first.cancel()
        go.set()
        answer = await second
        assert isinstance(answer.body, bytes)
        assert labelled(answer.body.decode(), SCRAPED)["decode", worker.url] == 1
        assert first.cancelled() and asked == [1]
        again = await metrics.response()
        assert len(asked) == scrapes
        assert fresh_s == 0 or again.body == answer.body


def test_labels_of_the_same_name_and_types_that_differ() -> None:
    one = (
        '# HELP a First.\n# TYPE a gauge\na{role="x",worker="y"} 1\n'
        "# HELP b Help.\n# TYPE b gauge\nb 2\nplain 5\n"
    )
    two = "# TYPE a gauge\na 3\n# HELP b_total Other.\n# TYPE b_total counter\nb_total 4\nplain 6\n"
    text, malformed = merged([Exposition("prefill", "u1", one), Exposition("decode", "u2", two)])
    assert not malformed
    lines = text.decode().splitlines()
    assert 'a{exported_role="x",exported_worker="y",role="prefill",worker="u1"} 1.0' in lines
    assert 'a{role="decode",worker="u2"} 3.0' in lines
    assert lines.count("# HELP a First.") == 1 and lines.count("# TYPE a gauge") == 1
    assert 'b{role="prefill",worker="u1"} 2.0' in lines
    assert 'b_total{role="decode",worker="u2"} 4.0' in lines
    assert "# TYPE b gauge" in lines and "# TYPE b_total counter" in lines
    assert [line for line in lines if line.startswith("# TYPE plain")] == ["# TYPE plain untyped"]
    assert 'plain{role="prefill",worker="u1"} 5.0' in lines


def test_one_name_with_two_types_is_untyped() -> None:
    found = [
        Exposition("decode", f"u{kind}", f"# TYPE c {kind}\nc 1\n") for kind in ("gauge", "summary")
    ]
    text, _ = merged(found)
    lines = text.decode().splitlines()
    assert [line for line in lines if line.startswith("# TYPE c ")] == ["# TYPE c untyped"]
    assert {line for line in lines if line.startswith("c{")} == {
        f'c{{role="decode",worker="u{kind}"}} 1.0' for kind in ("gauge", "summary")
    }
