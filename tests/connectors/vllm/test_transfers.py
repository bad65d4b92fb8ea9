"""What one worker moved, from any thread."""

from __future__ import annotations

import threading
from typing import Any

from kvflow.connectors.vllm.transfers import Transfers, no_transfers
from kvflow.protocols.errors import Code


def test_what_was_counted_is_taken_once() -> None:
    transfers = Transfers("0.1")
    assert transfers.take() is None
    transfers.sent(300, 0.5)
    transfers.received(0, 0.25)
    for code in (Code.DEADLINE, Code.PEER_LOST, Code.DEADLINE):
        transfers.failed(code)
    assert transfers.take() == {
        "sent_seconds": [0.5],
        "sent_bytes": [300],
        "received_seconds": [0.25],
        "received_bytes": [0],
        "failed": {"deadline": 2, "peer_lost": 1},
        "quarantine": {},
    }
    assert transfers.take() is None


def test_quarantine_is_told_when_it_changes() -> None:
    transfers = Transfers("0.1")
    transfers.quarantine(0)
    # The gauge exists from the start.
    assert transfers.take() == no_transfers() | {"quarantine": {"0.1": 0}}
    transfers.quarantine(0)
    assert transfers.take() is None
    for blocks in (3, 2, 2):
        transfers.quarantine(blocks)
    assert transfers.take() == no_transfers() | {"quarantine": {"0.1": 2}}
    transfers.quarantine(2)
    assert transfers.take() is None
    transfers.quarantine(0)
    assert transfers.take() == no_transfers() | {"quarantine": {"0.1": 0}}


def test_a_count_is_not_lost_to_that_of_another_thread() -> None:
    """One thread comes between what the other reads and what it writes, unless it has to wait."""
    transfers = Transfers("0.0")
    other = threading.Thread(target=transfers.failed, args=(Code.DEADLINE,))

    class Interrupted(dict[str, int]):
        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            if other.ident is None:
                other.start()
                other.join(0.2)  # it ends here only where nothing keeps it out
            return found

    transfers._data["failed"] = Interrupted()
    transfers.failed(Code.DEADLINE)
    other.join()
    assert (transfers.take() or {})["failed"] == {"deadline": 2}
