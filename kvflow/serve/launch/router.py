"""The router role as a process. It loads no engine and no pool.

It loads a tokenizer only if --tokenizer-path is given.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvflow.http.authorization import Keys
from kvflow.http.listening import bound_socket, url_of
from kvflow.http.tracing import tracing_to
from kvflow.protocols.errors import MisuseError
from kvflow.router.kvflow_engine import KvflowEngine
from kvflow.router.policies import Policy
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.vllm_engine import VllmEngine
from kvflow.serve.config.settings import Settings
from kvflow.serve.launch.process import Ready, serve_until_stopped
from kvflow.serve.launch.tls import client_tls, server_tls
from kvflow.transports.control.curve import read_key

if TYPE_CHECKING:
    from kvflow.serve.http.tokenizer import ThreadedTokenizer

_log = logging.getLogger("kvflow.serve.launch")


async def run_router(settings: Settings) -> None:
    """Run `kvflow router` until a signal stops it."""
    events_key = read_key(settings.kv_events_key_file)
    tokenizer = _routing_tokenizer(settings) if settings.tokenizer_path else None
    served, asked = server_tls(settings), client_tls(settings)
    http = bound_socket(settings.host, settings.port, "--port")
    router = Router(
        settings.prefill,
        settings.decode,
        keys=Keys(settings.api_key, settings.admin_api_key),
        request_timeout_s=settings.request_timeout_s,
        retry_timeout_s=settings.retry_timeout_s,
        max_waiting=settings.max_queued_requests,
        poll_s=settings.poll_s,
        policy=Policy(
            settings.policy, settings.balance_abs_threshold, settings.balance_rel_threshold
        ),
        encoder=tokenizer,
        local_prefill_tokens=settings.local_prefill_tokens,
        engine=VllmEngine(settings.legs) if settings.engine == "vllm" else KvflowEngine(events_key),
        tls=asked,
    )
    try:
        async with tracing_to(
            settings.otlp_endpoint, settings.otlp_sample_ratio, "router"
        ) as tracing:
            await router.start()
            ready = Ready("router", url_of(http, settings.host, served), os.getpid())
            app = router_app(router, settings.allowed_origins, tracing)
            await serve_until_stopped(
                app, http, router, ready, settings.drain_timeout_s, tls=served
            )
    finally:
        await router.close()
        if tokenizer is not None:
            tokenizer.close()


def _routing_tokenizer(settings: Settings) -> ThreadedTokenizer | None:
    path = settings.tokenizer_path
    from kvflow.serve.engine.model.tokenizer import find_tokenizer
    from kvflow.serve.http.tokenizer import ThreadedTokenizer
    from kvflow.serve.launch.chat_template import with_template

    try:
        found = find_tokenizer(path)
    except MisuseError as error:
        raise MisuseError(f"--tokenizer-path: {error}") from None
    if found is None:
        _log.warning(
            "--tokenizer-path %r: no tokenizer is there; events count for prompts of token ids "
            "alone",
            path,
        )
    if found is None:
        return None
    return ThreadedTokenizer(with_template(found, settings.chat_template))
