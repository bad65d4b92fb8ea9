"""A table of every request field of OpenAI, SGLang or vLLM, with the treatment by this server.

The server refuses bodies by this table: a field that would change the answer, is not implemented
and is not at its default is a 400 that names it, since the answer without it would be wrong.
FIELDS.md beside this file is printed from the table:

    python -m kvflow.serve.http.fields kvflow/serve/http/FIELDS.md

Fields that are not in the table are ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

WORKS, REFUSED, HARMLESS = "works", "refused", "harmless"

BODIES = {
    "c": "chat completions",
    "t": "completions",
    "g": "/generate",
    "s": "sampling_params of /generate",
    "o": "stream_options",
    "k": "/tokenize",
    "d": "/detokenize",
}
SOURCES = {"O": "OpenAI", "S": "SGLang", "V": "vLLM", "K": "kvflow"}
UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})


class Field(NamedTuple):
    """One field. `bodies` and `known_to` are letters of `BODIES` and `SOURCES`.

    `accepts` are the values at which a refused field has no effect; `example` is another value, for
    tests.
    """

    name: str
    bodies: str
    known_to: str
    note: str = ""
    accepts: tuple[Any, ...] = UNSET
    example: Any = True

    def changes_nothing(self, value: Any) -> bool:
        """Return True for a value at which a refused field has no effect."""
        # In Python False == 0, but a field that accepts one need not accept the other.
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in self.accepts
        )


_WORKS = (
    Field("model", "ctkd", "OSV", "the served name, or `default`; another name is a 404"),
    Field("messages", "ck", "OSV", "text only; rendered by the model's chat template"),
    Field("prompt", "t", "OSV", "a text, token ids, or a list of either"),
    Field("prompt", "k", "SV", "a text, or a list of texts"),
    Field("tokens", "d", "SV", "token ids, or a list of such lists"),
    Field("text", "g", "S", "a text or a list of texts"),
    Field("input_ids", "g", "S", "token ids, or a list of such lists"),
    Field(
        "sampling_params",
        "g",
        "S",
        "an object; with several prompts also a list, whose `n` are the same",
    ),
    Field("max_tokens", "ct", "OSV", "0, for completions alone, is the prompt alone"),
    Field("max_completion_tokens", "c", "OSV", "wins over `max_tokens`"),
    Field("max_new_tokens", "s", "S", "0 is the prompt alone"),
    Field("n", "cts", "OSV", "each choice is a room of its own"),
    Field("temperature", "cts", "OSV", "0 is greedy"),
    Field("top_p", "cts", "OSV"),
    Field("top_k", "cts", "SV", "0 and -1 are off"),
    Field("cache_salt", "ctg", "SV", "only prompts with the same one share cached pages"),
    Field("extra_key", "ctg", "S", "as `cache_salt`, beside it"),
    Field(
        "seed",
        "cts",
        "OSVK",
        "choice i draws with seed + i; in sampling_params another name of `sampling_seed`",
    ),
    Field("sampling_seed", "s", "S"),
    Field("stop", "cts", "OSV", "at most 64 strings, 2048 characters in all"),
    Field("stop_token_ids", "cts", "SV"),
    Field("no_stop_trim", "cts", "S", "the text ends with what ended it"),
    Field("include_stop_str_in_output", "ct", "V", "as `no_stop_trim`"),
    Field("skip_special_tokens", "ctsd", "SV"),
    Field("ignore_eos", "cts", "SV"),
    Field("frequency_penalty", "cts", "OSV", "-2 to 2, counted over generated tokens"),
    Field("presence_penalty", "cts", "OSV", "-2 to 2, over generated tokens"),
    Field(
        "repetition_penalty",
        "cts",
        "SV",
        "a factor, for tokens of the prompt too, as in transformers",
    ),
    Field("min_p", "cts", "SV", "after `top_k` and `top_p`"),
    Field("min_tokens", "ct", "SV", "before it no token and no stop string ends the answer"),
    Field("min_new_tokens", "s", "S", "`min_tokens` of the other routes"),
    Field("logit_bias", "cts", "OSV", "-100 to 100 by token id, at most 4096"),
    Field("bad_words", "ct", "V", "at most 1024 words, 8192 tokens in all"),
    Field("echo", "t", "OSV", "with `logprobs` those of the prompt too"),
    Field("logprobs", "c", "OSV"),
    Field("logprobs", "t", "OSV", "at most 20"),
    Field("top_logprobs", "c", "OSV", "at most 20"),
    Field(
        "return_logprob",
        "g",
        "S",
        "of generated tokens, and of the prompt from `logprob_start_len` on",
    ),
    Field("top_logprobs_num", "g", "S", "at most 20"),
    Field(
        "logprob_start_len",
        "g",
        "S",
        "-1: none of the prompt; a token is 4 bytes, and 8 per top one: at most 983,040, of all "
        "completions 16 MiB",
    ),
    Field("token_ids_logprob", "g", "S", "at most 128"),
    Field("stream", "ctg", "OSV", "/generate repeats the text so far, as SGLang does"),
    Field("stream_options", "ct", "OSV"),
    Field("include_usage", "o", "OSV"),
    Field("continuous_usage_stats", "o", "SV", "of each choice alone, as in SGLang and vLLM"),
    Field("chat_template_kwargs", "ck", "SV", "variables of the template"),
    Field("reasoning_effort", "ck", "OSV", "a variable of the template, and nothing else"),
    Field("add_special_tokens", "tk", "SV", "of plain prompts; templates write their own"),
    Field("add_generation_prompt", "k", "SV"),
    Field("return_token_strs", "k", "V"),
    Field("rid", "ctg", "S", "the id of the answer, at most 512 characters"),
    Field(
        "request_id",
        "ct",
        "V",
        "the id of the answer, behind `chatcmpl-` or `cmpl-`, at most 512 characters",
    ),
    Field("return_text_in_logprobs", "g", "S"),
    Field(
        "return_hidden_states",
        "g",
        "S",
        '`"last"` alone: the last hidden states at the last token, in the last event of a stream; '
        "true is a 400; "
        "sglang_router 0.3.2 refuses `last` itself",
    ),
    Field(
        "priority",
        "ctg",
        "SV",
        "0 unless given; of requests that wait the largest starts first, as in SGLang; the "
        "smallest, as in vLLM, with `--schedule-low-priority-values-first`; always on, no flag "
        "enables it",
    ),
    Field("bootstrap_host", "ctg", "S", "set by the router"),
    Field("bootstrap_port", "ctg", "S", "set by the router"),
    Field("bootstrap_room", "ctg", "S", "set by the router"),
    Field("routed_dp_rank", "ctg", "S", "the group of this worker, which has one: 0"),
    Field("data_parallel_rank", "ctg", "S", "as `routed_dp_rank`"),
    Field(
        "disagg_prefill_dp_rank",
        "ctg",
        "S",
        "at decode the group of prefill's ranks that serves the room, `bootstrap_room % dp_size` "
        "unless given; at prefill its own, 0",
    ),
)

_NO_TOOLS = "no tool calls"
_NO_GRAMMAR = "no structured output"
_NO_MEDIA = "text only"
_NO_LORA = "no adapters"
_REFUSED = (
    Field("min_tokens", "s", "V", "named `min_new_tokens` here", example=4),
    Field("min_new_tokens", "ct", "S", "named `min_tokens` here", example=4),
    Field("bad_words", "s", "V", example=["cat"]),
    Field("allowed_token_ids", "ct", "V", example=[5]),
    Field("prompt_logprobs", "ct", "V", accepts=(None,), example=0),
    Field("logprob_token_ids", "ct", "V", example=[5]),
    Field("chat_template", "ck", "V", "the model's own template is used", example="{{ messages }}"),
    Field("continue_final_message", "ck", "SV"),
    Field("add_generation_prompt", "c", "V", accepts=(None, True), example=False),
    Field("add_special_tokens", "c", "V"),
    Field("echo", "c", "V"),
    Field("documents", "c", "V", example=[{"text": "a"}]),
    Field("thinking", "c", "S", example={"type": "adaptive"}),
    Field("task", "c", "S", example="title"),
    Field("input_ids", "c", "S", "send /generate", example=[5]),
    Field("verbosity", "c", "O", accepts=(None, "medium"), example="low"),
    Field("truncate_prompt_tokens", "ct", "V", accepts=(None,), example=4),
    Field("suffix", "t", "OSV", example="a"),
    Field("best_of", "t", "OS", "send `n`", (None, 1), 2),
    Field("use_beam_search", "ct", "V"),
    Field("beam_width", "s", "S", accepts=(None, 1), example=2),
    Field("repetition_detection", "ct", "V", example={"max_pattern_size": 4}),
    Field("thinking_token_budget", "ct", "V", accepts=(None, -1), example=4),
    Field("max_thinking_tokens", "g", "S", accepts=(None,), example=4),
    Field("stop_regex", "cts", "S", example="a+"),
    Field(
        "custom_logit_processor", "ctg", "S", "code does not come with a request", example="code"
    ),
    Field("logits_processors", "ct", "V", "code does not come with a request", example=["code"]),
    Field("custom_params", "cts", "S", example={"a": 1}),
    Field("vllm_xargs", "ct", "V", example={"a": 1}),
    Field("watermark", "ctgs", "S", example={"enabled": True}),
    Field("watermarking", "ct", "V"),
    Field("tools", "ck", "OSV", _NO_TOOLS, example=[{"type": "function"}]),
    Field("tool_choice", "ck", "OSV", _NO_TOOLS, (None, "", "auto", "none"), "required"),
    Field("functions", "c", "O", _NO_TOOLS, example=[{"name": "a"}]),
    Field("function_call", "c", "O", _NO_TOOLS, (None, "", "auto", "none"), {"name": "a"}),
    Field("web_search_options", "c", "O", _NO_TOOLS, (None,), {}),
    Field(
        "response_format",
        "ct",
        "OSV",
        _NO_GRAMMAR,
        (None, {}, {"type": "text"}),
        {"type": "json_object"},
    ),
    Field("structured_outputs", "ct", "V", _NO_GRAMMAR, example={"choice": ["a"]}),
    Field("json_schema", "cts", "S", _NO_GRAMMAR, example="{}"),
    Field("regex", "cts", "S", _NO_GRAMMAR, example="a+"),
    Field("ebnf", "cts", "S", _NO_GRAMMAR, example="root ::= x"),
    Field("structural_tag", "cts", "S", _NO_GRAMMAR, example="{}"),
    Field("guided_json", "ct", "V", _NO_GRAMMAR, example={"type": "object"}),
    Field("guided_regex", "ct", "V", _NO_GRAMMAR, example="a+"),
    Field("guided_choice", "ct", "V", _NO_GRAMMAR, example=["a"]),
    Field("guided_grammar", "ct", "V", _NO_GRAMMAR, example="root ::= x"),
    Field("guided_whitespace_pattern", "ct", "V", _NO_GRAMMAR, example=" "),
    Field("audio", "c", "O", _NO_MEDIA, example={"voice": "a"}),
    Field("modalities", "c", "O", _NO_MEDIA, (None, [], ["text"]), ["text", "audio"]),
    Field("image_data", "g", "S", _NO_MEDIA, example="https://example.com/a.png"),
    Field("video_data", "g", "S", _NO_MEDIA, example="https://example.com/a.mp4"),
    Field("audio_data", "g", "S", _NO_MEDIA, example="https://example.com/a.wav"),
    Field("input_embeds", "g", "S", example=[[0.5]]),
    Field("prompt_embeds", "t", "V", example="AAAA"),
    Field("positional_embed_overrides", "g", "S", example=[1]),
    Field("lora_path", "ctg", "S", _NO_LORA, example="a"),
    Field("lora_id", "g", "S", _NO_LORA, example="a"),
    Field("session_params", "ctg", "S", "no sessions that continue", example={"id": "a"}),
    Field("moderation", "c", "O", example={"model": "a"}),
    Field("background", "g", "S"),
    Field(
        "kv_transfer_params",
        "ct",
        "V",
        "rooms are named by `bootstrap_*`",
        example={"do_remote_decode": True},
    ),
    Field("ec_transfer_params", "ct", "V", example={"a": 1}),
    Field("return_hidden_states", "ct", "S"),
    Field("return_routed_experts", "ctg", "S"),
    Field("return_indexer_topk", "g", "S"),
    Field("return_sampling_mask", "cg", "S"),
    Field("sampling_logprobs_mode", "cg", "S", example="support"),
    Field("return_flat_raw_top_logprobs", "g", "S"),
    Field("return_flat_raw_output_top_logprobs", "cg", "S"),
    Field("return_bytes", "g", "S"),
    Field("return_entropy", "g", "S"),
    Field("return_prompt_token_ids", "cg", "S"),
    Field("return_token_ids", "ct", "SV"),
    Field("return_tokens_as_token_ids", "ct", "V"),
    Field("return_meta_info", "c", "S"),
    Field("return_prompt_text", "c", "V"),
    Field("return_input_ids_in_sglext", "c", "S"),
    Field("return_output_ids_in_sglext", "c", "S"),
    Field("return_cached_tokens_details", "ct", "S"),
    Field("return_spec_tokens_details", "ct", "S"),
)

_FOR_BEAMS = "only beam search reads it"
_FOR_MEDIA = "only media read it"
_FOR_EXPERTS = "only `return_routed_experts` reads it"
_FOR_REASONING = "reasoning is left in the text"
_FOR_RENDERING = "vLLM's generation ignores it too"
_PLACEMENT = "says where to run"
_HARMLESS = (
    Field("user", "ct", "OSV", example="ann"),
    Field("safety_identifier", "c", "O", example="ann"),
    Field("metadata", "c", "O", example={"a": "b"}),
    Field("store", "c", "O", "nothing is stored"),
    Field("service_tier", "c", "O", example="flex"),
    Field("parallel_tool_calls", "c", "OSV", "only tools read it", example=False),
    Field("prediction", "c", "O", "only saves time", example={"type": "content", "content": "a"}),
    Field("prompt_cache_key", "c", "O", "prompts are cached by their tokens", example="a"),
    Field("prompt_cache_options", "c", "O", "`--prefix-cache` says what is cached", example={}),
    Field(
        "prompt_cache_retention", "c", "O", "`--prefix-cache` says what is cached", example="24h"
    ),
    Field("kv_hints", "g", "S", "`--prefix-cache` says what is cached", example={}),
    Field("include_obfuscation", "o", "O", "nothing is added to events"),
    Field("stream_interval", "cts", "SV", "every token is an event", example=2),
    Field("spaces_between_special_tokens", "cts", "SV", "fast tokenizers add none", example=False),
    Field("length_penalty", "ct", "V", _FOR_BEAMS, example=2.0),
    Field("early_stopping", "ct", "V", _FOR_BEAMS),
    Field(
        "guided_decoding_backend", "ct", "V", "only guided decoding reads it", example="xgrammar"
    ),
    Field("truncation_side", "ct", "V", "only `truncate_prompt_tokens` reads it", example="left"),
    Field("separate_reasoning", "c", "S", _FOR_REASONING),
    Field("stream_reasoning", "c", "S", _FOR_REASONING),
    Field("include_reasoning", "c", "V", _FOR_REASONING, example=False),
    Field("require_reasoning", "g", "S", _FOR_REASONING),
    Field("modalities", "g", "S", _FOR_MEDIA, example=["image"]),
    Field("mm_processor_kwargs", "ctg", "SV", _FOR_MEDIA, example={"a": 1}),
    Field("media_io_kwargs", "c", "V", _FOR_MEDIA, example={"image": {}}),
    Field("images_config", "ctg", "S", _FOR_MEDIA, example={"a": 1}),
    Field("video_config", "cg", "S", _FOR_MEDIA, example={"a": 1}),
    Field("use_audio_in_video", "cg", "S", _FOR_MEDIA),
    Field("max_dynamic_patch", "cg", "S", _FOR_MEDIA, example=2),
    Field("min_dynamic_patch", "cg", "S", _FOR_MEDIA, example=2),
    Field("image_max_dynamic_patch", "g", "S", _FOR_MEDIA, example=2),
    Field("video_max_dynamic_patch", "g", "S", _FOR_MEDIA, example=2),
    Field("mm_hashes", "g", "S", _FOR_MEDIA, example=["a"]),
    Field("mm_content_hashes", "g", "S", _FOR_MEDIA, example=["a"]),
    Field("need_wait_for_mm_inputs", "g", "S", _FOR_MEDIA),
    Field("num_items_assigned", "g", "S", _FOR_MEDIA, example={}),
    Field("encoder_urls", "g", "S", _FOR_MEDIA, example=["http://127.0.0.1:9"]),
    Field("multi_item_delimiter_indices", "g", "S", "only scoring reads it", example=[1]),
    Field("token_indices_to_pool", "g", "S", "only embedding reads it", example=[1]),
    Field("return_flat_raw_top_logprobs_b64", "cg", "S", "only flat log-probabilities read it"),
    Field("routed_experts_start_len", "ctg", "S", _FOR_EXPERTS, example=1),
    Field("routed_experts_prompt_start", "ct", "V", _FOR_EXPERTS, example=1),
    Field("return_token_offsets", "ct", "V", _FOR_RENDERING),
    Field("return_mm_kwargs", "ct", "V", _FOR_RENDERING, example=False),
    Field("session_id", "ctg", "SV", _PLACEMENT, example="a"),
    Field("conversation_id", "g", "S", _PLACEMENT, example="a"),
    Field("routing_key", "g", "S", _PLACEMENT, example="a"),
    Field("decode_tp_size", "g", "S", _PLACEMENT, example=1),
    Field("bootstrap_pair_key", "g", "S", _PLACEMENT, example="a"),
    Field("http_worker_ipc", "g", "S", _PLACEMENT, example="a"),
    Field("custom_labels", "tg", "S", "for metrics", example={"a": "b"}),
    Field("log_metrics", "g", "S", "for metrics", example=False),
    Field("no_logs", "g", "S", "for logs"),
    Field("external_trace_header", "g", "S", "for traces", example={"traceparent": "a"}),
    Field("received_time", "g", "S", "for traces", example=1.5),
)

TABLE = {WORKS: _WORKS, REFUSED: _REFUSED, HARMLESS: _HARMLESS}


def names_of(standing: str, body: str) -> frozenset[str]:
    """Return the names of all fields of one standing in one body."""
    return frozenset(field.name for field in TABLE[standing] if body in field.bodies)


def refused_in(body: str) -> dict[str, Field]:
    """Return the refused fields of one body, by name."""
    return {field.name: field for field in _REFUSED if body in field.bodies}


_HEAD = (
    "# Request fields",
    "",
    (
        "What this server does with every field of OpenAI's chat completions and completions, of "
        "SGLang's /generate and"
    ),
    (
        "of the extensions of SGLang and vLLM. Printed by `python -m kvflow.serve.http.fields`; "
        "do not edit."
    ),
    "",
    (
        "A refused field is a 400 that names it, unless its value is one that changes nothing (its "
        "default). A harmless"
    ),
    (
        "field is accepted and changes nothing, whatever its value. Fields that are not listed are "
        "ignored."
    ),
)


def render() -> str:
    """Return the content of FIELDS.md."""
    lines = [*_HEAD]
    for standing, fields in TABLE.items():
        lines += [
            "",
            f"## {standing.capitalize()}",
            "",
            "| field | of | in | note |",
            "|---|---|---|---|",
        ]
        lines += [_row(field) for field in fields]
    return "\n".join([*lines, ""])


def _row(field: Field) -> str:
    sources, bodies = _named(field.known_to, SOURCES), _named(field.bodies, BODIES)
    return f"| `{field.name}` | {sources} | {bodies} | {field.note.replace('|', ' ')} |"


def _named(letters: str, names: dict[str, str]) -> str:
    return ", ".join(names[letter] for letter in letters)


def main(arguments: Iterable[str]) -> None:
    """Write FIELDS.md to each of the paths."""
    for path in arguments:
        Path(path).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
