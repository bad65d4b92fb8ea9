"""Measured times of one model on one machine, and the step times that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvflow.protocols.errors import MisuseError

VERSION = 2


class Prompted(msgspec.Struct, frozen=True):
    """Time to the first token of `requests` equal prompts that arrive at once, at an idle fleet."""

    prompt_tokens: int
    requests: int
    seconds: float


class Stepped(msgspec.Struct, frozen=True):
    """Time of a decode step of `batch` requests, each with `context` tokens on average."""

    batch: int
    context: float
    seconds: float


class Sizes(msgspec.Struct, frozen=True):
    """Sizes on which the engine's scheduling depends. Pools are in tokens, for one worker."""

    prefill_pool: int
    decode_pool: int
    page_size: int
    token_bytes: int
    max_model_len: int
    chunk_tokens: int
    batch_tokens: int
    max_running: int
    new_token_ratio: float


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured points; `StepTimes` fits them. Saved as JSON."""

    model: str
    device: str
    dtype: str
    sizes: Sizes
    prompts: list[Prompted]
    steps: list[Stepped]
    answer_s: float
    """What an answer takes beside its steps, from its first token to its end."""
    transfer_bytes_s: float
    beside_decode: float
    """Time of a prefill step while a decode of the same machine steps; 1 = as if it were alone."""
    beside_prefill: float
    """The same for a decode step while a prefill of the same machine computes."""
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write the profile. Raises: MisuseError."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise MisuseError(f"--save {path}: {error.strerror}") from None


def load_profile(path: Path) -> Profile:
    """Read a saved profile. Raises: MisuseError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise MisuseError(f"--profile {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MisuseError(f"--profile {path}: {error}") from None
    if found.version != VERSION:
        raise MisuseError(
            f"--profile {path}: version {found.version}, and this kvflow reads {VERSION}; measure "
            "it again"
        )
    if not found.prompts or not found.steps or found.transfer_bytes_s <= 0:
        raise MisuseError(f"--profile {path}: it has no measured points; measure it again")
    return found


class StepTimes:
    """Times of prefill steps and decode steps, fitted to the points of a profile.

    A prefill step takes `base_s`, `token_s` for each of its tokens and `pair_s` for each pair of a
    token and one that it attends to. A request waits `request_s` before it arrives, and keeps the
    event loop of its prefill busy for `busy_s`. A decode step takes what was measured for its
    batch, interpolated, and `context_s` for each token more of context.
    """

    def __init__(self, profile: Profile) -> None:
        sizes = profile.sizes
        self.transfer_bytes_s, self._token_bytes = profile.transfer_bytes_s, sizes.token_bytes
        self.answer_s = profile.answer_s
        rows, seconds = [], []
        for point in profile.prompts:
            steps = list(steps_of(point, sizes.chunk_tokens, sizes.batch_tokens))
            every = [row for step in steps for row in step]
            pairs = sum(_pairs(count, before) for count, before in every)
            tokens = point.requests * point.prompt_tokens
            rows.append((1.0, point.requests, len(steps), tokens, pairs))
            seconds.append(point.seconds - self.transfer_s(sum(count for count, _ in steps[-1])))
        # Errors count relative to the time, or the longest prompts alone would decide.
        fit = non_negative_fit(np.array(rows, float), np.array(seconds))
        self.request_s, self.busy_s, self.base_s, self.token_s, self.pair_s = map(float, fit)
        short = [point for point in profile.steps if point.context <= _reference(profile)]
        self._reference = _reference(profile)
        self._batches = [float(point.batch) for point in short]
        self._seconds = [point.seconds for point in short]
        self.context_s = self._context_s(profile)

    def transfer_s(self, tokens: int) -> float:
        return tokens * self._token_bytes / self.transfer_bytes_s

    def prefill_step_s(self, rows: Iterable[tuple[int, int]]) -> float:
        """Return the time of one step. Each row has a number of tokens, and that before them."""
        return self.base_s + sum(
            self.token_s * count + self.pair_s * _pairs(count, before) for count, before in rows
        )

    def decode_step_s(self, batch: int, context: float) -> float:
        """Return the time of one step of `batch` requests with `context` tokens together."""
        return max(
            1e-6,
            self._of_batch(batch) + self.context_s * (context - batch * self._reference),
        )

    def _of_batch(self, batch: float) -> float:
        """Interpolate between the measured batches; go on in a line after the largest."""
        xs, ys = self._batches, self._seconds
        if batch <= xs[-1] or len(xs) < 2:
            return float(np.interp(batch, xs, ys))
        slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))
        return ys[-1] + slope * (batch - xs[-1])

    def _context_s(self, profile: Profile) -> float:
        found = [
            (point.seconds - self._of_batch(point.batch))
            / (point.batch * (point.context - self._reference))
            for point in profile.steps
            if point.context > self._reference
        ]
        return max(0.0, float(np.median(found))) if found else 0.0


def _reference(profile: Profile) -> float:
    """Return the context of the points that were measured for every batch."""
    return min(point.context for point in profile.steps) * 1.5


def steps_of(point: Prompted, chunk: int, batch: int) -> Iterable[list[tuple[int, int]]]:
    """Yield the rows of each prefill step of prompts that arrive at once, as the engine picks them.

    A row is a number of tokens, and that of the tokens of its prompt before them.
    """
    computed = [0] * point.requests
    while True:
        rows, left = [], batch
        for at, before in enumerate(computed):
            count = min(chunk, left, point.prompt_tokens - before)
            if count:
                rows.append((count, before))
                computed[at], left = before + count, left - count
        if not rows:
            return
        yield rows


def _pairs(count: int, before: int) -> float:
    return count * (before + count / 2)


def non_negative_fit(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the least squares of relative errors, with factors of at least 0."""
    weights = 1 / np.maximum(seconds, 1e-9)
    kept: Sequence[int] = range(rows.shape[1])
    while kept:
        found = np.linalg.lstsq(rows[:, kept] * weights[:, None], np.ones_like(seconds), rcond=None)
        factors = found[0]
        if (factors >= 0).all():
            result = np.zeros(rows.shape[1])
            result[list(kept)] = factors
            return result
        worst = int(np.argmin(factors * rows[:, kept].mean(axis=0)))
        kept = [one for i, one in enumerate(kept) if i != worst]
    return np.zeros(rows.shape[1])
