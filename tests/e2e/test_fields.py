"""The table of request fields against running servers: what works is seen in values, what is
refused is named, and what is harmless changes nothing. Chat and completions are asked by the
official client."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.http.fields import BODIES, HARMLESS, REFUSED, TABLE, WORKS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import all_home, running

pytestmark = pytest.mark.xdist_group("fields")  # one fleet for the module
in_one_loop = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = (
    "{{ lead }}{{ reasoning_effort }}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if enable_thinking is false %} at once{% endif %}"
)
PROMPTED = "{% if add_generation_prompt %} =>{{ tail }}{% endif %}"
PROMPT = DEMO_PROMPTS[0]
EOS = 2
PART = 170  # the first byte of a character of three
TOKENIZER: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
PATHS = {
    "c": "/v1/chat/completions",
    "t": "/v1/completions",
    "g": "/generate",
    "k": "/tokenize",
    "d": "/detokenize",
    "m": "/v1/messages",
    "e": "/v1/messages/count_tokens",
    "r": "/v1/responses",
}
CHAT = [{"role": "user", "content": PROMPT}]
OUTER = {"s": "g", "o": "t"}
LIMITS = {
    "c": "max_tokens",
    "t": "max_tokens",
    "s": "max_new_tokens",
    "m": "max_tokens",
    "r": "max_output_tokens",
}


class Service:
    """The fleet's router, asked for each kind of body in the same way: greedy, six tokens unless a
    field says else.
    """

    def __init__(
        self, fleet: Fleet, client: openai.AsyncOpenAI, session: aiohttp.ClientSession
    ) -> None:
        self.fleet, self.client, self.session = fleet, client, session

    async def ask(self, body: str, **fields: Any) -> Any:
        """The answer as a document.

        `s` and `o` put the fields inside /generate's and completions' own.
        """
        if body in ("c", "t", "o"):
            return await self._openai(body, fields)
        return await self.post(PATHS[OUTER.get(body, body)], self.document(body, fields))

    def document(self, body: str, fields: dict[str, Any]) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": 6}
        if body == "s":
            return {"text": PROMPT, "sampling_params": {**sampling, **fields}}
        base: dict[str, dict[str, Any]] = {
            "g": {"text": PROMPT, "sampling_params": sampling},
            "k": {"prompt": PROMPT},
            "d": {"tokens": [EOS, 300]},
            "m": {"messages": CHAT, "temperature": 0, "max_tokens": 6},
            "e": {"messages": CHAT},
            "r": {"input": PROMPT, "temperature": 0, "max_output_tokens": 6},
        }
        drop = {
            "g": "text" if "input_ids" in fields else "",
            "k": "prompt" if "messages" in fields else "",
        }.get(body)
        return {name: value for name, value in {**base[body], **fields}.items() if name != drop}

    async def _openai(self, body: str, fields: dict[str, Any]) -> Any:
        if body == "o":
            fields = {"stream": True, "stream_options": fields}
        named: dict[str, Any] = {
            "model": fields.pop("model", "kvflow-fields"),
            "temperature": 0,
            "max_tokens": 6,
        }
        named |= (
            {"messages": [{"role": "user", "content": PROMPT}]}
            if body == "c"
            else {"prompt": PROMPT}
        )
        if "max_completion_tokens" in fields:
            del named["max_tokens"]
        streamed = bool(fields.get("stream"))
        named |= {
            name: fields.pop(name)
            for name in list(fields)
            if name in {*named, "stream", "stream_options"}
        }
        create: Any = (
            self.client.chat.completions.create if body == "c" else self.client.completions.create
        )
        answer = await create(**named, extra_body=fields)
        return [chunk.to_dict() async for chunk in answer] if streamed else answer.to_dict()

    async def post(self, path: str, document: Any, url: str = "") -> Any:
        async with self.session.post(f"{url or self.fleet.url}{path}", json=document) as answer:
            raw = await answer.text()
            if answer.status != 200:
                raise AssertionError(f"{answer.status}: {raw}")
            return raw if document.get("stream") else json.loads(raw)


def text_of(answer: Any) -> str:
    """The text of the first choice of any answer."""
    if isinstance(answer, list) and "choices" in answer[0]:  # a stream
        return "".join(
            text_of({"choices": chunk["choices"]}) for chunk in answer if chunk["choices"]
        )
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(
            choice.get("text")
            or choice.get("message", choice.get("delta", {})).get("content")
            or ""
        )
    if "input_tokens" in answer:  # a count
        return str(answer["input_tokens"])
    blocks = answer.get("content") or answer.get("output")
    if isinstance(blocks, list):
        return "".join(str(block.get("text") or block["content"][0]["text"]) for block in blocks)
    return str(answer.get("text", answer.get("tokens")))


def count_of(answer: Any) -> int:
    if "usage" not in answer:
        return int(answer["meta_info"]["completion_tokens"])
    usage = answer["usage"]
    return int(
        usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
    )


def prompt_count(answer: Any) -> int:
    usage = answer.get("usage", answer)
    # Anthropic counts cached tokens apart from the others.
    cached = int(usage.get("cache_read_input_tokens", 0))
    names = ("prompt_tokens", "input_tokens", "count")
    return cached + next((int(usage[name]) for name in names if name in usage), 0)


def id_of(answer: Any) -> str:
    return str(answer["id"] if "id" in answer else answer["meta_info"]["id"])


def model_dir(path: Path) -> Path:
    """The demo model with a template that has variables,
    and a recommended sampling that is greedy.
    """
    shutil.copytree(
        DEMO_MODEL_DIR, path, ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__")
    )
    (path / "chat_template.jinja").write_text(TEMPLATE + PROMPTED)
    recommended = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**recommended, "top_k": 1}))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    path = model_dir(tmp_path_factory.mktemp("fields") / "model")
    async with (
        running(
            model_path=str(path),
            served_model_name="kvflow-fields",
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
        ) as fleet,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0) as client,
        aiohttp.ClientSession() as session,
    ):
        yield Service(fleet, client, session)
        assert await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)


Check = Callable[[Service, str, str], Awaitable[None]]
CHECKS: dict[tuple[str, str], Check] = {}


def of(*names: str) -> Callable[[Check], Check]:
    """The check of these fields, written "bodies:name"."""

    def register(check: Check) -> Check:
        for name in names:
            bodies, _, field = name.partition(":")
            CHECKS.update({(body, field): check for body in bodies})
        return check

    return register


@of("ctkdmer:model")
async def _model(on: Service, body: str, name: str) -> None:
    await on.ask(body, model="default")
    try:
        await on.ask(body, model="other")
    except (openai.NotFoundError, AssertionError) as error:
        assert "404" in str(error) and "'other' is not served here" in str(error)
    else:
        raise AssertionError("another model was served")


@of("ckme:messages", "t:prompt", "k:prompt", "g:text", "g:input_ids", "d:tokens", "r:input")
async def _prompts(on: Service, body: str, name: str) -> None:
    text = DEMO_PROMPTS[1]
    ids = TOKENIZER.encode(text)
    if body == "d":
        assert (await on.ask("d", tokens=ids))["text"] == TOKENIZER.decode(ids)
    elif name in ("messages", "input"):
        answer = await on.ask(body, **{name: [{"role": "user", "content": text}]})
        assert prompt_count(answer) == len(TOKENIZER.encode(text + " =>"))
    elif body == "k":
        assert (await on.ask("k", prompt=text))["tokens"] == ids
    else:
        other = {"prompt": ids} if body == "t" else {"input_ids": ids}
        given = {"prompt": text} if body == "t" else {"text": text}
        assert text_of(await on.ask(body, **given)) == text_of(await on.ask(body, **other))
        assert text_of(await on.ask(body, **given)) != text_of(await on.ask(body))


@of("g:sampling_params")
async def _lists_of_sampling(on: Service, body: str, name: str) -> None:
    sampling = [{"max_new_tokens": 1}, {"max_new_tokens": 3, "ignore_eos": True}]
    answers = await on.ask("g", text=[PROMPT, PROMPT], sampling_params=sampling)
    assert [count_of(answer) for answer in answers] == [1, 3]


@of("ctm:max_tokens", "c:max_completion_tokens", "s:max_new_tokens", "r:max_output_tokens")
async def _limits(on: Service, body: str, name: str) -> None:
    assert count_of(await on.ask(body, **{name: 3})) == 3


@of("cts:n")
async def _choices(on: Service, body: str, name: str) -> None:
    answer = await on.ask(body, n=3)
    assert len(answer if isinstance(answer, list) else answer["choices"]) == 3


HOT = {"temperature": 3.0, "top_k": -1}


@of("m:temperature", "m:top_p", "m:top_k", "r:temperature", "r:top_p")
async def _greedy_limits_of_the_model(on: Service, body: str, name: str) -> None:
    """Without a seed, an answer that is drawn may be any. The model's own top_k is 1."""
    greedy = text_of(await on.ask(body))
    hot: dict[str, Any] = {"temperature": 3.0, **({"top_k": -1} if body == "m" else {})}
    value = {"temperature": 0, "top_p": 1e-6, "top_k": 1}[name]
    assert text_of(await on.ask(body, **{**hot, name: value})) == greedy
    with pytest.raises(AssertionError, match=f"400.*{name}"):
        await on.ask(body, **{name: -5})


