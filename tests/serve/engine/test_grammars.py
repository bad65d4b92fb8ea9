"""Grammars: what is compiled and what is refused, masks that depend on the answer alone, and
answers of two engines, against the same library's mask over plain `generate`.

`json_schemas.jsonl` has 220 schemas of the JSON Schema Test Suite, each with its draft, its name
and the suite's invalid instances. Its licence lies beside it. llguidance refuses another 331 of
them, because it does not enforce them in full, and reads one as only draft 2020-12 does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import llguidance.hf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from kvflow.protocols.errors import Code, KvflowError, MisuseError
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.engine.model import grammars as module
from kvflow.serve.engine.model.grammars import (
    MAX_GRAMMAR_BYTES,
    Grammar,
    Grammars,
    Matcher,
    grammar_of_choices,
)
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.scheduler import burst, sampling
from kvflow.serve.engine.scheduler.adjustments import adjustments_of
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.sampling import Draw, allowed_ahead, choose
from tests.serve.engine.pair import EnginePair, greedy, until

SCHEMAS: list[tuple[str, str, Any, list[Any]]] = [
    tuple(json.loads(line))
    for line in Path(__file__).with_name("json_schemas.jsonl").read_text().splitlines()
]
DRAFTS: dict[str, Any] = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"enum": ["a", "b"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "<f>", "schema": POINT, "end": "</f>"}], "triggers": ["<f"]}


def schema(of: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(of))


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load_model(str(DEMO_MODEL_DIR))


@pytest.fixture
def grammars(demo: LoadedModel) -> Iterator[Grammars]:
    made = Grammars(demo.tokenizer, demo.vocab_size, demo.eos_ids)
    yield made
    made.close()


def ids(demo: LoadedModel, text: str) -> list[int]:
    return list(demo.tokenizer.encode(text, add_special_tokens=False))


def allowed(grammars: Grammars, matcher: Matcher, tokens: Any) -> Any:
    """Which tokens may follow, as an array of bools."""
    (mask,) = grammars.masks_of(grammars.allowed([(matcher, tokens)]))
    assert ((mask == 0) | np.isneginf(mask)).all()
    return mask == 0


def matches(grammars: Grammars, grammar: Grammar, tokens: list[int], eos: int = 2) -> bool:
    """Whether each token is allowed after the ones before it, and the end after the last."""
    matcher, steps = grammars.matcher(grammar), [*tokens, eos]
    return all(allowed(grammars, matcher, steps[:i])[token] for i, token in enumerate(steps))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(POINT), '{"x": 5, "name":"b"}', '{"name": "b", "y": 5}'),
        (Grammar("regex", "[ab]+c"), "abac", "abacd"),
        (Grammar("ebnf", 'root ::= "yes" | "no" root'), "nonoyes", "nono"),
        (Grammar("lark", 'start: "x" /[0-9]{2}/'), "x42", "x4"),
        (grammar_of_choices(["one", 'an "é"\n']), 'an "é"\n', "on"),
        (Grammar("structural_tag", json.dumps(TAG)), 'so <f>{"x":1,"name":"a"}</f> on', "<f>1"),
    ],
    ids=lambda each: each.kind if isinstance(each, Grammar) else "",
)
def test_masks_allow_what_the_grammar_matches(
    demo: LoadedModel, grammars: Grammars, grammar: Grammar, good: str, bad: str
) -> None:
    assert matches(grammars, grammar, ids(demo, good))
    assert not matches(grammars, grammar, ids(demo, bad))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (schema({"not": {}}), r'json_schema cannot be compiled: Unimplemented keys: \["not"\]'),
        (schema(False), "Unimplemented keys"),
        (schema({"type": "thing"}), "json_schema cannot be compiled: .*type"),
        (Grammar("json_schema", "{"), "json_schema cannot be read: Expecting property name"),
        (Grammar("json_schema", "[]"), "json_schema cannot be read: Expecting object schema"),
        (
            Grammar("json_schema", '{"items":' * 129 + "{}" + "}" * 129),
            "json_schema cannot be read: nested 130 levels deep, limit 128",
        ),
        (Grammar("regex", "("), "regex cannot be compiled: .*unclosed group"),
        (Grammar("ebnf", "root := x"), "ebnf cannot be read: Expected ::="),
        (Grammar("ebnf", 'root ::= "a" b'), "ebnf cannot be read: Rule 'b' not found"),
        (Grammar("ebnf", "root ::= " + 5000 * "("), "ebnf cannot be read: maximum recursion"),
        (Grammar("lark", "start: foo"), 'unknown name: "foo"'),
        (schema({"$ref": "#"}), "json_schema cannot be compiled: no token may follow$"),
        (Grammar("lark", "start: start"), "lark cannot be compiled: no token may follow$"),
        (Grammar("structural_tag", "{}"), "cannot be read: .*missing required field `structures`"),
        *(
            (
                Grammar("structural_tag", json.dumps({**TAG, **wrong})),
                f"structural_tag cannot be read: .* at `\\$.{place}",
            )
            for wrong, place in (
                ({"structures": []}, "structures`"),
                ({"triggers": None}, "triggers`"),
                ({"triggers": [""]}, "triggers"),
                ({"structures": [{"begin": 4}]}, "structures"),
            )
        ),
        (
            Grammar("structural_tag", json.dumps({**TAG, "triggers": ["x"]})),
            "structural_tag cannot be read: no trigger is the start of '<f>'",
        ),
    ],
    ids=str,
)
async def test_what_cannot_be_compiled_is_refused_with_its_reason(
    grammars: Grammars, grammar: Grammar, why: str
) -> None:
    # One of them is nested deeper than the library's parser can call itself. Finalizers fail there.
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(MisuseError, match=why) as raised:
            await grammars.compile(grammar)
    finally:
        gc.enable()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_a_grammar_is_checked_where_it_is_made() -> None:
    with pytest.raises(MisuseError, match="kind 'gbnf' is not one of json_schema, regex"):
        Grammar("gbnf", "")
    with pytest.raises(MisuseError, match=f"regex: {MAX_GRAMMAR_BYTES + 2} bytes, limit"):
        Grammar("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1))
    with pytest.raises(MisuseError, match="no text to choose from"):
        grammar_of_choices([])
    with pytest.raises(MisuseError, match="ignore_eos: an answer that matches a grammar"):
        greedy(5, grammar=schema(POINT), ignore_eos=True)


async def test_a_model_without_a_tokenizer_or_an_end_has_no_grammars(demo: LoadedModel) -> None:
    for made, why in (
        (Grammars(None, 100, frozenset([2])), "needs a tokenizer"),
        (Grammars(demo.tokenizer, demo.vocab_size, frozenset()), "needs a token that ends"),
    ):
        with pytest.raises(MisuseError, match=why):
            await made.compile(schema(POINT))
        made.close()


async def test_an_installation_without_the_library_says_what_to_install(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MisuseError, match=r"llguidance is not installed: pip install 'kvflow\[eng"):
        await grammars.compile(schema(POINT))


async def test_compiled_grammars_are_kept_and_bounded(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    honest = grammars._compile

    def counted(grammar: Grammar) -> Any:
        compiled.append(grammar.text)
        return honest(grammar)

    monkeypatch.setattr(grammars, "_compile", counted)
    monkeypatch.setattr(module, "KEPT_GRAMMARS", 2)
    for text in "ababcb":
        await grammars.compile(Grammar("regex", text))
        grammars.matcher(Grammar("regex", text))
    assert compiled == ["a", "b", "c"]
    grammars.matcher(Grammar("regex", "a"))
    assert compiled == ["a", "b", "c", "a"]
    monkeypatch.setattr(module, "_trial", lambda text: 5)
    monkeypatch.setattr(module, "KEPT_BYTES", 100)
    for text in (9 * "x", "y", 20 * "z"):
        grammars.matcher(Grammar("regex", text))
    assert [kept.text for kept in grammars._kept] == [20 * "z"]
    assert grammars._kept_bytes == grammars._kept[Grammar("regex", 20 * "z")].size_bytes > 20


def chain(name: str) -> str:
    """A Lark grammar of many rules, each of which is the next one. The last one is an x."""
    rules = (f"{name}{i}: {name}{i + 1}" for i in range(17000))
    return "\n".join([f"start: {name}0", *rules, f'{name}17000: "x"'])


REFERENCES = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(5000)}


@pytest.mark.parametrize(
    ("grammar", "good"),
    [
        (Grammar("lark", chain("a")), "x"),
        (Grammar("lark", chain("A")), "x"),
        (schema({"$defs": REFERENCES | {"5000": {}}, "$ref": "#/$defs/0"}), "[[[]]]"),
    ],
    ids=["rules", "terminals", "references"],
)
async def test_a_long_chain_of_rules_does_not_end_the_process(
    demo: LoadedModel, grammars: Grammars, grammar: Grammar, good: str
) -> None:
    await grammars.compile(grammar)
    assert matches(grammars, grammar, ids(demo, good))


async def test_an_intersection_without_end_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take all memory, in a thread that cannot be interrupted."""
    monkeypatch.setattr(module, "TRIAL_CPU_S", 1)
    parts = " & ".join(f"/(.*[a-m]){{{i}}}.*/" for i in range(2, 38))
    with pytest.raises(MisuseError, match="lark takes too much time or memory to compile"):
        await grammars.compile(Grammar("lark", f"start: A\nA: {parts}"))
    await grammars.compile(Grammar("regex", "a"))


