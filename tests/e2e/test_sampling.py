"""What changes the chosen tokens, through HTTP, a router and two processes: against stock
transformers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import all_home, running
from tests.e2e.sglang import sglang_router

pytestmark = pytest.mark.xdist_group("sampling")  # one fleet for the module
PROMPT, NEW = DEMO_PROMPTS[0], 24


class Stock:
    """The demo model without kvflow."""

    def __init__(self) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            DEMO_MODEL_DIR, dtype=torch.float32
        ).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)

    def generate(self, **options: Any) -> list[int]:
        ids = torch.tensor([self.tokenizer.encode(PROMPT)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found

    def logprobs(self, text: str) -> tuple[list[int], torch.Tensor]:
        """Token ids, and the distribution [tokens, vocabulary] behind each."""
        ids: list[int] = self.tokenizer.encode(text)
        with torch.inference_mode():
            return ids, torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1)

    def text(self, **options: Any) -> str:
        """Without the token that ended it."""
        ids = self.generate(**options)
        text: str = self.tokenizer.decode(
            ids[:-1] if len(ids) < NEW else ids, skip_special_tokens=True
        )
        return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as made:
        yield made


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client_gets_what_transformers_generates(
    fleet: Fleet, stock: Stock
) -> None:
    plain = stock.generate()
    word = stock.tokenizer.decode(plain[2:3]).strip()
    banned = {
        (i,)
        for text in (word, " " + word)
        for i in stock.tokenizer.encode(text, add_special_tokens=False)
    }
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
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", max_retries=0
    ) as client:
        for ours, theirs in pairs:
            answer = await client.completions.create(
                model="default", prompt=PROMPT, max_tokens=NEW, temperature=0, **ours
            )
            assert answer.choices[0].text == stock.text(**theirs) != stock.text()
        strong = await client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=NEW,
            temperature=0,
            frequency_penalty=2,
            presence_penalty=2,
            n=2,
        )
        assert strong.choices[0].text == strong.choices[1].text != stock.text()
        # min_p 1: the most likely token alone is left, whatever the seed.
        only = await client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=NEW,
            temperature=1,
            seed=5,
            extra_body={"min_p": 1},
        )
        assert only.choices[0].text == stock.text()
        with pytest.raises(
            openai.BadRequestError, match=r"frequency_penalty 3\.0 is outside -2\.\.2"
        ):
            await client.completions.create(model="default", prompt=PROMPT, frequency_penalty=3)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_echo_has_the_logprobs_of_a_plain_forward(fleet: Fleet, stock: Stock) -> None:
    """As evaluation harnesses score texts; the prompt alone, and with new tokens; streamed too."""
    ids, want = stock.logprobs(" ".join(DEMO_PROMPTS) * 4)
    assert len(ids) > 256, "the prompt must be longer than what is scored in one step"
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", max_retries=0
    ) as client:
        arguments: Any = {
            "model": "default",
            "prompt": ids,
            "echo": True,
            "logprobs": 3,
            "temperature": 0,
        }
        arguments["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
        for count in (0, 5):
            answer = await client.completions.create(**arguments, max_tokens=count, n=2)
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
                len(ids),
                2 * count,
            )
            for choice in answer.choices:
                found = choice.logprobs
                assert (
                    found is not None
                    and found.token_logprobs is not None
                    and found.top_logprobs is not None
                )
                assert found.tokens is not None and "".join(found.tokens) == choice.text
                assert len(found.token_logprobs) == len(ids) + count
                assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
                own = want[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
                assert found.token_logprobs[1 : len(ids)] == pytest.approx(own.tolist(), abs=2e-4)
                best = [max(top.values()) for top in found.top_logprobs[1 : len(ids)]]
                assert best == pytest.approx(want[:-1].max(-1).values.tolist(), abs=2e-4)
            stream = await client.completions.create(**arguments, max_tokens=count, stream=True)
            parts = [chunk.choices[0] async for chunk in stream]
            assert "".join(part.text for part in parts) == answer.choices[0].text
            values = [
                value
                for part in parts
                if part.logprobs
                for value in part.logprobs.token_logprobs or ()
            ]
            # Two requests beside one: a batch of another composition rounds otherwise.
            assert values[0] is None and values[1:] == pytest.approx(
                answer.choices[0].logprobs.token_logprobs[1:], abs=1e-4
            )


@pytest.mark.asyncio(loop_scope="module")
async def test_input_logprobs_through_both_routers(fleet: Fleet, stock: Stock) -> None:
    """sglang_router puts those of prefill's answer before decode's: they must be there once."""
    ids, want = stock.logprobs(" ".join(DEMO_PROMPTS[:5]))
    own = want[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    body = {
        "input_ids": ids,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 2},
    }
    async with sglang_router(fleet) as url, aiohttp.ClientSession() as session:
        for router in (fleet.url, url):
            for start in (0, 5):
                asked = {**body, "logprob_start_len": start}
                async with session.post(f"{router}/generate", json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    meta = (await answer.json(content_type=None))["meta_info"]
                assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == ids[start:]
                assert meta["input_token_logprobs"][0][0] is None
                assert [p for p, _, _ in meta["input_token_logprobs"][1:]] == pytest.approx(
                    own[start:], abs=2e-4
                )
                for row, top in zip(want[start:-1], meta["input_top_logprobs"][1:], strict=True):
                    assert [token_id for _, token_id, _ in top] == row.topk(2).indices.tolist()


@pytest.mark.asyncio(loop_scope="module")
async def test_no_room_is_left(fleet: Fleet) -> None:
    async with aiohttp.ClientSession() as session:
        assert await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)
