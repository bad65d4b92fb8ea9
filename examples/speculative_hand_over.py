"""What a speculative decoder gets beside the pages: hidden states and draft candidates.

    python examples/speculative_hand_over.py

`kvflow.HandOff` carries them from an engine's prefill to its decode, with their dtypes and shapes,
checked on both sides. Its arrays are bytes of their own: prefill's buffers may be overwritten by
the next request at once, and what decode keeps does not change with later handoffs, however long
the request lives.
"""

import asyncio

import numpy as np

import kvflow

# Both nodes on a network in memory; see one_room.py for real ones.
from kvflow.testing.pair import pair

PROMPT, VOCABULARY, HIDDEN, CANDIDATES = list(range(40)), 1000, 64, 4


async def prefill(node: kvflow.PrefillNode, room: int) -> None:
    pages = node.pages.take(node.pool.layout.pages_for(len(PROMPT)), room)
    async with node.room(room, PROMPT) as session:
        await session.matched()
        random = np.random.default_rng(room)
        logits, hidden = (
            random.standard_normal(VOCABULARY),
            random.standard_normal((1, HIDDEN), dtype=np.float32),
        )
        best = np.argsort(logits)[-CANDIDATES:][::-1]
        handoff = kvflow.HandOff(
            first_token=int(best[0]),
            prompt_tokens=len(PROMPT),
            # A numpy array or a torch tensor, bfloat16 too.
            hidden_states=kvflow.PackedArray.of(hidden),
            draft_token_ids=kvflow.PackedArray.of(best),
            draft_probabilities=kvflow.PackedArray.of(
                (np.exp(logits) / np.exp(logits).sum())[best].astype(np.float32)
            ),
        )
        session.send(pages, last=True, handoff=handoff.encode())
        await session.done()
    node.pages.give_back(pages, room)


async def decode(node: kvflow.DecodeNode, room: int) -> kvflow.HandOff:
    async with await node.room(room, "prefill", PROMPT) as session:
        handoff = kvflow.HandOff.decode(await session.landed())
    handoff.check_fits(len(PROMPT), VOCABULARY, HIDDEN)  # of this prompt, and of this model
    return handoff


async def main() -> None:
    async with pair() as both:
        kept = []
        for room in range(100):
            _, handoff = await asyncio.gather(
                prefill(both.prefill, room), decode(both.decode, room)
            )
            kept.append(handoff)
    handoff = kept[0]  # 99 handoffs ago
    assert handoff.hidden_states and handoff.draft_token_ids and handoff.draft_probabilities
    print(f"first token {handoff.first_token}, hidden states {handoff.hidden_states.shape}")
    for token, share in zip(
        handoff.draft_token_ids.array(), handoff.draft_probabilities.array(), strict=True
    ):
        print(f"candidate {token}: {share:.4f}")


if __name__ == "__main__":
    asyncio.run(main())
