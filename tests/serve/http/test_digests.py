"""A long prompt is hashed once per request, and not on the event loop."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvflow.protocols import arguments
from kvflow.protocols.arguments import check_prompt, prompt_digest
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.generation_requests import LONG_PROMPT, with_digests


def requests_for(*prompts: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(room=room, prefill="", prompt=prompt, params=SamplingParams())
        for room, prompt in enumerate(prompts)
    ]


@pytest.fixture
def hashing_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    found: list[threading.Thread] = []
    digest = prompt_digest

    def recorded(ids: Any) -> bytes:
        found.append(threading.current_thread())
        return digest(ids)

    monkeypatch.setattr(arguments, "prompt_digest", recorded)
    return found


async def test_choices_share_one_digest_made_in_a_thread(
    hashing_threads: list[threading.Thread],
) -> None:
    long, other = (np.arange(LONG_PROMPT + i, dtype=np.uint32) for i in range(2))
    found = await with_digests(requests_for(long, long, other, long))
    assert len(hashing_threads) == 2
    assert threading.main_thread() not in hashing_threads
    assert [request.checked for request in found] == [
        check_prompt(p) for p in (long, long, other, long)
    ]
    assert all(
        check_prompt(request.checked or request.prompt) is request.checked for request in found
    )


async def test_short_prompts_are_left_to_their_rooms(
    hashing_threads: list[threading.Thread],
) -> None:
    short = np.arange(LONG_PROMPT - 1, dtype=np.uint32)
    requests = requests_for(short, short)
    assert await with_digests(requests) is requests
    assert not hashing_threads