@of("cts:temperature", "cts:top_p", "cts:top_k", "cts:min_p")
async def _greedy_limits(on: Service, body: str, name: str) -> None:
    greedy = text_of(await on.ask(body))
    assert text_of(await on.ask(body, **HOT, seed=1)) != greedy
    value = {"temperature": 0, "top_p": 1e-6, "top_k": 1, "min_p": 1.0}[name]
    assert text_of(await on.ask(body, **{**HOT, name: value}, seed=1)) == greedy


@of("cts:seed", "s:sampling_seed")
async def _seeds(on: Service, body: str, name: str) -> None:
    texts = [text_of(await on.ask(body, **HOT, **{name: seed})) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


@of("cts:stop", "cts:no_stop_trim", "ct:include_stop_str_in_output")
async def _stop_strings(on: Service, body: str, name: str) -> None:
    whole = text_of(await on.ask(body))
    stop = whole[2:4]
    kept = name != "stop"
    answer = await on.ask(body, stop=[stop], **({name: True} if kept else {}))
    end = whole.index(stop) + (len(stop) if kept else 0)
    assert text_of(answer) == whole[:end]


@of("m:stop_sequences")
async def _stop_sequences(on: Service, body: str, name: str) -> None:
    whole = text_of(await on.ask(body))
    stop = whole[2:4]
    answer = await on.ask(body, stop_sequences=[stop])
    assert (text_of(answer), answer["stop_sequence"]) == (whole[: whole.index(stop)], stop)


TOOL = {"function": {"name": "weather"}, "type": "function"}
TOOLS = {
    "c": TOOL,
    "k": TOOL,
    "r": {"type": "function", "name": "weather"},
    **{body: {"name": "weather", "input_schema": {}} for body in "me"},
}


@of("ckmer:tools", "cmer:tool_choice", "cr:parallel_tool_calls")
async def _tools(on: Service, body: str, name: str) -> None:
    """The template gets them, unless no call is wanted. This model calls none of them."""
    given = {"tools": [TOOLS[body]], **({"messages": CHAT} if body == "k" else {})}
    without = {"messages": CHAT} if body == "k" else {}
    choice: Any = {"tools": "auto", "tool_choice": "none"}.get(name, "auto")
    asked = {"tool_choice": {"type": choice} if body in "me" else choice} if body != "k" else {}
    more = {name: False} if name == "parallel_tool_calls" else {}
    answer = await on.ask(body, **given, **asked, **more)
    shown = "" if name == "tool_choice" else "weather"
    assert prompt_count(answer) == len(TOKENIZER.encode(f"{PROMPT}{shown} =>"))
    assert prompt_count(await on.ask(body, **without)) == len(TOKENIZER.encode(f"{PROMPT} =>"))
    if name == "tool_choice" and body != "e":
        await _forced_call(on, body)
    wrong: Any = {"tools": [{"type": "browser"}], "tool_choice": "other", name: "other"}[name]
    with pytest.raises((openai.BadRequestError, AssertionError), match=f"400.*{name}"):
        await on.ask(body, **{**given, name: wrong})


async def _forced_call(on: Service, body: str) -> None:
    """The model, left alone, writes no JSON at all."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool: Any = {"type": "function", "name": "weather", "parameters": schema}
    choice: Any = "required"
    if body == "c":
        tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    elif body == "m":
        tool, choice = {"name": "weather", "input_schema": schema}, {"type": "any"}
    answer = await on.ask(body, tools=[tool], tool_choice=choice, **{LIMITS[body]: 600})
    if body == "c":
        message = answer["choices"][0]["message"]
        found = [call["function"] for call in message["tool_calls"]]
    else:
        found = answer["content" if body == "m" else "output"]
    assert found
    for call in found:
        arguments = call.get("arguments", "{}")
        assert (call["name"], arguments.strip("{} \r\n\t"), call.get("input", {})) == (
            ("weather", "", {})
        )


@of("me:system", "r:instructions")
async def _system(on: Service, body: str, name: str) -> None:
    answer = await on.ask(body, **{name: "first "})
    assert prompt_count(answer) == len(TOKENIZER.encode(f"first {PROMPT} =>"))


FORMAT = {"format": {"type": "json_schema", "name": "a", "schema": {"const": "so"}}}


@of("me:output_config", "r:text")
async def _formats(on: Service, body: str, name: str) -> None:
    if body == "e":
        answer = await on.ask(body, output_config={"effort": "low"})
        assert prompt_count(answer) == len(TOKENIZER.encode(f"low{PROMPT} =>"))
        return
    answer = await on.ask(body, **{name: FORMAT, LIMITS[body]: 100})
    assert json.loads(text_of(answer)) == "so"
    with pytest.raises(AssertionError, match=f"400.*{name}"):
        await on.ask(body, **{name: {"format": {"type": "xml"}}})


@of("me:thinking", "r:reasoning", "r:metadata")
async def _options(on: Service, body: str, name: str) -> None:
    if name == "metadata":
        assert (await on.ask(body, metadata={"a": "b"}))["metadata"] == {"a": "b"}
        return
    value = {"thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}}[name]
    prompt = f"{PROMPT} at once =>" if name == "thinking" else f"low{PROMPT} =>"
    assert prompt_count(await on.ask(body, **{name: value})) == len(TOKENIZER.encode(prompt))


@of("c:include_reasoning", "c:separate_reasoning", "c:stream_reasoning")
async def _reasoning(on: Service, body: str, name: str) -> None:
    """The prompt opens the reasoning, and the answer does not close it."""
    opened = {"chat_template_kwargs": {"tail": "<think>"}}
    message = (await on.ask(body, **opened))["choices"][0]["message"]
    assert message["content"] == "" and len(message["reasoning_content"].split()) > 1
    if name == "stream_reasoning":
        chunks = await on.ask(body, **opened, stream=True, stream_reasoning=False)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        pieces = [one["reasoning_content"] for one in deltas if "reasoning_content" in one]
        assert pieces == [message["reasoning_content"]]
        return
    changed = (await on.ask(body, **opened, **{name: False}))["choices"][0]["message"]
    assert "reasoning_content" not in changed
    content = "" if name == "include_reasoning" else message["reasoning_content"]
    assert changed["content"].strip() == content.strip()


@of("cts:stop_token_ids", "cts:ignore_eos", "cts:logit_bias", "cts:skip_special_tokens")
async def _forced_tokens(on: Service, body: str, name: str) -> None:
    forced = {"logit_bias": {str(EOS): 100}}
    ended = await on.ask(body, **forced)
    assert (text_of(ended), count_of(ended)) == ("", 1)
    endless = await on.ask(body, **forced, ignore_eos=True)
    assert (text_of(endless), count_of(endless)) == ("", 6)
    shown = await on.ask(body, **forced, ignore_eos=True, skip_special_tokens=False)
    assert text_of(shown) == "</s>" * 6
    stopped = await on.ask(body, logit_bias={"300": 100}, stop_token_ids=[300])
    assert count_of(stopped) == 1


SCHEMA = {"enum": ["a b", 42]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
JSON = r'"a b"|42'
GRAMMARS: dict[str, list[tuple[Any, str]]] = {
    "response_format": [
        ({"type": "json_object"}, r"(?s)\{.*"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, JSON),
        ({"type": "structural_tag", **TAG}, "(?s).*"),
    ],
    "structured_outputs": [
        ({"json": SCHEMA}, JSON),
        ({"json": json.dumps(SCHEMA)}, JSON),
        ({"json_object": True}, r"(?s)\{.*"),
        ({"regex": "[xy]{3}"}, "[xy]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "ab" | "cd"'}, "ab|cd"),
        ({"grammar": 'start: "ab" | "cd"'}, "ab|cd"),
        ({"structural_tag": json.dumps(TAG)}, "(?s).*"),
    ],
    "guided_json": [(SCHEMA, JSON), (json.dumps(SCHEMA), JSON)],
    "guided_regex": [("[xy]{3}", "[xy]{3}")],
    "guided_choice": [(["yes", "no"], "yes|no")],
    "guided_grammar": [('root ::= "ab" | "cd"', "ab|cd")],
    "json_schema": [(SCHEMA, JSON), (json.dumps(SCHEMA), JSON)],
    "regex": [("[xy]{3}", "[xy]{3}")],
    "ebnf": [('root ::= "ab" | "cd"', "ab|cd")],
    "structural_tag": [(json.dumps(TAG), "(?s).*")],
}
OF_OPENAI = "response_format structured_outputs guided_json guided_regex guided_choice"


@of(
    *(f"ct:{name}" for name in (*OF_OPENAI.split(), "guided_grammar")),
    *(f"cts:{name}" for name in ("json_schema", "regex", "ebnf", "structural_tag")),
)
async def _grammars(on: Service, body: str, name: str) -> None:
    for value, pattern in GRAMMARS[name]:
        answer = await on.ask(body, **{name: value})
        assert re.fullmatch(pattern, text_of(answer)), (value, answer)
    where = "sampling_params." if body == "s" else ""
    other = "ebnf" if name == "regex" else "regex"
    for wrong, why in (
        ({name: GRAMMARS[name][0][0], other: "a"}, f"{where}{other}.* restrict the answer"),
        ({other: "(", "ignore_eos": True}, "ignore_eos: an answer that matches a grammar"),
        ({other: "("}, f"{other} cannot be "),
    ):
        with pytest.raises((openai.BadRequestError, AssertionError), match=f"400.*{why}"):
            await on.ask(body, **wrong)


@of("ct:min_tokens", "s:min_new_tokens")
async def _at_least(on: Service, body: str, name: str) -> None:
    assert count_of(await on.ask(body, logit_bias={str(EOS): 100}, **{name: 3})) == 4


@of("ct:bad_words")
async def _bad_words(on: Service, body: str, name: str) -> None:
    word = text_of(await on.ask(body)).split()[0]
    assert word not in text_of(await on.ask(body, bad_words=[word]))


@of("cts:frequency_penalty", "cts:presence_penalty")
async def _penalties(on: Service, body: str, name: str) -> None:
    """Each token is the best of the model's twenty best, less the penalty of what has been
    generated.
    """
    penalty = 2.0
    seen: Counter[Any] = Counter()
    for chosen, top in await _scored(on, body, {name: penalty, LIMITS[body]: 16}):
        times = {
            token: seen[token] if name == "frequency_penalty" else min(seen[token], 1)
            for token in top
        }
        assert chosen == max(top, key=lambda token: top[token] - penalty * times[token])
        seen[chosen] += 1
    assert len(seen) > 4


async def _scored(
    on: Service, body: str, fields: dict[str, Any]
) -> list[tuple[Any, dict[Any, float]]]:
    """Each generated token, and the model's twenty best with their log-probabilities."""
    if body == "s":
        document = {**on.document("s", fields), "return_logprob": True, "top_logprobs_num": 20}
        meta = (await on.post("/generate", document))["meta_info"]
        top = [
            {token: logprob for logprob, token, _ in best} for best in meta["output_top_logprobs"]
        ]
        return [
            (one[1], best) for one, best in zip(meta["output_token_logprobs"], top, strict=True)
        ]
    wanted: dict[str, Any] = (
        {"logprobs": True, "top_logprobs": 20} if body == "c" else {"logprobs": 20}
    )
    logprobs = (await on.ask(body, **fields, **wanted))["choices"][0]["logprobs"]
    if body == "t":
        return list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    return [
        (
            tuple(one["bytes"]),
            {tuple(best["bytes"]): best["logprob"] for best in one["top_logprobs"]},
        )
        for one in logprobs["content"]
    ]


@of("cts:repetition_penalty")
async def _repetition(on: Service, body: str, name: str) -> None:
    """As transformers has it, over the prompt too."""
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    prompt = PROMPT + " =>" if body == "c" else PROMPT
    ids = torch.tensor([TOKENIZER.encode(prompt)])
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "pad_token_id": 0,
        "repetition_penalty": 1.5,
    }
    stock = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    answer = await on.ask(body, repetition_penalty=1.5, **{LIMITS[body]: 16})
    assert text_of(answer) == TOKENIZER.decode(stock, skip_special_tokens=True)


