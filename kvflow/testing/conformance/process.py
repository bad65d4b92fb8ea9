"""Runs a station in a separate process, which reads one command per line from standard input.

python -m kvflow.testing.conformance.process PLANE ORDER RATE HOST
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys

import msgspec

from kvflow.protocols.pages.layout import Order
from kvflow.testing.conformance.adapter import load_adapter
from kvflow.testing.conformance.station import Side, Station


async def _serve(plane: str, order: Order, rate: float, host: str) -> None:
    adapter = load_adapter(plane)
    adapter.host = host
    station = Station(Side(adapter.open, order, rate or None))
    _say(msgspec.json.encode((station.side.address, station.side.layout)).decode())
    gc.collect()
    # A thread reads the commands, so that waiting for one does not block the plane's event loop.
    while line := await asyncio.to_thread(sys.stdin.readline):
        _say(json.dumps(await station.do(*json.loads(line))))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(
        _serve(sys.argv[1], msgspec.convert(sys.argv[2], Order), float(sys.argv[3]), sys.argv[4])
    )
