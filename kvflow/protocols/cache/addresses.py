"""Addresses for cache events. Each rank or worker derives its address from the configured one."""

from __future__ import annotations

from ipaddress import ip_address

from kvflow.protocols.errors import MisuseError

# vLLM and SGLang use the same port, but bind every interface. This address is reachable from the
# same machine only, because events contain the tokens of prompts.
DEFAULT_ADDRESS = "tcp://127.0.0.1:5557"
LAST_PORT = 65535


def numbered_address(name: str, address: str, number: int) -> str:
    """Return the address of rank or worker `number`.

    A TCP port is increased by `number`, but a port of `*` or 0 becomes `*`, which stands for any
    free port. An ipc or inproc address gets a suffix, except for number 0. `name` is the name of
    the setting, for errors. Raises: MisuseError.
    """
    scheme, found, rest = address.partition("://")
    if not found or scheme not in ("tcp", "ipc", "inproc") or not rest:
        raise MisuseError(f"{name} {address!r} is not tcp://host:port, ipc://path or inproc://name")
    if number < 0:
        raise MisuseError(f"rank {number} is negative")
    if scheme != "tcp":
        return f"{address}_dp{number}" if number else address
    host, found, port = rest.rpartition(":")
    if not found or not host or not (port == "*" or port.isdecimal()):
        raise MisuseError(f"{name} {address!r} is not tcp://host:port")
    if port == "*" or not int(port):
        return f"tcp://{host}:*"
    if int(port) + number > LAST_PORT:
        more = f", and number {number} would take {int(port) + number}" if number else ""
        raise MisuseError(f"{name} {address!r}: the last port is {LAST_PORT}{more}")
    return f"tcp://{host}:{int(port) + number}"


def is_loopback(address: str) -> bool:
    """Return True if only processes on this machine can reach a socket at "tcp://host:port"."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "lo")