@of("t:echo")
async def _echo(on: Service, body: str, name: str) -> None:
    assert text_of(await on.ask("t", echo=True)) == PROMPT + text_of(await on.ask("t"))


@of(
    "ct:logprobs",
    "c:top_logprobs",
    "g:return_logprob",
    "g:top_logprobs_num",
    "g:return_text_in_logprobs",
)
async def _logprobs(on: Service, body: str, name: str) -> None:
    if body == "g":
        answer = await on.ask(
            "g", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True
        )
        chosen = answer["meta_info"]["output_token_logprobs"]
        top = answer["meta_info"]["output_top_logprobs"]
        assert [one[1] for one in chosen] == answer["output_ids"]
        assert "".join(one[2] for one in chosen) == answer["text"]
        assert [pair[0] for pair in top] == chosen  # greedy
    elif body == "c":
        answer = await on.ask(
            "c", logprobs=True, top_logprobs=2, logit_bias={str(PART): 100}, max_tokens=1
        )
        (one,) = answer["choices"][0]["logprobs"]["content"]
        assert (one["token"], len(one["bytes"]), len(one["top_logprobs"])) == ("\ufffd", 1, 2)
    else:
        answer = await on.ask("t", logprobs=2)
        logprobs = answer["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == text_of(answer)
        assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]


