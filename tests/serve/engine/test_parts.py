"""A model in parts, each in its own process: the same tokens and pages as the whole in one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

# Public, and not in its stubs.
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transformers import AutoConfig, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, LostError, MisuseError
from kvflow.protocols.pages.components import Part
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.parallel import joining
from kvflow.serve.engine.model.parallel.agreement import Agreement, ProcessOfRank
from kvflow.serve.engine.model.parallel.division import split_of
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart, own_layers
from kvflow.serve.engine.model.parallel.shards import _connections, _open_files
from kvflow.serve.engine.model.parallel.stage import ForeignLayer, _Convention, _stand_in
from kvflow.serve.engine.model.probe import Layers
from kvflow.serve.engine.model.selftest import Fit
from kvflow.transports.host.identity import own_identity
from tests.serve.engine import tiny_models
from tests.serve.engine.test_shards import copy_of
from tests.serve.engine.tiny_models import Loaded, Tiny
from tests.serve.engine.world import NEW, PAGE_SIZE, PROMPTS, Ran, World, run, world

pytestmark = pytest.mark.xdist_group("parts")  # they share processes


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with world(2) as found:
        yield found


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with world(4) as found:
        yield found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes: with more threads, sums are made in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def annotation(kind: StateKind) -> tuple[int, ...]:
    """Start, whole, replica, replicas and axis."""
    return tuple(map(int, (kind.start, kind.whole, kind.replica, kind.replicas, kind.axis)))


def check(found: list[Ran], whole: Ran, stages: int, shards: int) -> None:
    held: dict[str, list[tuple[int, int]]] = {}
    for rank, ran in enumerate(found):
        for name in ("tokens", "mode", "fingerprint"):
            assert getattr(ran, name) == getattr(whole, name), name
        last = rank // shards == stages - 1
        assert len(ran.logits) == (len(whole.logits) if last else 0)
        for mine, wanted in zip(ran.logits, whole.logits, strict=last):
            check_close(mine, wanted, exact=shards == 1)
        for kind in ran.streams:
            mine, wanted = ran.kept[kind.name], whole.kept[kind.name]
            start, whole_count, replica, _, along = annotation(kind)
            axis = mine.dim() - len(kind.shape) + along
            if whole_count:
                assert whole_count == wanted.shape[axis]
                wanted = wanted.narrow(axis, start, mine.shape[axis])
            check_close(mine, wanted, exact=shards == 1)
            held.setdefault(kind.name, []).append((start, replica))
    assert held.keys() == whole.kept.keys()
    for name, parts in held.items():
        assert len(parts) == len(set(parts)) == shards, f"{name} is held as {parts}"


def check_close(mine: torch.Tensor, wanted: torch.Tensor, *, exact: bool) -> None:
    assert mine.shape == wanted.shape
    if exact:
        assert torch.equal(mine, wanted)
    else:
        assert float((mine - wanted).abs().max()) < 1e-5 * float(wanted.abs().max().clamp_min(1.0))


def one(path: Path, **options: str) -> Ran:
    return run(load_model(str(path), **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("stages", "shards"), [(2, 1), (1, 2)])
def test_two_processes_are_one_model(
    two: World, tiny: Tiny, loaded: Loaded, stages: int, shards: int
) -> None:
    whole = run(loaded("llama"))
    found = two.run(tiny("llama"), stages, shards)
    check(found, whole, stages, shards)
    # others' weights are not there.
    assert max(ran.parameters for ran in found) < 0.7 * whole.parameters
    assert all(ran.weights < 1.1 * ran.parameters * 4 for ran in found)  # nor their memory


def test_latents_are_held_by_every_shard(two: World, tiny: Tiny, loaded: Loaded) -> None:
    found = two.run(tiny("deepseek_v3"), 1, 2)
    check(found, run(loaded("deepseek_v3")), 1, 2)
    assert [annotation(ran.streams[0]) for ran in found] == [(0, 0, 0, 2, 0), (0, 0, 1, 2, 0)]


def test_all_parts_choose_one_mode(two: World, tmp_path: Path) -> None:
    """Of this lfm2 one stage has attention alone, and would run packed by itself."""
    layer_types = ["conv", "conv", "full_attention", "full_attention"]
    path = tiny_models.build("lfm2", tmp_path, layer_types=layer_types)
    found = two.run(path, 2, 1)
    check(found, one(path), 2, 1)
    assert [(ran.mode, len(ran.kept)) for ran in found] == [("pad", 2), ("pad", 4)]


def test_a_rank_that_cannot_load_is_named_by_the_others(two: World, tmp_path: Path) -> None:
    """The last layers of a nemotron_h may keep nothing."""
    path = tiny_models.build(
        "nemotron_h", tmp_path, layers_block_type=["attention"] * 2 + ["mlp"] * 2
    )
    first, second = two.outcomes(path, 2, 1)
    assert "is not supported: the layers of this stage wrote nothing to its cache" in second
    assert "rank 1 cannot load its part of the model: model" in first


def test_an_abort_ends_what_a_shard_waits_for(two: World, tiny: Tiny) -> None:
    for survivor in two.outcomes(tiny("llama"), 1, 2, idle=1):
        assert "LostError" in survivor and "start all processes of the stage again" in survivor


@pytest.mark.parametrize("shards", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_ends_the_step_of_the_others(
    two: World, tiny: Tiny, shards: int
) -> None:
    """A shard notices in a collective; a stage waits until it is told."""
    killed, survivor = two.outcomes(tiny("llama"), 2 // shards, shards, killed={0: 3})
    assert killed == "ended"
    assert (
        "LostError: a shard of this stage is gone" if shards == 2 else "LostError: passing hidden"
    ) in survivor


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_loads_ends_the_wait_of_the_others(
    two: World, tiny: Tiny
) -> None:
    killed, survivor = two.outcomes(tiny("llama"), 2, 1, killed={0: 0})
    assert (
        killed == "ended"
        and "LostError: rank 0 has ended while it loaded its part of the model" in survivor
    )


def soaked(*cases: tuple[str, int, int]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.soak) for case in cases]


WIDE = ["llama", "qwen3", "deepseek_v3", "gemma2", "gemma3"]
STAGES_ONLY = [
    "gpt_oss",
    "gpt2",
    "bloom",
    "opt",
    "llama4_chunked",
    "falcon_h1",
    "lfm2",
    "bamba",
    "jamba",
    "mamba2",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stages", "shards"),
    [(f, 2, 2) for f in WIDE]
    + soaked(*((f, *shape) for f in WIDE for shape in ((2, 1), (4, 1), (1, 2))))
    + [(f, 4, 1) for f in STAGES_ONLY]
    + [(f, 2, 2) for f in ("mistral", "mixtral", "deepseek_v2", "qwen3_next")]
    + soaked(*((f, 1, 2) for f in ("mistral", "mixtral", "deepseek_v2", "qwen3_next")))
    + [(f, 1, 2) for f in ("deepseek_v32", "glm_moe_dsa", "gemma4_shared_kv", "llama4_chunked")]
    + [("mixtral", 1, 4)]
    + soaked(*((f, 1, 4) for f in ("llama", "deepseek_v3"))),
)
def test_families_in_parts(
    four: World, tiny: Tiny, loaded: Loaded, family: str, stages: int, shards: int
) -> None:
    check(four.run(tiny(family), stages, shards), run(loaded(family)), stages, shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "heads", "shards"),
    [
        *(("llama", 1, 4), ("llama", 2, 4), ("gemma3", 1, 2)),
        *soaked(("llama", 1, 2), ("llama", 2, 2), ("llama", 4, 2), ("llama", 4, 4)),
        *soaked(("gemma3", 1, 4), ("qwen3", 2, 2), ("qwen3", 2, 4)),
    ],
)
def test_fewer_heads_than_shards_are_repeated(
    four: World, tmp_path: Path, family: str, heads: int, shards: int
) -> None:
    path = tiny_models.build(family, tmp_path, num_key_value_heads=heads)
    found = four.run(path, 1, shards)
    check(found, one(path), 1, shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gpt2"),
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("gemma2", "falcon_h1")),
    ],
)
def test_tied_weights(four: World, tmp_path: Path, family: str) -> None:
    path = tiny_models.build(family, tmp_path, tie_word_embeddings=True)
    shapes = [(2, 1)] if family in STAGES_ONLY else [(2, 1), (2, 2)]
    for stages, shards in shapes:
        check(four.run(path, stages, shards), one(path), stages, shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "lfm2"),
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("llama", "gemma3", "gpt2")),
    ],
)
def test_stages_in_half_precision_are_exact(
    four: World, tiny: Tiny, loaded: Loaded, family: str
) -> None:
    check(four.run(tiny(family), 4, 1, dtype="bfloat16"), run(loaded(family, "bfloat16")), 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["always", "never"])
def test_windows_in_rows_and_in_pages(four: World, tiny: Tiny, rows: str) -> None:
    for family in ("mistral", "gemma3"):
        whole = one(tiny(family), sliding_window_rows=rows)
        for stages, shards in ((4, 1), (2, 2)):
            check(
                four.run(tiny(family), stages, shards, sliding_window_rows=rows),
                whole,
                stages,
                shards,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "stages", "shards", "heads", "said"),
    [
        (
            "gpt2",
            1,
            2,
            (),
            "cannot be divided among 2 shards: transformers has no tensor-parallel plan for it",
        ),
        ("qwen3", 1, 2, (3, 3), "has 3 attention heads: 2 shards"),
        ("qwen3", 1, 4, (12, 3), "has 3 K/V heads: 4 shards"),
        (
            "glm_moe_dsa",
            2,
            1,
            (),
            "cannot be cut into stages: its layers hand on more than hidden states",
        ),
    ],
)
def test_what_cannot_be_divided_gets_one_line(
    four: World,
    tmp_path: Path,
    family: str,
    stages: int,
    shards: int,
    heads: tuple[int, ...],
    said: str,
) -> None:
    """`heads` are the attention heads, and those of K and V, if they are not the family's."""
    changes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=False))
    path = tiny_models.build(family, tmp_path, **changes)
    for found in four.outcomes(path, stages, shards):
        assert said in found.strip().splitlines()[-1]


