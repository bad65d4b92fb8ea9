"""`kvflow up`: a router, prefills and decodes as processes on this machine, which end together.

Workers announce their ports through a pipe: the kernel chooses those that no setting names. It
also kills the children when this process ends, even by kill -9 (`process.die_with_parent`). Unless
a control key is given, the workers share a new one, which is not stored in any file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvflow.http.listening import bound_socket, url_of
from kvflow.serve.config.catalog import FIELDS_OF_ROLE, env_of, flag_of
from kvflow.serve.config.kv_events import KvEvents
from kvflow.serve.config.settings import Settings
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch.child import Child, ChildEndedError, first_end, start_together
from kvflow.serve.launch.mooncake_master import NAME, MooncakeMaster
from kvflow.serve.launch.process import StopSignals, notify_systemd
from kvflow.serve.launch.tls import check_fleet_tls, client_tls
from kvflow.transports.control.curve import open_new_key

KILL_AFTER_S = 5.0
_log = logging.getLogger("kvflow.up")
# The supervisor sets these itself, or passes them where a process list does not show them.
_OWN_FIELDS = frozenset(
    {
        "port",
        "api_key",
        "admin_api_key",
        "disaggregation_bootstrap_port",
        "control_port",
        "disaggregation_mode",
        "mem_fraction",
        "prefill",
        "decode",
    }
)


class Fleet:
    """The roles of one machine, as an async context manager. Leaving it stops all of them."""

    def __init__(
        self,
        settings: Settings,
        given: Mapping[str, Any],
        config: str | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self._settings, self._config, self._quiet = settings, config, quiet
        self._given = {
            name: value
            for name, value in given.items()
            if value is not None and name not in _OWN_FIELDS
        }
        self.prefills: list[Child] = []
        self.decodes: list[Child] = []
        self.router: Child | None = None
        self.store: MooncakeMaster | None = None  # None unless the fleet starts one
        self._key: int | None = None  # open descriptor of the control key

    @property
    def children(self) -> list[Child]:
        return [*self.prefills, *self.decodes, *([self.router] if self.router else [])]

    @property
    def url(self) -> str:
        return self.router.url if self.router else ""

    async def start(self) -> None:
        """Start all roles. Return when they run and are healthy.

        Raises: ChildEndedError, TimeoutError; MisuseError for a missing program or an unusable
        port.
        """
        settings = self._settings
        if not settings.control_key_file:
            self._key = open_new_key()
        if settings.l3 == "mooncake" and not settings.mooncake_master:
            self.store = MooncakeMaster()
            await self.store.start()
        self.prefills = [self._worker("prefill", i) for i in range(settings.prefill_workers)]
        self.decodes = [self._worker("decode", i) for i in range(settings.decode_workers)]
        await self._start_together([*self.prefills, *self.decodes])
        urls = [
            f for child in (*self.prefills, *self.decodes) for f in (f"--{child.role}", child.url)
        ]
        arguments = [*self._arguments("router"), "--port", str(settings.port), *urls]
        # Cache events are about tokens, so a router needs the tokenizer to match texts.
        if (
            settings.kv_events_config
            and settings.policy == "cache_aware"
            and not settings.tokenizer_path
        ):
            arguments += ["--tokenizer-path", settings.model_path]
        self.router = self._child("router", "router", arguments)
        await self._start_together([self.router])
        await self._healthy()

    async def wait_for_end(self) -> ChildEndedError:
        """Wait until any role ends. Return how it ended."""
        return await first_end(self.children)

    async def stop(self, forced: asyncio.Event | None = None) -> None:
        """Stop the router, the workers and the store, in this order.

        Once `forced` is set, the router and the workers are killed.
        """
        timeout_s = self._settings.drain_timeout_s + KILL_AFTER_S
        killing = asyncio.create_task(self._kill_when(forced or asyncio.Event()))
        try:
            if self.router is not None:
                await self.router.stop(timeout_s)
            await asyncio.gather(
                *(child.stop(timeout_s) for child in (*self.prefills, *self.decodes))
            )
        finally:
            killing.cancel()
            if self.store is not None:
                await self.store.stop()
            key, self._key = self._key, None
            if key is not None:
                os.close(key)

    async def _kill_when(self, forced: asyncio.Event) -> None:
        await forced.wait()
        for child in self.children:
            child.kill()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _worker(self, role: str, index: int) -> Child:
        several = (
            self._settings.prefill_workers if role == "prefill" else self._settings.decode_workers
        )
        name = f"{role}-{index}" if several > 1 else role
        port = self._settings.worker_ports
        # Prefills come first in the row.
        if port:
            port += index + (self._settings.prefill_workers if role == "decode" else 0)
        # A decode needs a registry port too, because a role switch may turn it into a prefill.
        arguments = [*self._arguments(role), "--port", str(port)]
        arguments += ["--disaggregation-bootstrap-port", "0"]
        if role == "prefill":
            arguments += ["--control-port", "0"]
        elif not self._settings.disaggregation_prefill_tp:
            arguments += ["--disaggregation-prefill-tp", str(self._settings.tp)]
        if self._settings.mem_fraction:
            workers = self._settings.prefill_workers + self._settings.decode_workers
            arguments += ["--mem-fraction", str(self._settings.mem_fraction / workers)]
        if self._settings.l3_dir:
            arguments += ["--l3-dir", os.path.join(self._settings.l3_dir, f"{role}-{index}")]
        if self.store is not None:
            arguments += ["--mooncake-master", self.store.address]
        if (events := self._settings.kv_events_config) and (
            config := KvEvents.parse(events)
        ) is not None:
            number = index + (0 if role == "prefill" else self._settings.prefill_workers)
            arguments += ["--kv-events-config", config.of_worker(number)]
        if self._key is not None:
            arguments += ["--control-key-file", f"/dev/fd/{self._key}"]
        return self._child(name, role, arguments)

    def _child(self, name: str, role: str, arguments: list[str]) -> Child:
        return Child(
            name,
            role,
            arguments,
            quiet=self._quiet,
            log_format=self._settings.log_format,
            descriptors=() if self._key is None or role == "router" else (self._key,),
        )

    def _arguments(self, role: str) -> list[str]:
        """Return the flags of `kvflow up` that a role has. The role also reads the environment."""
        arguments = ["--config", self._config] if self._config else []
        # The --tp of `kvflow up` is for prefills. Decodes receive --decode-tp as their --tp.
        if role == "decode" and self._settings.decode_tp * self._settings.tp > 1:
            arguments += ["--tp", str(self._settings.decode_tp)]
        for name, value in self._given.items():
            if name in FIELDS_OF_ROLE[role] and not (role == "decode" and name == "tp"):
                if isinstance(value, bool):
                    arguments.append(flag_of(name) if value else f"--no-{flag_of(name)[2:]}")
                else:
                    several = value if isinstance(value, tuple | list) else (value,)
                    arguments += [part for one in several for part in (flag_of(name), str(one))]
        if "model_path" in FIELDS_OF_ROLE[role] and "model_path" not in self._given:
            arguments += ["--model-path", self._settings.model_path]
        return arguments

    async def _start_together(self, children: list[Child]) -> None:
        environment = dict(os.environ)
        # Keys are passed in the environment, because a process list shows arguments.
        for name in ("api_key", "admin_api_key"):
            if key := getattr(self._settings, name):
                environment[env_of(name)] = key
        await start_together(
            [(child, environment) for child in children], self._settings.start_timeout_s
        )

    async def _healthy(self) -> None:
        async with (
            asyncio.timeout(self._settings.start_timeout_s),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=client_tls(self._settings) or True)
            ) as session,
        ):
            while True:
                async with session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(0.05)


async def run_up(settings: Settings, given: Mapping[str, Any], config: str | None) -> int:
    """Run `kvflow up`. Return 0 after a signal, 2 after a usage error of a role, otherwise 1."""
    if not settings.model_path:
        settings = msgspec.structs.replace(settings, model_path=str(DEMO_MODEL_DIR))
        given = {**given, "served_model_name": settings.served_model_name or "kvflow-demo"}
    # Binding the ports here reports a port in use before a model is loaded.
    for port in _worker_ports(settings):
        bound_socket(settings.host, port, "--worker-ports").close()
    with closing(bound_socket(settings.host, settings.port, "--port")) as made:
        check_fleet_tls(settings, urlsplit(url_of(made, settings.host)).hostname or settings.host)
    _announce(
        settings,
        given.get("served_model_name") or settings.served_model_name or settings.model_path,
    )
    fleet = Fleet(settings, given, config)
    stop = StopSignals()
    stop.listen()
    requested = asyncio.create_task(stop.requested.wait())
    running = asyncio.create_task(_run_until_one_ends(fleet))
    try:
        await asyncio.wait([requested, running], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return 0
        error = running.exception() or running.result()
        if not isinstance(error, ChildEndedError | TimeoutError):
            raise error
        text = (
            str(error) or f"not healthy within {settings.start_timeout_s:g} s (--start-timeout-s)"
        )
        is_usage_error = isinstance(error, ChildEndedError) and error.status == 2
        text += "" if is_usage_error else "; ending the others"
        if settings.log_format == "json":
            _log.error(text)
        else:
            sys.stderr.write(f"kvflow up: error: {text}\n")
        return 2 if is_usage_error else 1
    finally:
        notify_systemd("STOPPING=1")
        for task in (requested, running):
            task.cancel()
        await asyncio.wait([requested, running])
        await fleet.stop(stop.forced)


def _worker_ports(settings: Settings) -> range:
    first, count = settings.worker_ports, settings.prefill_workers + settings.decode_workers
    return range(first, first + count) if first else range(0)


def _announce(settings: Settings, model: str) -> None:
    """Report what is being started, because that takes seconds, or minutes with a large model."""
    workers = f"{settings.prefill_workers} prefill, {settings.decode_workers} decode"
    if ports := _worker_ports(settings):
        workers += f" on ports {ports[0]} to {ports[-1]}"
    text = f"starting {workers} and a router on port {settings.port} for {model}"
    if settings.log_format == "json":
        _log.info(text)
    else:
        sys.stderr.write(f"kvflow up: {text}\n")


async def _run_until_one_ends(fleet: Fleet) -> ChildEndedError:
    await fleet.start()
    for child in fleet.children:
        sys.stdout.write(f"{child.name:<10} {child.url}  pid {child.process.pid}\n")
    if fleet.store is not None:
        sys.stdout.write(f"{NAME} {fleet.store.address}  pid {fleet.store.pid}\n")
    sys.stdout.flush()
    notify_systemd("READY=1")
    return await fleet.wait_for_end()
