"""What changes the chosen tokens, through HTTP, a router and two processes: against stock transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvflow.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.launch.supervisor import Fleet
from tests.e2e.fleet import all_home, running

pytestmark = pytest.mark.xdist_group("sampling")  # one fleet for the module
PROMPT, NEW = DEMO_PROMPTS[0], 24


class Stock:
    """The demo model without kvflow."""

    def __init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)

    def generate(self, **options: Any) -> list[int]:
        ids = torch.tensor([self.tokenizer.encode(PROMPT)])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
        )
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found

    def text(self, **options: Any) -> str:
        """Without the token that ended it."""
        ids = self.generate(**options)
        text: str = self.tokenizer.decode(ids[:-1] if len(ids) < NEW else ids, skip_special_tokens=True)
        return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as made:
        yield made


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client_gets_what_transformers_generates(fleet: Fleet, stock: Stock) -> None:
    plain = stock.generate()
    word = stock.tokenizer.decode(plain[2:3]).strip()
    banned = {(i,) for text in (word, " " + word) for i in stock.tokenizer.encode(text, add_special_tokens=False)}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"extra_body": {"repetition_penalty": 1.3}}, {"repetition_penalty": 1.3}),
        (
            {"logit_bias": {str(plain[0]): -100, str(plain[4]): 2.5}},
            {"sequence_bias": {(plain[0],): -100.0, (plain[4],): 2.5}},
        ),
        ({"extra_body": {"bad_words": [word]}}, {"bad_words_ids": [list(one) for one in banned]}),
        (
            {"extra_body": {"min_tokens": 9, "stop_token_ids": plain[:6]}},
            {"min_new_tokens": 9, "eos_token_id": plain[:6]},
        ),
    ]
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client:
        for ours, theirs in pairs:
            answer = await client.completions.create(model="any", prompt=PROMPT, max_tokens=NEW, temperature=0, **ours)
            assert answer.choices[0].text == stock.text(**theirs) != stock.text()
        strong = await client.completions.create(
            model="any", prompt=PROMPT, max_tokens=NEW, temperature=0, frequency_penalty=2, presence_penalty=2, n=2
        )
        assert strong.choices[0].text == strong.choices[1].text != stock.text()
        only = await client.completions.create(  # min_p 1: the most likely token alone is left, whatever the seed
            model="any", prompt=PROMPT, max_tokens=NEW, temperature=1, seed=5, extra_body={"min_p": 1}
        )
        assert only.choices[0].text == stock.text()
        with pytest.raises(openai.BadRequestError, match=r"frequency_penalty 3\.0 is outside -2\.\.2"):
            await client.completions.create(model="any", prompt=PROMPT, frequency_penalty=3)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_room_is_left(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as session:
        assert await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)
