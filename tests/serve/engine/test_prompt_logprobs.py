"""Log-probabilities of the prompt are computed by prefill, handed over, and those of a forward."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import pytest
import torch

from kvflow.node.handoff import HandOff
from kvflow.node.prompt_logprobs import PromptLogprobs, ScoredToken
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler import scoring
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.sampling import Draw, choose
from tests.serve.engine.pair import EnginePair, greedy, prompt_of, tokens_of
from tests.serve.engine.test_parity import equals_one_process
from tests.serve.engine.tiny_models import Generated, Loaded, Stock, Tiny


def reference(stock: Any, prompt: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]; row i is the distribution of token i + 1."""
    with torch.inference_mode():
        return torch.log_softmax(stock(torch.tensor([prompt])).logits[0], -1)


async def scored(pair: EnginePair, prompt: list[int], **asked: Any) -> list[ScoredToken]:
    first, *others = await pair.outputs(prompt, greedy(3, **asked))
    assert all(out.prompt_logprobs is None for out in others)
    assert first.prompt_logprobs is not None
    return list(first.prompt_logprobs.tokens(prompt))


def assert_like(
    found: list[ScoredToken], want: torch.Tensor, prompt: list[int], start: int, top: int
) -> None:
    assert [one.token_id for one in found] == prompt[start:]
    assert found[0].logprob is None
    for i, one in enumerate(found[1:], start + 1):
        row = want[i - 1]
        assert one.logprob == pytest.approx(float(row[prompt[i]]), abs=2e-4)
        assert [t for t, _ in one.top_logprobs] == row.topk(top).indices.tolist()
        assert [p for _, p in one.top_logprobs] == pytest.approx(
            row.topk(top).values.tolist(), abs=2e-4
        )


@pytest.mark.parametrize("attention", ["packed", "pad"])
async def test_they_are_those_of_a_plain_forward(
    attention: str, llama: LoadedModel, tiny: Tiny, stock: Stock, generated: Generated
) -> None:
    model = llama if attention == "packed" else load_model(str(tiny("llama")), "float32", "pad")
    prompt = prompt_of(150)
    want = reference(stock("llama"), prompt)
    async with EnginePair(model, chunk_tokens=40, max_batch_tokens=64) as pair:
        plain = [prompt_of(n, n) for n in (1, 39, 80)]
        asked = [(0, 3), (0, 0), (1, 1), (39, 2), (40, 2), (41, 2), (100, 5), (148, 1), (149, 4)]
        runs = (scored(pair, prompt, logprobs=n, prompt_logprobs_from=at) for at, n in asked)
        *got, beside = await asyncio.gather(*runs, pair.tokens_of_all(plain, greedy(5)))
    for (start, top), found in zip(asked, got, strict=True):
        assert_like(found, want, prompt, start, top)  # type: ignore[arg-type]
    assert beside == [generated("llama", other, 5) for other in plain]


async def test_what_is_scored_in_one_step_is_bounded(
    llama: LoadedModel, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "TOKENS_PER_STEP", 24)
    counts: list[int] = []
    prompts = [prompt_of(n, n) for n in (90, 33, 60)]
    async with EnginePair(llama, chunk_tokens=512) as pair:
        forward = pair.prefill.steps.runner.forward

        def counted(rows: list[Row]) -> torch.Tensor:
            logits = forward(rows)
            counts.append(len(logits))
            return logits

        pair.prefill.steps.runner.forward = counted  # type: ignore[method-assign]
        got = await asyncio.gather(
            *(scored(pair, p, logprobs=2, prompt_logprobs_from=0) for p in prompts)
        )
    assert max(counts) <= 24
    for prompt, found in zip(prompts, got, strict=True):
        assert_like(found, reference(stock("llama"), prompt), prompt, 0, 2)


async def test_one_process_hands_over_the_same(loaded: Loaded) -> None:
    model = loaded("qwen3", "bfloat16")
    prompt = prompt_of(70)
    params = SamplingParams(
        temperature=1.1, seed=3, max_new_tokens=9, logprobs=2, prompt_logprobs_from=5
    )
    async with EnginePair(model, chunk_tokens=40, max_batch_rooms=1) as pair:
        plain = msgspec.structs.replace(params, prompt_logprobs_from=None)
        tokens = await pair.tokens(prompt, plain)
    [outs] = await equals_one_process(model, [prompt], params)
    assert [out.token_id for out in outs] == tokens


