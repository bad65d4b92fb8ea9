"""The ledger of loans: pages in the hands of prefill ranks. Apart from rooms, which end in time; loans end on proof."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from kvflow.protocols.errors import Cause, QuarantineError
from kvflow.protocols.machines.loan import LoanCommand, LoanKey, LoanKind, LoanPhase, step
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import PageStore


class Lender(Protocol):
    """The link to one prefill rank, as far as a loan needs it."""

    @property
    def source(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def send_abort(self, room: int, grant: int, cause: Cause) -> None: ...

    def await_fence(self) -> None:
        """Start waiting, once per link, for the data plane's proof that this writer can write no more."""


class Grant:
    """Pages lent to every rank of a room under one number; they are free again when the room and all its loans are."""

    __slots__ = ("cause", "loans", "number", "on_change", "owner", "pages", "room", "room_ended")

    def __init__(self, number: int, room: int, pages: PageIndices, owner: Hashable) -> None:
        self.number, self.room, self.pages, self.owner = number, room, pages, owner
        self.loans: list[Loan] = []
        self.room_ended = False
        self.cause: Cause | None = None
        self.on_change: Callable[[], None] | None = None  # set by a room that waits for its loans

    @property
    def doubtful(self) -> bool:
        """Every loan still out is in doubt."""
        return all(loan.phase is LoanPhase.DOUBTFUL for loan in self.loans)


class Loan:
    __slots__ = ("grant", "link", "phase", "said_at_s")

    def __init__(self, grant: Grant, link: Lender) -> None:
        self.grant, self.link = grant, link
        self.phase = LoanPhase.LENT
        self.said_at_s = 0.0


class Quarantined:
    """The owner of pages whose room has ended while a loan on them has not."""

    __slots__ = ("grant",)

    def __init__(self, grant: int) -> None:
        self.grant = grant

    def __repr__(self) -> str:
        return f"quarantine({self.grant})"


class Ledger:
    """Runs the loan machine; the only place that gives lent pages back."""

    def __init__(self, pages: PageStore, now: Callable[[], float], quarantine_limit: int) -> None:
        self._pages, self._now = pages, now
        self._loans: dict[LoanKey, Loan] = {}
        self.quarantined_pages, self.quarantine_limit = 0, quarantine_limit

    def __len__(self) -> int:
        return len(self._loans)

    def check_quarantine(self) -> None:
        """Raises: QuarantineError while it holds more than its share of the pool."""
        if self.quarantined_pages > self.quarantine_limit:
            raise QuarantineError(self.quarantined_pages, self.quarantine_limit)

    def lend(self, grant: Grant, link: Lender) -> None:
        loan = Loan(grant, link)
        grant.loans.append(loan)
        self._loans[LoanKey(link.source, link.rank, grant.number)] = loan

    def feed(self, key: LoanKey, kind: LoanKind) -> bool:
        """One event for one loan; False when there is no such loan (late or foreign: nothing to do)."""
        loan = self._loans.get(key)
        if loan is None:
            return False
        self._feed(key, loan, kind)
        return True

    def feed_link(self, link: Lender, kind: LoanKind) -> None:
        """The same event for every loan of one link."""
        for key in [key for key, loan in self._loans.items() if loan.link is link]:
            self.feed(key, kind)  # unless it has ended by what a user does when a room ends

    def repeat(self, older_than_s: float) -> None:
        """Say Abort again for loans recalled before `older_than_s` and not answered."""
        for key, loan in list(self._loans.items()):
            if loan.phase is LoanPhase.RECALLED and loan.said_at_s < older_than_s:
                self._feed(key, loan, LoanKind.REPEAT_DUE)

    def recall(self, grant: Grant, cause: Cause) -> None:
        grant.cause = cause
        for loan in list(grant.loans):
            self._feed(LoanKey(loan.link.source, loan.link.rank, grant.number), loan, LoanKind.RECALL)

    def room_ended(self, grant: Grant) -> None:
        """The room is over: its pages go home, or wait in quarantine for their loans."""
        grant.room_ended = True
        grant.on_change = None
        if grant.loans:
            owner = Quarantined(grant.number)
            self._pages.move(grant.pages, grant.owner, owner)
            grant.owner = owner
            self.quarantined_pages += len(grant.pages)
        else:
            self._pages.give_back(grant.pages, grant.owner)

    def owes(self, link: Lender) -> bool:
        """Some loan of this link has not ended."""
        return any(loan.link is link for loan in self._loans.values())

    def owed_by(self, link: Lender) -> tuple[int, int]:
        """Loans of this link that have not ended, and pages it keeps in quarantine."""
        grants = [loan.grant for loan in self._loans.values() if loan.link is link]
        return len(grants), sum(len(grant.pages) for grant in grants if grant.room_ended)

    def lowest_open_grant(self, default: int) -> int:
        return min((key.grant for key in self._loans if key.grant < default), default=default)

    def _feed(self, key: LoanKey, loan: Loan, kind: LoanKind) -> None:
        loan.phase, commands = step(loan.phase, kind)
        grant = loan.grant
        for command in commands:
            if command is LoanCommand.RETURN:
                del self._loans[key]
                grant.loans.remove(loan)
                if grant.room_ended and not grant.loans:
                    self.quarantined_pages -= len(grant.pages)
                    self._pages.give_back(grant.pages, grant.owner)
            elif command is LoanCommand.SEND_ABORT:
                loan.said_at_s = self._now()
                if grant.cause is not None:
                    loan.link.send_abort(grant.room, grant.number, grant.cause)
            else:
                loan.link.await_fence()
        if commands and grant.on_change is not None:
            grant.on_change()
