"""`kv_connector_extra_config`: what it may have, and what is said of the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connectors.vllm.settings import Settings, check_engine
from kvflow.protocols.errors import MisuseError


def test_what_is_set_is_read() -> None:
    found = Settings.read(
        {
            "transfer_backend": "local",
            "source_deadline_s": 5,
            "lost_after_s": 2.5,
            "quarantine_share": 0.25,
            "max_decodes": 5000,
            "decodes_per_address": 3000,
            "staging": "always",
            "staging_bytes": 4096,
        }
    )
    assert (found.staging, found.staging_bytes) == ("always", 4096)
    assert (found.bounds.targets, found.bounds.decodes_per_address) == (5000, 3000)
    assert (found.source_deadline_s, found.load_deadline_s) == (5.0, 300.0)
    assert found.bootstrap_port == 8998
    assert not found.verify_transfers, "checksums of all that travels are asked for"
    assert found.timing.lost_after_s == 2.5 and found.bounds.quarantine_share == 0.25


def test_the_ranks_of_data_parallel_engines_have_ports_of_their_own() -> None:
    settings, ranks = Settings(bootstrap_port=9000), 3
    ports = [
        settings.port_of_engine(engine, ranks) + rank
        for engine in range(4)
        for rank in range(ranks)
    ]
    assert ports == list(range(9000, 9012))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"bootstrap_prot": 1}, "unknown field `bootstrap_prot`; it may have transfer_backend, "),
        ({"transfer_backend": "tcp"}, "no data plane 'tcp'; there are: local"),
        ({"ib_device": "mlx5_0"}, "the local data plane has no use for one"),
        ({"host": ""}, "host: '' is not a host name or IP address"),
        ({"host": "http://10.0.0.1"}, "host: 'http://10.0.0.1' is not a host name"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0: the other side cannot reach that"),
        ({"host": "::"}, "host ::: the other side cannot reach that"),
        ({"api_key": "a\nb"}, "api_key: only printable ASCII characters"),
        ({"bootstrap_port": 0}, "bootstrap_port 0 is outside 1..65535"),
        ({"bootstrap_port": 65536}, "bootstrap_port 65536 is outside"),
        ({"bootstrap_port": "8998"}, "Expected `int`, got `str` - at `$.bootstrap_port`"),
        ({"status_port": -1}, "status_port -1 is outside 0..65535"),
        ({"staging": "never"}, "staging 'never' is neither 'auto' nor 'always'"),
        ({"staging": None}, "Expected `str`, got `null` - at `$.staging`"),
        ({"staging_bytes": -1}, "staging_bytes -1 is below 0"),
        ({"staging_bytes": "1GB"}, "Expected `int`, got `str` - at `$.staging_bytes`"),
        ({"source_deadline_s": -1}, "source_deadline_s -1.0 is not a number of seconds"),
        ({"source_deadline_s": float("nan")}, "source_deadline_s nan is not"),
        ({"source_deadline_s": None}, "$.source_deadline_s"),
        ({"load_deadline_s": 1e9}, "load_deadline_s 1000000000.0 is not"),
        ({"lost_after_s": 0}, "lost_after_s 0.0 is not"),
        ({"quarantine_share": 1.5}, "quarantine_share 1.5"),
        ({"max_decodes": 0}, "max_decodes 0 is not a whole number above 0"),
        ({"decodes_per_address": 0}, "decodes_per_address 0 is not a whole number above 0"),
        ({"recompute_below_tokens": -1}, "recompute_below_tokens -1 is below 0"),
        ({"rate_limit_bytes_per_s": 0}, "rate_limit_bytes_per_s 0.0 is not above 0"),
        ({"rate_limit_bytes_per_s": float("nan")}, "rate_limit_bytes_per_s nan is not above 0"),
        ({"verify_transfers": 1}, "$.verify_transfers"),
    ],
)
def test_what_is_wrong_names_itself(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(MisuseError) as raised:
        Settings.read({"transfer_backend": "local", **extra})
    assert str(raised.value).startswith("kv_connector_extra_config: ") and text in str(raised.value)


def config(*, chunks: bool, prefixes: bool, mla: bool = False, sleeps: bool = False) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunks),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        model_config=SimpleNamespace(model="tiny", use_mla=mla, enable_sleep_mode=sleeps),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize(("chunks", "prefixes"), [(True, True), (True, False), (False, True)])
def test_a_vllm_that_goes_on_from_its_own_cache_goes_on_from_what_was_loaded(
    chunks: bool, prefixes: bool, mla: bool
) -> None:
    check_engine(config(chunks=chunks, prefixes=prefixes, mla=mla))


@pytest.mark.parametrize(("mla", "kind"), [(True, "tiny, MLA on cpu"), (False, "tiny, cpu")])
def test_a_vllm_that_never_does_is_refused_in_one_line(mla: bool, kind: str) -> None:
    with pytest.raises(MisuseError) as raised:
        check_engine(config(chunks=False, prefixes=False, mla=mla))
    text = str(raised.value)
    assert f"chunked prefill and prefix caching off here ({kind})" in text and "\n" not in text


def test_an_engine_whose_memory_may_go_is_refused() -> None:
    with pytest.raises(MisuseError, match=r"--enable-sleep-mode: .* cannot prove"):
        check_engine(config(chunks=True, prefixes=True, sleeps=True))
