"""vLLM's KV-cache groups as the spaces of a pool, and which blocks of a request travel.

vLLM divides a model's layers into groups: layers with full attention, layers with one sliding
window, layers that keep a state. A request has a list of blocks in each group. All groups take
their blocks from one supply, in which a block is one number and has the same bytes for every group.
Where a request no longer needs a block, its list has vLLM's null block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvflow.protocols.pages.layout import PageIndices, PoolLayout, Space

Blocks = Sequence[Sequence[int]]
"""Block numbers, one list for each space of the pool, in the order of the spaces."""


class Group(NamedTuple):
    """The layers of one group. `number` is the group's place in vLLM's order.

    In the group's space, `window` is the number of tokens before the next one that attention reads.
    Where a group keeps states, a request has one block for every `state_tokens` tokens or part of
    them, and the last one has the state after all of its tokens; vLLM's prefix cache may keep
    others. `most_blocks` bounds the blocks that a request holds at once, whatever its length; 0
    sets no bound but the length.
    """

    number: int
    layers: tuple[str, ...]
    space: Space
    most_blocks: int = 0
    state_tokens: int = 0


class Groups:
    """The groups of one engine, in the order of the pool's spaces."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """`groups` begins with one that has pages, because these count the tokens of prompts."""
        self.groups = tuple(groups)
        # With a single group, all tokens travel, and decode computes the last one again. It would
        # enter a state twice, and vLLM may have freed the block of the earliest token in a window
        # that the last token reads.
        self.moves_last_token = len(groups) == 1 and not groups[0].space.window
        self.null_block = 0

    @property
    def page_size(self) -> int:
        """Tokens in a block of the first space."""
        return self.groups[0].space.page_size

    def tokens_moved(self, prompt_tokens: int) -> int:
        """Return how many tokens of a prompt travel, from its beginning. Decode computes the rest;
        if the number is 0, it computes all.
        """
        return prompt_tokens if self.moves_last_token else prompt_tokens - 1

    def most_blocks(self, prompt_tokens: int) -> int:
        """Return a bound of the blocks that a request holds at once while its prompt is computed,
        all groups together.
        """
        found = 0
        for group in self.groups:
            size = group.space.page_size
            filled = -(-prompt_tokens // size) if size else group.most_blocks
            found += min(filled, group.most_blocks or filled)
        return found

    def filled(self, block_ids: Blocks, tokens: int, computed: int) -> list[list[int]]:
        """Return the blocks that are final once `computed` tokens of a prompt are, from the first
        block of the prompt on. `tokens` of the prompt travel. `block_ids` is in vLLM's order.

        A state is final with the last of these tokens.
        """
        is_all = computed >= tokens
        found: list[list[int]] = []
        for group in self.groups:
            own, size = block_ids[group.number], group.space.page_size
            if not size:
                last = -(-tokens // group.state_tokens)
                found.append(list(own[last - 1 : last]) if is_all else [])
            else:
                found.append(list(own[: -(-tokens // size) if is_all else computed // size]))
        return found

    def lent(self, block_ids: Blocks, tokens: int, prefix_tokens: int) -> list[list[int]]:
        """Return the blocks into which prefill writes the first `tokens` tokens of a prompt, if
        decode has `prefix_tokens` of them already. `block_ids` is in vLLM's order.
        """
        return [
            own[first_place(group.space, tokens, prefix_tokens) :]
            for own, group in zip(self.filled(block_ids, tokens, tokens), self.groups, strict=True)
        ]

    def missing(self, blocks: Blocks, tokens: int, prefix_tokens: int = 0) -> str:
        """Return the name of a space in which a place that travels has no block in `blocks`, lists
        as `filled` returns them for the whole prompt. Return "" if there is none.
        """
        for own, group in zip(blocks, self.groups, strict=True):
            wanted = group.space.wanted(tokens, prefix_tokens)
            found = own[first_place(group.space, tokens, prefix_tokens) :]
            if len(found) != wanted or self.null_block in found:
                return group.space.name
        return ""


def first_place(space: Space, tokens: int, prefix_tokens: int) -> int:
    """Return how many places of a prompt come before the first one that a room moves."""
    if space.in_rows:
        return 0
    return -(-tokens // space.page_size) - space.wanted(tokens, prefix_tokens)


def places_of(layout: PoolLayout, blocks: Blocks) -> PageIndices:
    """Return the places of `blocks` in one list, as rooms take them."""
    return layout.numbered([np.asarray(own, dtype=np.int32) for own in blocks])
