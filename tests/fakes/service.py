"""A prefill and a decode without engine and node, which really meet by room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvflow.http import aborts
from kvflow.http.app import build_app
from kvflow.http.authorization import NO_KEYS, Keys
from kvflow.http.tracing import Tracing
from kvflow.node.packed_array import PackedArray
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import Cause, Code, MisuseError, room_error
from kvflow.protocols.wire.ranks import PoolShape
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import (
    EngineOptimism,
    EngineRetractions,
    SamplingParams,
    TokenOut,
)
from kvflow.serve.http import (
    anthropic,
    generate,
    openai,
    openai_responses,
    operations,
    role_switch,
    tokenize,
)
from kvflow.serve.http.completion_service import GenerationRequest, ModelCard, Report
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.tokenizer import ThreadedTokenizer
from tests.fakes.servers import Server

AT_REST = {"pages_free": 4, "pages_at_rest": True, "rooms_by_state": {}, "running": 0, "waiting": 0}
NO_CACHE = CacheStats(pages=0, evictable_pages=0, asked_tokens=0, hit_tokens=0, evicted_pages=0)
WORDS = [f"w{i}" for i in range(100)]
META = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
# What a client asks a router for; the answer is 2, 3, 4.
BODY = {"text": "w1", "sampling_params": {"max_new_tokens": 3}}
CHAT: Any = [{"role": "user", "content": "w1"}]
# The same request by every route.
PROMPTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "w1"},
    "/v1/completions": {"prompt": "w1"},
    "/v1/chat/completions": {"messages": CHAT},
}


def body(**changes: Any) -> dict[str, Any]:
    """A request of one worker for three tokens after w1 and w2, which meet in room 7."""
    sampling = {"max_new_tokens": 3, "temperature": 0}
    return {"text": "w1 w2", "sampling_params": sampling, **META, **changes}


class WordTokenizer:
    """One word per token, `w7` is 7; enough of a transformers tokenizer for the server."""

    chat_template = "present"

    def __init__(self) -> None:
        self.backend_tokenizer = Tokenizer(
            WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0")
        )
        self.backend_tokenizer.pre_tokenizer = Whitespace()

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(WORDS)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        tokenize: bool = True,
        **variables: Any,
    ) -> dict[str, list[int]]:
        """The contents, and before them the variable `lead`."""
        contents = [variables.get("lead", ""), *(message["content"] for message in messages)]
        return {"input_ids": self.encode(" ".join(contents))}


class Meeting:
    """Where the two fakes meet: one future per room, resolved by prefill."""

    def __init__(self) -> None:
        self._rooms: dict[int, asyncio.Future[None]] = {}

    def of(self, room: int) -> asyncio.Future[None]:
        return self._rooms.setdefault(room, asyncio.get_running_loop().create_future())

    def come(self, *rooms: int) -> None:
        """Prefill has been in these rooms."""
        for room in rooms:
            self.of(room).set_result(None)

    def fail(self, room: int, cause: Cause) -> None:
        """End the wait for a room that nothing has ended yet."""
        future = self.of(room)
        if not future.done():
            future.set_exception(room_error(cause))
            future.exception()


def _scores(request: GenerationRequest) -> PromptLogprobs:
    """-0.5 for each prompt token, its most likely one; -1.5 for the next id; -i for asked i."""
    start, top = request.params.prompt_logprobs_from or 0, request.params.logprobs or 0
    behind = np.array(request.prompt[start + 1 :], dtype=np.int64)
    ranks = np.arange(top)
    ids = (behind[:, None] + ranks) % 100
    asked = np.tile(-np.array(request.params.logprob_token_ids, dtype=np.float64), (len(behind), 1))
    return PromptLogprobs.pack(
        start, np.full(len(behind), -0.5), ids, np.zeros((len(behind), 1)) - 0.5 - ranks, asked
    )


OPTIMISM = EngineOptimism(starts=8, hits=4, lost=2, holding_now=1)
RETRACTION = EngineRetractions(
    retracts=9,
    resumes=5,
    recomputes=3,
    retracted_now=1,
    host_bytes_used=4096,
    host_bytes_limit=8192,
    new_token_ratio=0.25,
)


class FakeService:
    """Counts up from the prompt's last token; `gate` holds every token after the first."""

    def __init__(self, role: str, meeting: Meeting, *, pool_tokens: int = 64) -> None:
        self.role = role
        self.card = ModelCard(path="fake/model", name="fake", context_length=128, vocab_size=100)
        self.unavailable_reason = ""
        self.incarnation = 0xABC
        self.fingerprint = "fake model"
        self.data_plane = "fake"
        self.changed_report: dict[str, Any] = {}
        self.dead: list[tuple[int, str]] = []
        self.limits = EngineLimits(128, 100, 1, pool_tokens, 4)
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Cause | None = None
        self.fail_after: int | None = None
        self.refused: list[tuple[int, Cause]] = []
        self.requests: list[GenerationRequest] = []
        self.started = asyncio.Event()
        self.cached_tokens = 0  # of every prompt
        self.held = 0  # how often a token after the first has come to the gate
        self.ended: asyncio.Queue[int] = asyncio.Queue()
        self._meeting = meeting

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        # To be compared.
        self.requests.append(msgspec.structs.replace(request, prompt=request.prompt.tolist()))
        self.started.set()
        try:
            if self.failure is not None:
                await self.gate.wait()
                raise room_error(self.failure)
            # Without a room, decode computes the prompt itself.
            room = request.room
            meeting = None if room is None else self._meeting.of(room)
            if self.role == "prefill":
                assert meeting is not None
                await self.gate.wait()
                if self.failure is not None:
                    raise room_error(self.failure)
                meeting.set_result(None)
                yield self._token(int(request.prompt[-1]) + 1, request.params, "length")
                return
            if meeting is not None:
                await asyncio.shield(meeting)
            most = max(1, request.params.max_new_tokens)
            for i in range(1, most + 1):
                if self.fail_after is not None and i > self.fail_after:
                    raise room_error(Cause(Code.ENGINE_ERROR, "step failed"))
                if i > 1:
                    self.held += 1
                    await self.gate.wait()
                    if self.failure is not None:
                        raise room_error(self.failure)
                last = i == most
                token = self._token(
                    int(request.prompt[-1]) + i, request.params, "length" if last else None
                )
                if i == 1:
                    token = msgspec.structs.replace(token, cached_tokens=self.cached_tokens)
                if i == 1 and request.params.prompt_logprobs_from is not None:
                    token = msgspec.structs.replace(token, prompt_logprobs=_scores(request))
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            self.ended.put_nowait(request.room or 0)

    def _token(self, token: int, params: SamplingParams, reason: Any) -> TokenOut:
        token %= 100
        top = tuple(((token + i) % 100, -0.5 - i) for i in range(params.logprobs or 0))
        asked = tuple((i, -float(i)) for i in params.logprob_token_ids)
        stopped = token if token in params.stop_token_ids else None
        reason = reason if stopped is None else "stop"
        hidden = (
            PackedArray.of(np.full((1, 4), token + 0.5, dtype="f4"))
            if params.hidden_states
            else None
        )
        return TokenOut(token, -0.5, top, reason, stopped, asked, hidden_states=hidden)

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        self.refused.append((room, cause))
        self._meeting.fail(room, cause)

    def abort(self, request: GenerationRequest) -> None:
        if self.role == "prefill":
            assert request.room is not None
            self.refuse(request.room, request.prefill, Cause(Code.ABORTED))

    def end_requests(self) -> None:
        self.failure = Cause(Code.SHUTDOWN, "this server is shutting down")
        self.gate.set()
        for request in self.requests:
            if request.room is not None:
                self._meeting.fail(request.room, self.failure)

    def report(self) -> Report:
        return msgspec.structs.replace(self._report(), **self.changed_report)

    def _report(self) -> Report:
        return Report(
            incarnation=self.incarnation,
            control_endpoint="tcp://127.0.0.1:1",
            data_plane=self.data_plane,
            fingerprint=self.fingerprint,
            pool=PoolShape(16, 4, 1024, 2),
            pool_bytes=4608,
            pool_dtype="bfloat16",
            pool_device="cpu",
            pages_free=3,
            pages_total=4,
            pages_by_kind={"room": 1},
            pages_at_rest=False,
            peers_by_phase={"silent": 1},
            peers_declared_dead=2,
            rooms_by_state={"transferring": 1},
            rooms_ended={"success": 2, "failed:rendezvous": 1},
            rooms_failed={("bootstrap", "rendezvous"): 1},
            bytes_moved=2048,
            running=1,
            waiting=2,
            rows_free=6,
            rows_total=8,
            rows_by_kind={"sequence": 2},
            optimism=OPTIMISM if self.role == "prefill" else None,
            retraction=None if self.role == "prefill" else RETRACTION,
            decode_steps=None if self.role == "prefill" else 77,
        )

    def rooms(self, most_ended: int = 256) -> list[dict[str, Any]]:
        return [{"room": request.room} for request in self.requests][-most_ended:]

    def story(self, room: int) -> dict[str, Any] | None:
        known = any(request.room == room for request in self.requests)
        return {"room": room, "events": []} if known else None

    def peers(self) -> list[dict[str, Any]]:
        return [{"incarnation": "000000000000abcd", "phase": "silent"}]

    def declare_dead(self, incarnation: int, why: str) -> None:
        if incarnation != 0xABCD:
            raise MisuseError(f"no prefill {incarnation:016x} is linked here")
        self.dead.append((incarnation, why))

    async def flush_cache(self) -> None:
        return None


