"""The parts of a worker in either role: model, pool, model thread, staging, data plane and card."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvflow.aio import Threads
from kvflow.http.listening import reachable
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.ports import DataPlane
from kvflow.serve.cache.storage.mooncake import check_usable
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import ConfigError
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.http.completion_service import ModelCard
from kvflow.serve.launch.loading import LoadingProgress
from kvflow.serve.launch.pool import make_pool, make_staging
from kvflow.transports.data.select import check_plane, open_plane

if TYPE_CHECKING:
    from kvflow.serve.engine.model.load import LoadedModel
    from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart

_log = logging.getLogger("kvflow.serve")


class Parts(NamedTuple):
    """The parts of a worker that outlive a role switch."""

    model: LoadedModel
    pool: PagedPool
    executor: Threads


@asynccontextmanager
async def loaded_model(
    settings: Settings, part: ModelPart | None = None, meeting: Meeting | None = None
) -> AsyncGenerator[tuple[LoadedModel, Threads], None]:
    """Load a model, and yield it with the thread that runs its steps. The device is checked first.

    Processes that share a model each load a `part` of it, and find each other by `meeting`.
    """
    executor = Threads("model")
    try:
        # "auto" and "cpu" always work, and the check costs a second of imports.
        if settings.device not in ("auto", "cpu"):
            from kvflow.serve.engine.model.device import find_device

            await executor.run(functools.partial(find_device, settings.device))
        from kvflow.serve.engine.model.source import locate

        source = await executor.run(functools.partial(locate, settings.model_path))
        # These imports take seconds, so every quick check comes before them.
        from kvflow.serve.engine.model.load import load_model
        from kvflow.serve.engine.model.parallel.part import WHOLE

        with LoadingProgress(settings.model_name) as progress:
            load = functools.partial(
                load_model,
                source,
                settings.dtype,
                settings.attention,
                progress.report,
                settings.device,
                settings.sliding_window_rows,
                part or WHOLE,
                meeting,
            )
            model = await executor.run(load)
        try:
            model = shortened(model, settings)
            yield model, executor
        finally:
            model.grammars.close()
            model.neighbours.close()
    finally:
        executor.close()


def shortened(model: LoadedModel, settings: Settings) -> LoadedModel:
    """Return the model with --max-model-len as its context.

    Raises: ConfigError if the model has been trained for fewer tokens.
    """
    if not (most := settings.max_model_len):
        return model
    if most > model.context_length:
        raise ConfigError(
            f"--max-model-len {most}: the context of model {settings.model_name!r} has "
            f"{model.context_length} tokens; set this at most"
        )
    return replace(model, context_length=most)


@asynccontextmanager
async def loaded(
    settings: Settings,
    part: ModelPart | None = None,
    meeting: Meeting | None = None,
    *,
    for_stage: bool = False,
) -> AsyncGenerator[Parts, None]:
    """Yield the parts of a worker. First check the data plane, and the store of --l3 mooncake.

    See `loaded_model` for the arguments. With `for_stage`, the pool is for all shards of the stage.
    """
    check_plane(
        settings.disaggregation_transfer_backend,
        settings.disaggregation_ib_device,
        reachable(settings.host),
    )
    if settings.l3 == "mooncake":
        try:
            check_usable(settings.mooncake_master)
        except MisuseError as error:
            raise MisuseError(
                f"--l3 mooncake --mooncake-master {settings.mooncake_master}: {error}"
            ) from None
    async with loaded_model(settings, part, meeting) as (model, executor):
        streams = model.streams_of_stage if for_stage else model.streams
        ring_bytes = model.ring_bytes * (model.part.shards if for_stage else 1)
        allocate = functools.partial(
            make_pool,
            settings,
            streams,
            model.fingerprint,
            model.device,
            ring_bytes=ring_bytes,
            # The shards of decode's one stage have one pool. Each rank of a prefill has its own.
            sharing=1 if for_stage else settings.pp * settings.tp,
        )
        pool = await executor.run(allocate, PagedPool.close)
        _log.info("%s", described(pool, model.context_length, settings.max_running_requests))
        try:
            yield Parts(model, pool, executor)
        finally:
            pool.close()


def described(pool: PagedPool, context_length: int, most_requests: int) -> str:
    """Describe a pool, and how many requests of full length it holds at once.

    The full length is `context_length` tokens, or what the pool holds where that is less. No more
    than `most_requests` run at once.
    """
    layout = pool.layout
    rows = f" and {layout.num_rows} rows for states" if layout.num_rows else ""
    tokens = layout.num_pages * layout.page_size
    full = min(context_length, tokens + 1)
    # The last token of a completion is never fed back, so it takes no place.
    at_once = min(most_requests, layout.num_pages // -(-max(1, full - 1) // layout.page_size))
    requests = "1 request" if at_once == 1 else f"{at_once} requests"
    return (
        f"the KV pool holds {tokens} tokens, in {layout.num_pages} pages of {layout.page_size}"
        f"{rows}: {layout.size_bytes} bytes, {layout.dtypes}, on {pool.device}; room for "
        f"{requests} of {full} tokens at once"
    )


def say_what_fits(limits: EngineLimits) -> None:
    """Log a warning if the pool is smaller than the model's context."""
    if limits.max_tokens < limits.context_length:
        text = (
            "the KV pool is smaller than the model's context of %d tokens: prompt and completion "
            "have %d at most; raise --num-pages, --pool-bytes or --mem-fraction for more, or set "
            "--max-model-len to what is enough"
        )
        _log.warning(text, limits.context_length, limits.max_tokens)


@asynccontextmanager
async def staged(
    settings: Settings, parts: Parts, staging_bytes: int
) -> AsyncGenerator[Staging | None, None]:
    """Yield host memory for transfers, by default `staging_bytes`, or None without staging."""
    staging = await parts.executor.run(
        functools.partial(make_staging, settings, parts.pool, staging_bytes)
    )
    if staging is None:
        yield None
        return
    size_bytes = staging.host.layout.size_bytes
    _log.info(
        "model on %s; transfers pass through %d bytes of host memory",
        parts.model.device,
        size_bytes,
    )
    try:
        yield staging
    finally:
        staging.close()


def plane_of(settings: Settings, pool: PagedPool) -> DataPlane:
    rate = float(settings.transfer_rate_limit) or None
    device = settings.disaggregation_ib_device
    return open_plane(
        settings.disaggregation_transfer_backend,
        pool.segment,
        rate,
        reachable(settings.host),
        device,
    )


def card_of(settings: Settings, model: LoadedModel) -> ModelCard:
    """Return the model's card. Raises: MisuseError for sampling defaults out of bounds."""
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
    if settings.sampling_defaults != "model":
        return {}
    found = dict(model.sampling_defaults)
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except (MisuseError, TypeError) as error:
        text = (
            f"generation_config.json of model {settings.model_path!r}: {error}; start with "
            "--sampling-defaults openai"
        )
        raise MisuseError(text) from None
    if found:
        _log.info(
            "sampling defaults of the model: %s",
            ", ".join(f"{name} {value}" for name, value in found.items()),
        )
    return found
