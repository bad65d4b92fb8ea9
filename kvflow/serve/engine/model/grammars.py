"""Grammars that an answer must match: compiled in a thread, kept for later requests, and turned
into a mask over the vocabulary before each token.

llguidance compiles them. It refuses a JSON schema that it cannot enforce in full, so an answer that
ends is always valid. A grammar's state follows from the tokens of the answer alone, so a request
that moves to another process or another place continues with the same masks.

This module does not import torch or llguidance before a grammar is used.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvflow.aio import Threads
from kvflow.extras import missing_extra
from kvflow.protocols.errors import MisuseError, WireError
from kvflow.protocols.wire.json_text import check_nesting

KINDS = ("json_schema", "regex", "ebnf", "lark", "structural_tag")
MAX_GRAMMAR_BYTES = 1 << 18
KEPT_GRAMMARS = 256
# Compiled grammars are kept while they have at most this many bytes together, as the trials show.
KEPT_BYTES = 1 << 28
# A model may like whitespace so much that a JSON answer never ends: between two tokens of JSON it
# gets no more than a deep indentation needs.
MAX_WHITESPACE = 64
# llguidance compiles a chain of rules by recursion, which takes up to 5 KB of stack for each rule.
# On a usual stack of 8 MB, a chain of 2,000 rules would end the process. A text of
# `MAX_GRAMMAR_BYTES` has some 130,000 levels at most. Only the memory in use counts.
STACK_BYTES = 1 << 30
# Intersections of expressions can take llguidance hours and all memory. No limit of its own ends
# that, and no thread can be interrupted. So a process that can be killed compiles each text first.
TRIAL_CPU_S = 10
TRIAL_BYTES = 3 << 29
_TRIAL = """
import json, resource, sys, threading
sys.path[:] = json.loads(sys.argv[1])
cpu_s, size_bytes = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (size_bytes, size_bytes))
from llguidance import LLMatcher, LLTokenizer
def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
done = []
before = used()
def run():
    matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    done.append(used() - before)
