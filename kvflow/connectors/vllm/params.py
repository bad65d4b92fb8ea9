"""`kv_transfer_params`: the field in which a proxy states what a request fetches from a prefill, or
leaves for a decode.

A proxy may send the legs one after the other, as the proxies in vLLM and llm-d do. It then sends
`{"do_remote_decode": true}` to prefill, and copies the answer unread into the request for decode.

Or a proxy sends both legs at once, and the pages travel while prefill computes. It then draws the
room's number, puts the number into both legs, and gives `remote_host` and `remote_port` to decode.
Proxies for vLLM's MooncakeConnector do the same with other fields. These are accepted, too:
`transfer_id` for the room, and `remote_bootstrap_addr` for the address.
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
MAX_ROOM = (1 << 53) - 1  # proxies may read JSON numbers as doubles
_FIELD = "kv_transfer_params"
_SHOWN = 80  # characters of a wrong value that an error text shows
_TRANSFER, _BOOTSTRAP = "transfer_id", "remote_bootstrap_addr"
_ADDRESS = re.compile(
    r"(?:http://)?(?P<host>\[[^\]]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})/?", re.ASCII
)


class ToDecode(msgspec.Struct, frozen=True):
    """Prefill's leg. If the proxy gives no room, one is drawn when the request arrives."""

    room: int | None


class FromPrefill(msgspec.Struct, frozen=True):
    """Decode's leg: the source of its blocks. `port` is the registry port of prefill's rank 0."""

    room: int
    host: str
    port: int
    workers: int | None = None
    """The number of workers that a decode of this prefill must have; None if unknown."""
    is_computed: bool = False
    """True if prefill's answer states that prefill has computed all blocks."""

    def registry(self, rank: int) -> str:
        """Return the registry address of rank `rank`; each rank has its own registry."""
        return registry_address(self.host, self.port + rank)


def read_params(params: object) -> ToDecode | FromPrefill | None:
    """Parse a request's `kv_transfer_params`; return None if they ask for no transfer.

    Fields of other connectors are ignored.

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
    """Return the fields that all answers from prefill share. The caller adds the room's number."""
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
    name = params.get(_TRANSFER)
    if params.get(ROOM) is not None or name is None:
        return _number(params, ROOM, 1, MAX_ROOM)
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    # The text has half a surrogate pair, which JSON can express and UTF-8 cannot.
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
    # A proxy that reads JSON numbers as doubles may send 7 as 7.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise MisuseError(
            f"{_FIELD}: {name} {_shown(value)} is not a whole number from {least} to {most}"
        )
    return value


def _shown(value: object) -> str:
    """Return a value as text for an error. The text is cut, because it may be megabytes long."""
    try:
        text = repr(value)
    # The integer has more digits than Python converts to text.
    except ValueError:
        return "of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
