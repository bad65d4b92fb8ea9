"""The composition root: it assembles a role's process from its settings."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from typing import NamedTuple, Self

import msgspec

from kvflow.http import aborts
from kvflow.http.app import build_app
from kvflow.http.authorization import Keys
from kvflow.http.listening import bound_socket, listening_on, reachable, url_of
from kvflow.http.tracing import check_collector, tracing_to
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.serve.config.catalog import FIELDS_OF_ROLE
from kvflow.serve.config.settings import Role, Settings
from kvflow.serve.http import (
    anthropic,
    generate,
    openai,
    openai_responses,
    operations,
    role_switch,
    tokenize,
)
from kvflow.serve.http.completion_service import CompletionService
from kvflow.serve.http.engine_services import PrefillService
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.registry import registry_app
from kvflow.serve.http.role_switch import RoleSwitch
from kvflow.serve.http.tokenizer import ThreadedTokenizer
from kvflow.serve.http.tools.answers import OutputFormats, formats_of
from kvflow.serve.launch.caching import check_cache
from kvflow.serve.launch.chat_template import check_template, with_template
from kvflow.serve.launch.joining import WorkerIdentity, member_of
from kvflow.serve.launch.parts import Parts, loaded, say_what_fits
from kvflow.serve.launch.process import Ready, serve_until_stopped
from kvflow.serve.launch.services import (
    Control,
    bind_control,
    check_decode,
    decode_over,
    prefill_over,
)
from kvflow.serve.launch.tls import check_tls, client_tls, server_tls
from kvflow.transports.control.registry import RankTable

_log = logging.getLogger("kvflow.serve.launch")
# Returns a worker's settings for its other role. Raises: ConfigError.
SettingsOf = Callable[[Role], Settings]


async def run_prefill(settings: Settings, settings_of: SettingsOf | None = None) -> None:
    """Run `kvflow prefill` until a signal stops it. Raises: MisuseError."""
    with (
        closing(bound_socket(settings.host, settings.port, "--port")) as http,
        # The sockets are bound first, so that a port in use is refused before a model is loaded.
        closing(_PrefillPorts.bind(settings)) as ports,
    ):
        check_tls(settings)
        check_cache(settings)
        check_collector(settings.otlp_endpoint)
        check_template(settings.chat_template)
        if settings.pp * settings.tp > 1:
            await _run_first_rank(settings, http, ports)
            return
        async with loaded(settings) as parts:
            roles = _Roles("prefill", settings, parts, settings_of)
            await _serve(settings, await roles.start_prefill(settings, ports), roles, http)


async def _run_first_rank(settings: Settings, http: socket.socket, ports: _PrefillPorts) -> None:
    from kvflow.serve.launch.group import group_over  # this import takes seconds

    table = RankTable()
    async with AsyncExitStack() as stack:
        service, parts = await stack.enter_async_context(group_over(settings, ports.control, table))
        roles = _Roles("prefill", settings, parts, None)
        running = await roles.announced(service, table, ports, stack.pop_all())
        await _serve(settings, running, roles, http)


async def run_decode(settings: Settings, settings_of: SettingsOf | None = None) -> None:
    """Run `kvflow decode` until a signal stops it. Raises: MisuseError."""
    with closing(bound_socket(settings.host, settings.port, "--port")) as http:
        check_tls(settings)
        check_cache(settings)
        check_collector(settings.otlp_endpoint)
        check_template(settings.chat_template)
        check_decode(settings)
        if settings.tp > 1:
            await _run_first_shard(settings, http)
            return
        async with loaded(settings) as parts:
            roles = _Roles("decode", settings, parts, settings_of)
            await _serve(settings, await roles.start_decode(settings), roles, http)


async def _run_first_shard(settings: Settings, http: socket.socket) -> None:
    from kvflow.serve.launch.shards import decode_over_shards  # this import takes seconds

    async with AsyncExitStack() as stack:
        service, parts, lost = await stack.enter_async_context(decode_over_shards(settings))
        roles = _Roles("decode", settings, parts, None)
        await _serve(settings, _RunningRole(service, None, stack.pop_all()), roles, http, lost)


def _keys_of(settings: Settings) -> Keys:
    return Keys(settings.api_key, settings.admin_api_key)


class _PrefillPorts(NamedTuple):
    """The sockets on which a prefill listens in addition to its HTTP server."""

    bootstrap: socket.socket
    control: Control

    @classmethod
    def bind(cls, settings: Settings, bootstrap_port: int | None = None) -> Self:
        port = settings.disaggregation_bootstrap_port if bootstrap_port is None else bootstrap_port
        bootstrap = bound_socket(settings.host, port, "--disaggregation-bootstrap-port")
        try:
            return cls(bootstrap, bind_control(settings))
        except BaseException:
            bootstrap.close()
            raise

    def close(self) -> None:
        self.bootstrap.close()
        self.control[0].close()


class _RunningRole:
    """A role that runs until `stack` is closed. It implements `role_switch.RunningRole`."""

    def __init__(
        self, service: CompletionService, bootstrap_port: int | None, stack: AsyncExitStack
    ) -> None:
        self.service, self.bootstrap_port, self._stack = service, bootstrap_port, stack

    async def close(self) -> None:
        await self._stack.aclose()


class _Roles:
    """Starts either role over the same parts, for the first start and for role switches."""

    def __init__(
        self, own: Role, settings: Settings, parts: Parts, settings_of: SettingsOf | None
    ) -> None:
        self._own = own
        self._settings = settings
        self.parts = parts
        self._settings_of = settings_of
        # A later prefill binds the same registry port again, because routers know it.
        self._bootstrap_port: int | None = None
        self.tls = server_tls(settings)
        self.metrics = RoleMetrics(model=settings.model_name, sglang=settings.sglang_metrics)

    async def start(self, role: Role) -> _RunningRole:
        """Start a role alongside the one that runs. Raises: MisuseError."""
        settings = self._settings if role == self._own else self._settings_of_other(role)
        if settings.pp * settings.tp > 1:
            raise MisuseError(
                "a worker over several ranks (--pp, --tp) neither takes nor leaves its role by a "
                "switch"
            )
        if role == "prefill":
            return await self.start_prefill(
                settings, _PrefillPorts.bind(settings, self._bootstrap_port)
            )
        check_decode(settings)
        return await self.start_decode(settings)

    async def start_prefill(self, settings: Settings, ports: _PrefillPorts) -> _RunningRole:
        async with AsyncExitStack() as stack:
            stack.callback(ports.close)
            service = await stack.enter_async_context(
                prefill_over(self.parts, settings, ports.control)
            )
            return await self.announced(service, RankTable(), ports, stack.pop_all())

    async def announced(
        self,
        service: PrefillService,
        table: RankTable,
        ports: _PrefillPorts,
        stack: AsyncExitStack,
    ) -> _RunningRole:
        """Serve a prefill's bootstrap registry. Return the prefill as a role that `stack` ends."""
        async with stack:
            table.put(service.rank)
            self._bootstrap_port = ports.bootstrap.getsockname()[1]
            registry = registry_app(table, self.metrics, _keys_of(self._settings))
            await stack.enter_async_context(listening_on(registry, ports.bootstrap, self.tls))
            return _RunningRole(service, self._bootstrap_port, stack.pop_all())

    async def start_decode(self, settings: Settings) -> _RunningRole:
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(decode_over(self.parts, settings))
            return _RunningRole(service, None, stack.pop_all())

    def _settings_of_other(self, role: Role) -> Settings:
        """Return the settings for `role`. Those that both roles have keep their values."""
        if self._settings_of is None:
            return self._settings
        other, shared = self._settings_of(role), set(FIELDS_OF_ROLE[self._own])
        changes = {
            name: getattr(other, name) for name in FIELDS_OF_ROLE[role] if name not in shared
        }
        return msgspec.structs.replace(self._settings, **changes)


