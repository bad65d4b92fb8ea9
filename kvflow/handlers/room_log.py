"""Debug lines that report each step of a room as it happens.

GET /rooms returns the same steps afterwards.
"""

from __future__ import annotations

import logging
from typing import Any

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.protocols.machinery import Line

log = logging.getLogger("kvflow.rooms")


def about(room: DecodeRoom | PrefillRoom) -> dict[str, Any]:
    """Return the `extra` argument for a log line about `room`.

    Tasks that serve all requests need it, because their context names no request.
    """
    return {"request_id": room.request_id, "rooms": (room.room,)}


def follow(room: DecodeRoom | PrefillRoom) -> None:
    """Log the room's steps so far, and each later step as it happens.

    Call it only if `log` is enabled for DEBUG.
    """
    assert room.record is not None
    story, opened_at_s, extra = room.record.story, room.opened_at_s, about(room)

    def write(line: Line) -> None:
        text = f": {line.text}" if line.text else ""
        log.debug(
            "%.3f s %s, %s%s",
            line.at_s - opened_at_s,
            line.what,
            line.phase.lower(),
            text,
            extra=extra,
        )

    peers = (
        f" at prefill {room.record.peers[0].info.control}" if isinstance(room, DecodeRoom) else ""
    )
    log.debug("opened%s", peers, extra=extra)
    for line in story.lines():
        write(line)
    story.follower = write