async def test_a_grammar_that_takes_too_long_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, gate = grammars._compile, threading.Event()

    def held(grammar: Grammar) -> Any:
        assert not grammar.text.startswith("slow") or gate.wait(20)
        return honest(grammar)

    monkeypatch.setattr(grammars, "_compile", held)
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "MAX_LATE", 2)
    for i in range(2):
        with pytest.raises(MisuseError, match="cannot be compiled within"):
            await grammars.compile(Grammar("regex", f"slow{i}"))
    with pytest.raises(MisuseError, match="2 earlier grammars take more"):
        await grammars.compile(Grammar("regex", "a"))
    gate.set()
    await until(lambda: not grammars._late)
    monkeypatch.setattr(module, "COMPILE_TIMEOUT_S", 20)
    await grammars.compile(Grammar("regex", "a"))


def test_a_mask_depends_on_the_answer_alone(demo: LoadedModel, grammars: Grammars) -> None:
    tokens = ids(demo, '{"x": -17, "name": "b"}')
    whole = grammars.matcher(schema(POINT))
    masks = [allowed(grammars, whole, tokens[:i]) for i in range(len(tokens) + 1)]
    for order in ([3, 4, 9], [9, 4], [0, len(tokens)], [5, 5, 2, 6]):
        matcher = grammars.matcher(schema(POINT))
        for i in order:
            assert np.array_equal(
                allowed(grammars, matcher, np.array(tokens[:i], np.uint32)), masks[i]
            )


