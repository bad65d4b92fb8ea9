"""`kv_transfer_params` in every dialect, and what is said of each wrong field."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from kvflow.connectors.vllm.params import (
    MAX_ROOM,
    FromPrefill,
    ToDecode,
    draw_room,
    prefill_answer,
    read_params,
)
from kvflow.protocols.errors import MisuseError

ANSWER: dict[str, Any] = {  # prefill's, as a sequential proxy copies it
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine",
    "remote_block_ids": [],
    "remote_host": "10.0.0.7",
    "remote_port": 8998,
    "tp_size": 1,
    "kvflow_decode_workers": 1,
    "kvflow_room": 77,
    "remote_prefill_cached_tokens": 12,
}
MOONCAKE: dict[str, Any] = {
    "do_remote_prefill": True,
    "transfer_id": "xfer-1",
    "remote_bootstrap_addr": "http://10.0.0.7:8998",
}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": None},
        {"do_remote_decode": False, "do_remote_prefill": False},
        {"other": object()},
    ],
)
def test_nothing_is_asked_for(params: object) -> None:
    assert read_params(params) is None


def test_one_leg_after_the_other() -> None:
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_host": None,
    }
    assert read_params(asked) == ToDecode(None)
    assert read_params(ANSWER) == FromPrefill(77, "10.0.0.7", 8998, 1)


def test_prefills_answer_says_that_it_has_computed_the_prompt() -> None:
    answer = prefill_answer("10.0.0.7", 8998, engine="e", workers=2, tensor_parallel=2)
    assert read_params(answer | {"kvflow_room": 7}) == FromPrefill(
        7, "10.0.0.7", 8998, 2, is_computed=True
    )


def test_both_legs_at_once() -> None:
    assert read_params({"do_remote_decode": True, "kvflow_room": 5}) == ToDecode(5)
    asked = {
        "do_remote_prefill": True,
        "kvflow_room": 5,
        "remote_host": "prefill-0.prefill",
        "remote_port": 9000,
    }
    found = read_params(asked)
    assert found == FromPrefill(5, "prefill-0.prefill", 9000, None)
    assert found.registry(0) == "prefill-0.prefill:9000"


def test_words_of_mooncakes_proxies() -> None:
    source = read_params({"do_remote_decode": True, "transfer_id": "xfer-1"})
    target = read_params(MOONCAKE)
    assert isinstance(source, ToDecode) and isinstance(target, FromPrefill)
    assert source.room == target.room and 1 <= target.room <= MAX_ROOM
    assert (target.host, target.port, target.workers) == ("10.0.0.7", 8998, None)
    other = read_params({"do_remote_decode": True, "transfer_id": "xfer-2"})
    assert isinstance(other, ToDecode) and other.room != source.room
    both = read_params({"do_remote_decode": True, "transfer_id": "xfer-1", "kvflow_room": 5})
    assert both == ToDecode(5)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.7:8998", "10.0.0.7", 8998),
        ("http://prefill:1/", "prefill", 1),
        ("http://[fd00::1]:65535", "fd00::1", 65535),
    ],
)
def test_addresses_of_mooncakes_proxies(address: str, host: str, port: int) -> None:
    found = read_params(MOONCAKE | {"remote_bootstrap_addr": address})
    assert isinstance(found, FromPrefill) and (found.host, found.port) == (host, port)


def test_ranks_have_ports_of_their_own() -> None:
    found = read_params(ANSWER | {"kvflow_decode_workers": 6, "remote_host": "::1"})
    assert isinstance(found, FromPrefill) and found.workers == 6
    assert [found.registry(rank) for rank in (0, 5)] == ["[::1]:8998", "[::1]:9003"]


def test_whole_numbers_may_be_written_as_floats() -> None:
    """Some proxies' JSON knows no other numbers."""
    floats = {"kvflow_room": float(MAX_ROOM), "remote_port": 8998.0, "kvflow_decode_workers": 2.0}
    found = read_params(ANSWER | floats)
    assert found == FromPrefill(MAX_ROOM, "10.0.0.7", 8998, 2)
    assert type(found.room) is type(found.port) is int