async def test_no_new_token_is_still_a_handed_over_prompt(llama: LoadedModel) -> None:
    async with EnginePair(llama) as pair:
        (only,) = await pair.outputs(prompt_of(20), greedy(0, logprobs=0, prompt_logprobs_from=0))
        assert only.finish_reason == "length"
        assert only.prompt_logprobs is not None
        assert len(list(only.prompt_logprobs.tokens(prompt_of(20)))) == 20


async def test_tokens_that_are_named_have_theirs_at_every_place(
    llama: LoadedModel, stock: Stock
) -> None:
    prompt, ids = prompt_of(60), (3, 500, 77)
    async with EnginePair(llama, chunk_tokens=16) as pair:
        outs = await pair.outputs(
            prompt, greedy(6, logprobs=1, logprob_token_ids=ids, prompt_logprobs_from=20)
        )
        beside = await pair.outputs(prompt, greedy(6, logprobs=1))
    assert all(out.asked_logprobs == () for out in beside)
    tokens = [out.token_id for out in outs]
    want = reference(stock("llama"), prompt + tokens)
    for i, out in enumerate(outs):
        assert tuple(token_id for token_id, _ in out.asked_logprobs) == ids
        row = want[len(prompt) - 1 + i, list(ids)].tolist()
        assert [p for _, p in out.asked_logprobs] == pytest.approx(row, abs=2e-4)
    assert outs[0].prompt_logprobs is not None
    first, *others = outs[0].prompt_logprobs.tokens(prompt, ids)
    assert first.asked_logprobs == []
    for i, one in enumerate(others, 20):
        assert [p for _, p in one.asked_logprobs] == pytest.approx(
            want[i, list(ids)].tolist(), abs=2e-4
        )


def test_a_token_without_a_logit_has_none_and_fails_no_step() -> None:
    """An embedding may be larger than the output layer."""
    sequence = Sequence("test", [5, 130, 7], 0, 16)
    scorer = scoring.PromptScorer(sequence, 0, 1, (140, 2))
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    scorer.add(logits, 3)
    assert scorer._parts == [], "packed: the parts are not kept beside it"
    _, second, third = scorer.scores.tokens([5, 130, 7], (140, 2))
    want = torch.log_softmax(logits, -1)
    assert second.logprob == -math.inf
    assert third.logprob == pytest.approx(float(want[1, 7]))
    assert second.asked_logprobs == [(140, -math.inf), (2, pytest.approx(float(want[0, 2])))]
    params = SamplingParams(temperature=0, logprobs=0, logprob_token_ids=(140, 2))
    (choice,) = choose(logits[:1], [Draw(params, 0, 3)])
    assert list(choice.asked_logprobs) == second.asked_logprobs


@pytest.mark.parametrize(
    ("length", "params", "text"),
    [
        (20, {"prompt_logprobs_from": 20}, r"logprob_start_len 20 is outside the prompt, 0\.\.19"),
        (20, {"prompt_logprobs_from": -1}, r"logprob_start_len -1 is outside the prompt, 0\.\.19"),
        (
            250_000,
            {"prompt_logprobs_from": 0},
            "logprobs of 249999 prompt tokens, 0 top ones at each, are 999996 bytes, limit 983040",
        ),
        (
            20,
            {"logprobs": 0, "logprob_token_ids": (5, 512)},
            "token_ids_logprob: token id 512 is outside the model's",
        ),
        (
            5000,
            {"prompt_logprobs_from": 0, "logprobs": 0, "logprob_token_ids": tuple(range(60))},
            (
                "logprobs of 4999 prompt tokens, 0 top ones and 60 asked for at each, are 1219756 "
                "bytes, limit 983040"
            ),
        ),
        (
            7000,
            {"prompt_logprobs_from": 0, "logprobs": 20},
            "logprobs of 6999 prompt tokens, 20 top ones at each",
        ),
    ],
)
def test_more_than_a_handover_holds_is_refused_by_name(
    length: int, params: dict[str, Any], text: str
) -> None:
    limits = EngineLimits(1 << 20, 512, 16, 1 << 20)
    with pytest.raises(MisuseError, match=text):
        limits.check_sampling(prompt_of(length), SamplingParams(**params))