def test_an_answer_that_does_not_match_is_an_error_and_bans_nothing(
    demo: LoadedModel, grammars: Grammars
) -> None:
    matcher = grammars.matcher(schema(POINT))
    assert allowed(grammars, matcher, ids(demo, "[")).all() and "token" in matcher.error
    assert allowed(grammars, matcher, ids(demo, "[1")).all()


def test_whitespace_between_tokens_of_json_is_bounded(
    demo: LoadedModel, grammars: Grammars
) -> None:
    for indent, fits in ((20, True), (module.MAX_WHITESPACE, True), (200, False)):
        text = '{"x":' + indent * " " + '5,"name":"a"}'
        assert matches(grammars, schema(POINT), ids(demo, text)) is fits


def first_draw(grammars: Grammars, params: SamplingParams, seed: int = 0) -> Draw:
    sequence = Sequence("test", [5, 6], 9, 4)
    return Draw(params, seed, 2, adjustments_of(params, sequence, frozenset([2]), grammars))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_with_and_without_grammars(
    demo: LoadedModel, grammars: Grammars, *, ahead: bool
) -> None:
    """Rows with a grammar, with another ban as well, drawn ones, and none."""
    (brace,), (colon,) = ids(demo, "{"), ids(demo, ":")
    one = Grammar("regex", r"[{:]")
    logits = torch.zeros(9, demo.vocab_size)
    logits[:, brace], logits[:, 77] = 3, 9
    drawn = SamplingParams(grammar=one, top_p=0.9, temperature=0.5, logprobs=1)
    params = [
        greedy(3),
        greedy(3, grammar=one),
        greedy(3, grammar=one, bad_words=((brace,),)),
        # Bans of all that the grammar allows are ignored.
        greedy(3, grammar=one, bad_words=((brace,), (colon,))),
        greedy(3, grammar=one, logit_bias=((colon, 3.5),)),
        *(4 * [drawn]),
    ]
    draws = [first_draw(grammars, each, seed=4) for each in params]
    begun = allowed_ahead(draws) if ahead else None
    assert (begun is not None) is ahead
    found = choose(logits, draws, begun)
    assert [each.token_id for each in found[:5]] == [77, brace, colon, brace, colon]
    for each in found[5:]:
        assert each.token_id == brace and each.top_logprobs[0][0] == 77
    assert allowed_ahead(draws[:1]) is None and allowed_ahead(draws[:4]) is None


