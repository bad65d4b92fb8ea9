"""What one worker moved, from any thread."""

from __future__ import annotations

import threading

from kvflow.connectors.vllm.transfers import Transfers, no_transfers
from kvflow.protocols.errors import Code


def test_what_was_counted_is_taken_once() -> None:
    transfers = Transfers(100, "0.1")
    assert transfers.take() is None
    transfers.sent(3, 0.5)
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
    transfers = Transfers(100, "0.1")
    transfers.quarantine(0)
    assert transfers.take() == no_transfers() | {"quarantine": {"0.1": 0}}  # the gauge exists from the start
    transfers.quarantine(0)
    assert transfers.take() is None
    for blocks in (3, 2, 2):
        transfers.quarantine(blocks)
    assert transfers.take() == no_transfers() | {"quarantine": {"0.1": 2}}
    transfers.quarantine(2)
    assert transfers.take() is None
    transfers.quarantine(0)
    assert transfers.take() == no_transfers() | {"quarantine": {"0.1": 0}}


def test_any_thread_may_count() -> None:
    transfers, found = Transfers(1, "0.0"), 0

    def count() -> None:
        for _ in range(500):
            transfers.sent(1, 0.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found += sum((transfers.take() or no_transfers())["sent_bytes"])
    found += sum((transfers.take() or no_transfers())["sent_bytes"])
    assert found == 2000
