"""The tries of one request: how often each worker failed it, and whether it may be tried again."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from kvflow.router.legs import PairFailedError
from kvflow.router.workers import Worker

MOST_TRIES = 16
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


class Tries:
    """At most `MOST_TRIES` tries of one request.

    The pauses between them take at most `left_s` seconds in all. The tries themselves have no time
    limit. `retried` has the statuses after which another try is allowed.
    """

    def __init__(self, left_s: float, retried: Collection[int]) -> None:
        self.left_s, self._retried = left_s, retried
        self.failed: Counter[Worker] = Counter()
        self.error: PairFailedError | None = None
        # True once decode failed the request alone. Only pairs are tried from then on.
        self.needs_pair = False
        self.missing: dict[Worker, int] = {}  # tokens that decodes lack, for `LocalPrefill.begin`
        self._pairs: set[tuple[Worker, Worker]] = set()
        self._pauses = 0

    def note_alone(self, error: PairFailedError) -> None:
        """Record that decode failed the request alone. Raises: `error`, if no pair may help."""
        self.needs_pair = True
        if not error.may_retry(self._retried):
            raise error

    def note(self, error: PairFailedError, prefill: Worker, decode: Worker) -> None:
        """Record that a pair failed the request. Raises: `error`, if no other try is allowed."""
        self.failed.update((prefill, decode))
        self._pairs.add((prefill, decode))
        self.error = error
        # Every try counts once for each of its two workers.
        if not error.may_retry(self._retried) or self.failed.total() >= 2 * MOST_TRIES:
            raise error

    def untried(
        self, prefills: Sequence[Worker], decodes: Sequence[Worker]
    ) -> tuple[Worker, Worker] | None:
        """Return the first untried pair. Return None if all pairs that fit were tried.

        Also return None if the number of tried pairs has reached the number of workers.

        Raises: the last error, if trying a pair again would only repeat it.
        """
        if len(self._pairs) < len(prefills) + len(decodes):
            for pair in fitting(prefills, decodes):
                if pair not in self._pairs:
                    return pair
        if self.error is not None and not self.error.passes:
            raise self.error
        return None

    def pause_s(self) -> float:
        """Return the seconds to wait before the next try. They grow up to `LONGEST_PAUSE_S`."""
        pause_s = min(FIRST_PAUSE_S * 2**self._pauses, LONGEST_PAUSE_S)
        self._pauses += 1
        # The pause is random: requests that failed together must not all come back at once.
        return random.uniform(pause_s / 2, pause_s)


def fitting(
    prefills: Sequence[Worker], decodes: Sequence[Worker]
) -> Iterator[tuple[Worker, Worker]]:
    """Yield the pairs that can serve a request together, those of the first prefill first."""
    return (pair for pair in itertools.product(prefills, decodes) if pair[0].fits(pair[1]))
