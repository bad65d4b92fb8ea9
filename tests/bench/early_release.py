"""`kvflow.bench.abort_worker`, spoilt: pages come back without proof, and the only Abort is lost on its way."""

from __future__ import annotations

import sys

import uvloop

from kvflow.bench.abort_worker import AbortWorker
from kvflow.bench.child import serve
from kvflow.protocols.errors import Cause
from kvflow.protocols.machines.ledger import Grant, Ledger
from kvflow.protocols.machines.loan import LoanKey, LoanKind


def _believe(self: Ledger, grant: Grant, cause: Cause) -> None:
    for loan in list(grant.loans):
        self.feed(LoanKey(loan.link.source, loan.link.rank, grant.number), LoanKind.DRAINED)


if __name__ == "__main__":
    Ledger.recall = _believe  # type: ignore[method-assign]
    uvloop.run(serve(AbortWorker(sys.argv[1])))