def test_a_row_of_few_tokens_is_drawn_as_without_the_other_rows(
    demo: LoadedModel, grammars: Grammars
) -> None:
    """Also where many logits are equal, as they are in bfloat16."""
    logits = torch.randn(301, demo.vocab_size, generator=torch.Generator().manual_seed(5)) * 2
    params = SamplingParams(grammar=Grammar("regex", "[a-zA-Z0-9]"), temperature=2.0, top_p=0.95)
    more = SamplingParams(grammar=Grammar("regex", "."), temperature=1.0, top_p=0.5)

    def drawn(rows: list[int], *others: SamplingParams) -> list[int]:
        draws = [first_draw(grammars, params, seed=i) for i in rows]
        draws += [first_draw(grammars, each) for each in others]
        given = logits[[*rows, *([300] * len(others))]].bfloat16()
        return [each.token_id for each in choose(given, draws)[: len(rows)]]

    alone = [drawn([i])[0] for i in range(300)]
    assert drawn(list(range(300)), more) == alone
    assert len(set(alone)) > 10


@pytest.mark.parametrize("seed", range(3))
def test_few_allowed_tokens_are_drawn_as_from_a_mask_of_all(
    demo: LoadedModel, grammars: Grammars, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Over grammars that allow one, some and many tokens, with random parameters."""
    print("seed", seed)
    rng = random.Random(seed)
    logits = torch.randn(40, demo.vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    texts = ["x", "[abc]", "[a-z]{1,3}", "(alpha|beta|gamma)", "[a-zA-Z0-9 .,]+", "."]
    params = [
        SamplingParams(
            grammar=Grammar("regex", rng.choice(texts)),
            temperature=rng.choice([0.3, 1.0, 2.0]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            top_k=rng.choice([-1, 2, 5, 2000]),
            min_p=rng.choice([0.0, 0.2]),
        )
        for _ in range(len(logits))
    ]

    def drawn() -> list[int]:
        draws = [first_draw(grammars, each, seed=seed + i) for i, each in enumerate(params)]
        return [each.token_id for each in choose(logits, draws)]

    found = drawn()
    monkeypatch.setattr(sampling, "few_tokens", lambda allowed, most: None)
    assert found == drawn()
    assert len(set(found)) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_rows_take_the_most_likely_token_of_the_mask(
    demo: LoadedModel, grammars: Grammars, dtype: torch.dtype
) -> None:
    """Step by step, beside a drawn row. In bfloat16 many logits are equal: the first one counts."""
    drawn = SamplingParams(grammar=Grammar("regex", "[a-z]+"), temperature=1.0)
    texts = ["(alpha|beta){1,9}", "[a-z]{20}", ".*"]
    params = [*(greedy(9, grammar=Grammar("regex", text)) for text in texts), drawn]
    sequences = [Sequence("test", [5, 6], 99, 4) for _ in params]
    made = [
        adjustments_of(each, sequence, demo.eos_ids, grammars)
        for each, sequence in zip(params, sequences, strict=True)
    ]
    masking = [grammars.matcher(Grammar("regex", text)) for text in texts]
    random_numbers = torch.Generator().manual_seed(7)
    for _ in range(12):
        logits = torch.randn(4, demo.vocab_size, generator=random_numbers).to(dtype)
        draws = [Draw(p, 3, s.length, a) for p, s, a in zip(params, sequences, made, strict=True)]
        found = [each.token_id for each in choose(logits, draws)]
        for i, matcher in enumerate(masking):
            answer = sequences[i].tokens[2 : sequences[i].length]
            mask = torch.from_numpy(allowed(grammars, matcher, answer))[: demo.vocab_size]
            assert found[i] == int(logits[i].double().masked_fill(~mask, -torch.inf).argmax())
        for sequence, token in zip(sequences, found, strict=True):
            sequence.append(token)


@pytest.mark.parametrize("seed", range(3))
def test_a_greedy_choice_without_a_mask_is_that_of_the_mask(
    demo: LoadedModel, grammars: Grammars, seed: int
) -> None:
    """Over answers that follow schemas with free and forced parts, with other likely tokens."""
    print("seed", seed)
    rng = random.Random(seed)
    known = forced = 0
    size = len(demo.tokenizer or ())
    for of in (POINT, {"type": "string"}, {"enum": ["alpha beta", "alpha gamma"]}, {}):
        grammar = schema(of)
        masking, matcher = grammars.matcher(grammar), grammars.matcher(grammar)
        answer: list[int] = []
        while len(answer) < 30:
            mask = allowed(grammars, masking, answer)
            fitting = [int(token) for token in np.flatnonzero(mask)]
            likely = rng.choice([rng.choice(fitting), rng.randrange(size)])
            if len(fitting) == 1:
                # A shorter token with the beginning of the forced text fits the grammar as well.
                spelled = [one for one in range(size) if masking.state.validate_tokens([one])]
                likely = rng.choice([likely, *spelled])
            token = matcher.choose(answer, likely, demo.vocab_size)
            if token is None:
                assert not mask[likely] or likely in demo.eos_ids
                token = rng.choice(fitting)
            elif len(fitting) == 1:
                assert token == fitting[0]
                forced += token != likely
            else:
                assert token == likely and mask[likely]
                known += 1
            if token in demo.eos_ids:
                break
            answer.append(token)
        if answer:
            # A request that is computed again asks for an earlier token once more.
            assert matcher.choose(answer[:-1], answer[-1], demo.vocab_size) == answer[-1]
    assert known > 10 and forced


def test_a_choice_after_the_end_of_a_grammar_is_the_models_own(
    demo: LoadedModel, grammars: Grammars
) -> None:
    matcher = grammars.matcher(Grammar("regex", "ab"))
    assert matcher.choose(ids(demo, "xy"), 77, demo.vocab_size) == 77
    assert matcher.error


def test_logits_of_other_widths_than_the_vocabulary(demo: LoadedModel, grammars: Grammars) -> None:
    (brace,) = ids(demo, "{")
    draw = first_draw(grammars, greedy(3, grammar=Grammar("regex", r".*")))
    wide = torch.zeros(1, demo.vocab_size + 40)
    wide[0, -1], wide[0, brace] = 5, 3
    assert choose(wide, [draw])[0].token_id == brace
    draw = first_draw(grammars, greedy(3, grammar=Grammar("regex", r"\{+")))
    assert choose(torch.zeros(1, brace + 1), [draw])[0].token_id == brace


def test_the_first_token_may_be_taken_under_the_same_grammar_alone() -> None:
    plain, one = greedy(3), greedy(3, grammar=Grammar("regex", "a"))
    other = greedy(9, grammar=Grammar("regex", "b"))
    assert one.may_take_first_token(greedy(9, grammar=Grammar("regex", "a")).first_token_digest())
    for params in (plain, other, greedy(3, grammar=Grammar("lark", "a"))):
        assert not one.may_take_first_token(params.first_token_digest())


# --- answers


class Masked(LogitsProcessor):
    """llguidance's own mask, over `generate`."""

    def __init__(self, demo: LoadedModel, text: str, prompt_length: int) -> None:
        options: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
        vocabulary = llguidance.hf.from_tokenizer(demo.tokenizer, n_vocab=demo.vocab_size)
        text = "{}" if text == "true" else text
        made = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=options)
        self._matcher = llguidance.LLMatcher(vocabulary, made)
        self._at = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self._at :].tolist():
            assert self._matcher.consume_token(token)
        self._at = input_ids.shape[1]
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        return scores.masked_fill(torch.from_numpy(bias.copy() == 0)[None], -torch.inf)


