"""Retraction: requests leave the device when decode's pool runs short of pages, and return when it
has pages again (I2, I13).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvflow.aio import run_to_end
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    HostMemoryError,
    KvflowError,
    room_error,
)
from kvflow.protocols.machines.residency import ResidencyPhase
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.scheduler.budget import NewTokenRatio, PageBudget
from kvflow.serve.engine.scheduler.burst import DecodeRequest
from kvflow.serve.engine.scheduler.params import EngineRetractions

_log = logging.getLogger("kvflow.serve.engine")
# A pool that is too small causes many retractions per second, too many for a log line each.
REPORT_EVERY_S = 10.0


class Retractions:
    """Chooses the requests to retract, and moves them off the device and back.

    `back` is called with each request that returns, `failed` with each that cannot return. Only the
    event loop uses this class. No step includes a request while it is moved.
    """

    def __init__(
        self,
        budget: PageBudget,
        ratio: NewTokenRatio,
        store: SnapshotStore | None,
        *,
        recompute: bool,
        back: Callable[[DecodeRequest], None],
        failed: Callable[[DecodeRequest, KvflowError], None],
        moved: Callable[[], None],
    ) -> None:
        """With `recompute`, a request for which there is no host memory computes its state again.
        Without it, such a request ends with an error. `moved` is called when pages may have become
        free.
        """
        self._budget, self._ratio, self._store, self._recompute = budget, ratio, store, recompute
        self._back, self._failed, self._moved = back, failed, moved
        # Requests by number, from their retraction until they run again.
        self._away: dict[int, DecodeRequest] = {}
        self._moves: set[asyncio.Task[None]] = set()
        self._next_report_s = 0.0
        self.retracts = self.resumes = self.recomputes = 0

    @property
    def away(self) -> list[DecodeRequest]:
        return list(self._away.values())

    def report(self) -> EngineRetractions:
        store = self._store
        return EngineRetractions(
            retracts=self.retracts,
            resumes=self.resumes,
            recomputes=self.recomputes,
            retracted_now=len(self._away),
            host_bytes_used=store.used_bytes if store else 0,
            host_bytes_limit=store.limit_bytes if store else 0,
            new_token_ratio=self._ratio.now,
        )

    @property
    def coming_pages(self) -> int:
        """The number of pages that become free once they are copied to the host."""
        leaving = (ResidencyPhase.RESIDENT, ResidencyPhase.LEAVING)
        return sum(r.resident.sizes[0] for r in self._away.values() if r.resident.phase in leaving)

    def victims(
        self, running: Iterable[DecodeRequest], short: dict[DecodeRequest, int]
    ) -> list[DecodeRequest]:
        """Choose requests of `running` to retract, so that those in `short` get their missing
        pages.

        Requests of lower priority go first. Among equals, those with fewer generated tokens go
        first, and then later arrivals. One request always stays. A request that has returned goes
        last until it makes progress, so every request ends, however small the pool is.
        """
        missing = sum(short.values()) - self.coming_pages
        candidates = sorted(
            running, key=lambda r: (r.protected, r.params.priority, r.generated, -r.number)
        )
        found: list[DecodeRequest] = []
        for victim in candidates[:-1]:
            if missing <= 0:
                break
            found.append(victim)
            missing -= victim.resident.sizes[0] + short.get(victim, 0)
        if found:
            generated = sum(r.generated for r in candidates)
            limit = sum(r.limit for r in candidates)
            self._ratio.retracted(generated, limit, len(candidates))
        return found

    def retract(self, request: DecodeRequest) -> None:
        """Start to retract a request: its state is copied to the host, and its pages become free.

        No step includes the request from this call until it returns, in its turn.
        """
        self.retracts += 1
        self._budget.retract(request.admission, request.resident.sizes[0])
        name = f"kvflow-retract-{request.number}"
        request.move = move = asyncio.create_task(
            self._move(request), name=name, context=request.context
        )
        self._away[request.number] = request
        self._moves.add(move)
        move.add_done_callback(lambda done: self._ended(done, request))
        self._log_shortage()

    def release_cached(self) -> bool:
        """Unlock the cached pages of one retracted request; return False if no request has any.

        While no request runs, these may be the only pages that can become free. The request that
        would return last is chosen. It later computes again what the cache no longer has.
        """
        waiting = [
            r
            for r in self._away.values()
            if r.resident.phase is ResidencyPhase.AWAY
            and not r.admission.granted.done()
            and r.prefix
            and r.prefix.held
        ]
        if not waiting:
            return False
        self._release_prefix(max(waiting, key=lambda r: r.admission.place))
        return True

    def _release_prefix(self, request: DecodeRequest) -> None:
        """Unlock the request's cached pages. They are looked up or computed again later."""
        assert request.prefix is not None
        count = int(request.prefix.pages.size)
        request.prefix.release()
        request.resident.needs(request.resident.sizes[0] + count)
        request.admission.has(-count)
        _log.debug("released %d cached pages, to be computed again", count)

    async def close(self) -> None:
        """Stop every move, and wait until no copy runs. The requests keep what they own."""
        for move in self._moves:
            move.cancel()
        await run_to_end(asyncio.gather(*self._moves, return_exceptions=True))

    def _log_shortage(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._next_report_s:
            return
        self._next_report_s = now + REPORT_EVERY_S
        _log.info(
            "the pool is short of pages: %d requests retracted since the start, %d of them wait "
            "now; new-token ratio %.2f",
            self.retracts,
            len(self._away),
            self._ratio.now,
        )

    def _ended(self, move: asyncio.Task[None], request: DecodeRequest) -> None:
        self._moves.discard(move)
        if request.move is move:
            request.move = None
            self._away.pop(request.number, None)

    async def _move(self, request: DecodeRequest) -> None:
        try:
            await self._leave(request)
            self._moved()
            while request.resident.phase is ResidencyPhase.AWAY:
                await request.admission.granted
                try:
                    await self._return(request)
                # Other requests grew into the granted pages, so this one waits again.
                except CapacityError:
                    self._budget.retract(request.admission, request.resident.sizes[0])
        except KvflowError as error:
            self._failed(request, error)
        # One request's failed copy must not end the others.
        except Exception as error:  # noqa: BLE001
            _log.exception("moving a retracted request failed")
            text = f"moving a retracted request failed: {type(error).__name__}"
            self._failed(request, room_error(Cause(Code.ENGINE_ERROR, text)))

    async def _leave(self, request: DecodeRequest) -> None:
        pages, rows = request.resident.sizes[0], sum(request.resident.sizes[1:])
        try:
            if self._store is None:
                raise HostMemoryError("page", pages, 0, 0)
            await request.resident.retract()
            _log.debug("retracted to host memory: %d pages, %d rows", pages, rows)
        except HostMemoryError as error:
            if not self._recompute:
                # Clients count in tokens. A row is the state of one request.
                in_pages = error.what.startswith("page")
                size = request.sequence.page_size if in_pages else 1
                unit = "tokens" if in_pages else "states"
                error.args = (
                    f"the KV pool ran short, and the request that was retracted needs "
                    f"{error.asked * size} {unit} of host memory (--host-memory-bytes), of which "
                    f"{error.limit * size} are free",
                )
                raise
            request.resident.drop()
            if rows and request.prefix is not None and request.prefix.held:
                # The cached pages are useless without the state at their end, which is lost.
                self._release_prefix(request)
            _log.debug("retracted, its state to be computed again: %d pages, %d rows", pages, rows)

    async def _return(self, request: DecodeRequest) -> None:
        self._look_again(request)
        restored = await request.resident.resume()
        if request.resident.phase is not ResidencyPhase.RESIDENT:
            return
        if restored:
            self.resumes += 1
        else:
            self.recomputes += 1
        request.admission.took(request.resident.sizes[0])
        request.move = None
        del self._away[request.number]
        sequence = moved(request, computed=restored)
        _log.debug(
            "resumed after %d tokens%s",
            request.generated,
            "" if restored else ", which are computed again",
        )
        request.came_back(sequence)
        self._back(request)

    def _look_again(self, request: DecodeRequest) -> None:
        """Look up the pages that the cache has now, for a request whose state is computed again.

        A request that still holds cached pages, or has a copy of its state, needs no look-up. A
        request that lost its row begins without cached pages, because decode's cache keeps no rows.
        """
        prefix, s, resident = request.prefix, request.sequence, request.resident
        if prefix is None or prefix.held or resident.copied:
            return
        has_row = any(resident.sizes[1:])
        request.prefix = found = prefix.again(s.tokens[: 0 if has_row else s.length - 1])
        if found.held:
            resident.needs(resident.sizes[0] - int(found.pages.size))
            request.admission.has(int(found.pages.size))


def moved(request: DecodeRequest, *, computed: bool) -> Sequence:
    """Return a new sequence with the same tokens at other places.

    It is a new object, so that no plan of steps made for the old places can match it.
    """
    old = request.sequence
    prompt = old.tokens[: old.prompt_length]
    new = Sequence(old.owner, prompt, old.tokens.size - old.prompt_length, old.page_size)
    new.tokens[: old.length] = old.tokens[: old.length]
    if request.prefix is not None:
        new.begin_with(request.prefix.pages)
    new.length, new.computed = old.length, old.computed if computed else new.computed
    new.add(request.resident.places)
    return new
