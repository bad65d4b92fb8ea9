"""Discovery of a prefill's ranks: a table of them, and a client that reads it over HTTP.

Each prefill runs its own registry (`serve.http.registry`):

PUT /ranks/{rank}  RankInfo as JSON; a restarted rank replaces its entry
GET /ranks         all ranks, sorted by group and number

If a registry has no API key, anyone who can reach it could redirect the decodes that use it. A
registry therefore accepts only ranks that fit those it already has (`RankTable.register`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from http.client import HTTPException, HTTPResponse, IncompleteRead
from io import BytesIO
from ipaddress import IPv6Address
from itertools import product
from typing import Any

import msgspec

from kvflow.protocols.errors import LostError, MisuseError, PeerError, WireError
from kvflow.protocols.limits import LEAST_WAIT_S, check_time
from kvflow.protocols.wire.json_text import decode_json
from kvflow.protocols.wire.ranks import RankInfo, group_for, rank_from_json, rank_to_json
from kvflow.transports.host.names import HostNames

MAX_ANSWER_BYTES = 4 << 20  # 1,024 ranks take some 300 KiB
_LABEL = r"[\w-]{1,63}"
_NAME = rf"(?=[^:]{{1,253}}:){_LABEL}(?:\.{_LABEL})*\.?"
# A zone may follow the address: "%", a network interface and its VLAN.
_V6 = r"[0-9A-Fa-f:.]{2,45}(?:%[\w-]{1,15}(?:\.[0-9]{1,4})?)?"
_ADDRESS = re.compile(rf"(?:\[(?P<v6>{_V6})\]|(?P<name>{_NAME})):(?P<port>[0-9]{{1,5}})", re.ASCII)


def registry_address(host: str, port: int) -> str:
    """Return the "host:port" that `RegistryClient` takes for a prefill at `host`.

    `host` is a host name or an IP address; an IPv6 address may stand in brackets.

    Raises: MisuseError for anything else.
    """
    named = f"[{host}]" if ":" in host and not host.startswith("[") else host
    # The port is not checked: a prefill may not know its own port yet.
    if _parsed(f"{named}:1") is None:
        raise MisuseError(f"{host[:80]!r} is not a host name or IP address")
    return f"{named}:{port}"


def _parsed(address: str) -> tuple[str, int] | None:
    """Return host and port of "host:port" or "[address]:port"; None for anything else."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        return None
    if found["v6"]:
        try:
            IPv6Address(found["v6"])
        except ValueError:
            return None
    return found["v6"] or found["name"], int(found["port"])


