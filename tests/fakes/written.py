"""A prefill and a decode whose model writes a given text, with one token per byte."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvflow.serve.engine.model.grammars import Grammars
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.tools.answers import OutputFormats, formats_of
from tests.fakes.servers import Front
from tests.fakes.service import FakeService, Meeting, Role

# As templates of Qwen's family do it.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": N, "arguments": A}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinking %}<think>
{% endif %}{% endif %}"""
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<arg_key>", "</arg_key>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
)
END = "<|im_end|>"


def byte_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, for `SPECIAL`, and for two plain tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "<think>")])
    found = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    found.chat_template = template
    return found


def grammars_of(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, 300, frozenset({tokenizer.convert_tokens_to_ids(END)}))


class WritingService(FakeService):
    """Its model writes `answer`, whatever the prompt is, and ends with the token of `END`."""

    def __init__(self, role: str, meeting: Meeting, tokenizer: Any) -> None:
        super().__init__(role, meeting)
        self.limits = EngineLimits(8192, 300, 1, 8192, 4)
        self.card = msgspec.structs.replace(self.card, context_length=8192, vocab_size=300)
        self.answer = ""
        self._tokenizer = tokenizer

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        written = self._tokenizer.encode(self.answer + END, add_special_tokens=False)
        async with contextlib.aclosing(super().tokens(request)) as tokens:
            at = 0
            async for token in tokens:
                at += 1
                ends = "stop" if at == len(written) else token.finish_reason
                yield msgspec.structs.replace(
                    token, token_id=written[at - 1], finish_reason=ends, matched_stop=None
                )
                if ends == "stop":
                    return

    def prompt(self) -> str:
        """Return the text of the last prompt."""
        return str(self._tokenizer.decode(self.requests[-1].prompt))


class Written:
    """A router in front of a prefill and a decode that write the same text."""

    def __init__(self, front: Front, prefill: Role, decode: Role) -> None:
        self.front, self.prefill, self.decode = front, prefill, decode

    def writes(self, answer: str) -> None:
        for role in (self.prefill, self.decode):
            role.service.answer = answer  # type: ignore[attr-defined]

    def prompt(self) -> str:
        return self.decode.service.prompt()  # type: ignore[attr-defined, no-any-return]


@asynccontextmanager
async def writing(
    formats: OutputFormats | None = None, template: str = TEMPLATE, **more: Any
) -> AsyncIterator[Written]:
    """Yield a pair behind a router. Without `formats`, they fit the template."""
    tokenizer, meeting = byte_tokenizer(template), Meeting()
    grammars = grammars_of(tokenizer)
    options: Any = {
        "tokenizer": tokenizer,
        "formats": formats or formats_of("auto", "off", tokenizer),
        "grammars": grammars,
        **more,
    }
    with contextlib.closing(grammars):
        async with (
            Role(WritingService("prefill", meeting, tokenizer), **options) as prefill,
            Role(WritingService("decode", meeting, tokenizer), **options) as decode,
            Front([prefill], [decode], retry_timeout_s=0) as front,
        ):
            yield Written(front, prefill, decode)
