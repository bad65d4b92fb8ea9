"""A probe that checks whether a peer's mooncake engine answers, without using our own engine.

The engine's own call can block a thread for a minute, because a frozen process still accepts
connections but never answers.

The protocol is that of the engine's handshake (its `transfer_metadata_plugin.cpp`): the length of
the rest as a little-endian u64, one byte for the kind of request, and a JSON object. The answer has
the same form and kind.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvflow.protocols.errors import TransferError
from kvflow.transports.host.names import HostNames

_PROBE = 3
_REQUEST = bytes([_PROBE]) + b"{}"
_MAX_ANSWER_BYTES = 4 << 10  # a real answer has some 20 bytes
# The engine closes a connection that is silent for this long. We then probe again.
_PATIENCE_S = 5.0


async def check_answers(session: str, names: HostNames, within_s: float) -> None:
    """Wait until the engine at `session` ("host:port") answers a probe.

    Raises: TransferError if no engine answers within `within_s`.
    """
    host, _, port = session.rpartition(":")
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(within_s):
            while True:
                began_s = clock()
                try:
                    await _probe(
                        host.removeprefix("[").removesuffix("]"), int(port), names, within_s
                    )
                except EOFError:
                    if clock() - began_s < _PATIENCE_S:
                        raise
                else:
                    return
    except TimeoutError:
        raise TransferError(
            f"no mooncake engine answers at {session} within {within_s:g} s"
        ) from None
    except (OSError, OverflowError, EOFError, ValueError) as error:
        raise TransferError(f"no mooncake engine answers at {session}: {error}") from None


async def _probe(host: str, port: int, names: HostNames, within_s: float) -> None:
    reader, writer = await names.connect(host, port, within_s, limit=_MAX_ANSWER_BYTES)
    try:
        writer.write(len(_REQUEST).to_bytes(8, "little") + _REQUEST)
        size_bytes = int.from_bytes(await reader.readexactly(8), "little")
        if (
            not 1 <= size_bytes <= _MAX_ANSWER_BYTES
            or (await reader.readexactly(size_bytes))[0] != _PROBE
        ):
            raise ValueError("what listens there speaks another language")
    finally:
        # The engine serves one connection at a time, and waits until ours is closed.
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
