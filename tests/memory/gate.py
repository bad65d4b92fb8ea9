"""Copies of host memory that wait in their threads until a test lets them go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvflow.memory.copies import HostCopier
from kvflow.protocols.errors import TransferError


class CopyGate:
    """Lets copies wait for `go`, and then refuses the one numbered `fails_at`, counted from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int = 0) -> None:
        self.go, self.begun = threading.Event(), 0
        self._reached, real = threading.Event(), HostCopier.copy

        def copy(blocks: Any) -> None:
            self.begun += 1
            mine = self.begun
            self._reached.set()
            assert self.go.wait(20)
            if mine == fails_at:
                raise TransferError("the device is lost")
            real(blocks)

        monkeypatch.setattr(HostCopier, "copy", staticmethod(copy))

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 20)
        self._reached.clear()