@of("g:logprob_start_len", "g:token_ids_logprob")
async def _prompt_logprobs(on: Service, body: str, name: str) -> None:
    """Those of the prompt are those of a prompt without its end, as it goes on."""
    ids = TOKENIZER.encode(PROMPT)
    answer = await on.ask("g", return_logprob=True, logprob_start_len=0)
    scores = answer["meta_info"]["input_token_logprobs"]
    assert [one[1] for one in scores] == ids
    for cut in (1, len(ids) // 2):
        forced = {"temperature": 0, "max_new_tokens": 1, "logit_bias": {str(ids[cut]): 100}}
        one = await on.ask("g", input_ids=ids[:cut], return_logprob=True, sampling_params=forced)
        assert one["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(
            scores[cut][0], abs=1e-3
        )


@of("mr:stream")
async def _named_events(on: Service, body: str, name: str) -> None:
    events = await on.ask(body, stream=True)
    lines = [line.removeprefix("data: ") for line in events.split("\n") if line.startswith("data")]
    deltas = [json.loads(line).get("delta") for line in lines]
    pieces = [one.get("text", "") if isinstance(one, dict) else one for one in deltas if one]
    assert "".join(pieces) == text_of(await on.ask(body))


@of("ctg:stream", "ct:stream_options", "o:include_usage", "o:continuous_usage_stats")
async def _streams(on: Service, body: str, name: str) -> None:
    if body == "g":
        lines = (await on.ask("g", stream=True)).split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert json.loads(events[-2])["text"] == text_of(await on.ask("g"))
        return
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (
        await on.ask("o", **options)
        if body == "o"
        else await on.ask(body, stream=True, stream_options=options)
    )
    assert text_of(chunks) == text_of(await on.ask("t" if body == "o" else body))
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]][-6:] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@of(
    "ck:chat_template_kwargs",
    "ck:reasoning_effort",
    "k:add_generation_prompt",
    "tk:add_special_tokens",
)
async def _templates(on: Service, body: str, name: str) -> None:
    if name == "add_special_tokens":  # this model's tokenizer adds none
        assert prompt_count(await on.ask(body, add_special_tokens=False)) == len(
            TOKENIZER.encode(PROMPT)
        )
        return
    value = {"chat_template_kwargs": {"lead": "first "}, "reasoning_effort": "low"}.get(name, False)
    lead = {"chat_template_kwargs": "first ", "reasoning_effort": "low"}.get(name, "")
    end = "" if name == "add_generation_prompt" else " =>"
    messages = [{"role": "user", "content": PROMPT}]
    answer = await on.ask(body, messages=messages, **{name: value})
    assert prompt_count(answer) == len(TOKENIZER.encode(lead + PROMPT + end))


