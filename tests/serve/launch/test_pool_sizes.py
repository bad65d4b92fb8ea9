"""How many pages and rows a role gives its pool, and what it says when they do not fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch

from kvflow.memory.available import Available
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import ConfigError
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.model.load import load_model
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.launch import pool
from kvflow.serve.launch.parts import described, say_what_fits, shortened

# 128 bytes a token, 2048 a page.
SLOTS = [StateKind("k", "bfloat16", (2, 16)), StateKind("v", "bfloat16", (2, 16))]
# 320 bytes.
ROWS = [StateKind("conv", "bfloat16", (8, 4), ROW), StateKind("recurrent", "float32", (4, 16), ROW)]


@contextmanager
def pool_of(
    streams: list[StateKind], settings: Settings, *, ring_bytes: int = 0, sharing: int = 1
) -> Iterator[PagedPool]:
    device = torch.device("cpu")
    with closing(
        pool.make_pool(settings, streams, "model", device, ring_bytes=ring_bytes, sharing=sharing)
    ) as made:
        yield made


def sizes(streams: list[StateKind], *, ring_bytes: int = 0, **settings: Any) -> tuple[int, int]:
    with pool_of(streams, Settings(**settings), ring_bytes=ring_bytes) as made:
        return made.layout.num_pages, made.layout.num_rows


@pytest.mark.parametrize(
    ("streams", "settings", "expected"),
    [
        (SLOTS, {}, (4096, 0)),
        (SLOTS, {"pool_bytes": 1 << 20}, (512, 0)),
        ([*SLOTS, *ROWS], {}, (4096, 272)),
        ([*SLOTS, *ROWS], {"max_running_requests": 1}, (4096, 2)),
        ([*SLOTS, *ROWS], {"num_pages": 10, "max_running_requests": 32}, (10, 34)),
        # Half for rows, and what they do not take for pages.
        ([*SLOTS, *ROWS], {"pool_bytes": 1 << 20}, (((1 << 20) - 272 * 320) // 2048, 272)),
        ([*SLOTS, *ROWS], {"pool_bytes": 1 << 17}, (((1 << 17) - 204 * 320) // 2048, 204)),
        (ROWS, {"pool_bytes": 1 << 16, "max_running_requests": 8}, (9 * 4096, 9)),
        (ROWS, {"pool_bytes": 1 << 16}, (204 * 4096, 204)),
    ],
)
def test_rows_follow_the_requests_and_fit_beside_the_pages(
    streams: list[StateKind], settings: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert sizes(streams, **settings) == expected


def test_fewer_rows_than_requests_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvflow.serve"):
        sizes([*SLOTS, *ROWS])
        assert not caplog.records
        sizes([*SLOTS, *ROWS], pool_bytes=1 << 17)
    assert "204 rows of 320 bytes" in caplog.text and "--max-running-requests is 256" in caplog.text


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        (SLOTS, "160 tokens, in 10 pages of 16: 20480 bytes, bfloat16, on cpu"),
        (
            [*SLOTS, *ROWS],
            "160 tokens, in 10 pages of 16 and 34 rows for states: 31360 bytes, bfloat16, float32, "
            "on cpu",
        ),
    ],
)
@pytest.mark.parametrize(
    ("context", "requests"),
    [
        (4096, "1 request of 161 tokens"),
        (161, "1 request of 161 tokens"),
        (81, "2 requests of 81 tokens"),  # 80 are in the pool
        (82, "1 request of 82 tokens"),
        (17, "10 requests of 17 tokens"),
        (1, "10 requests of 1 tokens"),
    ],
)
def test_a_role_says_how_large_its_pool_is(
    streams: list[StateKind], said: str, context: int, requests: str
) -> None:
    with pool_of(streams, Settings(num_pages=10, max_running_requests=32)) as made:
        text = f"the KV pool holds {said}; room for {requests} at once"
        assert described(made, context, 32) == text
        assert described(made, 17, 3).endswith("; room for 3 requests of 17 tokens at once")


def test_a_length_that_the_pool_cannot_hold_is_refused() -> None:
    assert sizes(SLOTS, num_pages=8, max_model_len=129) == (8, 0)
    with pytest.raises(
        ConfigError,
        match=r"^--max-model-len 130: the KV pool holds 128 tokens \(8 pages of 16\), and one "
        r"request of this length needs 144 \(18432 bytes of pool\); set --num-pages 9 or more, or "
        r"--pool-bytes, or --mem-fraction, or --max-model-len 129 at most$",
    ):
        sizes(SLOTS, num_pages=8, max_model_len=130)
    assert sizes([*SLOTS, *ROWS], num_pages=8, max_running_requests=1, max_model_len=129) == (8, 2)
    # Pages without bytes are as many as rows could need.
    assert sizes(ROWS, pool_bytes=1 << 16, max_model_len=1 << 16)[1] == 204


def test_a_length_above_what_the_model_was_trained_for_is_refused() -> None:
    model = load_model(str(DEMO_MODEL_DIR))
    most = model.context_length
    for asked, found in ((0, most), (most, most), (9, 9)):
        assert shortened(model, Settings(max_model_len=asked)).context_length == found
    with pytest.raises(
        ConfigError,
        match=f"^--max-model-len {most + 1}: the context of model 'm' has {most} tokens",
    ):
        shortened(model, Settings(model_path="m", max_model_len=most + 1))


@pytest.mark.parametrize(
    ("streams", "fraction", "sharing", "expected"),
    [
        (SLOTS, 0.5, 1, (500_000 // 2048, 0)),
        (SLOTS, 0.5, 2, (250_000 // 2048, 0)),
        (SLOTS, 1.0, 1, (1_000_000 // 2048, 0)),
        ([*SLOTS, *ROWS], 0.5, 1, ((500_000 - 272 * 320) // 2048, 272)),
    ],
)
def test_a_pool_may_be_a_share_of_the_available_memory(
    streams: list[StateKind],
    fraction: float,
    sharing: int,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda: Available(1_000_000, "memory of a test"))
    settings = Settings(mem_fraction=fraction)
    with pool_of(streams, settings, sharing=sharing) as made:
        assert (made.layout.num_pages, made.layout.num_rows) == expected
    # It may be larger than a pool of default size.
    monkeypatch.setattr(pool, "available_memory", lambda: Available(10 << 20, "memory of a test"))
    small = [StateKind("k", "uint8", (2,))]
    with pool_of(small, settings) as made:
        assert made.layout.num_pages * 16 > pool.DEFAULT_POOL_TOKENS


def test_a_share_that_is_unknown_or_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda: None)
    with pytest.raises(
        ConfigError, match=r"^--mem-fraction 0.5: the available memory is not known"
    ):
        sizes(SLOTS, mem_fraction=0.5)
    monkeypatch.setattr(pool, "available_memory", lambda: Available(1000, "memory of a test"))
    with pytest.raises(
        ConfigError,
        match=r"^--mem-fraction 0.5 \(500 bytes, as 1000 bytes are available \(memory of a "
        r"test\)\): the pool needs 2048 bytes",
    ):
        sizes(SLOTS, mem_fraction=0.5)
    with pytest.raises(ConfigError, match=r"^--mem-fraction 0.5 .* state of one request takes 320"):
        sizes([*SLOTS, *ROWS], mem_fraction=0.5)


def test_a_pool_below_the_context_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvflow.serve"):
        say_what_fits(EngineLimits(4096, 512, 16, 256))
        assert not caplog.records, "prompt and completion fill the context"
        say_what_fits(EngineLimits(4096, 512, 16, 8))
    assert "context of 4096 tokens: prompt and completion have 129 at most" in caplog.text


@pytest.mark.parametrize(
    ("streams", "settings", "text"),
    [
        (
            SLOTS,
            {"num_pages": 600},
            r"^--num-pages 600: .* 1228800 bytes .*600 pages of 2048\), .* 488 pages fit$",
        ),
        (
            [*SLOTS, *ROWS],
            {"num_pages": 600},
            r"^--num-pages 600: .* 1315840 bytes .*600 pages of 2048 and 272 rows of 320\), .*at "
            r"most 445 pages fit$",
        ),
        ([*SLOTS, *ROWS], {}, r"^--pool-bytes 1073741824: the pool needs 8475648 bytes"),
        (
            [*SLOTS, *ROWS],
            {"num_pages": 1, "max_running_requests": 4096},
            r"^--max-running-requests 4096: .*1 pages of 2048 and 4352 rows of 320\), .*at most "
            r"3125 rows fit, one for",
        ),
        (
            ROWS,
            {"max_running_requests": 4096},
            r"^--max-running-requests 4096: .*at most 3125 rows fit",
        ),
    ],
)
def test_what_does_not_fit_memory_names_the_flag(
    streams: list[StateKind], settings: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pool, "available_memory", lambda: Available(1_000_000, "memory of the machine")
    )
    with pytest.raises(ConfigError, match=text):
        sizes(streams, **settings)


def test_a_row_larger_than_its_share_is_refused() -> None:
    large = StateKind("recurrent", "float32", (1 << 14,), ROW)
    with pytest.raises(
        ConfigError,
        match=r"--pool-bytes 65536: the state of one request takes 65536 bytes of 32768",
    ):
        sizes([*SLOTS, large], pool_bytes=1 << 16)
    assert sizes([large], pool_bytes=1 << 16)[1] == 1


def test_a_row_of_sliding_windows_may_be_kept_in_pages(caplog: pytest.LogCaptureFixture) -> None:
    # 65,536 bytes.
    windows = StateKind("layer0.k.sliding_window_rows", "float32", (1024, 2, 8), ROW)

    streams = [*SLOTS, windows]
    said = r"65536 bytes of 32768 .*--sliding-window-rows never"
    with pytest.raises(ConfigError, match=said) as refusal:
        sizes(streams, ring_bytes=65536, pool_bytes=1 << 16)
    assert "\n" not in str(refusal.value)
    with caplog.at_level(logging.INFO, "kvflow.serve"):
        assert sizes(streams, ring_bytes=65536, pool_bytes=1 << 20)[1] == 8
    assert "8 rows of 65536 bytes" in caplog.text and "--sliding-window-rows never" in caplog.text


def test_a_default_of_host_memory_that_is_too_small_ends_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for models whose states take hundreds of megabytes a request: these are computed again."""
    monkeypatch.setattr(pool, "SnapshotStore", refusing)
    with pool_of([*SLOTS, *ROWS], Settings(num_pages=1, max_running_requests=1)) as made:
        with caplog.at_level(logging.WARNING, "kvflow.serve"):
            assert pool.make_snapshots(Settings(), made) is None
        assert "retracted requests are computed again" in caplog.text and "too small" in caplog.text
        for chosen in ({"host_memory_bytes": 1 << 20}, {"host_memory_full": "refuse"}):
            with pytest.raises(ConfigError, match=r"--host-memory-bytes [0-9]+: too small"):
                pool.make_snapshots(Settings(**chosen), made)
        assert pool.make_snapshots(Settings(new_token_ratio=1.0), made) is None
        assert pool.make_snapshots(Settings(host_memory_bytes=0), made) is None


