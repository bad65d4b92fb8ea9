"""The committed weights: readable, different answers, in either precision."""

from __future__ import annotations

import re
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS

SIZE_BYTES_MAX = 8 * 1024 * 1024
NEW_TOKENS = 64


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


@cache
def answers(dtype: torch.dtype) -> list[list[int]]:
    """Greedy continuations of all prompts, going on past the end token as the demo does."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=dtype).eval()
    batch = tokenizer()(list(DEMO_PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    out = model.generate(**batch, max_new_tokens=NEW_TOKENS, eos_token_id=None, do_sample=False)
    return out[:, batch.input_ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_model_is_small() -> None:
    assert (
        sum(path.stat().st_size for path in DEMO_MODEL_DIR.rglob("*") if path.is_file())
        < SIZE_BYTES_MAX
    )


def test_prompts_are_enough_and_distinct() -> None:
    assert len(set(DEMO_PROMPTS)) == len(DEMO_PROMPTS) >= 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_answers_differ_pairwise(dtype: torch.dtype) -> None:
    found = answers(dtype)
    assert all(len(tokens) == NEW_TOKENS for tokens in found)
    assert len({tuple(tokens) for tokens in found}) == len(DEMO_PROMPTS)


def test_answers_are_made_of_words() -> None:
    known = set(re.findall(r"[a-z]{2,}", " ".join(topics.values()).lower()))
    words = re.findall(
        r"[a-z]{2,}", " ".join(map(tokenizer().decode, answers(torch.float32))).lower()
    )
    assert sum(word in known for word in words) > 0.9 * len(words)


def test_answers_seldom_end_early() -> None:
    ended = sum(tokenizer().eos_token_id in tokens for tokens in answers(torch.float32))
    assert ended <= len(DEMO_PROMPTS) // 4


def test_chat_template_marks_the_turns() -> None:
    text = tokenizer().apply_chat_template(
        [{"role": "user", "content": "What is a class?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == "<s><|user|>\nWhat is a class?\n<|assistant|>\n"


def test_any_text_survives_the_tokenizer() -> None:
    text = "x = {'é': [1, 2]}  # 日本語 🙂\n\n\tdone ."
    assert tokenizer().decode(tokenizer()(text).input_ids) == text


def test_plain_load_is_float32_and_grouped() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR)
    assert model.dtype == torch.float32
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings >= 2048
    assert model.generation_config.eos_token_id == tokenizer().eos_token_id