async def _serve(
    settings: Settings,
    running: _RunningRole,
    roles: _Roles,
    http: socket.socket,
    lost: asyncio.Future[KvflowError] | None = None,
) -> None:
    """Serve in either role until a signal arrives or `lost` completes. Then close the role.

    Raises: the error in `lost`.
    """
    try:
        tokenizer, formats = _texts_of(settings, roles, running.service)
    except BaseException:
        await running.close()
        raise
    pipeline = _pipeline_of(settings, running.service, roles, tokenizer, formats)
    switch = RoleSwitch(pipeline, running, roles.start)
    try:
        await _serve_switch(settings, switch, pipeline, roles, http, lost)
    finally:
        await switch.close()
        tokenizer.close()


def _texts_of(
    settings: Settings, roles: _Roles, service: CompletionService
) -> tuple[ThreadedTokenizer, OutputFormats]:
    """Return how texts become tokens, and how answers are read. Raises: MisuseError."""
    model = roles.parts.model
    say_what_fits(service.limits)
    text = with_template(model.tokenizer, settings.chat_template)
    formats = formats_of(settings.tool_call_parser, settings.reasoning_parser, text)
    return ThreadedTokenizer(text, model.context_length), formats


async def _serve_switch(
    settings: Settings,
    switch: RoleSwitch,
    pipeline: CompletionPipeline,
    roles: _Roles,
    http: socket.socket,
    lost: asyncio.Future[KvflowError] | None,
) -> None:
    routes = [
        *generate.routes(pipeline),
        *openai.routes(pipeline),
        *anthropic.routes(pipeline),
        *openai_responses.routes(pipeline),
        *tokenize.routes(pipeline),
        *aborts.routes(pipeline.choices),
        *operations.routes(pipeline, host=settings.host, role_switch=switch),
        *role_switch.routes(switch),
    ]
    keys = _keys_of(settings)
    url = url_of(http, settings.host, roles.tls)
    ready = Ready(switch.role, url, os.getpid(), switch.bootstrap_port)

    def identity() -> WorkerIdentity:
        return WorkerIdentity(
            switch.role, f"{pipeline.service.report().incarnation:016x}", switch.bootstrap_port
        )

    member = member_of(
        settings.join,
        url_of(http, reachable(settings.host), roles.tls),
        identity,
        keys.of_operator,
        client_tls(settings),
    )
    origins, collector = settings.allowed_origins, settings.otlp_endpoint
    async with tracing_to(collector, settings.otlp_sample_ratio, switch.role) as tracing:
        app = build_app(routes, roles.metrics, keys, origins, tracing=tracing)
        await serve_until_stopped(
            app, http, pipeline, ready, settings.drain_timeout_s, member, lost, roles.tls
        )


def _pipeline_of(
    settings: Settings,
    service: CompletionService,
    roles: _Roles,
    tokenizer: ThreadedTokenizer,
    formats: OutputFormats,
) -> CompletionPipeline:
    return CompletionPipeline(
        service,
        tokenizer,
        roles.metrics,
        bootstrap_port=settings.disaggregation_bootstrap_port,
        max_requests=settings.max_running_requests + settings.max_queued_requests,
        request_timeout_s=settings.request_timeout_s,
        keepalive_s=settings.sse_keepalive_s,
        headers_after_s=settings.sse_headers_after_s,
        low_priority_first=settings.schedule_low_priority_values_first,
        grammars=roles.parts.model.grammars,
        formats=formats,
    )
