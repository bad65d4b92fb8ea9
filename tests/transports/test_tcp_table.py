"""What the kernel lists, and descriptors that belong to others: borrowed for a moment, or gone."""

from __future__ import annotations

import errno
import os
import socket
from unittest.mock import patch

import pytest

from kvflow.transports.host import tcp_table
from kvflow.transports.host.tcp_table import borrow, encode_address, own_addresses, rows
from tests.ipv6 import needs_ipv6


def test_what_is_no_socket_or_not_that_one_any_more_is_not_borrowed() -> None:
    reader, writer = os.pipe()
    with socket.socket() as mine:
        inode = os.fstat(mine.fileno()).st_ino
        for fd, found in ((mine.fileno(), True), (reader, False)):
            with borrow(fd) as borrowed:
                assert (borrowed is not None) == found
        for wanted, found in ((inode, True), (inode + 1, False)):
            with borrow(mine.fileno(), wanted) as borrowed:
                assert (borrowed is not None) == found
        mine.getsockname()  # still open: a duplicate was closed
    os.close(reader)
    os.close(writer)
    with borrow(reader) as borrowed:
        assert borrowed is None, "it is closed"


def test_that_no_descriptor_is_left_is_an_error() -> None:
    full = OSError(errno.EMFILE, "too many open files")
    with (
        socket.socket() as mine,
        patch("os.dup", side_effect=full),
        pytest.raises(OSError, match="too many open files"),
        borrow(mine.fileno()),
    ):
        raise AssertionError("it was borrowed all the same")


@pytest.mark.parametrize("gone", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_has_ended_has_no_rows(
    gone: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise gone

    monkeypatch.setattr(tcp_table, "open", missing, raising=False)
    assert list(rows(1)) == []


def test_addresses_of_this_machine_are_its_own() -> None:
    assert encode_address("127.0.0.1") in own_addresses()
    assert encode_address("8.8.8.8") not in own_addresses()


@needs_ipv6
def test_ipv6_addresses_of_this_machine_are_its_own() -> None:
    assert encode_address("::1") in own_addresses()
    assert encode_address("2001:db8::1") not in own_addresses()