class RankTable:
    """The ranks of one prefill, in all its groups.

    A rank that registers again replaces its entry, so a restarted rank never counts twice.
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], RankInfo] = {}  # by group and rank
        self._own: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        return f"<RankTable of ranks {[info.rank for info in self.all()]}>"

    def put(self, info: RankInfo) -> None:
        """Add or replace a rank of this process. No registration over the network can replace it.

        If its world size or its number of groups differs from that of the other ranks, they are
        removed.
        """
        self._replace(info)
        self._own.add(_place(info))

    def register(self, info: RankInfo, *, is_trusted: bool) -> None:
        """Add or replace a rank that was received over the network.

        `is_trusted` is True if the sender has the API key.

        Raises: PeerError for a rank of this process; for a rank of another prefill, unless the
        sender is trusted and this process has no rank in the table; and for a rank that moves to
        another host, unless the sender is trusted.
        """
        if _place(info) in self._own:
            raise PeerError(
                f"rank {info.rank} is this process's own, at {self._ranks[_place(info)].control}"
            )
        known = next(iter(self._ranks.values()), info)
        if _world(info) != _world(known) and not (is_trusted and not self._own):
            mine, theirs = _world(known), _world(info)
            raise PeerError(
                f"rank {info.rank} is one of {theirs}, this registry's ranks are of {mine}"
            )
        before = self._ranks.get(_place(info), info)
        if not is_trusted and _host(before) != _host(info):
            raise PeerError(
                f"rank {info.rank} is at {before.control}, and moves to {info.control} with an API "
                "key only"
            )
        self._replace(info)

    def register_body(self, rank: str, body: bytes, *, is_trusted: bool) -> dict[str, Any]:
        """Register the rank that `PUT /ranks/{rank}` sent; return the document that answers it.

        Raises: WireError for a body that is not a rank, or whose number differs from `rank`; and
        the errors of `register`.
        """
        info = rank_from_json(decode_json(body))
        if rank != str(info.rank):
            raise WireError(f"the body is of rank {info.rank}, the path is /ranks/{rank[:20]}")
        self.register(info, is_trusted=is_trusted)
        return {"ranks": len(self._ranks)}

    def document(self) -> dict[str, Any]:
        """Return the document that answers GET /ranks."""
        return {"ranks": [rank_to_json(info) for info in self.all()]}

    def _replace(self, info: RankInfo) -> None:
        size = info.world_size, info.dp_size
        if any((known.world_size, known.dp_size) != size for known in self._ranks.values()):
            self._ranks, self._own = {}, set()
        self._ranks[_place(info)] = info

    def all(self) -> list[RankInfo]:
        return [self._ranks[place] for place in sorted(self._ranks)]


def _place(info: RankInfo) -> tuple[int, int]:
    return info.dp_rank, info.rank


def _world(info: RankInfo) -> str:
    groups = f"{info.dp_size} groups of " if info.dp_size > 1 else ""
    return (
        f"a prefill of {groups}{info.world_size} ranks over {info.backend}, model "
        f"{info.model[:80]!r}"
    )


def _host(info: RankInfo) -> str:
    return info.control.rpartition(":")[0]


class RegistryClient:
    """A client for the registries of prefills.

    Nodes call `resolve` before they link to a prefill, and again after they lose one.
    """

    def __init__(
        self, api_key: str = "", timeout_s: float = 5.0, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Create a client whose every call takes at most `timeout_s`, over HTTPS with `tls`.

        Raises: MisuseError for a timeout out of range, or for a key that no HTTP header can carry.
        """
        if not all(" " <= c <= "~" for c in api_key):
            raise MisuseError(
                "api_key: only printable ASCII characters can be sent in an HTTP header"
            )
        check_time("timeout_s", timeout_s, LEAST_WAIT_S)
        self._key, self._timeout_s = api_key, timeout_s
        self._tls = tls
        self._names = HostNames("registry")

    async def register(self, prefill: str, info: RankInfo) -> None:
        """Register a rank at the registry "host:port".

        Raises: WireError when the registry rejects it, and the errors of `resolve`.
        """
        await self._call(
            "PUT", prefill, f"/ranks/{info.rank}", msgspec.json.encode(rank_to_json(info))
        )

    async def resolve(
        self, prefill: str, room: int | None = None, dp_rank: int | None = None
    ) -> Sequence[RankInfo]:
        """Return all ranks of the prefill at "host:port"; for a `room`, only those of its group
        (see `ranks.group_for`).

        Raises: LostError when the registry does not answer or is incomplete, WireError when its
        answer is malformed, MisuseError for a `prefill` that is not "host:port".
        """
        document = await self._call("GET", prefill, "/ranks")
        listed = document.get("ranks") if isinstance(document, dict) else None
        if not isinstance(listed, list):
            raise WireError(f"registry {prefill}: the answer has no list of ranks")
        ranks = [rank_from_json(entry) for entry in listed]
        first = ranks[0] if ranks else None
        if first is None or list(map(_place, ranks)) != list(
            product(range(first.dp_size), range(first.world_size))
        ):
            raise LostError(f"registry {prefill}: {len(ranks)} ranks have registered so far")
        return ranks if room is None else group_for(ranks, room, dp_rank)

    async def _call(self, method: str, place: str, path: str, body: bytes = b"") -> Any:
        where = _parsed(place)
        if where is None:
            raise MisuseError(
                f'registry {place[:80]!r} is not "host:port" ("[address]:port" for IPv6)'
            )
        url = f"{'http' if self._tls is None else 'https'}://{place}{path}"
        head = [f"{method} {path} HTTP/1.1", f"Host: {place}", f"Content-Length: {len(body)}"]
        # This makes the registry close the stream after its answer.
        head.append("Connection: close")
        if self._key:
            head.append(f"Authorization: Bearer {self._key}")
        request = "\r\n".join([*head, "", ""]).encode() + body
        try:
            async with asyncio.timeout(self._timeout_s):
                raw = await self._exchanged(*where, request)
        except OSError as error:
            # This includes TimeoutError, which is an OSError.
            raise LostError(
                f"{url}: {str(error) or f'no answer within {self._timeout_s:g} s'}"
            ) from None
        if len(raw) > MAX_ANSWER_BYTES:
            raise WireError(f"{url}: the answer is over the limit of {MAX_ANSWER_BYTES} bytes")
        return _document(url, raw)

    async def _exchanged(self, host: str, port: int, request: bytes) -> bytes:
        """Return the whole answer, or its first MAX_ANSWER_BYTES + 1 bytes."""
        reader, writer = await self._names.connect(host, port, self._timeout_s, tls=self._tls)
        try:
            writer.write(request)
            await writer.drain()
            raw = bytearray()
            while len(raw) <= MAX_ANSWER_BYTES and (
                more := await reader.read(MAX_ANSWER_BYTES + 1 - len(raw))
            ):
                raw += more
            return bytes(raw)
        finally:
            # A graceful close could outlast the time limit.
            writer.transport.abort()


class _Answered:
    """A received answer that stands in for a socket: HTTPResponse calls only its `makefile`."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, _mode: str) -> BytesIO:
        return BytesIO(self._raw)


def _reason(body: bytes) -> str:
    """Return the message of an error's body for another error's text, or "" if there is none."""
    try:
        message = decode_json(body)["error"]["message"]
    except (WireError, LookupError, TypeError):
        return ""
    return f": {message[:200]!r}" if isinstance(message, str) else ""


def _document(url: str, raw: bytes) -> Any:
    """Parse a whole HTTP answer and return its JSON body.

    Raises: WireError for a malformed answer or an error status; LostError when it is cut short.
    """
    response = HTTPResponse(_Answered(raw))  # type: ignore[arg-type]
    try:
        response.begin()
        body = response.read()
    except IncompleteRead:
        raise LostError(f"{url}: the connection was closed before the end of the answer") from None
    except (HTTPException, ValueError) as error:
        if not raw:
            raise LostError(f"{url}: the connection was closed without an answer") from None
        raise WireError(f"{url}: the answer is not HTTP: {type(error).__name__}") from None
    if response.status != 200:
        raise WireError(f"{url}: answered {response.status}{_reason(body)}")
    try:
        return decode_json(body)
    except WireError as error:
        raise WireError(f"{url}: {error}") from None
