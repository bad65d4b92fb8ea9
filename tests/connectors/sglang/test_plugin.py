"""What the backend adds to SGLang, and which SGLang it is for."""

from __future__ import annotations

import json
import math
import sys
import urllib.error
import urllib.request
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

import kvflow.connectors.sglang
from kvflow.connectors.sglang import plugin, queues
from kvflow.connectors.sglang.prompts import PromptSlot
from kvflow.connectors.sglang.version import check_version
from kvflow.protocols.arguments import check_prompt
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.ranks import RankInfo, rank_to_json
from kvflow.transports.control.registry import RegistryClient
from tests.fakes import sglang

Patch = pytest.MonkeyPatch
UTILS = "sglang.srt.disaggregation.utils"


@pytest.fixture
def modules(monkeypatch: Patch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.delenv("KVFLOW_SGLANG_TRANSFER_BACKEND", raising=False)
    return dict(sglang.install(monkeypatch))


def test_the_backend_is_a_choice_and_a_member(modules: dict[str, Any]) -> None:
    for _ in range(2):
        kvflow.connectors.sglang.register()
    choices = modules["sglang.srt.arg_groups.choices"].DISAGG_TRANSFER_BACKEND_CHOICES
    assert choices == ["mooncake", "kvflow"]
    backend = modules[UTILS].TransferBackend
    assert [each.value for each in backend] == ["mooncake", "fake", "kvflow"]
    assert backend("kvflow") is backend.KVFLOW is backend["KVFLOW"]
    assert (backend.KVFLOW.name, isinstance(backend.KVFLOW, backend)) == ("KVFLOW", True)
    assert backend.KVFLOW != backend.MOONCAKE and hash(backend.KVFLOW) == hash("KVFLOW")
    with pytest.raises(ValueError, match="'other' is not a valid"):
        backend("other")


def test_only_its_own_classes_are_given(modules: dict[str, Any]) -> None:
    kvflow.connectors.sglang.register()
    (target, hook, kind), *_ = modules["sglang.srt.plugins.hook_registry"].HookRegistry.hooks
    assert (target, kind) == (f"{UTILS}.get_kv_class", sglang.HookType.AROUND)
    kinds, backend = modules[UTILS].KVClassType, modules[UTILS].TransferBackend

    def original(*asked: Any) -> Any:
        return asked

    found = {each.name: hook(original, backend.KVFLOW, each) for each in kinds}
    assert found.pop("KVARGS") == (backend.KVFLOW, kinds.KVARGS)
    common = modules["sglang.srt.disaggregation.common.conn"]
    for name, base in (
        ("MANAGER", common.CommonKVManager),
        ("SENDER", common.CommonKVSender),
        ("RECEIVER", common.CommonKVReceiver),
        ("BOOTSTRAP_SERVER", common.CommonKVBootstrapServer),
    ):
        assert issubclass(found[name], base)
    assert hook(original, backend.FAKE, kinds.SENDER) == (backend.FAKE, kinds.SENDER)


@pytest.mark.parametrize(
    ("plane", "staging", "count"),
    [("local", "auto", 5), ("local", "always", 3), ("mooncake", "auto", 3)],
)
def test_only_the_local_plane_changes_allocations(
    modules: dict[str, Any], monkeypatch: Patch, plane: str, staging: str, count: int
) -> None:
    monkeypatch.setenv("KVFLOW_SGLANG_TRANSFER_BACKEND", plane)
    monkeypatch.setenv("KVFLOW_SGLANG_STAGING", staging)
    kvflow.connectors.sglang.register()
    assert len(modules["sglang.srt.plugins.hook_registry"].HookRegistry.hooks) == count


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+cpu"])
def test_any_build_of_the_release_is_supported(monkeypatch: Patch, version: str) -> None:
    sglang.install(monkeypatch, version)
    check_version()


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.2", "0.5.23.post1", "0.5.23rc1"])
@pytest.mark.parametrize("words", [["kvflow"], ["--disaggregation-transfer-backend=kvflow"], []])
def test_another_release_is_refused_where_the_backend_is_named(
    monkeypatch: Patch, version: str, words: list[str]
) -> None:
    found: Any = sglang.install(monkeypatch, version)
    monkeypatch.setattr(sys, "argv", ["launch_server", *words])
    with pytest.raises(MisuseError, match=r"backend for SGLang 0\.5\.23, and SGLang "):
        check_version()
    if words:
        with pytest.raises(SystemExit) as raised:
            kvflow.connectors.sglang.register()
        assert f"SGLang {version} is installed: install sglang==0.5.23" in str(raised.value)
    else:
        kvflow.connectors.sglang.register()
    assert [each.value for each in found[UTILS].TransferBackend] == ["mooncake", "fake"]


def test_queues_name_the_prompt(modules: dict[str, Any]) -> None:
    queues.install()
    queues.install()
    slot = PromptSlot()
    manager, request = SimpleNamespace(prompts=slot), SimpleNamespace(origin_input_ids=[1, 2])
    prefill = modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue
    decode = modules["sglang.srt.disaggregation.decode"].DecodePreallocQueue
    for queue in (prefill(manager, slot.take), decode(manager, slot.take)):
        make = getattr(queue, "create_sender", None) or queue._create_receiver_and_enqueue
        assert make(request) == check_prompt([1, 2])
    with pytest.raises(MisuseError, match="no known request"):
        slot.take()
    other = prefill(SimpleNamespace(), lambda: "another backend's")
    assert other.create_sender(request) == "another backend's"


def test_the_other_side_learns_what_a_queue_refuses(modules: dict[str, Any]) -> None:
    queues.install()
    refused: list[Any] = []
    manager = SimpleNamespace(prompts=PromptSlot(), refuse=refused.append)
    fits, too_long = SimpleNamespace(to_finish=None), SimpleNamespace(to_finish="too long")
    for queue in (
        modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue(manager, int),
        modules["sglang.srt.disaggregation.decode"].DecodePreallocQueue(manager, int),
    ):
        refused.clear()
        queue.add(fits, 4)
        assert queue.queue == [fits] and not refused
        queue.add(too_long, 4)
        assert queue.queue == [fits] and refused == [too_long]
        others = type(queue)(SimpleNamespace(), int)
        others.add(too_long)
        assert refused == [too_long]


@pytest.mark.parametrize(("stage", "polls"), [(0, 0), (1, 2)])
def test_later_stages_publish_their_states(modules: dict[str, Any], stage: int, polls: int) -> None:
    """SGLang polls the first stage only, which must know whether the others are ready."""
    queues.install()
    asked: list[int] = []
    requests = [
        SimpleNamespace(disagg_kv_sender=SimpleNamespace(poll=lambda n=n: asked.append(n)))
        for n in range(2)
    ]
    manager = SimpleNamespace(prompts=PromptSlot(), place=SimpleNamespace(stage=stage))
    queue = modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue(manager, None)
    queue.queue = requests
    assert queue.pop_bootstrapped() == requests
    assert len(asked) == polls


def test_pages_are_held_until_there_is_proof(modules: dict[str, Any]) -> None:
    """SGLang's own time-out ends a hold while a prefill may still write."""
    queues.install()
    queue = modules["sglang.srt.disaggregation.decode"].DecodeTransferQueue(None, lambda: None)
    others = SimpleNamespace(kv_receiver=SimpleNamespace(kv_mgr=SimpleNamespace()))
    ours = SimpleNamespace(
        kv_receiver=SimpleNamespace(kv_mgr=SimpleNamespace(prompts=PromptSlot()))
    )
    queue._defer_release(others)
    queue._defer_release(ours)
    assert queue.deferred == [(others, 30.0), (ours, math.inf)]


def test_an_idle_scheduler_rests(modules: dict[str, Any]) -> None:
    """SGLang would poll without a pause, and hold Python's lock against the node's thread."""
    queues.install()
    rests: list[int] = []
    manager = SimpleNamespace(prompts=PromptSlot(), rest=lambda: rests.append(1))
    scheduler = modules["sglang.srt.managers.scheduler"].Scheduler
    prefill = modules["sglang.srt.disaggregation.prefill"].PrefillBootstrapQueue
    decode = modules["sglang.srt.disaggregation.decode"].DecodePreallocQueue
    for each in (scheduler(prefill=prefill(manager, int)), scheduler(decode=decode(manager, int))):
        rests.clear()
        each.on_idle()
        assert (each.idled, rests) == (1, [1])
    for other in (scheduler(), scheduler(decode=decode(SimpleNamespace(), int))):
        rests.clear()
        other.on_idle()
        assert (other.idled, rests) == (1, [])


def put(url: str, body: object) -> int:
    request = urllib.request.Request(
        f"{url}/route", body if isinstance(body, bytes) else json.dumps(body).encode(), method="PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        error.close()
        return error.code


async def test_the_bootstrap_server_lists_the_ranks(modules: dict[str, Any]) -> None:
    from kvflow.connectors.sglang.bootstrap import KvflowBootstrapServer

    server: Any = KvflowBootstrapServer("127.0.0.1", 0)
    try:
        info = RankInfo(0, 1, 5, "tcp://127.0.0.1:1", "local", "m")
        refused: list[object] = [b"{", b"[]", {"kvflow": {}}, {"kvflow": {"rank": 1}}]
        for wrong in [*refused, {"page_size": 1}]:
            assert put(server.url, wrong) == 400
        assert put(server.url, {"page_size": 1, "kvflow": rank_to_json(info)}) == 200
        moved = RankInfo(0, 1, 6, "tcp://10.0.0.9:1", "local", "m")
        assert put(server.url, {"kvflow": rank_to_json(moved)}) == 409
        assert [row["page_size"] for row in server.rows] == [1]
        client = RegistryClient()
        assert list(await client.resolve(server.url.removeprefix("http://"))) == [info]
    finally:
        server.close()


def start(modules: dict[str, Any], *, is_prefill: bool = False, **parallel: Any) -> None:
    from kvflow.connectors.sglang import nodes

    vars(modules["sglang.srt.runtime_context"].get_parallel()).update(parallel)
    hisparse = SimpleNamespace(enable_hisparse=parallel.get("hisparse", False))
    nodes.place_of(SimpleNamespace(pp_rank=0), hisparse, is_prefill=is_prefill)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pp_size": 2}, "--pp-size above 1 at decode"),
        ({"dp_size": 2}, "data parallelism (--dp-size above 1)"),
        ({"attn_dp_size": 2}, "data parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"attn_dcp_size": 2}, "context parallelism"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"hisparse": True}, "--enable-hisparse"),
    ],
)
def test_what_is_not_supported_is_refused_at_start(
    modules: dict[str, Any], given: dict[str, Any], text: str
) -> None:
    start(modules)
    start(modules, is_prefill=True, pp_size=2)
    start(modules, pp_size=1)
    with pytest.raises(MisuseError) as raised:
        start(modules, **given)
    assert f"does not support {text}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_RUST_SERVER", True),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", False),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK"),
    ],
)
def test_variables_of_sglang_that_do_not_fit_are_named(
    modules: dict[str, Any], name: str, value: Any
) -> None:
    setattr(modules["sglang.srt.environ"].envs, name, SimpleNamespace(get=lambda: value))
    with pytest.raises(MisuseError, match=f"does not support {name}"):
        start(modules)