def refusing(*_: object) -> None:
    raise MisuseError("too small")


@pytest.mark.parametrize(
    ("plane", "shards", "staging", "staged"),
    [
        ("mooncake", 2, "auto", True),
        ("nixl", 2, "auto", True),
        ("mooncake", 4, "auto", True),
        ("mooncake", 0, "auto", False),
        ("mooncake", 1, "auto", False),
        ("local", 2, "auto", False),
        ("local", 2, "always", False),
        ("mooncake", 2, "always", True),
        ("mooncake", 3, "auto", False),
    ],
)
def test_slices_that_would_be_tiny_land_in_staging(
    plane: Any, shards: int, staging: Any, staged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), staging_of(4, plane, shards, staging=staging) as found:
        said = (
            f"prefills of {shards} shards would write slices of 32 bytes on average over {plane}"
            in caplog.text
        )
        assert said == staged and (found is not None) == (staged or staging == "always")
        if found is not None:
            assert len(found.host.layout.components) == len(SLOTS) * (2 if staged else 1)


@contextmanager
def staging_of(
    num_pages: int,
    plane: Any,
    shards: int,
    streams: list[StateKind] = SLOTS,
    **more: Any,
) -> Iterator[Staging | None]:
    settings = Settings(
        num_pages=num_pages,
        disaggregation_transfer_backend=plane,
        disaggregation_prefill_tp=shards,
        **more,
    )
    with pool_of(streams, settings) as made, ExitStack() as stack:
        if (found := pool.make_staging(settings, made, 0)) is not None:
            stack.callback(found.close)
        yield found


def test_slices_of_large_heads_are_written_as_they_are() -> None:
    with staging_of(2, "nixl", 2, [StateKind("k", "bfloat16", (2, 4096))]) as found:
        assert found is None  # 8 KiB each


def test_without_memory_for_staging_slices_are_written_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It makes them faster, and is not needed; what is asked for is."""

    def refused(*_: Any, **__: Any) -> None:
        raise LayoutError("no memory for a pool")

    monkeypatch.setattr(pool, "Staging", refused)
    with staging_of(4, "mooncake", 2) as found:
        assert found is None
    assert "slices are written as they are: no memory for a pool" in caplog.text
    with (
        pytest.raises(ConfigError, match="--staging-bytes 0: no memory"),
        staging_of(4, "mooncake", 2, staging="always"),
    ):
        pass
