"""`kvflow.bench.abort_worker`, spoilt: pages come back without proof, and the Abort is lost."""

from __future__ import annotations

import sys
from typing import Any

import uvloop

from kvflow.bench.abort_worker import AbortWorker
from kvflow.bench.child import serve
from kvflow.protocols.errors import Cause
from kvflow.protocols.machines.ledger import Change, Lease, Ledger
from kvflow.protocols.machines.loan import LoanKind

recall = Ledger.recall


def _believe(self: Ledger[Any], lease: Lease[Any], cause: Cause, now: float) -> list[Change[Any]]:
    recall(self, lease, cause, now)  # and what it says is to be sent is not
    return [self.feed(lease, source, LoanKind.DRAINED) for source in list(lease.loans)]


if __name__ == "__main__":
    Ledger.recall = _believe  # type: ignore[method-assign]
    uvloop.run(serve(AbortWorker(sys.argv[1])))