@pytest.mark.parametrize(
    ("served", "named", "host"),
    [
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2", "10.0.0.2"),
        ("0.0.0.0", "", "10.9.8.7"),
        ("::", "", "10.9.8.7"),
        ("0.0.0.0", "10.0.0.2", "10.0.0.2"),
    ],
)
def test_the_address_is_one_that_peers_reach(
    modules: dict[str, Any], served: str, named: str, host: str
) -> None:
    from kvflow.connectors.sglang import nodes
    from kvflow.connectors.sglang.settings import Settings

    modules["sglang.srt.runtime_context"].get_serving().host = served
    assert nodes._host(Settings(host=named)) == host


@pytest.mark.parametrize(
    ("plane", "named", "given", "device"),
    [
        ("mooncake", "", None, ""),
        ("mooncake", "", "mlx5_1", "mlx5_1"),
        ("mooncake", "mlx5_0", "mlx5_1", "mlx5_0"),
        ("local", "", "mlx5_1", ""),
    ],
)
def test_sglangs_rdma_device_is_used(
    modules: dict[str, Any], plane: str, named: str, given: str | None, device: str
) -> None:
    from kvflow.connectors.sglang import nodes
    from kvflow.connectors.sglang.settings import Settings

    settings = Settings(transfer_backend=plane, ib_device=named)
    assert nodes._device(SimpleNamespace(ib_device=given), settings) == device