Generate = Callable[[list[int], str, int], list[int]]


@pytest.fixture(scope="module")
def stock(demo: LoadedModel) -> Generate:
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR)

    def generate(prompt: list[int], text: str, most: int) -> list[int]:
        found = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=most,
            logits_processor=LogitsProcessorList([Masked(demo, text, len(prompt))]),
            pad_token_id=2,
        )
        return [int(token) for token in found[0, len(prompt) :]]

    return generate


def prompts(demo: LoadedModel) -> list[list[int]]:
    return [list(demo.tokenizer.encode(prompt)) for prompt in DEMO_PROMPTS]


async def answers(
    demo: LoadedModel, drawn: list[Any], most: int, at_once: int = 16, **more: Any
) -> list[list[int]]:
    """The tokens of one answer to each schema. Prompts take turns, and share cached pages."""
    gate, given = asyncio.Semaphore(at_once), prompts(demo)
    async with EnginePair(demo, num_pages=2048, cache="lru", **more) as pair:

        async def one(i: int) -> list[int]:
            async with gate:
                params = greedy(most, grammar=schema(drawn[i]))
                return await pair.tokens(given[i % len(given)], params)

        return list(await asyncio.gather(*map(one, range(len(drawn)))))


def check_valid(demo: LoadedModel, draft: str, of: Any, tokens: list[int]) -> bool:
    """Check an answer, and return True if it has ended."""
    if tokens[-1] not in demo.eos_ids:
        return False
    # Exact numbers: with floats, 0.3 is no multiple of 0.1.
    text = demo.tokenizer.decode(tokens[:-1])
    exact = json.loads(json.dumps(of), parse_float=Decimal)
    DRAFTS[draft](exact).validate(json.loads(text, parse_float=Decimal))
    return True