@of("k:return_token_strs", "d:skip_special_tokens")
async def _pieces(on: Service, body: str, name: str) -> None:
    if body == "k":
        assert "".join((await on.ask("k", return_token_strs=True))["token_strs"]) == PROMPT
    else:
        for skip in (True, False):
            answer = await on.ask("d", skip_special_tokens=skip)
            assert answer["text"] == TOKENIZER.decode([EOS, 300], skip_special_tokens=skip)


@of("ctg:rid", "ct:request_id")
async def _ids(on: Service, body: str, name: str) -> None:
    prefix = {"c": "chatcmpl-", "t": "cmpl-"}[body] if name == "request_id" else ""
    assert id_of(await on.ask(body, **{name: "mine"})) == prefix + "mine"


@of("g:return_hidden_states")
async def _hidden_states(on: Service, body: str, name: str) -> None:
    """Of the last token: what transformers' body says of the token that it was chosen from, here
    and at the prompt.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    for count in (0, 1, 6):
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answer = await on.ask("g", sampling_params=sampling, return_hidden_states="last")
        ids = TOKENIZER.encode(PROMPT) + answer["output_ids"][: max(0, count - 1)]
        want = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(
            torch.tensor(answer["meta_info"]["hidden_states"]), want, atol=1e-3, rtol=1e-3
        )
    assert "hidden_states" not in (await on.ask("g", return_hidden_states=False))["meta_info"]


@of("ctgmr:priority")
async def _priority(on: Service, body: str, name: str) -> None:
    """It decides who waits, never what is generated; through the router,
    both legs know its limits.
    """
    for value in (-5, 5):
        assert text_of(await on.ask(body, priority=value)) == text_of(await on.ask(body))
    with pytest.raises((openai.BadRequestError, AssertionError), match=r"400.*`priority`"):
        await on.ask(body, priority=1 << 63)


@of("ctgmr:cache_salt", "ctgmr:extra_key")
async def _salts(on: Service, body: str, name: str) -> None:
    """They say what may be shared (tests/serve/http/test_prefixes.py), never what is generated;
    both legs check them.
    """
    assert text_of(await on.ask(body, **{name: "mine"})) == text_of(await on.ask(body))
    with pytest.raises(
        (openai.BadRequestError, AssertionError), match=rf"400.*{name}: 513 characters, limit 512"
    ):
        await on.ask(body, **{name: "a" * 513})


@of("ctgmr:bootstrap_host", "ctgmr:bootstrap_port", "ctgmr:bootstrap_room", "ctgmr:compute_prompt")
async def _meeting(on: Service, body: str, name: str) -> None:
    """The router's own are the ones that count."""
    lie = {
        "bootstrap_host": "nowhere.invalid",
        "bootstrap_port": 1,
        "bootstrap_room": 1,
        "compute_prompt": True,
    }[name]
    assert text_of(await on.ask(body, **{name: lie})) == text_of(await on.ask(body))


