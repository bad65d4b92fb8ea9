"""`kv_transfer_params`, the field by which a proxy names what a request has to fetch from a
prefill, or to leave for a decode.

One leg after the other (the contract of vLLM's and llm-d's proxies): the proxy asks prefill with
`{"do_remote_decode": true}`, and copies its answer unread into the request for decode. Both legs at
once: the proxy draws the room's number and gives it to both legs, and gives decode `remote_host`
and `remote_port` too; the pages then travel while prefill computes. Proxies for vLLM's
MooncakeConnector do the same with other fields, which are accepted too: `transfer_id` for the room,
`remote_bootstrap_addr` for the address.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

import msgspec

from kvflow.protocols.errors import MisuseError
from kvflow.transports.control.registry import registry_address

ROOM, WORKERS = "kvflow_room", "kvflow_decode_workers"
COMPUTED = "kvflow_computed"
MAX_ROOM = (1 << 53) - 1  # proxies read numbers of JSON as doubles
_FIELD = "kv_transfer_params"
_SHOWN = 80  # characters of a wrong value
_TRANSFER, _BOOTSTRAP = "transfer_id", "remote_bootstrap_addr"
_ADDRESS = re.compile(
    r"(?:http://)?(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})/?", re.ASCII
)


class ToDecode(msgspec.Struct, frozen=True):
    """Prefill's leg.

    Where the proxy gives no room, one is drawn when the prompt is computed.
    """

    room: int | None


class FromPrefill(msgspec.Struct, frozen=True):
    """Decode's leg: the source of the prompt's blocks. `port` is that of prefill's rank 0."""

    room: int
    host: str
    port: int
    workers: int | None = None
    """The number of workers that a decode of this prefill must have; None where it is not known."""
    is_computed: bool = False
    """True where prefill's answer states that it holds all of the blocks."""

    def registry(self, rank: int) -> str:
        """Return the registry of rank `rank`; each rank has one."""
        return registry_address(self.host, self.port + rank)


def read_params(params: object) -> ToDecode | FromPrefill | None:
    """Return what one request's `kv_transfer_params` ask for; None where they ask for no transfer.

    Fields that other connectors use are ignored.

    Raises: MisuseError naming the field.
    """
    if params is None:
        return None
    if not isinstance(params, dict):
        raise MisuseError(f"{_FIELD}: {type(params).__name__} is not an object")
    to_decode, from_prefill = _flag(params, "do_remote_decode"), _flag(params, "do_remote_prefill")
    if to_decode and from_prefill:
        raise MisuseError(
            f"{_FIELD}: do_remote_decode and do_remote_prefill are both true: a request is one leg"
        )
    if to_decode:
        is_named = params.get(ROOM) is not None or params.get(_TRANSFER) is not None
        return ToDecode(_room(params) if is_named else None)
    if not from_prefill:
        return None
    if params.get(_BOOTSTRAP) is not None:
        return _from_mooncake(params)
    host = params.get("remote_host")
    if not isinstance(host, str) or not host:
        raise MisuseError(
            f"{_FIELD}: remote_host {_shown(host)} is not a host name or IP address: copy "
            "prefill's answer"
        )
    workers = None if params.get(WORKERS) is None else _number(params, WORKERS, 1, 1024)
    port, is_computed = _number(params, "remote_port", 1, 65_535), _flag(params, COMPUTED)
    return _checked(FromPrefill(_room(params), host, port, workers, is_computed))


def prefill_answer(
    host: str, port: int, *, engine: str, workers: int, tensor_parallel: int
) -> dict[str, Any]:
    """Return the part of a prefill's answers that is the same for every request; the room is added
    to it. `read_params` reads both at decode.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine,
        "remote_block_ids": [],
        "remote_host": host,
        "remote_port": port,
        "tp_size": tensor_parallel,
        WORKERS: workers,
        COMPUTED: True,
    }


def draw_room() -> int:
    return secrets.randbelow(MAX_ROOM) + 1


def _from_mooncake(params: dict[str, Any]) -> FromPrefill:
    address = params[_BOOTSTRAP]
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or not 1 <= int(found["port"]) <= 65_535:
        raise MisuseError(f"{_FIELD}: {_BOOTSTRAP} {_shown(address)} is not http://HOST:PORT")
    return _checked(FromPrefill(_room(params), found["host"].strip("[]"), int(found["port"])))


def _checked(found: FromPrefill) -> FromPrefill:
    try:
        found.registry(0)
    except MisuseError as error:
        raise MisuseError(f"{_FIELD}: {error}") from None
    return found


def _room(params: dict[str, Any]) -> int:
    """Return the room's number; for a `transfer_id`, a digest of it."""
    name = params.get(_TRANSFER)
    if params.get(ROOM) is not None or name is None:
        return _number(params, ROOM, 1, MAX_ROOM)
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    # Half a surrogate pair, which JSON can write.
    except UnicodeEncodeError:
        encoded = b""
    if not encoded:
        raise MisuseError(f"{_FIELD}: {_TRANSFER} {_shown(name)} is not a text")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big") % MAX_ROOM + 1


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise MisuseError(f"{_FIELD}: {name} {_shown(value)} is neither true nor false")
    return bool(value)


def _number(params: dict[str, Any], name: str, least: int, most: int) -> int:
    value = params.get(name)
    # A proxy that reads JSON numbers as doubles returns them with a fraction of 0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise MisuseError(
            f"{_FIELD}: {name} {_shown(value)} is not a whole number from {least} to {most}"
        )
    return value


def _shown(value: object) -> str:
    """Return a value for an error text, cut because it may be megabytes long."""
    try:
        text = repr(value)
    # An integer with more digits than Python converts.
    except ValueError:
        return "of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