# --- in one process


@pytest.fixture
def meeting(tmp_path: Path) -> Meeting:
    path = tmp_path / "meeting"
    path.mkdir(mode=0o700)
    return Meeting(path, load_timeout_s=0.1)


@pytest.mark.parametrize(
    ("family", "part", "said"),
    [
        ("llama", ModelPart(0, 5), "has 4 layers: they cannot be cut into 5 stages"),
        (
            "falcon_h1",
            ModelPart(shards=2),
            r"\(falcon_h1\) cannot be divided among 2 shards: transformers has no",
        ),
        (
            "gemma4_shared_kv",
            ModelPart(1, 2),
            r"into 2 stages before layer 2: layers 2..3 use the K and V of layers 0 "
            "and 1, so all of these have to be in one stage",
        ),
    ],
)
def test_what_the_configuration_forbids_is_refused_before_weights_are_read(
    tiny: Tiny, tmp_path: Path, meeting: Meeting, family: str, part: ModelPart, said: str
) -> None:
    path = shutil.copytree(tiny(family), tmp_path / "model")
    (path / "model.safetensors").unlink()
    with pytest.raises(MisuseError, match=said) as caught:
        load_model(str(path), part=part, meeting=meeting)
    assert "\n" not in str(caught.value)


def test_a_part_needs_a_meeting_that_is_private(tiny: Tiny, tmp_path: Path) -> None:
    path = str(tiny("llama"))
    with pytest.raises(
        MisuseError, match="stage 0 of 2, shard 1 of 2 of a model needs a meeting directory"
    ):
        load_model(path, part=ModelPart(0, 2, 1, 2))
    os.chmod(tmp_path, 0o750)
    with pytest.raises(
        MisuseError,
        match=r"has mode 750 and owner .*: it has to be a directory of user .* mode 700",
    ):
        load_model(path, part=ModelPart(0, 2), meeting=Meeting(tmp_path))
    with pytest.raises(MisuseError, match="No such file"):
        load_model(path, part=ModelPart(0, 2), meeting=Meeting(tmp_path / "x"))


