"""POST /switch_role: switch between prefill and decode without loading the model or pool again.

A worker can switch only at rest: no request runs, no page is lent, and no write reads a page. With
`drain_timeout_s`, the worker first refuses new requests and waits for rest for at most that time. A
switch never ends a running request. The new role starts while the old one is still open. If the
start fails, the old role continues unchanged. /health answers 503 until the old role is closed, so
that routers choose other workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, Protocol

import msgspec
from aiohttp import web

from kvflow.aio import all_ended
from kvflow.http.bodies import decoded
from kvflow.http.errors import ConflictError
from kvflow.http.responses import json_response
from kvflow.protocols.errors import Code, KvflowError
from kvflow.serve.http.completion_service import CompletionService
from kvflow.serve.http.pipeline import CompletionPipeline

PATH = "/switch_role"
WorkerRole = Literal["prefill", "decode"]
# Ended rooms may still have lent pages or running writes. No event reports the end of these, so
# a switch polls.
REST_CHECK_S = 0.01
_log = logging.getLogger("kvflow.serve")


class SwitchRequest(msgspec.Struct, frozen=True):
    """The body of POST /switch_role."""

    role: WorkerRole
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class RunningRole(Protocol):
    @property
    def service(self) -> CompletionService: ...

    @property
    def bootstrap_port(self) -> int | None:
        """Port of a prefill's bootstrap registry. None for a decode."""

    async def close(self) -> None: ...


class SwitchFailedError(KvflowError):
    """The new role did not start, and the old one serves requests again."""

    code = Code.ENGINE_ERROR


class RoleSwitch:
    """The role of one worker. `switch` changes it, and `close` ends a switch and then the role."""

    def __init__(
        self,
        pipeline: CompletionPipeline,
        running: RunningRole,
        start: Callable[[WorkerRole], Awaitable[RunningRole]],
    ) -> None:
        """Manage `running`. `start` starts another role alongside it, and may raise any error."""
        self._pipeline, self._running, self._start = pipeline, running, start
        self._started_as = running.service.role
        self._switching: asyncio.Task[float] | None = None
        self._switching_to = ""
        self._last: dict[str, Any] | None = None

    @property
    def role(self) -> str:
        return self._running.service.role

    @property
    def bootstrap_port(self) -> int | None:
        return self._running.bootstrap_port

    def describe(self) -> dict[str, Any]:
        """Return the entries of /server_info that describe switches."""
        return {
            "started_as": self._started_as,
            "switching_to": self._switching_to or None,
            "last_switch": self._last,
        }

    async def switch(self, role: WorkerRole, drain_timeout_s: float = 0.0) -> dict[str, Any]:
        """Switch to `role`, and return when the worker has it.

        Cancelling this call does not stop the switch.

        Raises: ConflictError (409) if the worker cannot switch now; SwitchFailedError (500) if the
        new role does not start.
        """
        if self._switching_to:
            raise ConflictError(f"a switch to {self._switching_to} is under way")
        if self._pipeline.draining:
            raise ConflictError(self._pipeline.draining_reason)
        seconds = None
        if role != self.role:
            self._switching_to = role
            self._switching = asyncio.create_task(
                self._switch(role, drain_timeout_s), name="kvflow-switch-role"
            )
            self._switching.add_done_callback(_retrieve)
            # If the client disconnects, the switch must not stop between two roles.
            seconds = round(await asyncio.shield(self._switching), 3)
        incarnation = f"{self._running.service.report().incarnation:016x}"
        return {
            "role": role,
            "switched": seconds is not None,
            "seconds": seconds,
            "incarnation": incarnation,
        }

    async def close(self) -> None:
        """Cancel a switch that is under way, and close the role."""
        if self._switching is not None and not self._switching.done():
            self._switching.cancel()
            await all_ended([self._switching])
        await self._running.close()

    async def _switch(self, role: WorkerRole, drain_timeout_s: float) -> float:
        began_s, before = time.monotonic(), self.role
        self._pipeline.pause(f"this worker switches from {before} to {role}")
        try:
            await self._come_to_rest(drain_timeout_s)
            _log.info("switching from %s to %s", before, role)
            try:
                started = await self._start(role)
            except Exception as error:
                if not isinstance(error, KvflowError | OSError):
                    _log.exception("cannot start as %s", role)
                text = f"this worker cannot serve as {role}, and serves as {before} again: {error}"
                raise SwitchFailedError(text) from error
            await self._exchange(started)
        except KvflowError as error:
            self._note(role, str(error), began_s)
            _log.warning("not switched from %s to %s: %s", before, role, error)
            raise
        finally:
            self._switching_to = ""
            self._pipeline.resume()
        self._note(role, "", began_s)
        _log.info("switched from %s to %s in %.2f s", before, role, time.monotonic() - began_s)
        return time.monotonic() - began_s

    async def _exchange(self, started: RunningRole) -> None:
        old, self._running = self._running, started
        self._pipeline.take_over(started.service)
        # The new role serves now, so an error while the old one closes cannot undo the switch.
        try:
            await old.close()
        except Exception:  # noqa: BLE001 - logged; the new role is there
            _log.exception("the old role, %s, has not ended in order", old.service.role)

    async def _come_to_rest(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while reason := self._busy_with():
            left_s = until_s - loop.time()
            if left_s <= 0:
                waited = f" after {timeout_s:g} s (drain_timeout_s)" if timeout_s else ""
                raise ConflictError(f"this worker is not idle{waited}: {reason}")
            if self._pipeline.running:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._pipeline.idle.wait()
            else:
                await asyncio.sleep(min(REST_CHECK_S, left_s))

    def _busy_with(self) -> str:
        """Return a text that names what keeps the worker from rest, or "" at rest."""
        report, service = self._running.service.report(), self._running.service
        found = {
            "requests": max(self._pipeline.running, report.running + report.waiting),
            "open rooms": sum(report.rooms_by_state.values()),
            "pages in quarantine": report.quarantine_pages,
            "pages that writes still read": report.pinned_pages,
        }
        parts = [f"{count} {what}" for what, count in found.items() if count]
        if not parts and not report.pages_at_rest:
            parts = [f"{report.pages_total - report.pages_free} pages in use"]
        if not parts and service.unavailable_reason:
            return service.unavailable_reason
        return ", ".join(parts)

    def _note(self, role: str, error: str, began_s: float) -> None:
        seconds = round(time.monotonic() - began_s, 3)
        self._last = {"to": role, "ok": not error, "error": error or None, "seconds": seconds}


def _retrieve(task: asyncio.Task[float]) -> None:
    # If the caller has left, asyncio would report an error that `_switch` has logged already.
    if not task.cancelled():
        task.exception()


def routes(role_switch: RoleSwitch) -> list[web.RouteDef]:
    async def switch(http: web.Request) -> web.StreamResponse:
        request = decoded(await http.read(), SwitchRequest)
        return json_response(await role_switch.switch(request.role, request.drain_timeout_s))

    return [web.post(PATH, switch)]
