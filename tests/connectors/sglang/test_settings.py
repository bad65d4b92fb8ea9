"""The environment variables: what they may hold, and what is said of the rest."""

from __future__ import annotations

import pytest

from kvflow.connectors.sglang.settings import PREFIX, Settings, variable
from kvflow.protocols.errors import MisuseError


def read(**values: str) -> Settings:
    return Settings.read(
        {f"{PREFIX}TRANSFER_BACKEND": "local", **{PREFIX + k: v for k, v in values.items()}}
    )


def test_what_is_set_is_read() -> None:
    found = read(RENDEZVOUS_S="5", LOST_AFTER_S="2.5", VERIFY_TRANSFERS="true", HOST=" 10.0.0.1 ")
    assert (found.rendezvous_s, found.lost_after_s, found.host) == (5.0, 2.5, "10.0.0.1")
    assert found.verify_transfers and found.transfer_backend == "local"
    timing = found.timing
    assert (timing.rendezvous_s, timing.announced_s, timing.lost_after_s) == (5.0, 5.0, 2.5)
    assert read(QUARANTINE_SHARE="0.25").bounds.quarantine_share == 0.25
    many = read(MAX_DECODES="5000", DECODES_PER_ADDRESS="3000").bounds
    assert (many.targets, many.decodes_per_address) == (5000, 3000)
    assert read(RATE_LIMIT_BYTES_PER_S="1e6").rate_limit_bytes_per_s == 1e6
    staged = read(STAGING="always", STAGING_BYTES="4096")
    assert (staged.staging, staged.staging_bytes) == ("always", 4096)


def test_an_empty_variable_and_those_of_others_count_as_not_set() -> None:
    found = Settings.read(
        {f"{PREFIX}TRANSFER_BACKEND": "local", f"{PREFIX}RENDEZVOUS_S": " ", "KVFLOW_PORT": "x"}
    )
    assert found.rendezvous_s == 30.0 and not found.verify_transfers


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RENDEZVOUS", "1", "KVFLOW_SGLANG_RENDEZVOUS is not a setting; there are KVFLOW_SGLANG_T"),
        ("TRANSFER_BACKEND", "tcp", "KVFLOW_SGLANG_TRANSFER_BACKEND: no data plane 'tcp'; there"),
        ("IB_DEVICE", "mlx5_0", "TRANSFER_BACKEND: RDMA device 'mlx5_0': the local data plane has"),
        ("HOST", "http://10.0.0.1", "KVFLOW_SGLANG_HOST: 'http://10.0.0.1' is not a host name"),
        ("HOST", "0.0.0.0", "KVFLOW_SGLANG_HOST: host 0.0.0.0: the other side cannot reach"),
        ("HOST", "::", "KVFLOW_SGLANG_HOST: host ::: the other side cannot reach that"),
        ("VERIFY_TRANSFERS", "maybe", "KVFLOW_SGLANG_VERIFY_TRANSFERS is 'maybe': Expected `bool`"),
        ("RENDEZVOUS_S", "soon", "KVFLOW_SGLANG_RENDEZVOUS_S is 'soon': Expected `float`"),
        ("RENDEZVOUS_S", "-1", "KVFLOW_SGLANG_RENDEZVOUS_S: rendezvous_s -1.0 is not a number of"),
        ("LOST_AFTER_S", "0", "KVFLOW_SGLANG_LOST_AFTER_S: lost_after_s 0.0 is not"),
        (
            "STAGING",
            "never",
            "KVFLOW_SGLANG_STAGING: staging 'never' is neither 'auto' nor",
        ),
        ("STAGING_BYTES", "-1", "KVFLOW_SGLANG_STAGING_BYTES: staging_bytes -1 is below 0"),
        ("STAGING_BYTES", "1GB", "KVFLOW_SGLANG_STAGING_BYTES is '1GB': Expected `int`"),
        ("DECODE_TP_SIZE", "two", "KVFLOW_SGLANG_DECODE_TP_SIZE is 'two': Expected `int`"),
        ("QUARANTINE_SHARE", "1.5", "KVFLOW_SGLANG_QUARANTINE_SHARE: quarantine_share 1.5"),
        (
            "MAX_DECODES",
            "0",
            "KVFLOW_SGLANG_MAX_DECODES: max_decodes 0 is not a whole number above",
        ),
        ("DECODES_PER_ADDRESS", "-1", "KVFLOW_SGLANG_DECODES_PER_ADDRESS: decodes_per_address -1"),
        ("RATE_LIMIT_BYTES_PER_S", "0", "RATE_LIMIT_BYTES_PER_S: rate_limit_bytes_per_s 0.0 is"),
        ("CONTROL_KEY_FILE", "/no/such", "KVFLOW_SGLANG_CONTROL_KEY_FILE: key file /no/such: No"),
    ],
)
def test_what_is_wrong_names_its_variable(name: str, value: str, text: str) -> None:
    with pytest.raises(MisuseError) as raised:
        read(**{name: value})
    assert text in str(raised.value)


def test_the_local_data_plane_is_known_before_all_else() -> None:
    local = {variable("transfer_backend"): " local "}
    assert Settings.needs_segment(local)
    assert not Settings.needs_segment({variable("transfer_backend"): "mooncake"})
    assert not Settings.needs_segment({})
    assert Settings.needs_segment(local | {variable("staging"): "auto"})
    assert not Settings.needs_segment(local | {variable("staging"): " always "})
