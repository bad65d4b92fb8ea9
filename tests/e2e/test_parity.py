"""Token parity across two processes: prefill in one, decode in another, real sockets and a real
data plane between.

fp32 must equal `model.generate`; half precision one process of kvflow with the same batch
composition (batching alone flips tokens in stock transformers).
"""

from __future__ import annotations

from typing import Any

import pytest

from kvflow.serve.engine.model.probe import RINGS
from tests.e2e.parity_pair import CHUNKS, Model, ProcessPair, WorkerError
from tests.planes import mooncake_unavailable_reason, nixl_unavailable_reason
from tests.serve.engine.pair import prompt_of
from tests.serve.engine.tiny_models import FAMILIES, Generated, Tiny

NEW = 16
CHUNK = CHUNKS["chunk_tokens"]
PAGE_SIZES = (1, 16, 64)
ONE_SIZE = [16, *(pytest.param(page, marks=pytest.mark.soak) for page in (1, 64))]
# The default run: every family of K and V, page sizes spread over them.
# The others are served like these; tests/serve/engine has all of them in `make test`.
OFTEN = ("llama", "gemma3", "deepseek_v2", "falcon_h1")
DEFAULT_PAGES = {
    "llama": 16,
    "qwen3": 1,
    "mistral": 64,
    "gemma2": 16,
    "gemma3": 1,
    "gpt2": 64,
    "mixtral": 16,
    "deepseek_v2": 1,
    "deepseek_v3": 64,
    "falcon_h1": 16,  # pages and a row of states; more of its kind in test_states.py
}
OTHER_ORDERS = {
    "llama": ("layer_first", "layer_first"),
    "deepseek_v3": ("page_first", "layer_first"),
}
GREEDY = {"temperature": 0, "max_new_tokens": NEW}
SAMPLED = {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "seed": 7, "max_new_tokens": NEW}


pytestmark = pytest.mark.xdist_group("parity")  # one pair of processes for this and test_states


def prompts_for(page: int) -> list[list[int]]:
    """16 prompts: one token, one page and its neighbours, many pages, and more than one, more than
    many chunks.
    """
    edges = [1, page - 1, page, page + 1, 3 * page - 1, 3 * page, 3 * page + 1, 5 * page + 2]
    chunks = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 4 * CHUNK]
    lengths = list(dict.fromkeys(n for n in edges + chunks if n > 0))
    lengths += [n for n in (5, 23, 37, 50, 90, 111, 130) if n not in lengths][: 16 - len(lengths)]
    assert len(set(lengths)) == 16
    return [prompt_of(n, salt) for salt, n in enumerate(lengths)]


def tokens_of(reply: dict[str, Any]) -> list[list[int]]:
    return [[out["token_id"] for out in outs] for outs in reply["outs"]]


def check_fp32(model: Model, family: str, expected: Generated) -> None:
    """16 requests at once equal stock transformers, and the bytes that moved are what made them
    equal.
    """
    prompts = prompts_for(model.page_size)
    prefill, decode = model.run(prompts, GREEDY)
    found = tokens_of(decode)
    for prompt, tokens in zip(prompts, found, strict=True):
        wanted = expected(family, prompt, NEW, tokens)
        assert tokens == wanted, f"prompt of {len(prompt)} tokens"
    assert len({tuple(tokens) for tokens in found}) == len(prompts), (
        "outputs that are all the same prove nothing"
    )
    for prompt, sends in zip(prompts, prefill["sends"], strict=True):
        assert sum(sends) == model.places_for(prompt)
    assert max(map(len, prefill["sends"])) > 2, "no prompt left in chunks"
    check_zeroed_page(model, prompts, found)


def check_zeroed_page(model: Model, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    """The negative control: parity would not notice pages that nobody reads, or the row of a model
    that has all in it. (A page of one token may go unnoticed by some prompt, so there are
    several.)"""
    chosen = [i for i, prompt in enumerate(prompts) if 2 <= len(prompt) <= 60][:4]
    _, decode = model.run(
        [prompts[i] for i in chosen], GREEDY, zero=(-1, "" if model.page_bytes else RINGS)
    )
    spoiled = tokens_of(decode)
    assert [tokens[0] for tokens in spoiled] == [wanted[i][0] for i in chosen], (
        "the first token is prefill's"
    )
    changed = [tokens != wanted[i] for tokens, i in zip(spoiled, chosen, strict=True)]
    whole = model.page_size > 1 or not model.page_bytes
    assert len(changed) == 4 and (all(changed) if whole else any(changed))


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in OFTEN else pytest.mark.slow) for f in DEFAULT_PAGES],
)
def test_fp32_equals_generate(
    family: str, pair: ProcessPair, tiny: Tiny, expected: Generated
) -> None:
    with pair.open(tiny(family), page_size=DEFAULT_PAGES[family]) as model:
        check_fp32(model, family, expected)


def test_fp32_over_mooncake(pair: ProcessPair, tiny: Tiny, expected: Generated) -> None:
    if reason := mooncake_unavailable_reason():
        pytest.skip(reason)
    with pair.open(tiny("llama"), plane="mooncake") as model:
        check_fp32(model, "llama", expected)


