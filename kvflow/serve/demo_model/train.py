"""Train the demo model: a byte-level BPE tokenizer and a small Llama on the interpreter's
documentation topics.

Run once, by hand: `python -m kvflow.serve.demo_model.train --out DIR`. It takes about eight minutes
on one thread.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = [PAD, BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>"]
VOCABULARY_SIZE = 4096
CONTEXT_TOKENS = 4096
# Training windows as (sequences, tokens in each), used in turn. Most are short, but enough are
# long for late positions to work.
WINDOWS = [*[(8, 256)] * 3, (1, 2048), *[(8, 256)] * 3, (1, CONTEXT_TOKENS)]
STEPS = 880
# Share of input tokens replaced at random. The model soon memorizes the small text. Without this
# noise in training, one wrong token would derail a generation.
NOISE = 0.1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% "
    "endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Fit a tokenizer to `texts`, and give it the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT_TOKENS,
        # A decoded token must be exactly its bytes: streamed pieces are joined and compared.
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create the untrained network. Three query heads share each key head, to exercise grouping."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return all texts as one row of token ids, each between a start and an end token."""
    backend = tokenizer.backend_tokenizer
    start, end = backend.token_to_id(BOS), backend.token_to_id(EOS)
    rows = [[start, *backend.encode(text).ids, end] for text in texts]
    return torch.tensor([token for row in rows for token in row])


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for the rest, with updates of equal size."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate, weight_decay=0.0, betas=(0.9, 0.95))]


def draw(ids: torch.Tensor, step: int) -> torch.Tensor:
    """Return the training windows [sequence, token] of one step, from random places in the text."""
    sequences, length = WINDOWS[step % len(WINDOWS)]
    starts = torch.randint(0, len(ids) - length, (sequences,)).tolist()
    return torch.stack([ids[start : start + length] for start in starts])


def train(model: LlamaForCausalLM, ids: torch.Tensor, steps: int, rate: float) -> None:
    """Train `model` in place, and print the mean loss every 80 steps."""
    steppers = optimizers(model, rate)
    started, losses = time.monotonic(), []
    for step in range(steps):
        scale = min(1.0, (step + 1) / 40) * max(0.02, 1 - step / steps)
        for group in (group for stepper in steppers for group in stepper.param_groups):
            group["lr"] = rate * scale
        wanted = draw(ids, step)
        given = torch.where(
            torch.rand(wanted.shape) < NOISE, torch.randint_like(wanted, VOCABULARY_SIZE), wanted
        )
        loss = model(given, labels=wanted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 80 == 0:
            elapsed_s = time.monotonic() - started
            print(
                f"step {step + 1} loss {sum(losses[-80:]) / 80:.3f} elapsed {elapsed_s:.0f} s",
                flush=True,
            )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model and tokenizer. Weights are bfloat16, declared as float32: loading widens them."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.save_pretrained(out)
    model.bfloat16().save_pretrained(out)
    model.config.dtype = torch.float32
    model.config.save_pretrained(out)
    # safetensors makes the file readable only by its owner.
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    """Train with the given seed, and write the model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--steps", type=int, default=STEPS, help="fewer for a quick try")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    texts = [topics[name] for name in sorted(topics)]
    tokenizer = build_tokenizer(texts)
    ids = encode(texts, tokenizer)
    model = build_model(tokenizer)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"python {sys.version.split()[0]}, seed {options.seed}, {len(ids)} tokens, {size} "
        "parameters",
        flush=True,
    )
    train(model, ids, options.steps, options.rate)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