threading.stack_size(size_bytes // 3)
thread = threading.Thread(target=run)
thread.start()
thread.join()
print(done[0])
"""
# What the trial does not show is left to itself after this time, such as a conversion of GBNF. When
# a few are, no other compilation begins.
COMPILE_TIMEOUT_S = 30.0
MAX_LATE = 4
_MAX_ERROR = 500  # characters
# What llguidance raises for a text that it cannot convert, and the check of its nesting. Its parser
# of GBNF calls itself for each parenthesis.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, WireError)

Tokens = Sequence[int] | npt.NDArray[Any]
# [answers, vocabulary]: 0 for a token that may follow, -inf for any other. Adding them to logits
# takes a fraction of the time that a boolean mask takes.
Masks = npt.NDArray[np.float32]

# [answers, bytes]: a bit for each token, the lowest first, which is 1 if the token may follow.
Allowed = npt.NDArray[np.uint8]

# The bits of each byte [256, 8], and the masks of the eight tokens for which it stands.
_BITS_OF_BYTE = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(np.bool_)
_MASK_OF_BYTE = np.where(_BITS_OF_BYTE, np.float32(0), np.float32(-np.inf))
# More bytes with an allowed token than this are no few.
_FEW_BYTES = 64


class Grammar(msgspec.Struct, frozen=True):
    """A grammar, as text.

    `json_schema` is a JSON schema, `regex` a regular expression for the whole answer, `ebnf` a
    grammar in GBNF whose first rule is `root`, `lark` a Lark grammar that begins at `start`.
    `structural_tag` is a JSON object with `structures` and `triggers`, as SGLang and vLLM have it.

    Raises: MisuseError for an unknown kind or a text that is too long.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MisuseError(f"grammar kind {self.kind[:40]!r} is not one of {', '.join(KINDS)}")
        if (size := len(self.text.encode(errors="replace"))) > MAX_GRAMMAR_BYTES:
            raise MisuseError(f"{self.kind}: {size} bytes, limit {MAX_GRAMMAR_BYTES}")


def grammar_of_choices(choices: Iterable[str]) -> Grammar:
    """Return a grammar that matches exactly one of `choices`. Raises: MisuseError without any."""
    choices = list(choices)
    if not choices:
        raise MisuseError("there is no text to choose from")
    spelled = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar("lark", "start: " + " | ".join(spelled))


class Matcher:
    """The state of a grammar after the tokens that one answer has so far."""

    def __init__(self, state: Any, vocab_size: int) -> None:
        """`state` is an `llguidance.LLMatcher` at the beginning of the grammar."""
        self.state, self._vocab_size = state, vocab_size
        self._consumed = 0
        self._allowed = _everything(1, vocab_size)[0]
        self._address = self._allowed.ctypes.data
        self.error = ""

    def consume(self, tokens: Tokens) -> bool:
        """Move to the state after `tokens`, which are all tokens of the answer so far.

        Returns False, and sets `error`, if they do not match.
        """
        if len(tokens) < self._consumed:
            self.state.reset()
            self._consumed = 0
        if (new := len(tokens) - self._consumed) == 1:
            self._consumed += 1
            return bool(self.state.consume_token(int(tokens[-1]))) or self.check()
        if new:
            self.state.consume_tokens([int(token) for token in tokens[self._consumed :]])
            self._consumed = len(tokens)
            return self.check()
        return not self.error

    def choose(self, tokens: Tokens, likely: int, most: int) -> int | None:
        """Return the token that a greedy choice takes after `tokens`, the answer so far, if it is
        known without a mask, and move past it. It is the most likely token, `likely`, or the token
        that the grammar forces, if that is below `most`.

        This takes a fraction of a mask's time. None means that only a mask can tell, as it does
        for tokens that end the answer.
        """
        if not self.consume(tokens):
            return likely
        # What follows most texts is not forced, and asking for that takes longer than asking
        # whether one token may follow. So the grammar is asked for it only where that is left.
        if likely >= min(most, self._vocab_size) or not self.state.validate_tokens([likely]):
            return None if self.check() else likely
        forced = self.state.compute_ff_tokens()
        token = int(forced[0]) if forced else likely
        if token >= most or not self.state.try_consume_tokens([token]):
            return None if self.check() else likely
        self._consumed += 1
        return token

    def most_likely(self, logits: npt.NDArray[Any], likely: int) -> int:
        """Return the index of the largest of `logits` [tokens] among the tokens that may follow,
        the first one among equals. Call it where `choose` has returned None.

        Returns `likely`, and sets `error`, if the grammar cannot go on.
        """
        self.state.unsafe_compute_mask_ptr(self._address, self._allowed.nbytes)
        return most_likely_of(logits, self._allowed) if self.check() else likely

    def check(self) -> bool:
        """Return True while the grammar can go on. Otherwise, set `error`."""
        if not self.error and self.state.is_error():
            self.error = _reason_of(self.state)
        return not self.error


class _Compiled(NamedTuple):
    """A compiled grammar: an `llguidance.LLMatcher` at its beginning, and its memory, estimated."""

    state: Any
    size_bytes: int


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the compiled ones that were used last."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`tokenizer` is a fast tokenizer of transformers. `vocab_size` is the width of logits."""
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._vocab_size = vocab_size
        self._kept: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._kept_bytes = 0
        # Requests compile in a thread, and the model thread compiles what is no longer kept.
        self._lock = threading.Lock()
        self._thread: Threads | None = None
        self._late = 0  # compilations that run on after `COMPILE_TIMEOUT_S`
        self._masking: ThreadPoolExecutor | None = None

    async def compile(self, grammar: Grammar | None) -> None:
        """Compile the grammar of a request, if it has one, in a thread, unless it is kept.

        Raises: MisuseError if it cannot be compiled, or if this model or installation has no
        grammars.
        """
        if grammar is None or self._find(grammar) is not None:
            return
        if self._thread is None:
            # With a second thread, others need not wait for one that takes long.
            self._thread = Threads("grammar", 2)
        await self._thread.ask(functools.partial(self._compiled, grammar))

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return the grammar's state before the first token. Raises: as `compile`."""
        return Matcher(self._compiled(grammar).state.deep_copy(), self._width)

    def allowed(self, answers: Sequence[tuple[Matcher, Tokens]]) -> Allowed:
        """Return which tokens may be next in each answer, given all of its tokens so far.

        All tokens may follow an answer whose matcher has an `error`.
        """
        bits = _everything(len(answers), self._width)
        address, size = bits.ctypes.data, bits.strides[0]
        for i, (matcher, tokens) in enumerate(answers):
            if matcher.consume(tokens):
                matcher.state.unsafe_compute_mask_ptr(address + i * size, size)
        return _checked(answers, bits)

    def allowed_ahead(self, answers: Sequence[tuple[Matcher, Tokens]]) -> Future[Allowed]:
        """Begin to compute `allowed` in a thread, while the model computes the logits.

        Until the result is there, the matchers must not be used otherwise.
        """
        if self._masking is None:
            self._masking = ThreadPoolExecutor(1, thread_name_prefix="kvflow-masks")
        return self._masking.submit(self._allowed_together, answers)

    def _allowed_together(self, answers: Sequence[tuple[Matcher, Tokens]]) -> Allowed:
        bits = _everything(len(answers), self._width)
        rows = [(one.state, i) for i, (one, tokens) in enumerate(answers) if one.consume(tokens)]
        if rows:
            # One call for all of them, because each call takes the interpreter lock from the model.
            self._executor.unsafe_compute_mask_ptr(
                rows, bits.ctypes.data, bits.strides[0], len(answers)
            )
        return _checked(answers, bits)

    def masks_of(self, allowed: Allowed) -> Masks:
        """Return the masks that `allowed` stands for."""
        # `take` needs a quarter of the time that indexing needs.
        masks = np.take(_MASK_OF_BYTE, allowed, axis=0)
        return masks.reshape(len(allowed), -1)[:, : self._width]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        if self._masking is not None:
            self._masking.shutdown()

    def _find(self, grammar: Grammar) -> _Compiled | None:
        with self._lock:
            if (found := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
            return found

    def _compiled(self, grammar: Grammar) -> _Compiled:
        if (found := self._find(grammar)) is not None:
            return found
        made = self._compile_in_time(grammar)
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = made
                self._kept_bytes += made.size_bytes
            while len(self._kept) > 1 and (
                len(self._kept) > KEPT_GRAMMARS or self._kept_bytes > KEPT_BYTES
            ):
                self._kept_bytes -= self._kept.popitem(last=False)[1].size_bytes
        return made

    def _compile_in_time(self, grammar: Grammar) -> _Compiled:
        if self._late >= MAX_LATE:
            raise MisuseError(
                f"{grammar.kind} cannot be compiled now: {self._late} earlier grammars take more "
                f"than {COMPILE_TIMEOUT_S:g} s each"
            )
        ended = _on_deep_stack(functools.partial(self._compile, grammar))
        try:
            made: _Compiled = ended.result(COMPILE_TIMEOUT_S)
            return made
        except TimeoutError:
            with self._lock:
                self._late += 1
            ended.add_done_callback(self._ended_late)
            raise MisuseError(
                f"{grammar.kind} cannot be compiled within {COMPILE_TIMEOUT_S:g} s"
            ) from None

    def _ended_late(self, _: Future[Any]) -> None:
        with self._lock:
            self._late -= 1

    def _compile(self, grammar: Grammar) -> _Compiled:
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise MisuseError(missing_extra(error)) from None
        try:
            text = _text_of(grammar)
        except KeyError as error:
            raise MisuseError(f"{grammar.kind} cannot be read: it has no {error}") from None
        except _UNREADABLE as error:
            raise MisuseError(f"{grammar.kind} cannot be read: {_in_one_line(error)}") from None
        if (used := _trial(text)) is None:
            raise MisuseError(f"{grammar.kind} takes too much time or memory to compile")
        matcher = LLMatcher(self._vocabulary, text, log_level=0)
        # A grammar that is too complex, or that matches nothing, may fail only at its first mask.
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()
        for state in (matcher, first):
            if state.is_error():
                raise MisuseError(f"{grammar.kind} cannot be compiled: {_reason_of(state)}")
        return _Compiled(matcher, len(text) + used)

    @functools.cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(num_threads=1)

    @functools.cached_property
    def _width(self) -> int:
        # Logits may be wider than the tokenizer's vocabulary, or (in small test models) narrower.
        return max(self._vocab_size, 0 if self._tokenizer is None else len(self._tokenizer))

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """The tokenizer as llguidance needs it. It takes seconds for a large vocabulary."""
        if self._tokenizer is None:
            raise MisuseError("a grammar needs a tokenizer, and this model has none")
        if not self._eos_ids:
            raise MisuseError(
                "a grammar needs a token that ends the answer, and this model has none"
            )
        from llguidance import hf

        return hf.from_tokenizer(
            self._tokenizer, n_vocab=self._width, eos_token=sorted(self._eos_ids)
        )


def _everything(answers: int, width: int) -> Allowed:
    """Return bits that allow all tokens of a vocabulary of `width` tokens."""
    # llguidance writes words of 32 bits.
    return np.full((answers, (width + 31) // 32 * 4), 255, dtype=np.uint8)


def most_likely_of(logits: npt.NDArray[Any], allowed: Allowed) -> int:
    """Return the index of the largest of `logits` [tokens] among the tokens that may follow, the
    first one among equals. `allowed` [bytes] is a row of `Grammars.allowed`.
    """
    # Where a grammar allows few tokens, a mask of all others would take more time.
    if (tokens := few_tokens(allowed, len(logits))) is not None:
        return int(tokens[logits[tokens].argmax()]) if len(tokens) else 0
    masks = np.take(_MASK_OF_BYTE, allowed, axis=0).reshape(-1)
    width = min(len(logits), len(masks))
    return int((logits[:width] + masks[:width]).argmax())


def few_tokens(allowed: npt.NDArray[np.uint8], most: int) -> npt.NDArray[np.int64] | None:
    """Return the tokens below `most` that may follow, in ascending order, or None for many.

    `allowed` [bytes] is a row of `Grammars.allowed`. The result must not be changed.
    """
    return _few_tokens(allowed.tobytes(), most)


# The states of a grammar between two strings or numbers occur again and again.
@functools.lru_cache(512)
def _few_tokens(allowed: bytes, most: int) -> npt.NDArray[np.int64] | None:
    bits = np.frombuffer(allowed, np.uint8)
    some = np.flatnonzero(bits)
    if len(some) > _FEW_BYTES:
        return None
    tokens = (some[:, None] * 8 + np.arange(8))[_BITS_OF_BYTE[bits[some]]]
    return tokens[tokens < most]


def _checked(answers: Sequence[tuple[Matcher, Tokens]], bits: Allowed) -> Allowed:
    """Return `bits`, with those of answers whose matcher has an error changed to all tokens."""
    for row, (matcher, _) in zip(bits, answers, strict=True):
        if not matcher.check():
            row[:] = 255
    return bits


_starting = threading.Lock()


def _on_deep_stack(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a thread of its own with `STACK_BYTES` of stack, which ends with the work."""
    ended: Future[Any] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            ended.set_exception(error)

    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="kvflow-grammar-stack", daemon=True).start()
        finally:
            threading.stack_size(before)
    return ended


def _trial(text: str) -> int | None:
    """Return the bytes that a process with limits takes to compile a text of llguidance's, or to
    find its error. None if it exceeds its limits.
    """
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-P", "-I", "-c", _TRIAL),
                *(json.dumps(sys.path), str(TRIAL_CPU_S), str(TRIAL_BYTES)),
            ],
            input=text.encode(errors="replace"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 else None


def _text_of(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form."""
    from llguidance import LLMatcher, StructTag, gbnf_to_lark

    if grammar.kind in ("json_schema", "structural_tag"):
        check_nesting(grammar.text.encode(errors="replace"))
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.text)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        pattern = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
        return str(
            LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": pattern})
        )
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "ebnf":
        # This parser raises a bare Exception for a rule that is not defined.
        try:
            lark = gbnf_to_lark.gbnf_to_lark(grammar.text)
        except Exception as error:  # noqa: BLE001
            raise ValueError(_in_one_line(error)) from None
        return str(LLMatcher.grammar_from_lark(lark))
    if grammar.kind == "structural_tag":
        given = msgspec.json.decode(grammar.text, type=_Tags)
        tags = [_tag_of(one, given.triggers) for one in given.structures]
        return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(tags)))
    return str(LLMatcher.grammar_from_lark(grammar.text))


class _Tag(msgspec.Struct):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Tags(msgspec.Struct):
    structures: Annotated[list[_Tag], Meta(min_length=1)]
    triggers: list[Annotated[str, Meta(min_length=1)]]


def _tag_of(given: _Tag, triggers: list[str]) -> Any:
    from llguidance import StructTag

    trigger = next((each for each in triggers if given.begin.startswith(each)), None)
    if trigger is None:
        raise ValueError(f"no trigger is the start of {given.begin[:40]!r}")
    return StructTag(
        trigger=trigger, begin=given.begin, grammar=json.dumps(given.schema), end=given.end
    )


def _reason_of(state: Any) -> str:
    """Return the error of an `llguidance.LLMatcher`, without the state of its parser."""
    error = _in_one_line(state.get_error().partition("<state>")[0])
    return "no token may follow" if error.startswith("NoExtension") else error


def _in_one_line(error: object) -> str:
    return " ".join(str(error).split())[:_MAX_ERROR] or type(error).__name__
