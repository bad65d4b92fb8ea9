"""What the two halves of a room inside vLLM must agree on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvflow.connectors.vllm.prompts import prompt_of


def request(adapter: str = "", media: tuple[str, ...] | None = None) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[5, 6, 7],
        lora_request=SimpleNamespace(lora_name=adapter) if adapter else None,
        mm_features=None if media is None else [SimpleNamespace(identifier=one) for one in media],
    )


def test_a_prompt_is_its_ids() -> None:
    for asked in (request(), request(media=())):
        assert prompt_of(asked).tolist() == [5, 6, 7]


def test_another_adapter_or_other_media_make_another_prompt() -> None:
    asked = [
        ("", ("cat",)),
        ("", ("dog",)),
        ("", ("cat", "dog")),
        ("x", None),
        ("y", None),
        ("x", ("cat",)),
    ]
    found = [prompt_of(request(*one)).tolist() for one in asked]
    assert found == [prompt_of(request(*one)).tolist() for one in asked]
    assert len({tuple(ids) for ids in [*found, [5, 6, 7]]}) == len(asked) + 1
    assert all(ids[1:] == [6, 7] for ids in found)