class RunningFake:
    """Implements `role_switch.RunningRole`."""

    def __init__(self, service: FakeService, bootstrap_port: int | None) -> None:
        self.service, self.bootstrap_port = service, bootstrap_port
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Role(Server):
    def __init__(
        self,
        service: FakeService,
        *,
        keys: Keys = NO_KEYS,
        bootstrap_port: int = 8998,
        port: int = 0,
        tracing: Tracing | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.service = service
        self.other: RunningFake | Exception | None = None
        metrics = RoleMetrics(service.report, role=service.role, model="m", sglang=True)
        self.tokenizer = ThreadedTokenizer(tokenizer or WordTokenizer())
        self.pipeline = CompletionPipeline(
            service, self.tokenizer, metrics, **{"keepalive_s": 0.02, **options}
        )
        running = RunningFake(service, bootstrap_port if service.role == "prefill" else None)
        self.role_switch = role_switch.RoleSwitch(self.pipeline, running, self.start_other)
        routes = [
            *generate.routes(self.pipeline),
            *openai.routes(self.pipeline),
            *anthropic.routes(self.pipeline),
            *openai_responses.routes(self.pipeline),
            *tokenize.routes(self.pipeline),
            *aborts.routes(self.pipeline.choices),
            *operations.routes(self.pipeline, host="127.0.0.1", role_switch=self.role_switch),
            *role_switch.routes(self.role_switch),
        ]
        app = build_app(routes, metrics, keys, tracing=tracing)
        super().__init__(app, key=keys.of_operator, port=port)

    async def stop(self) -> None:
        await super().stop()
        # aiohttp caches the handlers of closed applications, so the thread would outlive the block.
        self.tokenizer.close()

    @property
    def incarnation(self) -> str:
        return f"{self.service.incarnation:016x}"

    def at_rest_before(self, other: FakeService) -> FakeService:
        """Come to rest, and have `other` to switch to."""
        other.incarnation = 0xDEF
        self.other, self.service.changed_report = RunningFake(other, 9001), AT_REST
        return other

    async def begun(self) -> None:
        await asyncio.wait_for(self.service.started.wait(), 20)

    async def over(self, *rooms: int | None) -> None:
        """Wait until the service has left these rooms, and until nothing runs here.

        0 or None stands for a request without a room.
        """
        ended = [await asyncio.wait_for(self.service.ended.get(), 20) for _ in rooms]
        assert sorted(ended) == sorted(room or 0 for room in rooms)
        await asyncio.wait_for(self.pipeline.idle.wait(), 20)
        assert (self.pipeline.running, len(self.pipeline.choices)) == (0, 0)

    async def refuses(
        self, path: str, document: Any, *, status: int = 400, code: Code = Code.BAD_REQUEST
    ) -> Any:
        """Post what is refused before anything begins; the other leg, in room 7, has the same
        error.
        """
        before = len(self.service.requests)
        error = await self.refused(status, path, document)
        assert len(self.service.requests) == before
        told = [(room, cause.code, cause.text) for room, cause in self.service.refused]
        assert told == [(7, code, error["message"])], (told, error)
        self.service.refused.clear()
        return error

    async def start_other(self, role: str) -> RunningFake:
        """For the role switch: as set by a test."""
        if isinstance(self.other, BaseException):
            raise self.other
        assert self.other is not None and self.other.service.role == role
        return self.other
