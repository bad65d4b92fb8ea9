"""Real roles behind real HTTP: the official client, sglang_router, disconnects, and what changes
the chosen tokens, against stock transformers.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from kvflow.transports.control.registry import RegistryClient
from kvflow.transports.control.zmq import connect_dealer
from tests.e2e.fleet import LONG, WITHIN_S, all_home, ask, generate, running
from tests.e2e.sglang import sglang_router

pytestmark = pytest.mark.xdist_group("http")  # one fleet for the module
PROMPT, NEW = DEMO_PROMPTS[0], 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stranger_is_kept_from_the_control_link_of_a_fleet_that_was_given_no_key(
    fleet: Fleet,
) -> None:
    [info] = await RegistryClient().resolve(f"127.0.0.1:{fleet.prefills[0].bootstrap_port}")
    stranger = connect_dealer(info.control, 1)
    try:
        async with asyncio.timeout(WITHIN_S):
            while not (reason := stranger.lockout_reason):
                await asyncio.sleep(0.01)
        assert "requires a control key" in reason
    finally:
        stranger.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", max_retries=0
    ) as client:
        [model] = [model.id async for model in client.models.list()]
        messages: Any = [{"role": "user", "content": "What is a class?"}]
        plain = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0
        )
        text = plain.choices[0].message.content or ""
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert text
        assert "".join(parts) == text
        several = await client.completions.create(
            model=model, prompt=list(DEMO_PROMPTS[:2]), n=2, max_tokens=5, seed=7
        )
        assert len({choice.text for choice in several.choices}) > 1
        again = await client.completions.create(
            model=model, prompt=list(DEMO_PROMPTS[:2]), n=2, max_tokens=5, seed=7
        )
        assert [choice.text for choice in again.choices] == [
            choice.text for choice in several.choices
        ]
        scored = await client.completions.create(
            model=model, prompt=DEMO_PROMPTS[0], max_tokens=3, logprobs=2
        )
        logprobs = scored.choices[0].logprobs
        assert (
            logprobs is not None
            and logprobs.token_logprobs is not None
            and logprobs.top_logprobs is not None
        )
        assert all(value <= 0 for value in logprobs.token_logprobs)
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.completions.create(model=model, prompt="class " * 5000, max_tokens=1)


@pytest.mark.asyncio(loop_scope="module")
async def test_behind_sglang_router(fleet: Fleet) -> None:
    async with sglang_router(fleet) as url, aiohttp.ClientSession() as session:
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        _, direct = await generate(session, fleet.url)
        status, routed = await generate(session, url)
        assert (status, routed["output_ids"]) == (200, direct["output_ids"])
        status, raw = await generate(session, url, stream=True)
        assert status == 200
        events = [line[6:] for line in raw.decode().split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert msgspec.json.decode(events[-2])["output_ids"] == direct["output_ids"]
        _, scored = await generate(session, url, return_logprob=True)
        assert len(scored["meta_info"]["output_token_logprobs"]) == 8
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            messages: Any = [{"role": "user", "content": "What is a class?"}]
            chat = await client.chat.completions.create(
                model="default", messages=messages, max_tokens=4, temperature=0
            )
            assert chat.choices[0].message.content
            text = await client.completions.create(
                model="default", prompt=DEMO_PROMPTS[0], max_tokens=8, temperature=0
            )
            assert text.choices[0].text == direct["text"]
            # Both legs refuse by themselves: neither waits for the other.
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(openai.BadRequestError, match="stop_regex is not supported"):
                    await client.completions.create(
                        model="default", prompt="a", extra_body={"stop_regex": "a+"}
                    )
                with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
                    await client.completions.create(model="other", prompt="a")
        assert await all_home(session, prefill, decode)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_frees_its_pages(fleet: Fleet) -> None:
    prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
    async with aiohttp.ClientSession() as session:
        for stream in (True, False):
            request = asyncio.create_task(
                generate(session, fleet.url, stream=stream, sampling_params=LONG)
            )
            async with asyncio.timeout(WITHIN_S):
                while not (info := await ask(session, f"{decode}/server_info"))["running"]:
                    await asyncio.sleep(0.01)
            assert not info["pages"]["home"] and info["pages"]["sequence"], info["pages"]
            request.cancel()
            assert await all_home(session, prefill, decode)


@pytest.mark.asyncio(loop_scope="module")
async def test_clients_that_leave_do_not_hurt_their_neighbours(fleet: Fleet) -> None:
    """An abort during a model step ends one sequence of the batch, not the batch."""
    decode = fleet.decodes[0].url
    neighbourly = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        neighbour = asyncio.create_task(generate(session, fleet.url, sampling_params=neighbourly))
        for _ in range(20):
            leaver = asyncio.create_task(
                generate(session, fleet.url, stream=True, sampling_params=LONG)
            )
            async with asyncio.timeout(WITHIN_S):
                info = await ask(session, f"{decode}/server_info")
                while info["running"] < 2 and not neighbour.done():
                    await asyncio.sleep(0.001)
                    info = await ask(session, f"{decode}/server_info")
            leaver.cancel()
        status, answer = await asyncio.wait_for(neighbour, 30)
        assert status == 200, answer
        assert len(answer["output_ids"]) == 400
        assert await all_home(session, fleet.prefills[0].url, decode)


async def aborted(session: aiohttp.ClientSession, url: str, **body: Any) -> int:
    async with session.post(f"{url}/abort_request", json=body) as answer:
        assert answer.status == 200
        return int((await answer.json())["aborted"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_answers_with_what_there_is_and_frees_its_pages(
    fleet: Fleet, stream: bool
) -> None:
    prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
    async with aiohttp.ClientSession() as session:
        asked = [
            asyncio.create_task(
                generate(session, fleet.url, rid=rid, stream=stream, sampling_params=LONG)
            )
            for rid in ("first", "second", "third")
        ]
        async with asyncio.timeout(WITHIN_S):
            while (await ask(session, f"{decode}/server_info"))["running"] < 3:
                await asyncio.sleep(0.01)
        assert await aborted(session, fleet.url, rid="first") == 1
        answers = [await asyncio.wait_for(asked[0], WITHIN_S)]
        assert not asked[1].done() and not asked[2].done()
        assert await aborted(session, fleet.url, abort_all=True) == 2
        answers += [await asyncio.wait_for(other, WITHIN_S) for other in asked[1:]]
        for status, body in answers:
            assert status == 200
            events = body.decode().split("\n\n") if stream else []
            document = msgspec.json.decode(events[-3].removeprefix("data: ")) if stream else body
            assert document["meta_info"]["finish_reason"]["type"] == "abort"
            assert (
                document["meta_info"]["completion_tokens"]
                == len(document["output_ids"])
                < LONG["max_new_tokens"]
            )
        assert await all_home(session, prefill, decode)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_http2_preface_prints_nothing(fleet: Fleet) -> None:
    for child in fleet.children:
        before = list(child.last_lines)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(child.url.rsplit(":", 1)[1])
        )
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert b" 400 " in await asyncio.wait_for(reader.read(), 20)
        writer.close()
        await writer.wait_closed()
        async with aiohttp.ClientSession() as session:  # whatever it had to say has been said
            assert (await ask(session, f"{child.url}/health"))["status"] == "ok"
        assert list(child.last_lines) == before


@pytest.mark.asyncio(loop_scope="module")
async def test_the_chat_example(fleet: Fleet) -> None:
    example = Path(__file__).parents[2] / "examples" / "chat.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(example),
        env={**os.environ, "KVFLOW_URL": fleet.url},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert out.strip()


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
