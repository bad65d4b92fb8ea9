"""Write the state diagrams of the machines into a document.

Run it as `python -m kvflow.protocols.machines.diagrams FILE`. It replaces the text between each
line `<!-- table: NAME -->` and the next line `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from kvflow.protocols.machines import (
    cached_run,
    decode_room,
    grants,
    group,
    link,
    ownership,
    peer,
    prefill_room,
    residency,
)
from kvflow.protocols.machines import loan as loans

MERMAID: dict[str, Callable[[], str]] = {
    "prefill room": prefill_room.TABLE.mermaid,
    "decode room": decode_room.TABLE.mermaid,
    "loan": loans.TABLE.mermaid,
    "pages of a room": ownership.STORE.mermaid,
    "staging of a room": ownership.STAGING.mermaid,
    "link": link.TABLE.mermaid,
    "peer": peer.TABLE.mermaid,
    "grant": grants.TABLE.mermaid,
    "group member": group.MEMBER.mermaid,
    "group leader": group.LEADER.mermaid,
    "residency": residency.TABLE.mermaid,
    "cached run": cached_run.TABLE.mermaid,
}
_PLACE = re.compile(r"(<!-- table: (?P<name>[a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(document: str) -> str:
    """Return `document` with every diagram redrawn. Raises: KeyError for an unknown machine."""
    return _PLACE.sub(
        lambda found: f"{found[1]}```mermaid\n{MERMAID[found['name']]()}\n```\n{found[3]}", document
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