def test_a_rank_that_does_not_come_ends_the_wait(tiny: Tiny, meeting: Meeting) -> None:
    with pytest.raises(
        Exception, match=r"rank 1 has said nothing of its part of the model for 0\.1 s"
    ):
        load_model(str(tiny("llama")), part=ModelPart(0, 2), meeting=meeting)


def test_shards_that_are_started_again_wait_for_each_other_again(meeting: Meeting) -> None:
    parts = [ModelPart(shard=n, shards=2) for n in range(2)]
    patient = dataclasses.replace(meeting, load_timeout_s=20)
    wait_for_all([Agreement(part, patient) for part in parts])
    again = dataclasses.replace(meeting, attempt=1)
    first = Agreement(parts[0], again)
    ended = ProcessOfRank(0, msgspec.structs.replace(own_identity(), start_ticks=1))
    first.store.set("process/1", msgspec.json.encode(ended).decode())
    with pytest.raises(LostError, match="rank 1 has said nothing"):
        first.wait_for_weights()
    first._timeout_s = patient.load_timeout_s
    wait_for_all([first, Agreement(parts[1], dataclasses.replace(patient, attempt=1))])


def wait_for_all(agreements: list[Agreement]) -> None:
    with ThreadPoolExecutor(len(agreements)) as threads:
        list(threads.map(Agreement.wait_for_weights, agreements))