@of("ctgmr:routed_dp_rank", "ctgmr:data_parallel_rank", "ctgmr:disagg_prefill_dp_rank")
async def _groups(on: Service, body: str, name: str) -> None:
    """Both roles of a fleet are one group each;
    either leg's word may be the one that comes first.
    """
    assert text_of(await on.ask(body, **{name: 0})) == text_of(await on.ask(body))
    with pytest.raises(
        (openai.BadRequestError, AssertionError), match=rf"400.*{name}:? '?1'? is .*0\.\.0"
    ):
        await on.ask(body, **{name: 1})


def test_every_field_that_works_has_a_check() -> None:
    works = {(body, field.name) for field in TABLE[WORKS] for body in field.bodies}
    assert set(CHECKS) == works


@in_one_loop
@pytest.mark.parametrize(("body", "name"), CHECKS, ids=str)
async def test_what_works_is_seen_in_values(service: Service, body: str, name: str) -> None:
    await CHECKS[body, name](service, body, name)


@in_one_loop
async def test_the_models_recommended_sampling_is_the_default(service: Service) -> None:
    """top_k 1 in generation_config.json: hot as it may be, the answer is greedy; /generate does not
    read it.
    """
    for body, same in (("c", True), ("t", True), ("s", False)):
        answer = await service.ask(body, temperature=3.0, seed=1)
        assert (text_of(answer) == text_of(await service.ask(body))) == same, body


@in_one_loop
async def test_what_is_refused_is_named(service: Service) -> None:
    for field in TABLE[REFUSED]:
        for body in field.bodies:
            where = {"s": "sampling_params.", "o": "stream_options."}.get(body, "") + field.name
            try:
                await service.ask(body, **{field.name: field.example})
            except (openai.BadRequestError, AssertionError) as error:
                assert f"{where} is not supported" in str(error), (body, field.name)
            else:
                raise AssertionError(f"{where} was accepted")
            accepted = next((value for value in field.accepts if value is not None), None)
            await service.ask(
                body, **{field.name: accepted, **({LIMITS[body]: 1} if body in LIMITS else {})}
            )


@in_one_loop
async def test_what_is_harmless_changes_nothing(service: Service) -> None:
    plain = {body: text_of(await service.ask(body)) for body in BODIES}
    for field in TABLE[HARMLESS]:
        for body in field.bodies:
            assert text_of(await service.ask(body, **{field.name: field.example})) == plain[body], (
                body,
                field.name,
            )
