"""What the first rank of a prefill and the others tell each other about steps, beside the messages
of their group.

One frame is one message: a msgpack array that begins with its tag. They travel over one connection
of each rank, in order. A generation is a time in which every rank takes part in every step: it ends
with the loss of a rank or with a step that failed, and each rank's next `Hello` says that nothing
of it is left there.
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

MAX_ROWS = 1 << 14  # prompts of one step
MAX_PROMPT = 1 << 20  # tokens
_Number = Annotated[int, Meta(ge=1, le=1 << 53)]
_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_PROMPT)]
_Address = Annotated[str, Meta(max_length=256)]


class RankLife(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the bootstrap registry is told of a rank, see `RankInfo`."""

    incarnation: Life
    control: _Address
    backend: Annotated[str, Meta(max_length=64)]
    pool: PoolShape


class Hello(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """This rank is ready for a generation. Pages and rows are those of its pool."""

    member: Life
    rank: RankNumber
    pages: _Count
    rows: _Count
    info: RankLife


class FirstToken(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """Chosen after this step."""

    generation: _Number
    step: _Number
    ticket: _Number
    token: TokenOut


class StepFailed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=3):
    """A step failed at this rank: the others wait for what will not come."""

    generation: _Number
    cause: Cause


class Status(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=4):
    """What this rank has now, for /server_info and /metrics of the first one."""

    rank: RankNumber
    pid: _Count
    pages_free: _Count
    pages_total: _Count
    pages_at_rest: bool
    pinned_pages: _Count
    rooms: dict[Annotated[str, Meta(max_length=64)], _Count]
    requests: _Count
    tickets: _Count  # of its membership in the group
    bytes_moved: _Count
    failed_steps: _Count
    handler_errors: _Count
    dropped: _Count  # frames that changed nothing
    cache: CacheStats | None = None  # of its prefix cache


class Opened(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=5):
    """This rank has opened the request: a step may name it before the group starts it
    (`--optimistic-prefill`).
    """

    ticket: _Number


class Found(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=6):
    """The answer to `Find`: so many tokens of the prompt are in the cache of this rank, locked for
    it.
    """

    number: _Number
    tokens: _Tokens


class Begin(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=11):
    """first rank -> the others."""

    generation: _Number


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The `count` tokens of a prompt from its token `start` on, and logits of the last `logits` of
    them. What is before `start` was in earlier steps, or is in the cache of every rank."""

    ticket: _Number
    start: _Tokens
    count: Annotated[int, Meta(ge=1, le=MAX_PROMPT)]
    logits: _Tokens


class Plan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=12):
    """One step; `step` counts them within the generation, from 1."""

    generation: _Number
    step: _Number
    rows: Annotated[tuple[PlannedRow, ...], Meta(min_length=1, max_length=MAX_ROWS)]


class Drop(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=13):
    """No further step names this request.

    `succeeded`: the group has decided so, and the cache may keep its pages.
    """

    ticket: _Number
    succeeded: bool = False


class Preempt(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=15):
    """This request, which the group has not started at the first rank, loses its places and what
    was computed. A step may name it again, from its beginning."""

    ticket: _Number


class Keep(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=16):
    """The group has started this request at the first rank: no `Preempt` of it follows.

    Its pages may leave.
    """

    ticket: _Number


class Find(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=17):
    """How many of the first `tokens` tokens of this request's prompt are in your cache?

    Lock them for it, until a step, `Drop` or `Preempt` names it, or the generation is over.
    `number`: of the question, for the answer."""

    generation: _Number
    number: _Number
    ticket: _Number
    tokens: _Tokens


class Flush(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=18):
    """Forget all that is cached.

    What was found for a request that no step has named yet is forgotten with it.
    """


class End(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=14):
    """The generation is over: leave the step that runs, forget what it has named.

    `failed`: the rank whose step has failed, if that is why."""

    generation: _Number
    cause: Cause
    failed: RankNumber | None = None


ToFirst = Hello | FirstToken | StepFailed | Status | Opened | Found
ToOthers = Begin | Plan | Drop | End | Preempt | Keep | Find | Flush
encode = codec.encode
parse_at_first: Callable[[bytes], ToFirst] = codec.parser(ToFirst)
parse_at_others: Callable[[bytes], ToOthers] = codec.parser(ToOthers)


class GroupPrompt(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """What the leader of the group is given as a request: every rank opens its half of the room
    with it. `ids` are uint32, little-endian; `digest` is that of `check_prompt`."""

    ids: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_PROMPT)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    params: SamplingParams
    deadline_s: Annotated[float, Meta(gt=0)]
    namespace: Namespace = ANY  # of cached prefixes

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.frombuffer(self.ids, "<u4")

    @property
    def checked(self) -> CheckedPrompt:
        return CheckedPrompt(len(self.ids) // 4, self.digest)


_PROMPTS = msgspec.msgpack.Decoder(GroupPrompt)


def parse_prompt(data: bytes) -> GroupPrompt:
    """Raises: WireError, MisuseError for sampling parameters outside their limits."""
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
