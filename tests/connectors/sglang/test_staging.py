"""The staging of SGLang's KV cache: who waits for it, and when its memory is freed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connectors import staging
from kvflow.node.threads.decode import DecodeThread
from kvflow.protocols.errors import LayoutError, MisuseError
from tests.connectors.sglang.sglang_pair import pair
from tests.fakes import sglang

Patch = pytest.MonkeyPatch


def test_staging_that_may_still_be_written_stays(monkeypatch: Patch) -> None:
    with pair(monkeypatch, STAGING="always") as each:
        close, kept = each.decode.thread.close, each.decode._staging
        monkeypatch.setattr(each.decode.thread, "close", lambda: ["a loan"])
        with pytest.raises(RuntimeError, match="may still write into the staging of this KV cache"):
            each.decode.teardown()
        monkeypatch.setattr(each.decode.thread, "close", close)
        assert kept.host.array("kv0").size and staging._kept.pop() is kept
    with pytest.raises(LayoutError, match="the pool is closed"):
        kept.host.array("kv0")


@pytest.mark.parametrize("at", ["decode_node", "start", "super"])
def test_a_failed_start_leaves_no_staging(monkeypatch: Patch, at: str) -> None:
    made: list[Any] = []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no thread is left")

    def staging_for(*args: Any, **options: Any) -> Any:
        made.append(original(*args, **options))
        return made[-1]

    with pair(monkeypatch, STAGING="always") as each, monkeypatch.context() as inner:
        from kvflow.connectors.sglang import manager, nodes

        original = nodes.staging_for
        base: Any = each.modules["sglang.srt.disaggregation.common.conn"]
        owner: Any = {
            "decode_node": (nodes, "decode_node"),
            "start": (DecodeThread, "start"),
            "super": (base.CommonKVManager, "__init__"),
        }[at]
        inner.setattr(nodes, "staging_for", staging_for)
        inner.setattr(owner[0], owner[1], fail)
        served = SimpleNamespace(
            served_model_name="tiny", model_path="nowhere", enable_hisparse=False
        )
        with pytest.raises(OSError, match="no thread is left"):
            manager.KvflowManager(each.target.args, sglang.DisaggregationMode.DECODE, served, True)
        (found,) = made
        with pytest.raises(LayoutError, match="the pool is closed"):
            found.host.array("kv0")


@pytest.mark.parametrize(("size_bytes", "ranks"), [(64, 2), (0, 2), (1 << 20, 2), (192, 1)])
def test_ranks_of_a_decode_do_not_wait_for_staging(
    monkeypatch: Patch, size_bytes: int, ranks: int
) -> None:
    """They would lend to different requests, and none of them would be computed."""
    with pair(monkeypatch, STAGING="always") as each:
        from kvflow.connectors.sglang import nodes
        from kvflow.connectors.sglang.settings import Settings

        settings = Settings(staging="always", staging_bytes=size_bytes)
        pool = each.decode.thread.pool
        place = nodes.Place(0, ranks)
        if size_bytes == 64:
            text = "STAGING_BYTES 64 at a decode with --tp-size 2: .* or at least 6144, as much"
            with pytest.raises(MisuseError, match=text):
                nodes.staging_for(pool, settings, place, is_prefill=False)
        else:
            found = nodes.staging_for(pool, settings, place, is_prefill=False)
            assert found is not None
            found.close()
