"""Sampling: choosing the next tokens from logits.

Sampling is stateless: the random number of a draw is a hash of (seed, position). So prefill, decode
and a single process draw the same token, and no state of a random generator has to be handed over.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvflow.serve.engine.model.grammars import (
    Allowed,
    Grammars,
    Masks,
    Matcher,
    Tokens,
    few_tokens,
)
from kvflow.serve.engine.scheduler.adjustments import Adjustments
from kvflow.serve.engine.scheduler.params import SamplingParams

# top_k and top_p first select among this many tokens, because sorting all tokens is expensive.
CANDIDATES = 1024
# For fewer answers, handing the masks to another thread takes longer than computing them.
_FEWEST_AHEAD = 4


class Draw(NamedTuple):
    """The parameters of one row's draw; `position` is the index of the token to choose."""

    params: SamplingParams
    seed: int
    position: int
    adjustments: Adjustments | None = None


class Choice(NamedTuple):
    """A chosen token, with the log-probabilities under the model's unchanged distribution."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    asked_logprobs: tuple[tuple[int, float], ...] = ()


def allowed_ahead(draws: Sequence[Draw]) -> Future[Allowed] | None:
    """Begin to compute what the grammars of the rows to draw allow, for `choose`.

    Greedy rows are left out, because most of them need no mask: it is enough to ask whether their
    most likely token may follow. Returns None if there are few rows.
    """
    drawn = [draw for draw in draws if not draw.params.greedy]
    if len(drawn) < _FEWEST_AHEAD or (grammars := _grammars(drawn)) is None:
        return None
    answers = list(_answers(drawn).values())
    return grammars.allowed_ahead(answers) if len(answers) >= _FEWEST_AHEAD else None


def choose(
    logits: torch.Tensor, draws: Sequence[Draw], ahead: Future[Allowed] | None = None
) -> list[Choice]:
    """Choose one token for each row of `logits` [rows, vocabulary]; greedy rows cost one argmax.

    `ahead` is the result of `allowed_ahead` with the same draws.
    """
    tokens, vocabulary = _most_likely(logits), logits.shape[-1]
    adjusted = {
        i: d.adjustments(logits[i], d.position)
        for i, d in enumerate(draws)
        if d.adjustments is not None and d.adjustments.changes_logits
    }
    for i, row in adjusted.items():
        tokens[i] = int(row.argmax())
    few: dict[int, npt.NDArray[np.int64]] = {}
    if (grammars := _grammars(draws)) is not None:
        few = _apply_grammars(grammars, draws, ahead, logits, adjusted, tokens)
    if few:
        found = _draw(_logits_of(logits, few), [draws[i] for i in few], vocabulary)
        for (i, among), n in zip(few.items(), found, strict=True):
            tokens[i] = int(among[n])
    drawn = [i for i, d in enumerate(draws) if not d.params.greedy and i not in few]
    if drawn:
        if adjusted:
            rows = torch.stack([adjusted.get(i, logits[i]).float() for i in drawn])
        else:
            rows = logits[drawn].float()
        for i, token in zip(drawn, _draw(rows, [draws[i] for i in drawn], vocabulary), strict=True):
            tokens[i] = token
    wanted = [i for i, d in enumerate(draws) if d.params.logprobs is not None]
    choices = [Choice(token) for token in tokens]
    if wanted:
        _add_logprobs(choices, torch.log_softmax(logits[wanted].float(), dim=-1), wanted, draws)
    return choices


def _answers(draws: Sequence[Draw]) -> dict[int, tuple[Matcher, Tokens]]:
    """Return the answers that have a grammar, by row."""
    return {
        i: answer
        for i, draw in enumerate(draws)
        if draw.adjustments is not None
        and (answer := draw.adjustments.answer(draw.position)) is not None
    }


def _to_draw(
    draws: Sequence[Draw], answers: dict[int, tuple[Matcher, Tokens]]
) -> dict[int, tuple[Matcher, Tokens]]:
    """Return those of `answers` whose next token is not simply the most likely one."""
    return {i: answer for i, answer in answers.items() if not draws[i].params.greedy}


def _apply_grammars(
    grammars: Grammars,
    draws: Sequence[Draw],
    ahead: Future[Allowed] | None,
    logits: torch.Tensor,
    adjusted: dict[int, torch.Tensor],
    tokens: list[int],
) -> dict[int, npt.NDArray[np.int64]]:
    """Change `tokens`, the most likely ones, to the most likely ones that the grammars allow.

    Of the rows to draw, return the allowed tokens of those that have few, and mask the others in
    `adjusted`.
    """
    answers = _answers(draws)
    drawn = _to_draw(draws, answers)
    masked: dict[int, npt.NDArray[np.uint8]] = {}
    if len(drawn) < len(answers) and (
        left := _left_to_masks(answers, drawn, logits, adjusted, tokens)
    ):
        masked = dict(zip(left, grammars.allowed(list(left.values())), strict=True))
    few: dict[int, npt.NDArray[np.int64]] = {}
    if drawn:
        allowed = grammars.allowed(list(drawn.values())) if ahead is None else ahead.result()
        for i, row in zip(drawn, allowed, strict=True):
            among = None if i in adjusted else few_tokens(row, logits.shape[-1])
            if among is not None and len(among):
                few[i] = among
            else:
                masked[i] = row
    if masked:
        found = _masked(
            logits, adjusted, list(masked), grammars.masks_of(np.stack(list(masked.values())))
        )
        adjusted.update(zip(masked, found, strict=True))
        for i, token in zip(masked, _most_likely(found), strict=True):
            tokens[i] = token
    return few


def _left_to_masks(
    answers: dict[int, tuple[Matcher, Tokens]],
    drawn: dict[int, tuple[Matcher, Tokens]],
    logits: torch.Tensor,
    adjusted: dict[int, torch.Tensor],
    tokens: list[int],
) -> dict[int, tuple[Matcher, Tokens]]:
    """Return those of the greedy `answers` whose masks `_masked` must apply: where other parameters
    change the logits as well, and on devices. Change the `tokens` of the other greedy ones to the
    most likely ones that their grammars allow.
    """
    left = {}
    rows = logits.numpy() if _is_fast_in_numpy(logits) else None
    for i, (matcher, answer) in answers.items():
        if i in drawn:
            continue
        token = None
        if not _is_banned(adjusted, i, tokens[i]):
            token = matcher.choose(answer, tokens[i], logits.shape[-1])
        if token is None and i not in adjusted and logits.device.type == "cpu":
            row = logits[i].float().numpy() if rows is None else rows[i]
            token = matcher.most_likely(row, tokens[i])
        if token is None:
            left[i] = (matcher, answer)
        else:
            tokens[i] = token
    return left


def _is_banned(adjusted: dict[int, torch.Tensor], row: int, token: int) -> bool:
    """Return True if other parameters than a grammar ban the token. `_masked` judges then."""
    return row in adjusted and bool(torch.isneginf(adjusted[row][token]))


def _logits_of(logits: torch.Tensor, few: dict[int, npt.NDArray[np.int64]]) -> torch.Tensor:
    """Return float32 [rows, tokens]: the logits of the tokens of each row of `few`, then -inf."""
    counts = [len(among) for among in few.values()]
    tokens = np.zeros((len(few), max(counts)), np.int64)
    for row, among in zip(tokens, few.values(), strict=True):
        row[: len(among)] = among
    beyond = np.arange(max(counts)) >= np.array(counts)[:, None]
    device = logits.device
    found = logits[
        torch.tensor(list(few), device=device)[:, None], torch.from_numpy(tokens).to(device)
    ]
    return found.float().masked_fill(torch.from_numpy(beyond).to(device), -math.inf)


def _grammars(draws: Sequence[Draw]) -> Grammars | None:
    for draw in draws:
        if draw.params.grammar is not None and draw.adjustments is not None:
            return draw.adjustments.grammars
    return None


def _masked(
    logits: torch.Tensor, adjusted: dict[int, torch.Tensor], rows: list[int], masks: Masks
) -> torch.Tensor:
    """Return float32 `rows` of the logits with `masks` [rows, tokens] added.

    Logits of more tokens than the masks have are -inf. If the request's other parameters ban every
    token that its grammar allows, the model's own logits count, because a grammar must go on.
    """
    plain = logits[rows].float()
    added = torch.from_numpy(masks)[:, : plain.shape[-1]].to(plain.device)
    if (more := plain.shape[-1] - added.shape[-1]) > 0:
        added = torch.nn.functional.pad(added, (0, more), value=-math.inf)
    masked = plain.add_(added)
    for n, i in enumerate(rows):
        if i in adjusted:
            row = adjusted[i] + added[n]
            if not torch.isneginf(row).all():
                masked[n] = row
    return masked


def _most_likely(logits: torch.Tensor) -> list[int]:
    """Return the index of the largest entry of each row, the first one among equals."""
    found: list[int] = (
        logits.numpy().argmax(axis=-1) if _is_fast_in_numpy(logits) else logits.argmax(dim=-1)
    ).tolist()
    return found


def _is_fast_in_numpy(logits: torch.Tensor) -> bool:
    """Return True where numpy takes a fraction of torch's time, with the dtypes it supports."""
    return logits.dtype in (torch.float32, torch.float64) and logits.device.type == "cpu"


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) for this seed and position, the same on every machine."""
    packed = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"kvflow-draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) / float(1 << 53)


def _draw(logits: torch.Tensor, draws: list[Draw], vocabulary: int) -> list[int]:
    """Draw a column for each row by inverse CDF, independently of the other rows of the batch.

    Columns that are left out of the `vocabulary` change no draw if their logits are -inf.
    """
    device = logits.device
    heats = torch.tensor(
        [[d.params.temperature] for d in draws], dtype=torch.float64, device=device
    )
    scaled = (logits.double() / heats).float()
    points = torch.tensor(
        [[uniform(d.seed, d.position)] for d in draws], dtype=torch.float64, device=device
    )
    tokens = [-1] * len(draws)
    free = [
        i
        for i, d in enumerate(draws)
        if d.params.top_p >= 1 and not 0 < d.params.top_k < vocabulary
    ]
    if free:
        kept = _without_unlikely(scaled[free].double(), [draws[i] for i in free])
        _pick(tokens, free, torch.softmax(kept, dim=-1).cumsum(dim=-1), points[free], None)
    cut = sorted(set(range(len(draws))) - set(free))
    if cut:
        if (width := logits.shape[-1]) < vocabulary:
            # The order in which `topk` returns equal values depends on the width, which depends on
            # the other rows here.
            values, ids = scaled[cut].sort(dim=-1, descending=True, stable=True)
        else:
            values, ids = scaled[cut].topk(min(CANDIDATES, width), dim=-1)
        rest = _draw_cut(tokens, cut, values, ids, scaled[cut], points, draws)
        if rest:
            everything = scaled[rest].sort(dim=-1, descending=True, stable=True)
            _draw_cut(tokens, rest, *everything, scaled[rest], points, draws)
    return tokens


def _draw_cut(
    tokens: list[int],
    rows: list[int],
    values: torch.Tensor,
    ids: torch.Tensor,
    scaled: torch.Tensor,
    points: torch.Tensor,
    draws: list[Draw],
) -> list[int]:
    """Apply top_k, then top_p over what top_k leaves, and draw.

    `values` [rows, candidates] are in descending order. Returns the rows that need more candidates;
    no token is drawn for these.
    """
    candidates, vocabulary, device = values.shape[-1], scaled.shape[-1], scaled.device
    ranks = torch.arange(candidates, device=device)
    top_k = [
        d.params.top_k if 0 < d.params.top_k < vocabulary else vocabulary
        for d in (draws[i] for i in rows)
    ]
    top_p = torch.tensor(
        [[draws[i].params.top_p] for i in rows], dtype=torch.float64, device=device
    )
    limits = torch.tensor(top_k, device=device)[:, None]
    chances = torch.exp(values.double() - scaled.double().logsumexp(dim=-1, keepdim=True))
    chances = chances.masked_fill(ranks >= limits, 0.0)
    inside = chances.sum(dim=-1, keepdim=True)
    total = torch.where(limits <= candidates, inside, torch.ones_like(inside))
    enough = ((limits <= candidates) | (inside >= top_p))[:, 0] | (candidates == vocabulary)
    before = chances.cumsum(dim=-1) - chances
    nucleus = chances.masked_fill(before >= top_p * total, 0.0)
    likely = _without_unlikely(values.double(), [draws[i] for i in rows]).isfinite()
    cumulative = (nucleus * likely).cumsum(dim=-1)
    fits = [i for i, ok in enumerate(enough.tolist()) if ok]
    if fits:
        chosen = [rows[i] for i in fits]
        _pick(tokens, chosen, cumulative[fits], points[chosen], ids[fits])
    return [rows[i] for i, ok in enumerate(enough.tolist()) if not ok]


def _without_unlikely(scaled: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Return `scaled` [rows, tokens] with -inf for tokens below `min_p`.

    `min_p` is relative to the probability of the row's most likely token.
    """
    if not any(d.params.min_p for d in draws):
        return scaled
    shares = [[math.log(d.params.min_p) if d.params.min_p else -math.inf] for d in draws]
    floors = scaled.amax(dim=-1, keepdim=True) + torch.tensor(
        shares, dtype=scaled.dtype, device=scaled.device
    )
    return scaled.masked_fill(scaled < floors, -math.inf)


def _pick(
    tokens: list[int],
    rows: list[int],
    cumulative: torch.Tensor,
    points: torch.Tensor,
    ids: torch.Tensor | None,
) -> None:
    """Pick the first token whose cumulative probability exceeds the row's point.

    A token of probability 0 is never picked.
    """
    found = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    # The product may round up to the total: then pick the last entry of nonzero probability.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    found = torch.minimum(found, last)
    if ids is not None:
        found = ids.gather(-1, found)
    for row, token in zip(rows, found[:, 0].tolist(), strict=True):
        tokens[row] = token


def _add_logprobs(
    choices: list[Choice], logprobs: torch.Tensor, rows: list[int], draws: Sequence[Draw]
) -> None:
    most = max(draws[i].params.logprobs or 0 for i in rows)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    for n, row in enumerate(rows):
        count = draws[row].params.logprobs or 0
        token = choices[row].token_id
        top = tuple(zip(ids[n, :count].tolist(), values[n, :count].tolist(), strict=True))
        asked = tuple(
            (i, float(logprobs[n, i]) if i < logprobs.shape[-1] else -math.inf)
            for i in draws[row].params.logprob_token_ids
        )
        choices[row] = Choice(token, float(logprobs[n, token]), top, asked)
