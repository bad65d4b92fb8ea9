"""`kv_transfer_params`, the field by which a proxy tells vLLM what a request is to fetch, or to
leave for a decode.

One after the other (the contract of vLLM's and llm-d's proxies): prefill is asked with
`{"do_remote_decode": true}`, and what it answers with is copied, whatever it is, into the request
for decode. Both at once: the proxy draws the room's number itself and gives it to both legs, and
decode also `remote_host` and `remote_port`; the pages then stream while prefill computes. Proxies
for vLLM's MooncakeConnector do so in words of their own, which are understood, too: `transfer_id`
for the room, `remote_bootstrap_addr` for the address.
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

    Without a room of the proxy's, one is drawn when the prompt has been computed.
    """

    room: int | None


class FromPrefill(msgspec.Struct, frozen=True):
    """Decode's leg: where the prompt's blocks come from. `port` is that of prefill's rank 0."""

    room: int
    host: str
    port: int
    workers: int | None = None
    """How many a decode of this prefill must have; None where nobody has said."""
    is_computed: bool = False
    """Prefill has said so: it holds all of the blocks."""

    def registry(self, rank: int) -> str:
        """Of the rank of that number: each has one of its own."""
        return registry_address(self.host, self.port + rank)


def read_params(params: object) -> ToDecode | FromPrefill | None:
    """What one request's `kv_transfer_params` ask for; None for nothing.

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
    """What every answer of a prefill says to its decode, which also gets the room: `read_params`
    reads it there.
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
    """Its number; of a `transfer_id` a digest of it."""
    name = params.get(_TRANSFER)
    if params.get(ROOM) is not None or name is None:
        return _number(params, ROOM, 1, MAX_ROOM)
    try:
        encoded = name.encode() if isinstance(name, str) else b""
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write
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
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise MisuseError(
            f"{_FIELD}: {name} {_shown(value)} is not a whole number from {least} to {most}"
        )
    return value


def _shown(value: object) -> str:
    """In a refusal: a value may be megabytes."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