def test_no_more_logits_in_one_step_than_memory_is_meant_for() -> None:
    """65,536 logits of 4 bytes at each token: 4,096 tokens have a GiB of them."""
    divided, whole = (
        EngineLimits(1 << 20, 1 << 16, 16, 1 << 20, whole_prompts=whole) for whole in (False, True)
    )
    all_of_it = SamplingParams(logprobs=0, prompt_logprobs_from=0)
    divided.check_sampling(prompt_of(5000), all_of_it)
    whole.check_sampling(prompt_of(4096), all_of_it)
    whole.check_sampling(prompt_of(5000), SamplingParams())
    whole.check_sampling(prompt_of(5000), SamplingParams(logprobs=0, prompt_logprobs_from=904))
    text = (
        "logprobs of 4999 prompt tokens: this model .* 1310720000 bytes of logits, limit "
        "1073741824; ask from token 904"
    )
    with pytest.raises(MisuseError, match=text):
        whole.check_sampling(prompt_of(5000), all_of_it)


@pytest.mark.parametrize(("tokens", "top"), [(245_761, 0), (5_994, 20), (948, 128)])
def test_the_most_that_is_accepted_fits_the_message(tokens: int, top: int) -> None:
    params = SamplingParams(logprobs=top, prompt_logprobs_from=0)
    EngineLimits(1 << 20, 512, 16, 1 << 20).check_sampling(prompt_of(tokens), params)
    count = tokens - 1
    scores = PromptLogprobs(0, b"x" * 4 * count, b"x" * 4 * count * top, b"x" * 4 * count * top)
    most = tuple((2**31 - 1, -1.0 / 3) for _ in range(128))
    handoff = HandOff(
        first_token=1, logprob=-0.5, top_logprobs=most, prompt_tokens=tokens, prompt_logprobs=scores
    )
    assert len(handoff.encode()) <= MAX_HANDOFF_BYTES
    assert HandOff.decode(handoff.encode()) == handoff


NOT_FOR = r"tokens outside 0\.\.511"
ASKED = {"logprobs": 1, "prompt_logprobs_from": 0}


@pytest.mark.parametrize(
    ("told", "params", "text"),
    [
        (None, ASKED, "has no logprobs of the prompt"),
        (PromptLogprobs(1, b"x" * 4 * 39), ASKED, "from 1, not of 39 tokens"),
        (PromptLogprobs(0, b"x" * 4 * 38), ASKED, "are \\(152, 0, 0, 0\\) bytes"),
        (
            PromptLogprobs(0, b"x" * 4 * 39, b"\0" * 4 * 39, b""),
            ASKED,
            "are \\(156, 156, 0, 0\\) bytes",
        ),
        (PromptLogprobs(0, b"\0" * 4 * 39, b"\xff" * 4 * 39, b"\0" * 4 * 39), ASKED, NOT_FOR),
        (PromptLogprobs(0, b"\0" * 4 * 39, b"\x00\x02\0\0" * 39, b"\0" * 4 * 39), ASKED, NOT_FOR),
        (
            ((6, -1.0),),
            {"logprobs": 0, "logprob_token_ids": (5,)},
            "not of the token ids that were asked for",
        ),
        (PromptLogprobs(0, b"junk"), {}, ""),
    ],
    ids=str,
)
async def test_scores_that_were_not_asked_for_fail_the_room_or_are_dropped(
    told: PromptLogprobs | tuple[tuple[int, float], ...] | None,
    params: dict[str, Any],
    text: str,
    llama: LoadedModel,
) -> None:
    field = "asked_logprobs" if isinstance(told, tuple) else "prompt_logprobs"
    scores: dict[str, Any] = {field: told}
    handoff = HandOff(first_token=1, prompt_tokens=40, **scores)
    prompt = prompt_of(40)
    async with EnginePair(llama) as pair:
        room = pair.room(prompt)
        room.hand_over(handoff.encode())
        generating = pair.decode.generate(room, prompt, greedy(1, **params))
        if text:
            with pytest.raises(KvflowError, match=text):
                await tokens_of(generating)
        else:
            assert [out.prompt_logprobs async for out in generating] == [None]