def test_fp32_over_nixl(pair: ProcessPair, tiny: Tiny, expected: Generated) -> None:
    if reason := nixl_unavailable_reason():
        pytest.skip(reason)
    with pair.open(tiny("llama"), plane="nixl") as model:
        check_fp32(model, "llama", expected)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "page"),
    [(f, page) for f in FAMILIES for page in PAGE_SIZES if page != DEFAULT_PAGES[f]],
)
def test_fp32_matrix(
    family: str, page: int, pair: ProcessPair, tiny: Tiny, expected: Generated
) -> None:
    with pair.open(tiny(family), page_size=page) as model:
        check_fp32(model, family, expected)


@pytest.mark.slow
@pytest.mark.parametrize("page", ONE_SIZE)
@pytest.mark.parametrize("family", OTHER_ORDERS)
def test_fp32_other_orders(
    family: str, page: int, pair: ProcessPair, tiny: Tiny, expected: Generated
) -> None:
    """Layer-first on both sides, and page-first into layer-first."""
    with pair.open(tiny(family), page_size=page, orders=OTHER_ORDERS[family]) as model:
        check_fp32(model, family, expected)


@pytest.mark.slow
@pytest.mark.parametrize("page", ONE_SIZE)
def test_fp32_over_mooncake_all_page_sizes(
    page: int, pair: ProcessPair, tiny: Tiny, expected: Generated
) -> None:
    if reason := mooncake_unavailable_reason():
        pytest.skip(reason)
    with pair.open(tiny("deepseek_v2"), page_size=page, plane="mooncake") as model:
        check_fp32(model, "deepseek_v2", expected)


def check_one_process(
    model: Model, prompts: list[list[int]], params: dict[str, Any]
) -> list[list[int]]:
    """Tokens and logprobs of two processes are those of one, to the last bit, step by step in the
    same batch.
    """
    params = {**params, "logprobs": 3}
    _, two = model.run(prompts, params, lockstep=True)
    one = model.single(prompts, params)
    assert two["outs"] == one["outs"]
    assert two["steps"] == one["steps"] == NEW - 1, "not one batch from the first step to the last"
    return tokens_of(two)


def check_bf16(model: Model) -> None:
    """Alone, and 16 at once."""
    prompts = prompts_for(model.page_size)
    check_one_process(model, prompts[-1:], GREEDY)
    found = check_one_process(model, prompts, GREEDY)
    assert len({tuple(tokens) for tokens in found}) == len(prompts)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            f,
            marks=()
            if f in ("llama", "gemma3", "deepseek_v3")
            else (pytest.mark.slow, pytest.mark.soak),
        )
        for f in FAMILIES
    ],
)
def test_bf16_equals_one_process(family: str, pair: ProcessPair, tiny: Tiny) -> None:
    with pair.open(tiny(family), dtype="bfloat16", max_batch_rooms=1) as model:
        check_bf16(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_seeded_sampling_equals_one_process(dtype: str, pair: ProcessPair, tiny: Tiny) -> None:
    """The same seed gives the same tokens, whatever restricts the choice; another seed gives
    others.
    """
    prompts = [prompt_of(n, n) for n in (3, 16, 41, 90)]
    variants: list[dict[str, Any]] = [
        {"temperature": 1.3},
        {"top_k": 20},
        {"top_p": 0.9},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
    ]
    seen: list[list[int]] = []
    with pair.open(tiny("qwen3"), dtype=dtype, max_batch_rooms=1) as model:
        for seed, variant in enumerate(variants):
            params = {**variant, "seed": seed, "max_new_tokens": NEW}
            seen += check_one_process(model, prompts, params)
        seen += check_one_process(
            model, prompts, {**variants[-1], "seed": 99, "max_new_tokens": NEW}
        )
    assert len(set(map(tuple, seen))) == len(seen)


def test_seeded_sampling_ignores_the_company(pair: ProcessPair, tiny: Tiny) -> None:
    """In fp32 neither the batch nor the number of processes shows in the tokens of a seed."""
    prompts = [prompt_of(n, n) for n in (3, 16, 41, 90)]
    with pair.open(tiny("gpt2")) as model:
        together = tokens_of(model.run(prompts, SAMPLED)[1])
        alone = [tokens_of(model.run([prompt], SAMPLED)[1])[0] for prompt in prompts]
        one_process = tokens_of(model.single(prompts, SAMPLED))
    assert together == alone == one_process
    assert len(set(map(tuple, together))) == len(prompts)


def test_unsupported_models_are_refused_at_load(
    pair: ProcessPair, tiny: Tiny, expected: Generated
) -> None:
    """One clear line from either role; the process is none the worse for it."""
    for worker in pair.workers:
        shape = {
            "dtype": "float32",
            "page_size": 16,
            "order": "page_first",
            "plane": "local",
            "chunks": CHUNKS,
        }
        with pytest.raises(
            WorkerError, match=r"^MisuseError: .*minimax' cannot be probed: MiniMax uses cache"
        ) as refusal:
            worker.ask("load", path=str(tiny("minimax")), ranks=[], **shape)
        assert "\n" not in str(refusal.value)
    with pair.open(tiny("llama")) as model:
        _, decode = model.run([prompt_of(20)], GREEDY)
        assert tokens_of(decode) == [expected("llama", prompt_of(20), NEW)]