def test_what_is_no_connection_is_neither_kept_nor_left_open(tmp_path: Path) -> None:
    before, store = _open_files(), FileStore(str(tmp_path / "store"), -1)
    ends = os.pipe()
    made = _open_files()
    assert made - before == set(ends)
    assert _connections(before, store, ModelPart()) == []
    assert _open_files() == made
    for end in ends:
        os.close(end)


def choose_together(
    meeting: Meeting,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    fingerprints: tuple[str, str],
    *pad: int,
) -> list[Any]:
    """Return each stage's `Fit` or error; stages in `pad` cannot run packed."""

    def choose(_: Any, layers: Layers, name: str, requested: str, rings: str) -> Fit:
        return Fit(
            "pad" if requested == "pad" or int(name) in pad else "packed", int(name) in pad, layers
        )

    monkeypatch.setattr(joining, "choose_fit", choose)
    monkeypatch.setattr(joining, "set_packed", lambda model, packed: True)
    parts = [ModelPart(stage, 2) for stage in range(2)]
    meeting = Meeting(meeting.directory, load_timeout_s=20)
    with ThreadPoolExecutor(2) as threads:
        stages = [joining.Joined(part, meeting, Agreement(part, meeting)) for part in parts]
        asked = [
            threads.submit(
                stage.choose_fit, model.model, model.layers, str(n), "auto", "never", fingerprint
            )
            for n, (stage, fingerprint) in enumerate(zip(stages, fingerprints, strict=True))
        ]
        return [one.exception(30) or one.result() for one in asked]


