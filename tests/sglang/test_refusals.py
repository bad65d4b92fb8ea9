"""Servers that do not start, or do not fit, say why."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.engines import random_prompt, start_all, stop_all
from tests.sglang.asking import BothLegs
from tests.sglang.conftest import Fleet
from tests.sglang.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.sglang, pytest.mark.timeout(480)]


def test_a_wrong_setting_names_its_variable(model_of: Callable[[int], Path], logs: Path) -> None:
    server = Server("prefill", model_of(1), logs, name="wrong", rendezvous_s="soon")
    try:
        server.start()
        server.wait_end()
        assert "KVFLOW_SGLANG_RENDEZVOUS_S is 'soon': Expected `float`" in server.text()
    finally:
        stop_all([server])


async def test_another_model_is_refused_with_what_differs(
    fleet: Fleet, model_of: Callable[[int], Path], logs: Path
) -> None:
    """Its layers have the same shapes, and the pages of one would be read by the other."""
    other = Server("prefill", model_of(2), logs, name="other")
    prompt = random_prompt(random.Random(7), 50)
    try:
        start_all([other])
        async with aiohttp.ClientSession() as session:
            answer = await BothLegs(session, other, fleet.decode, prompt, 4).answer()
        assert answer.status == 500 and "model fingerprint" in answer.text
    finally:
        stop_all([other])


async def test_another_page_size_fails_the_request_and_not_decode(
    session: aiohttp.ClientSession, fleet: Fleet, model_of: Callable[[int], Path], logs: Path
) -> None:
    other = Server("prefill", model_of(1), logs, name="pages", page=8, rendezvous_s=60)
    prompt = random_prompt(random.Random(8), 50)
    try:
        start_all([other])
        answer = await BothLegs(session, other, fleet.decode, prompt, 4).answer()
        assert answer.status == 500 and "Page size mismatch" in answer.text
        fits = await BothLegs(session, fleet.prefill, fleet.decode, prompt, 4).answer()
        assert len(fits.tokens) == 4
    finally:
        stop_all([other])
