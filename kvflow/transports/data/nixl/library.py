"""NIXL's Python package, and the environment from which UCX configures itself."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import logging.config
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

from kvflow.protocols.errors import MisuseError

# The first module chooses one of the others by the CUDA version that it finds.
MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
# The UCX transports that need no device, and for which a fence can prove that a writer ended.
# Shared memory (posix, sysv) is not among them, because a reader may take a dead writer's last
# bytes from it at any later time.
PROVABLE = ("tcp", "cma", "self")
# By default UCX logs to standard output, which belongs to the program.
_LOGGING = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal", "UCX_LOG_FILE": "stderr"}
_LIST_ADDRESSES, _ROW_BYTES, _MAX_ROWS = 0x8912, 40, 1024  # SIOCGIFCONF, struct ifreq
_loading = threading.Lock()


def nixl_library() -> Any:
    """Return the module that has `nixl_agent`. The first load takes a second.

    Raises: MisuseError that explains what to do.
    """
    with _loading:
        for name, value in _LOGGING.items():
            os.environ.setdefault(name, value)
        # On import, the module configures logging. That would close every handler of this process.
        configure, raising = logging.config.dictConfig, logging.raiseExceptions
        logging.config.dictConfig = lambda config: None
        try:
            return _load()
        finally:
            logging.config.dictConfig, logging.raiseExceptions = configure, raising


def _load() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in {
                module.partition(".")[0] for module in MODULES
            }:
                raise MisuseError(
                    f"nixl cannot be loaded ({error}): pip install 'kvflow[nixl]'"
                ) from error
        except ImportError as error:
            raise MisuseError(
                f"nixl cannot be loaded ({error}); `kvflow doctor` tells more"
            ) from error
    raise MisuseError("nixl is not installed: pip install 'kvflow[nixl]'")


def transports() -> frozenset[str]:
    """Return the transports that UCX may use without a device: UCX_TLS if set, else `PROVABLE`."""
    return frozenset(os.environ.get("UCX_TLS", ",".join(PROVABLE)).split(","))


@contextmanager
def environment(host: str, device: str) -> Iterator[None]:
    """While an agent is made, set the variables that UCX reads, except those the operator has set.

    They select the interface with the address `host`, or an RDMA device.
    """
    if device:
        chosen = {"UCX_NET_DEVICES": device}
    else:
        chosen = {"UCX_TLS": ",".join(PROVABLE), **_interface(host)}
    with _loading:
        added = {name: value for name, value in chosen.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _interface(host: str) -> dict[str, str]:
    """Return the variables that restrict UCX to the interface with our address `host`.

    If this machine does not have the address `host`, for example behind an address translation, UCX
    may use every interface.
    """
    with suppress(OSError, ValueError):
        address = ip_address(str(socket.getaddrinfo(host, None)[0][4][0]).partition("%")[0])
        name = "lo" if address.is_loopback else _interfaces().get(str(address), "")
        family = {"UCX_TCP_AF_PRIO": "inet6,inet"} if address.version == 6 else {}
        return {"UCX_NET_DEVICES": name, **family} if name else family
    return {}


def _interfaces() -> dict[str, str]:
    """Return interface names by IP address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        rows = bytearray(_ROW_BYTES * _MAX_ROWS)
        pointer = struct.pack(
            "iP", len(rows), ctypes.addressof((ctypes.c_char * len(rows)).from_buffer(rows))
        )
        filled = struct.unpack("iP", fcntl.ioctl(any_socket, _LIST_ADDRESSES, pointer))[0]
    for at in range(0, filled, _ROW_BYTES):
        # An alias has a label after ":", which is not part of the interface's name.
        name = rows[at : at + 16].partition(b"\0")[0].decode().partition(":")[0]
        found[socket.inet_ntoa(rows[at + 20 : at + 24])] = name
    with suppress(FileNotFoundError), open("/proc/self/net/if_inet6", encoding="ascii") as file:
        for line in file:
            digits, *_, name = line.split()
            found[str(ip_address(bytes.fromhex(digits)))] = name
    return found
