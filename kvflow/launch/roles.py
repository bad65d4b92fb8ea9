"""The composition root: makes a role's parts from its settings (model, pool, data plane, node, engine, routes)."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from kvflow.config.settings import Settings
from kvflow.engine.scheduler.params import SamplingParams
from kvflow.launch.loading import LoadingProgress
from kvflow.launch.pool import check_host_memory, make_pool, make_snapshots, make_staging
from kvflow.launch.process import Ready, serve_until_stopped
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.ports import DataPlane
from kvflow.server.http import aborts, generate, openai, operations, tokenize
from kvflow.server.http.app import build_app
from kvflow.server.http.completion_service import CompletionService, ModelCard
from kvflow.server.http.engine_services import DecodeService, PrefillService
from kvflow.server.http.listening import bound_socket, listening_on, reachable, url_of
from kvflow.server.http.metrics import Metrics
from kvflow.server.http.pipeline import CompletionPipeline
from kvflow.server.http.registry import registry_app
from kvflow.server.http.tokenizer import ThreadedTokenizer
from kvflow.server.router.router import Router
from kvflow.server.router.routes import router_app
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.registry import RankTable, RegistryClient
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.data.select import check_plane, open_plane

if TYPE_CHECKING:
    from kvflow.engine.model.load import LoadedModel

_log = logging.getLogger("kvflow.serve")
_PREFILL_STAGING_BYTES = 256 << 20  # slices for some twenty decodes


async def run_prefill(settings: Settings) -> None:
    """`kvflow prefill`, until a signal stops it."""
    http = bound_socket(settings.host, settings.port, "--port")
    bootstrap = bound_socket(settings.host, settings.disaggregation_bootstrap_port, "--disaggregation-bootstrap-port")
    bootstrap_port: int = bootstrap.getsockname()[1]
    async with AsyncExitStack() as stack:
        service, model = await stack.enter_async_context(prefill_service(settings))
        metrics = Metrics(service.report, role="prefill", model=settings.model_name, sglang=settings.sglang_metrics)
        table = RankTable()
        table.put(service.rank)
        await stack.enter_async_context(listening_on(registry_app(table, metrics, settings.api_key), bootstrap))
        await _serve(settings, service, model, metrics, http, bootstrap_port)


async def run_decode(settings: Settings) -> None:
    """`kvflow decode`, until a signal stops it."""
    http = bound_socket(settings.host, settings.port, "--port")
    async with decode_service(settings) as (service, model):
        metrics = Metrics(service.report, role="decode", model=settings.model_name, sglang=settings.sglang_metrics)
        await _serve(settings, service, model, metrics, http, None)


async def run_router(settings: Settings) -> None:
    """`kvflow router`, until a signal stops it."""
    http = bound_socket(settings.host, settings.port, "--port")
    router = Router(
        settings.prefill,
        settings.decode,
        api_key=settings.api_key,
        request_timeout_s=settings.request_timeout_s,
        retry_timeout_s=settings.retry_timeout_s,
        max_waiting=settings.max_queued_requests,
        poll_s=settings.poll_s,
    )
    try:
        await router.start()
        ready = Ready("router", url_of(http, settings.host), os.getpid())
        app = router_app(router, settings.api_key, settings.allowed_origins)
        await serve_until_stopped(app, http, router, ready, settings.drain_timeout_s)
    finally:
        await router.close()


@asynccontextmanager
async def prefill_service(settings: Settings) -> AsyncGenerator[tuple[PrefillService, LoadedModel], None]:
    """A running prefill without its HTTP server. Raises: MisuseError."""
    async with AsyncExitStack() as stack:
        key = read_key(settings.control_key_file)
        # Bound here, so that a port in use is refused before a model is loaded.
        control = bind_router(settings.host, settings.control_port, key)
        stack.callback(control[0].close)
        model, pool, staging, executor = await stack.enter_async_context(_parts(settings, _PREFILL_STAGING_BYTES))
        from kvflow.engine.scheduler.prefill import PrefillEngine

        plane = _plane(settings, pool if staging is None else staging.host)
        name = settings.model_name
        node = PrefillNode(
            pool,
            plane,
            host=settings.host,
            port=settings.control_port,
            model=name,
            timing=Timing(rendezvous_s=settings.rendezvous_s),
            bounds=Bounds(pinned_share=settings.max_pinned_share),
            verify_transfers=settings.verify_transfers,
            staging=staging,
            advertise=reachable(settings.host),
            bind=lambda _host, _port: control,
        )
        engine = PrefillEngine(
            model, pool, pool.pages, executor,
            chunk_tokens=settings.chunked_prefill_size, max_batch_tokens=settings.max_batch_tokens,
            optimistic_tries=settings.optimistic_prefill,
        )  # fmt: skip
        stack.push_async_callback(node.close)
        await node.start()
        stack.push_async_callback(engine.close)
        await engine.start()
        yield PrefillService(_card(settings, model), node, engine, settings.request_timeout_s), model


@asynccontextmanager
async def decode_service(settings: Settings) -> AsyncGenerator[tuple[DecodeService, LoadedModel], None]:
    """A running decode without its HTTP server. Raises: MisuseError."""
    check_host_memory(settings)
    key = read_key(settings.control_key_file)
    async with AsyncExitStack() as stack:
        model, pool, staging, executor = await stack.enter_async_context(_parts(settings, 0))
        from kvflow.engine.scheduler.decode import DecodeEngine

        plane = _plane(settings, pool if staging is None else staging.host)
        node = DecodeNode(
            pool,
            plane,
            resolve=RegistryClient(settings.api_key).resolve,
            connect=functools.partial(connect_dealer, key=key),
            bounds=Bounds(quarantine_share=settings.max_quarantine_share),
            verify_transfers=settings.verify_transfers,
            staging=staging,
        )
        loop = asyncio.get_running_loop()
        snapshots = await loop.run_in_executor(executor, make_snapshots, settings, pool)
        if snapshots is not None:
            stack.push_async_callback(snapshots.close)
        engine = DecodeEngine(
            model, pool, pool.pages, executor, max_batch=settings.max_running_requests,
            new_token_ratio=settings.new_token_ratio, snapshots=snapshots,
            recompute=settings.host_memory_full == "recompute",
        )  # fmt: skip
        stack.push_async_callback(node.close)
        await node.start()
        stack.push_async_callback(engine.close)
        await engine.start()
        yield DecodeService(_card(settings, model), node, engine, settings.request_timeout_s), model


@asynccontextmanager
async def _parts(
    settings: Settings, staging_bytes: int
) -> AsyncGenerator[tuple[LoadedModel, PagedPool, Staging | None, ThreadPoolExecutor], None]:
    """Model, pool, its staging and the thread of model steps; the data plane's settings and the device are checked
    before the model is loaded."""
    check_plane(settings.disaggregation_transfer_backend, settings.disaggregation_ib_device, reachable(settings.host))
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvflow-model")
    loop = asyncio.get_running_loop()
    try:
        if settings.device not in ("auto", "cpu"):  # which are always there, and it is a second of imports
            from kvflow.engine.model.device import find_device

            await loop.run_in_executor(executor, find_device, settings.device)
        from kvflow.engine.model.source import locate

        source = await loop.run_in_executor(executor, locate, settings.model_path)
        from kvflow.engine.model.load import load_model  # seconds of imports, after what can be refused at once

        with LoadingProgress(settings.model_name) as progress:
            load = functools.partial(
                load_model, source, settings.dtype, settings.attention, progress.report, settings.device,
                settings.sliding_window_rows,
            )  # fmt: skip
            model = await loop.run_in_executor(executor, load)
        allocate = functools.partial(
            make_pool, settings, model.streams, model.fingerprint, model.device, ring_bytes=model.ring_bytes
        )
        pool = await loop.run_in_executor(executor, allocate)
        staging: Staging | None = None
        try:
            staging = await loop.run_in_executor(executor, make_staging, settings, pool, staging_bytes)
            if staging is not None:
                size_bytes = staging.host.layout.size_bytes
                _log.info("model on %s; transfers pass through %d bytes of host memory", model.device, size_bytes)
            yield model, pool, staging, executor
        finally:
            if staging is not None:
                staging.close()
            pool.close()
    finally:
        executor.shutdown(wait=False)


def _plane(settings: Settings, pool: PagedPool) -> DataPlane:
    """`pool`: what it reads and writes."""
    rate = float(settings.transfer_rate_limit) or None
    device = settings.disaggregation_ib_device
    return open_plane(settings.disaggregation_transfer_backend, pool.segment, rate, reachable(settings.host), device)


def _card(settings: Settings, model: LoadedModel) -> ModelCard:
    return ModelCard(
        path=settings.model_path,
        name=settings.model_name,
        model_type=model.model_type,
        architectures=model.architectures,
        dtype=model.dtype,
        context_length=model.context_length,
        vocab_size=model.vocab_size,
        sampling_defaults=_sampling_defaults(settings, model),
    )


def _sampling_defaults(settings: Settings, model: LoadedModel) -> dict[str, float]:
    """Raises: MisuseError for values that no request may have."""
    if settings.sampling_defaults != "model":
        return {}
    found = dict(model.sampling_defaults)
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except (MisuseError, TypeError) as error:
        text = (
            f"generation_config.json of model {settings.model_path!r}: {error}; start with --sampling-defaults openai"
        )
        raise MisuseError(text) from None
    if found:
        _log.info("sampling defaults of the model: %s", ", ".join(f"{name} {value}" for name, value in found.items()))
    return found


async def _serve(
    settings: Settings,
    service: CompletionService,
    model: LoadedModel,
    metrics: Metrics,
    http: socket.socket,
    bootstrap_port: int | None,
) -> None:
    tokenizer = ThreadedTokenizer(model.tokenizer, model.context_length)
    pipeline = CompletionPipeline(
        service,
        tokenizer,
        metrics,
        bootstrap_port=settings.disaggregation_bootstrap_port,
        max_requests=settings.max_running_requests + settings.max_queued_requests,
        request_timeout_s=settings.request_timeout_s,
        keepalive_s=settings.sse_keepalive_s,
        headers_after_s=settings.sse_headers_after_s,
        low_priority_first=settings.schedule_low_priority_values_first,
    )
    operator_routes = operations.routes(
        pipeline, host=settings.host, bootstrap_port=bootstrap_port, has_api_key=bool(settings.api_key)
    )
    routes = [
        *generate.routes(pipeline),
        *openai.routes(pipeline),
        *tokenize.routes(pipeline),
        *aborts.routes(pipeline.choices),
        *operator_routes,
    ]
    app = build_app(routes, metrics, settings.api_key, settings.allowed_origins)
    ready = Ready(service.role, url_of(http, settings.host), os.getpid(), bootstrap_port)
    try:
        await serve_until_stopped(app, http, pipeline, ready, settings.drain_timeout_s)
    finally:
        tokenizer.close()