def test_rooms_are_drawn_from_what_a_double_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda limit: 0)
    assert draw_room() == 1
    monkeypatch.setattr(secrets, "randbelow", lambda limit: limit - 1)
    assert draw_room() == MAX_ROOM
    monkeypatch.undo()
    drawn = [draw_room() for _ in range(100)]
    assert len(set(drawn)) == 100 and all(1 <= room <= MAX_ROOM == 2**53 - 1 for room in drawn)
    assert all(int(float(room)) == room for room in drawn)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"do_remote_decode": True}, "do_remote_decode and do_remote_prefill are both true"),
        ({"do_remote_decode": 1}, "do_remote_decode 1 is neither true nor false"),
        ({"do_remote_prefill": "true"}, "do_remote_prefill 'true' is neither true nor false"),
        ({"kvflow_room": None}, "None is not a whole number from 1 to 9007199254740991"),
        ({"kvflow_room": 0}, "kvflow_room 0 is not"),
        ({"kvflow_room": 2**53}, "kvflow_room 9007199254740992 is not"),
        ({"kvflow_room": 2.0**53}, "kvflow_room 9007199254740992 is not"),
        ({"kvflow_room": 1.5}, "kvflow_room 1.5 is not"),
        ({"kvflow_room": float("nan")}, "kvflow_room nan is not"),
        ({"kvflow_room": float("inf")}, "kvflow_room inf is not"),
        ({"kvflow_room": "7"}, "kvflow_room '7' is not"),
        ({"kvflow_room": True}, "kvflow_room True is not"),
        ({"remote_host": None}, "remote_host None is not a host name or IP address"),
        ({"remote_host": ""}, "remote_host '' is not"),
        ({"remote_host": 7}, "remote_host 7 is not"),
        ({"remote_host": "a b"}, "'a b' is not a host name"),
        ({"remote_port": None}, "remote_port None is not a whole number from 1 to 65535"),
        ({"remote_port": 0}, "remote_port 0 is not"),
        ({"remote_port": 65536}, "remote_port 65536 is not"),
        ({"kvflow_decode_workers": 0}, "workers 0 is not a whole number from 1 to 1024"),
        ({"kvflow_decode_workers": 1025}, "kvflow_decode_workers 1025 is not"),
        ({"remote_bootstrap_addr": 7}, "remote_bootstrap_addr 7 is not http://HOST:PORT"),
        ({"remote_bootstrap_addr": "10.0.0.7"}, "remote_bootstrap_addr '10.0.0.7' is not"),
        ({"remote_bootstrap_addr": "https://10.0.0.7:1"}, "addr 'https://10.0.0.7:1' is not"),
        ({"remote_bootstrap_addr": "http://10.0.0.7:65536"}, "'http://10.0.0.7:65536' is not"),
        ({"remote_bootstrap_addr": "http://10.0.0.7:0"}, "'http://10.0.0.7:0' is not"),
        ({"kvflow_room": None, "transfer_id": 7}, "transfer_id 7 is not a text"),
        ({"kvflow_room": None, "transfer_id": ""}, "transfer_id '' is not a text"),
        ({"kvflow_room": None, "transfer_id": "x\ud800"}, r"transfer_id 'x\ud800' is not a text"),
        ({"kvflow_room": "x" * 10_000}, "xxx... is not a whole number"),
        ({"remote_host": ["x"] * 10_000}, "... is not a host name"),
        ({"remote_bootstrap_addr": "x" * 10_000}, "xxx... is not http://HOST:PORT"),
        ({"kvflow_room": 10**5000}, "kvflow_room of thousands of digits is not"),
    ],
)
def test_what_is_wrong_names_itself(change: dict[str, Any], text: str) -> None:
    with pytest.raises(MisuseError) as raised:
        read_params(ANSWER | change)
    assert str(raised.value).startswith("kv_transfer_params: ") and text in str(raised.value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 250


@pytest.mark.parametrize("params", [[], "x", 7, True])
def test_what_is_no_object_is_refused(params: object) -> None:
    with pytest.raises(MisuseError, match=f"_params: {type(params).__name__} is not an object"):
        read_params(params)