def test_a_member_is_added_once() -> None:
    class Kinds(Enum):
        A = "a"

    plugin.add_member(Kinds, "b")
    plugin.add_member(Kinds, "b")
    assert [each.name for each in Kinds] == ["A", "B"]


def test_a_manager_is_made_with_what_its_scheduler_knows() -> None:
    seen: list[object] = []

    def make(queue: Any, more: int) -> str:
        seen.append((queues.MODEL.window_tokens, queues.MODEL.kv_heads, more))
        if more > 1:
            raise RuntimeError("refused")
        return "manager"

    config = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
    for window, order in ((128, "hnd"), (None, "nhd"), (None, None)):
        scheduler = SimpleNamespace(sliding_window_size=window, model_config=config)
        cache = SimpleNamespace(**{"kv_cache_layout": order} if order else {})
        queue = SimpleNamespace(scheduler=scheduler, token_to_kv_pool=cache)
        assert queues.with_model(make, queue, 1) == "manager"
        with pytest.raises(RuntimeError, match="refused"):
            queues.with_model(make, queue, more=2)
        assert (queues.MODEL.window_tokens, queues.MODEL.kv_heads) == (0, 0)
    assert seen == [(128, 0, 1), (128, 0, 2), (0, 8, 1), (0, 8, 2), (0, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize(
    ("place", "decode_ranks", "expected"),
    [
        ((1, 2), 0, (0, 1)),
        ((1, 2), 2, (0, 1)),
        ((1, 2), 1, (1, 2)),
        ((3, 4), 2, (1, 2)),
        ((1, 2, 1, 3), 0, (1, 3)),
        ((1, 2, 1, 3), 1, (4, 6)),
    ],
)
def test_ranks_that_serve_one_rank_of_decode_are_numbered(
    modules: dict[str, Any], place: tuple[int, ...], decode_ranks: int, expected: tuple[int, int]
) -> None:
    from kvflow.connectors.sglang import nodes

    cache = pool_of_unit("slot")
    assert nodes.rank_for_decode(nodes.Place(*place), decode_ranks, cache) == expected


def test_ranks_that_cannot_be_divided_are_refused(modules: dict[str, Any]) -> None:
    from kvflow.connectors.sglang import nodes

    for decode_ranks in (-1, 3, 4):
        with pytest.raises(MisuseError, match=f"DECODE_TP_SIZE {decode_ranks}: not a divisor of"):
            nodes.rank_for_decode(nodes.Place(0, 2), decode_ranks, pool_of_unit("slot"))
    with pytest.raises(MisuseError, match="DECODE_TP_SIZE 1 with --tp-size 2: kvflow's backend"):
        nodes.rank_for_decode(nodes.Place(0, 2), 1, pool_of_unit("page"))
    assert nodes.rank_for_decode(nodes.Place(1, 2), 2, pool_of_unit("page")) == (0, 1)


def pool_of_unit(unit: str) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(components=[SimpleNamespace(unit=unit)]))
