"""A profile whose times are known: the points follow from the factors below."""

from __future__ import annotations

from kvflow.plan.profile import Profile, Prompted, Sizes, Stepped

REQUEST_S, BASE_S, TOKEN_S, PAIR_S, BUSY_S = 0.010, 0.004, 1e-4, 1e-8, 0.002
STEP_S, ROW_S, CONTEXT_S, ANSWER_S = 0.003, 0.001, 1e-6, 0.007
CHUNK, BATCH = 128, 256
SHORT = 80.0

SIZES = Sizes(
    prefill_pool=4096,
    decode_pool=4096,
    page_size=16,
    token_bytes=1000,
    max_model_len=2048,
    chunk_tokens=CHUNK,
    batch_tokens=BATCH,
    max_running=64,
    new_token_ratio=0.5,
)
BYTES_S = 1e8  # 10 us a token


def transfer_s(tokens: int) -> float:
    return tokens * SIZES.token_bytes / BYTES_S


def prefill_s(tokens: int, before: int = 0) -> float:
    """Return the time of a step that computes `tokens` of one prompt."""
    return BASE_S + TOKEN_S * tokens + PAIR_S * tokens * (before + tokens / 2)


def alone_s(tokens: int) -> float:
    """Return the time to the first token of a prompt that nothing delays."""
    chunks = [(min(CHUNK, tokens - start), start) for start in range(0, tokens, CHUNK)]
    steps_s = sum(prefill_s(count, before) for count, before in chunks)
    return REQUEST_S + steps_s + transfer_s(chunks[-1][0])


def burst_s(tokens: int, requests: int) -> float:
    """Return the time of the last of several prompts at once, two of which make a step full."""
    steps = requests // 2
    step_s = BASE_S + 2 * (TOKEN_S * tokens + PAIR_S * tokens * tokens / 2)
    every_s = REQUEST_S + (requests - 1) * BUSY_S
    return every_s + steps * step_s + 2 * transfer_s(tokens)


def profile() -> Profile:
    return Profile(
        model="known",
        device="cpu",
        dtype="float32",
        sizes=SIZES,
        prompts=[
            *(Prompted(n, 1, alone_s(n)) for n in (8, 32, 64, 128, 256, 512, 1024)),
            Prompted(CHUNK, 8, burst_s(CHUNK, 8)),
        ],
        steps=[
            *(Stepped(n, SHORT, STEP_S + n * ROW_S) for n in (1, 2, 4, 8)),
            Stepped(4, 1080.0, STEP_S + 4 * ROW_S + 4 * 960 * CONTEXT_S),
        ],
        answer_s=ANSWER_S,
        transfer_bytes_s=BYTES_S,
        beside_decode=1.5,
        beside_prefill=2.0,
    )