async def test_answers_equal_plain_generate_under_the_same_mask(
    demo: LoadedModel, stock: Generate
) -> None:
    drawn = [POINT, {"enum": ["red", 7, None]}, {"type": "array", "items": POINT, "maxItems": 2}]
    found = await answers(demo, drawn, 40)
    given = prompts(demo)
    for i, (one, tokens) in enumerate(zip(drawn, found, strict=True)):
        assert tokens == stock(given[i % len(given)], json.dumps(one), 40)
    assert check_valid(demo, "draft2020-12", drawn[1], found[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_300_answers_to_schemas_of_the_suite(
    demo: LoadedModel, stock: Generate, seed: int
) -> None:
    drawn = random.Random(seed).choices(SCHEMAS, k=300)
    found = await answers(demo, [each[2] for each in drawn], 48)
    given, ended = prompts(demo), 0
    for i, ((draft, name, of, _), tokens) in enumerate(zip(drawn, found, strict=True)):
        assert tokens == stock(given[i % len(given)], json.dumps(of), 48), name
        ended += check_valid(demo, draft, of, tokens)
    print(f"seed {seed}: 300 of 300 equal, {ended} ended within 48 tokens, all of them valid")
    assert ended > 100


def test_invalid_instances_of_the_suite_are_never_matched(
    demo: LoadedModel, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process for each of the schemas would take most of the time.
    monkeypatch.setattr(module, "_trial", lambda _: 0)
    wrong = [
        (name, instance)
        for _, name, of, invalid in SCHEMAS
        for instance in invalid
        if matches(grammars, schema(of), ids(demo, json.dumps(instance)))
    ]
    assert not wrong


@pytest.mark.parametrize("host_pages", [0, 60])
async def test_a_retracted_request_goes_on_in_its_grammar(
    demo: LoadedModel, host_pages: int
) -> None:
    drawn = [{"type": "array", "items": POINT, "minItems": 3}] * 4
    plain = await answers(demo, drawn, 60)
    given = prompts(demo)
    async with EnginePair(demo, num_pages=600, host_pages=host_pages) as pair:
        params = greedy(60, grammar=schema(drawn[0]))
        running = [asyncio.create_task(pair.tokens(given[i], params)) for i in range(4)]
        for _ in range(5):
            before = pair.decode.steps
            await until(
                lambda before=before: (
                    pair.decode.steps > before
                    or all(  # type: ignore[misc]
                        task.done() for task in running
                    )
                )
            )
            pair.decode.retract_all()
        assert list(await asyncio.gather(*running)) == plain
        assert pair.decode.retraction.retracts >= 4


async def test_prompts_that_decode_computes_itself_have_the_answers_of_a_pair(
    demo: LoadedModel,
) -> None:
    prompt, params = prompts(demo)[0], greedy(9, grammar=Grammar("regex", "[a-f]{4}"))
    async with EnginePair(demo, local_prefill_chunk=16) as pair:
        found = [out.token_id async for out in pair.decode.compute(prompt, params)]
        assert found == await pair.tokens(prompt, params)
    assert re.fullmatch("[a-f]{4}", demo.tokenizer.decode(found[:-1]))


async def test_choices_drawn_at_random_all_match(demo: LoadedModel) -> None:
    pattern = "(red|green|blue)( (red|green|blue)){2}"
    async with EnginePair(demo) as pair:
        texts = set()
        for seed in range(6):
            params = SamplingParams(
                seed=seed, max_new_tokens=40, grammar=Grammar("regex", pattern), temperature=1.5
            )
            tokens = await pair.tokens(prompts(demo)[0], params)
            texts.add(demo.tokenizer.decode(tokens[:-1]))
            assert tokens[-1] in demo.eos_ids
    assert len(texts) > 2 and all(re.fullmatch(pattern, text) for text in texts)


async def test_a_grammar_that_fails_ends_its_own_request_alone(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes too complex in the middle of an answer."""
    honest = Matcher.consume

    def fails(self: Matcher, tokens: Any) -> bool:
        if len(tokens) == 7:
            self.error = "LexerTooComplex"
        return honest(self, tokens)

    given, found = prompts(demo), []
    params = greedy(30, grammar=Grammar("regex", "[a-z ]{60}"))
    # All steps of a burst share a delivery, those before the error too.
    monkeypatch.setattr(burst, "DELIVER_EVERY_S", 60.0)
    async with EnginePair(demo) as pair:
        whole = await pair.tokens(given[0], params)
        alone = await pair.tokens(given[1], greedy(30))
        monkeypatch.setattr(Matcher, "consume", fails)
        other = asyncio.create_task(pair.tokens(given[1], greedy(30)))
        stream, first = await pair.begun(given[0], params)
        with pytest.raises(KvflowError, match="LexerTooComplex") as caught:
            async for out in stream:
                found.append(out.token_id)
        assert caught.value.code is Code.BAD_REQUEST
        assert [first.token_id, *found] == whole[:7]
        assert await other == alone


async def test_a_grammar_that_matches_nothing_is_an_error_of_the_request(
    demo: LoadedModel,
) -> None:
    dead = Grammar("lark", 'start: "a" foo\nfoo: foo')
    async with EnginePair(demo) as pair:
        with pytest.raises(KvflowError, match=r"cannot go on: no token may follow$") as caught:
            await pair.tokens(prompts(demo)[0], greedy(5, grammar=dead))
        assert caught.value.code is Code.BAD_REQUEST


async def test_an_engine_compiles_what_no_server_has_compiled(demo: LoadedModel) -> None:
    fresh = replace(demo)
    async with EnginePair(fresh, local_prefill_chunk=16) as pair:
        bad, prompt = greedy(5, grammar=Grammar("regex", "(")), prompts(demo)[0]
        for leg in (
            pair.prefill.prefill(pair.room(prompt).prefill_half, prompt, bad),
            anext(pair.decode.generate(pair.room(prompt), prompt, bad)),
            anext(pair.decode.compute(prompt, bad)),
        ):
            with pytest.raises(MisuseError, match="regex cannot be compiled"):
                await leg
        tokens = await pair.tokens(prompt, greedy(5, grammar=Grammar("regex", "ab")))
        assert demo.tokenizer.decode(tokens[:-1]) == "ab"
    fresh.grammars.close()