def test_parts_of_two_models_name_each_other(
    meeting: Meeting, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = choose_together(meeting, llama, monkeypatch, ("one", "other"))
    assert str(first) == "rank 1 has loaded a part of 2 x 1 of 'other', rank 0 of 2 x 1 of 'one'"
    assert str(second) == "rank 0 has loaded a part of 2 x 1 of 'one', rank 1 of 2 x 1 of 'other'"


@pytest.mark.parametrize("pad", [(), (0,), (1,), (0, 1)])
def test_parts_of_one_model_run_as_all_of_them_can(
    pad: tuple[int, ...], meeting: Meeting, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = choose_together(meeting, llama, monkeypatch, ("one", "one"), *pad)
    assert [(fit.mode, fit.whole_prompts) for fit in found] == [
        ("pad" if pad else "packed", bool(pad))
    ] * 2


def test_a_layer_of_another_stage_is_stood_for_by_one_of_its_kind() -> None:
    plain, linear = DynamicLayer(), LinearAttentionLayer()
    sliding = DynamicSlidingWindowLayer(sliding_window=4)
    assert _stand_in(DynamicLayer(), [sliding, plain]) is plain
    assert _stand_in(DynamicLayer(), [linear, sliding]) is sliding, "any with a length"
    assert _stand_in(linear, [plain]) is linear, "no other one has what it has"


def test_what_stands_for_a_layer_shows_what_models_read_of_it_and_has_no_weights() -> None:
    layer: Any = torch.nn.Linear(2, 2)
    inner = torch.nn.Module()
    layer.attention_type, layer._own = "sliding_attention", "x"
    layer.inner = inner
    for name in ("scale", "shift"):
        inner.register_buffer(name, torch.ones(2))
    found: Any = ForeignLayer(layer, 3, _Convention("m"), follows=False)
    assert (found.attention_type, found.in_features, found.index) == ("sliding_attention", 2, 3)
    assert not hasattr(found, "_own")
    assert {
        name: buffer is inner.get_buffer(name[6:]) for name, buffer in found.named_buffers()
    } == {"inner.scale": True, "inner.shift": True}
    assert not list(found.parameters()) and not found.state_dict()


def test_only_connections_to_another_shard_are_kept(tmp_path: Path) -> None:
    before, store = _open_files(), FileStore(str(tmp_path / "store"), -1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [
            end
            for _ in range(2)
            for end in (socket.create_connection(server.getsockname()), server.accept()[0])
        ]
        here, there = str(ends[0].getsockname()), str(ends[0].getpeername())
        store.set("connections/1", msgspec.json.encode([(there, here)]).decode())
        made = _open_files()
        kept = _connections(before, store, ModelPart(shard=0, shards=2))
        assert [(str(one.getsockname()), str(one.getpeername())) for one in kept] == [(here, there)]
        assert [here, there] in msgspec.json.decode(store.get("connections/0"))
        for one in kept:
            one.close()
        assert _open_files() == made
        for end in ends:
            end.close()


def test_a_pool_may_hold_the_parts_of_several_shards(llama: LoadedModel) -> None:
    shards = [copy_of(llama, n) for n in range(2)]
    streams = [kind for shard in shards for kind in shard.streams]
    pages = sum(-(-(len(p) + NEW) // PAGE_SIZE) for p in PROMPTS)
    pool = PagedPool.allocate(build_layout(streams, page_size=PAGE_SIZE, num_pages=pages))
    whole = run(llama)
    for n, shard in enumerate(shards):
        assert run(shard, pool=pool).tokens == whole.tokens
        for name, kept in whole.kept.items():
            assert torch.equal(pool.tensor(name, start=0, replica=n), kept)
            assert n == 1 or not pool.tensor(name, start=0, replica=1).any()
    with pytest.raises(LayoutError, match=r"layer0\.k: only model has entries"):
        odd = [kind._replace(shape=(1, 16), start=1, whole=2) for kind in llama.streams]
        other = PagedPool.allocate(build_layout(odd, page_size=PAGE_SIZE, num_pages=pages))
        shards[0].runner(other)
    pool.close()


@pytest.mark.parametrize(
    "values", [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 0, 0, 1), (0, 1, 4, 4), (0, 1, 0, 2000)]
)
def test_parts_that_do_not_exist_are_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(
        MisuseError, match=r"(stage|shard) -?\d+ of \d+: a (stage|shard) is 0..count-1"
    ):
        ModelPart(*values)


def test_stages_are_consecutive_and_cover_every_layer() -> None:
    for count in range(1, 40):
        for stages in range(1, count + 1):
            ranges = [ModelPart(s, stages).layers(count) for s in range(stages)]
            assert [i for r in ranges for i in r] == list(range(count))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize(
    ("whole", "mine", "shards", "found"),
    [
        (8, 4, 2, [Part(0, 8), Part(4, 8)]),
        (1, 1, 2, [Part(0, 0, 0, 2), Part(0, 0, 1, 2)]),
        (2, 1, 4, [Part(0, 2, 0, 2), Part(0, 2, 1, 2), Part(1, 2, 0, 2), Part(1, 2, 1, 2)]),
        (8, 3, 2, [None, None]),
        (6, 2, 2, [None, None]),
    ],
)
def test_which_heads_a_shard_has(
    whole: int, mine: int, shards: int, found: list[Part | None]
) -> None:
    assert [
        split_of(whole, mine, ModelPart(shard=s, shards=shards)) for s in range(shards)
    ] == found


def test_the_layers_that_share_are_found_in_the_configuration() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    config = AutoConfig.for_model(
        "gemma3n_text",
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=kinds,
        intermediate_size=[8] * 6,
    )
    with pytest.raises(
        MisuseError, match=r"before layer 3: layers 4..5 use the K and V of layers 2 and 3"
    ):
        own_layers(config, ModelPart(1, 2), "m")
    config.num_kv_shared_layers = 0
    assert own_layers(config, ModelPart(1, 2), "m") == range(3, 6)


def test_a_model_that_names_no_layers_is_whole() -> None:
    assert own_layers(PretrainedConfig(), ModelPart(), "m") == range(0)
    with pytest.raises(MisuseError, match="has no num_hidden_layers"):
        own_layers(PretrainedConfig(), ModelPart(0, 2), "m")
