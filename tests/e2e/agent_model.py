"""A real Llama that calls a tool, and answers when it has the tool's result.

Its attention and MLP add nothing, its embeddings are unit vectors, and its last layer maps each
token to the one that follows in a script. Two tokens at the end of a prompt begin the two scripts.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CITY = "Bern"
END = "<|im_end|>"
# No token stands twice in a script, because each has one that follows.
CALL = (
    *("<|call|>", "<think>", "They ask for weather", "</think>", "\n\nI look it up.\n"),
    *("<tool_call>", '\n{"name": ', '"get_weather"', ', "arguments": {"city": '),
    *(f'"{CITY}"', "}}", "\n", "</tool_call>", END),
)
ANSWER = ("<|answer|>", "It is", " sunny in ", f"{CITY}.", END)
# Where a grammar bans the next token of a script, the model ends what is open, the last one first.
CLOSING = ("]", "}", '"')
REASONING, TEXT, REPLY = "They ask for weather", "I look it up.", f"It is sunny in {CITY}."
TEMPLATE = """
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": N, "arguments": A}</tool_call>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}
{{- '<|call|>' if tools and messages[-1].role != 'tool' else '<|answer|>' }}
{%- endif %}"""


def save_agent(folder: Path) -> Path:
    """Write the model and its tokenizer to `folder`, and return it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", END, CALL[0], ANSWER[0])
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    plain = [text for text in dict.fromkeys((*CALL, *ANSWER)) if text not in special]
    made.add_tokens([AddedToken(text, normalized=False) for text in plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    size = -(-len(tokenizer) // 64) * 64
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for preference, text in enumerate(CLOSING, 1):
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text)] = preference
        for script in (CALL, ANSWER):
            ids = [tokenizer.convert_tokens_to_ids(text) for text in script]
            for token, after in itertools.pairwise(ids):
                model.lm_head.weight[after, token] = 10.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
