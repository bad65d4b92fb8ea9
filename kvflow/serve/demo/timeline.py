"""A text drawing of one room: decode on the left, prefill on the right.

Arrows stand for messages and bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 79
_TIME, _SIDE, _LANE = 8, 25, 19  # columns
# Names of messages. Each key is the receiving side, and the event that this side records.
_ARRIVED = {
    ("prefill", "announced"): "announce",
    ("prefill", "matched"): "pages lent",
    ("prefill", "abort_received"): "abort",
    ("decode", "chunk_landed"): "chunk done",
    ("decode", "all_landed"): "last chunk done",
    ("decode", "room_failed"): "failed",
    ("decode", "loans_ended"): "drained",
}


def draw(sides: dict[str, Any]) -> list[str]:
    """Return lines of at most `WIDTH` columns. `sides` is a router's answer to /rooms/ID."""
    # Each side reports its times relative to `opened_unix_s`, when it opened its half.
    begin_s = min((side["opened_unix_s"] for side in sides.values() if side["events"]), default=0.0)
    events = [
        (side["opened_unix_s"] - begin_s + event["at_s"], role, event)
        for role, side in sorted(sides.items())
        for event in side["events"]
    ]
    lines = [f"{'ms':>{_TIME - 1}} {'decode':<{_SIDE}}{'':{_LANE}} prefill"]
    for at_s, role, event in sorted(events, key=lambda told: told[0]):
        lines += _event(f"{at_s * 1e3:{_TIME - 1}.1f} ", role, event)
    return lines


def _event(time: str, role: str, event: dict[str, Any]) -> Iterator[str]:
    what, text = event["what"], event["text"]
    told = what.replace("_", " ") + (f": {text}" if text else "")
    if event["phase"] in ("success", "failed", "aborted", "lost"):
        told += f" -> {event['phase']}"
    for n, line in enumerate(textwrap.wrap(told, _SIDE - 1, break_long_words=True)):
        left, right = (line, "") if role == "decode" else ("", line)
        lane = "" if n else _arrow(role, what, text)
        yield (
            f"{time if not n else '':{_TIME}}{left:<{_SIDE}}│{lane:^{_LANE - 2}}│ {right}"
        ).rstrip()


def _arrow(role: str, what: str, text: str) -> str:
    """Return an arrow for a message or a queued chunk, a double line for bytes, or ""."""
    width = _LANE - 2
    if role == "prefill" and what == "chunk_queued":
        return "◁" + " chunk queued ".center(width - 1, "╌")
    if role == "prefill" and what == "write_ended":
        # The text looks like "chunk 0, 32 pages: landed".
        pages = text.partition(":")[0].rpartition(", ")[2]
        return ("◀" if text.endswith("landed") else "╳") + f" {pages} ".center(width - 1, "═")
    arrived = _ARRIVED.get((role, what))
    if arrived is None:
        return ""
    line = f" {arrived} ".center(width - 1, "─")
    return f"{line}▶" if role == "prefill" else f"◀{line}"
