"""Prompts that share prefixes.

The content of a page depends on all tokens up to the end of the page, and on no others.
"""

from __future__ import annotations

import hashlib
import random
import struct
from functools import lru_cache

from kvflow.proof.sim.content import content
from kvflow.proof.sim.variety import PAGE_SIZE
from kvflow.protocols.arguments import prompt_digest
from kvflow.testing.subscriber import block_hash, digests_of_prompt


class Texts:
    """Page digests of all prompts of one run."""

    def __init__(self) -> None:
        self._pages: dict[bytes, list[bytes]] = {}
        # Names that events use for full pages, by page digest.
        self.names: dict[bytes, int] = {}

    def add(self, prompt: list[int]) -> list[bytes]:
        """Add a prompt. Returns a digest for each of its pages, including a partial last page."""
        key = prompt_digest(prompt)
        if (found := self._pages.get(key)) is None:
            found = digests_of_prompt(prompt, PAGE_SIZE)
            self.names.update((digest, block_hash(digest)) for digest in found)
            if rest := prompt[len(found) * PAGE_SIZE :]:
                above = found[-1] if found else b""
                tokens = struct.pack(f"<{len(rest)}I", *rest)
                found = [*found, hashlib.sha256(b"rest" + above + tokens).digest()]
            self._pages[key] = found
        return found

    def of(self, prompt: bytes) -> list[bytes]:
        return self._pages[prompt]


@lru_cache(4096)
def page_bytes(digest: bytes, size_bytes: int) -> bytes:
    return content(digest, 0, size_bytes)


class Library:
    """Source of the prompts of a run, most of which begin like an earlier one."""

    def __init__(self, rng: random.Random, most_pages: int) -> None:
        self._rng, self._most = rng, most_pages * PAGE_SIZE
        self._drawn: list[list[int]] = [self._fresh(self._most) for _ in range(rng.randint(1, 2))]

    def draw(self) -> list[int]:
        begins = self._rng.choice(self._drawn)
        kept = self._rng.choice((len(begins), self._rng.randint(0, len(begins))))
        return self.after(begins[:kept])

    def after(self, begins: list[int]) -> list[int]:
        rng = self._rng
        more = rng.choice((0, rng.randint(1, PAGE_SIZE), rng.randint(1, self._most)))
        prompt = (begins + self._fresh(more))[: self._most] or self._fresh(1)
        self._drawn.append(prompt)
        return prompt

    def _fresh(self, count: int) -> list[int]:
        return [self._rng.randrange(1 << 16) for _ in range(count)]
