"""Messages about steps between the first rank of a prefill and the others. They are separate from
the messages of the ranks' group.

Each frame is one message: a msgpack array that begins with its tag. Messages travel in order, over
one connection per rank. The first rank announces (`ToOthers`), and the others report (`ToFirst`).

A generation is a period in which every rank takes part in every step. It ends when a rank is lost
or a step fails. With its next `Hello`, each rank states that it no longer holds anything of the
generation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvflow.protocols.arguments import CheckedPrompt
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import Cause, WireError
from kvflow.protocols.wire import codec
from kvflow.protocols.wire.messages import Life, RankNumber
from kvflow.protocols.wire.ranks import PoolShape
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut

MAX_ROWS = 1 << 14  # prompts in one step
MAX_PROMPT = 1 << 20  # tokens
_Number = Annotated[int, Meta(ge=1, le=1 << 53)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
_Address = Annotated[str, Meta(max_length=256)]


class RankLife(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Facts about a rank for the bootstrap registry; see `RankInfo`."""

    incarnation: Life
    control: _Address
    backend: Annotated[str, Meta(max_length=64)]
    pool: PoolShape


class Hello(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """Reports that this rank is ready, and how many pages and rows its pool has."""

    member: Life
    rank: RankNumber
    pages: _Count
    rows: _Count
    info: RankLife


class FirstToken(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """Reports the first token of a request, which was chosen after this step."""

    generation: _Number
    step: _Number
    ticket: _Number
    token: TokenOut


class StepFailed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=3):
    """Reports that a step failed at this rank, so the others wait for data that will not come."""

    generation: _Number
    cause: Cause


class Status(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=4):
    """Reports the state of this rank, for /server_info and /metrics of the first rank."""

    rank: RankNumber
    pid: _Count
    pages_free: _Count
    pages_total: _Count
    pages_at_rest: bool
    pinned_pages: _Count
    rooms: dict[Annotated[str, Meta(max_length=64)], _Count]
    requests: _Count
    tickets: _Count  # requests of the group that this rank knows
    bytes_moved: _Count
    failed_steps: _Count
    handler_errors: _Count
    dropped: _Count  # frames that were ignored
    cache: CacheStats | None = None


class Opened(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=5):
    """Reports that this rank opened the request.

    Once every rank opens it, a step may name the request before the group starts it
    (`--optimistic-prefill`).
    """

    ticket: _Number


class Found(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=6):
    """Answers `Find`: this rank has the first `tokens` tokens of the prompt cached and locked."""

    number: _Number
    tokens: _Tokens


class Begin(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=11):
    """Announces that a generation begins."""

    generation: _Number


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The `count` tokens of a prompt from `start` on, with logits for the last `logits` of them.

    Tokens before `start` were in earlier steps, or are in the cache of every rank.
    """

    ticket: _Number
    start: _Tokens
    count: Annotated[int, Meta(ge=1, le=MAX_PROMPT)]
    logits: _Tokens


class Plan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=12):
    """Announces one step. `step` is its number within the generation, counted from 1."""

    generation: _Number
    step: _Number
    rows: Annotated[tuple[PlannedRow, ...], Meta(min_length=1, max_length=MAX_ROWS)]


class Drop(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=13):
    """Announces that no further step names this request.

    `succeeded` is True if the request succeeded; the cache may then keep the request's pages.
    """

    ticket: _Number
    succeeded: bool = False


class Preempt(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=15):
    """Announces that this request loses its places and everything that was computed.

    The group has not started the request at the first rank yet. A later step may name it again,
    from its first token.
    """

    ticket: _Number


class Keep(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=16):
    """Announces that the group started this request.

    The request keeps its places, and its pages may be sent.
    """

    ticket: _Number


class Find(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=17):
    """Asks how many of the first `tokens` tokens of a prompt are cached.

    The rank locks them for the request until a step, `Drop` or `Preempt` names that request, a
    `Flush` arrives, or the generation ends. The answer repeats `number`.
    """

    generation: _Number
    number: _Number
    ticket: _Number
    tokens: _Tokens


class Flush(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=18):
    """Instructs every rank to flush its cache.

    Each rank also releases the prefixes that it locked for requests that no step has named yet.
    """


class End(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=14):
    """Announces that the generation ended. `failed` is the rank whose step failed, or None.

    Each rank ends the running step, and frees what the generation took.
    """

    generation: _Number
    cause: Cause
    failed: RankNumber | None = None


ToFirst = Hello | FirstToken | StepFailed | Status | Opened | Found
ToOthers = Begin | Plan | Drop | End | Preempt | Keep | Find | Flush
encode = codec.encode
parse_at_first: Callable[[bytes], ToFirst] = codec.parser(ToFirst)
parse_at_others: Callable[[bytes], ToOthers] = codec.parser(ToOthers)


class GroupPrompt(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """A request that the leader of the group receives, and that every rank opens.

    `ids` are uint32, little-endian; `digest` is the one that `check_prompt` computes.
    """

    ids: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_PROMPT)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    params: SamplingParams
    deadline_s: Annotated[float, Meta(gt=0)]
    namespace: Namespace = ANY

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.frombuffer(self.ids, "<u4")

    @property
    def checked(self) -> CheckedPrompt:
        return CheckedPrompt(len(self.ids) // 4, self.digest)


_PROMPTS = msgspec.msgpack.Decoder(GroupPrompt)


def parse_prompt(data: bytes) -> GroupPrompt:
    """Decode a request of the group.

    Raises: WireError, or MisuseError for sampling parameters outside their limits.
    """
    try:
        found = _PROMPTS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"cannot decode a {len(data)}-byte request of a group: {error}") from None
    if len(found.ids) % 4:
        raise WireError(
            f"the prompt of a group's request: {len(found.ids)} bytes are no unsigned 32-bit "
            "integers"
        )
    return found
