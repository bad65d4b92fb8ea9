"""`bench cache`: its hit rate is that of a plain LRU of pages, and errors name their line."""

from __future__ import annotations

import ast
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from kvflow.bench import cache
from kvflow.bench.cache import CachePlan, bench_cache, middle, replay
from kvflow.bench.cache_curve import MILLIONS, PAPER, block_lru, capacity_curve
from kvflow.bench.cache_trace import Prompt, find_trace, read_trace
from kvflow.bench.commands import app
from kvflow.protocols.errors import MisuseError
from kvflow.traces import BLOCK_TOKENS

SMALL = Path(__file__).with_name("small_trace.jsonl")
LINE = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4, 7]}


def naive_hit_rate(prompts: Sequence[Prompt], page_size: int, capacity: int) -> float:
    """A page is known by all that comes before its end; a prompt's first page is used last."""
    cached: OrderedDict[Any, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        ends = range(page_size, prompt.num_tokens + 1, page_size)
        pages = [(end, tuple(prompt.blocks[: -(-end // BLOCK_TOKENS)])) for end in ends][:capacity]
        hits += next((at for at, page in enumerate(pages) if page not in cached), len(pages))
        for page in reversed(pages):
            cached[page] = None
            cached.move_to_end(page)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits * page_size / sum(prompt.num_tokens for prompt in prompts)


def made_up(draw: random.Random, count: int) -> list[Prompt]:
    """Some begin as others do, are cut short in a block, or go on in another way."""
    prompts = [Prompt(BLOCK_TOKENS, [0])]
    for number in range(1, count):
        blocks = draw.choice(prompts).blocks
        blocks = blocks[: draw.randint(0, len(blocks))] + [
            number * 10 + at for at in range(draw.randint(1, 4))
        ]
        prompts.append(Prompt(len(blocks) * BLOCK_TOKENS - draw.randrange(BLOCK_TOKENS), blocks))
    return prompts


@pytest.mark.parametrize("page_size", [64, 96, 512])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.4, 1])
def test_the_hit_rate_is_that_of_a_plain_lru(page_size: int, share: float, seed: int) -> None:
    draw = random.Random(f"{seed} {page_size} {share}")
    for _ in range(2):
        prompts = made_up(draw, 60)
        capacity = max(1, int(share * 250 * BLOCK_TOKENS / page_size))
        seen = replay(prompts, page_size, capacity)
        assert seen["hit_rate"] == naive_hit_rate(prompts, page_size, capacity)
        assert len(seen["seconds"]["match"]) == len(prompts)


def test_events_are_recorded_where_they_are_asked_for() -> None:
    prompts = read_trace(SMALL)
    assert replay(prompts, 64, 128)["seconds"]["events"] == []
    assert len(replay(prompts, 64, 128, True)["seconds"]["events"]) == len(prompts)


@pytest.mark.parametrize(
    ("capacity_tokens", "rate"), [(8_192, 0.2015), (65_536, 0.6859), (1_000_000, 0.7636)]
)
def test_the_hit_rate_of_a_trace_that_is_kept(capacity_tokens: int, rate: float) -> None:
    seen = replay(read_trace(SMALL), 64, capacity_tokens // 64)
    assert seen["hit_rate"] == pytest.approx(rate, abs=5e-5)


def test_a_prompt_longer_than_the_cache_is_cached_in_its_beginning() -> None:
    long = Prompt(4 * BLOCK_TOKENS, [0, 1, 2, 3])
    assert replay([long, long], BLOCK_TOKENS, 3)["hit_rate"] == 3 / 8


def test_numbers_of_blocks_are_those_of_first_use_and_tokens_differ(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n\n{json.dumps(LINE | {'hash_ids': [7, 2**63]})}\n")
    first, second = read_trace(path)
    assert (first.blocks, second.blocks) == ([0, 1], [1, 2])
    assert first.tokens()[BLOCK_TOKENS:].tolist() == second.tokens()[: 600 - BLOCK_TOKENS].tolist()
    assert len(set(first.tokens().tolist())) == 600
    assert len(read_trace(path, 1)) == 1


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON: "),
        ("\udcff", "not JSON: "),
        ("[]", "not a JSON object"),
        (json.dumps(LINE | {"input_length": 0}), "input_length 0 is not a number in 1..1073741824"),
        (
            json.dumps(LINE | {"input_length": True}),
            "input_length True is not a number in 1..1073741824",
        ),
        (json.dumps({"hash_ids": [1]}), "input_length None is not a number in 1..1073741824"),
        (json.dumps(LINE | {"hash_ids": [1, "2"]}), "hash_ids is not a list of integers"),
        (json.dumps({"input_length": 600}), "hash_ids is not a list of integers"),
        (
            json.dumps(LINE | {"hash_ids": [1]}),
            "1 hash_ids for 600 tokens, which are 2 blocks of 512",
        ),
    ],
)
def test_a_malformed_line_is_named(line: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{json.dumps(LINE)}\n{line}\n".encode(errors="surrogateescape"))
    assert str(refused("--trace", str(path))).startswith(f"{path}, line 2: {wrong}")


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    here = ("--trace", str(SMALL))
    published = "conversation_trace.jsonl is published in "
    assert "no such file, and no known name (conversation, synthetic)" in refused(
        "--trace", "dialogue"
    )
    assert f"neither --traces DIR nor KVFLOW_TRACES is given; {published}" in refused(
        "--trace", "conversation"
    )
    assert f"{tmp_path}/conversation_trace.jsonl is not there; {published}" in refused(
        "--traces", str(tmp_path)
    )
    assert refused("--trace", str(empty)) == f"{empty} has no prompts"
    less = "--capacity-tokens 63 is less than one page of 64 tokens (--page-size)"
    assert refused(*here, "--capacity-tokens", "63") == less
    assert "run its run.sh once, or leave --peer out" in refused(*here, "--peer", str(tmp_path))
    assert refused(*here, "--plot", "curve.svg").startswith(
        "--plot draws the curve of --capacity-curve"
    )
    nowhere = str(tmp_path / "missing" / "curve.svg")
    assert (
        refused(*here, "--capacity-curve", "--plot", nowhere)
        == f"--plot {nowhere}: there is no folder {tmp_path}/missing"
    )


def refused(*arguments: str) -> str:
    with pytest.raises(MisuseError) as caught:
        app(["cache", *arguments], standalone_mode=False)
    return str(caught.value)


def test_a_named_trace_is_found_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "synthetic_trace.jsonl").touch()
    assert find_trace("synthetic", tmp_path) == tmp_path / "synthetic_trace.jsonl"
    monkeypatch.setenv("KVFLOW_TRACES", str(tmp_path))
    assert refused("--trace", "synthetic") == f"{tmp_path}/synthetic_trace.jsonl has no prompts"


def test_the_peer_is_asked_the_same() -> None:
    """Its driver runs where kvflow cannot be imported, and has the sizes of the cases once more."""
    source = ast.parse(Path(cache.__file__).with_name("radix_driver.py").read_text())
    sizes: dict[str, int] = {}
    for line in source.body:
        if isinstance(line, ast.Assign):
            exec(compile(ast.Module([line], []), "radix_driver.py", "exec"), {}, sizes)
    assert len(sizes) == 9 and sizes.pop("BLOCK_TOKENS") == BLOCK_TOKENS
    assert sizes == {name: getattr(cache, name) for name in sizes}


@pytest.mark.slow
async def test_figures_are_medians_of_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LEAVES", 100)
    said: list[str] = []
    report = await bench_cache(
        read_trace(SMALL, 20), CachePlan(64, 10_000, True, rounds=2), said.append
    )
    assert report["plan"]["requests"] == 20 and len(said) == 2
    assert set(report["parts_us"]) == {"match", "lock", "evict", "insert", "events"}
    for part, calls in report["parts_us"].items():
        assert 0 < calls["p50"] <= calls["p99"]
        assert 0 < calls["calls"] < 20 if part == "evict" else calls["calls"] == 20
    for figure in ("us_per_request", "evict_us", "deep_match_us", "hit_rate"):
        assert report[figure] > 0
    assert "ratio" not in report
    rounds = [{"a": a, "b": {"c": c}} for a, c in ((1.0, 3), (5.0, 4), (2.0, 9))]
    assert middle(rounds) == {"a": 2.0, "b": {"c": 4}}


def test_one_json_object_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAVES", 100)
    app(["cache", "--trace", str(SMALL), "--rounds", "1", "--json"], standalone_mode=False)
    report = json.loads(capsys.readouterr().out)
    assert report["hit_rate"] == round(naive_hit_rate(read_trace(SMALL), 64, 3_000_000 // 64), 4)


async def test_the_curve_is_drawn_beside_the_papers(tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    report = await capacity_curve("synthetic", read_trace(SMALL), plot, lambda _: None)
    rows = report["table"]
    assert [row["capacity_tokens"] for row in rows] == [int(n * 1e6) for n in MILLIONS]
    assert [row["index"] for row in rows] == sorted(row["index"] for row in rows)
    assert {row["capacity_tokens"] / 1e6: row["paper"] for row in rows if "paper" in row} == PAPER
    assert all(row["holds"] == (row["off"] <= 0.01) for row in rows if "paper" in row)
    assert not report["holds"], "it is another trace than the paper's"
    drawing = ElementTree.parse(plot).getroot()
    space = "{http://www.w3.org/2000/svg}"
    (line,) = drawing.findall(f"{space}polyline")
    assert len(line.attrib["points"].split()) == len(MILLIONS)
    assert len(drawing.findall(f"{space}circle")) == len(PAPER)


async def test_another_trace_has_no_curve_to_hold(tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    report = await capacity_curve("a<b&c", read_trace(SMALL), plot, lambda _: None)
    assert report["holds"] is None and not any("paper" in row for row in report["table"])
    texts = [
        text.text
        for text in ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts[0] == "a<b&c: hit rate by capacity" and "paper" not in texts


def test_the_curve_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    app(["cache", "--trace", str(SMALL), "--capacity-curve"], standalone_mode=False)
    assert "50,000,000" in capsys.readouterr().out


def test_the_plain_lru_of_whole_blocks_by_hand() -> None:
    first = Prompt(1024, [0, 1])
    prompts = [first, first, Prompt(1535, [2, 3, 4]), first]
    # Of 8 whole blocks the second prompt finds both; of 3 places the third takes two, and leaves
    # block 1 alone.
    assert block_lru(prompts, 4) == 4 / 8
    assert block_lru(prompts, 3) == 2 / 8
    assert block_lru(prompts, 1) == 0


async def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MisuseError) as caught:
        await capacity_curve("small", read_trace(SMALL, 5), tmp_path, lambda _: None)
    assert str(caught.value) == f"--plot {tmp_path}: Is a directory"
