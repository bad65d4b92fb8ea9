"""Loans that the last decode node over a pool could not prove: the next one waits for their fences."""

from __future__ import annotations

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.shell import fenced
from kvflow.protocols.ports import UnprovenLoan


class Inheritance:
    """Takes over what is in `unproven`; its pages stay with their owners until every writer of theirs is fenced off."""

    def __init__(self, shell: DecodeShell, unproven: list[UnprovenLoan]) -> None:
        """Empties `unproven`: it is filled again when this node closes."""
        self._shell = shell
        self._loans, unproven[:] = list(unproven), []
        for n, loan in enumerate(self._loans):
            if all(other.pages is not loan.pages for other in self._loans[:n]):
                shell.endpoint.core.ledger.quarantined_pages += len(loan.pages)
            shell.spawn(self._await_proof(loan), f"kvflow-inherited-{loan.writer.locator}")

    async def _await_proof(self, loan: UnprovenLoan) -> None:
        shell = self._shell
        if not await fenced(shell.plane, loan.writer, shell.timing, shell.counts):
            return
        self._loans = [other for other in self._loans if other is not loan]
        if all(other.pages is not loan.pages for other in self._loans):  # several ranks may hold the same pages
            shell.endpoint.core.ledger.quarantined_pages -= len(loan.pages)
            if loan.owner is not None:
                shell.lent.give_back(loan.pages, loan.owner)
            if loan.held_in is not None:
                loan.held_in.unhold(loan.pages)

    def left(self) -> list[UnprovenLoan]:
        """What is still without proof. Ask when the shell has stopped."""
        return self._loans
