"""Descriptors of connections that belong to somebody else: borrowed for a moment, or not there."""

from __future__ import annotations

import errno
import os
import socket
from unittest.mock import patch

import pytest

from kvflow.transports.host.tcp_table import borrow


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
