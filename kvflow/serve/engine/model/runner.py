"""Running a model over one pool: each forward takes any mix of prompt chunks and decoding
sequences.

The runner works in the model thread. It reads and writes only the pages and pool rows of the
sequences that it is given.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model.ahead import DecodeSteps, KeptMemory
from kvflow.serve.engine.model.attention import NAME
from kvflow.serve.engine.model.device import place_on
from kvflow.serve.engine.model.paged_cache import PagedCache
from kvflow.serve.engine.model.parallel.neighbours import ALONE, Neighbours
from kvflow.serve.engine.model.parallel.stage import StageEnd
from kvflow.serve.engine.model.probe import Layers, cache_argument, have_rows, kinds_of
from kvflow.serve.engine.model.recorded import RecordedSteps
from kvflow.serve.engine.model.rings import RingLayers
from kvflow.serve.engine.model.step import Row, Step, current


class Runner:
    """Runs the forwards of one model.

    In `packed` mode, all sequences form one row, and kvflow's attention function runs. Otherwise
    the model's own attention runs over left-padded rows.
    """

    def __init__(
        self,
        model: Any,
        layers: Layers,
        pool: PagedPool,
        *,
        packed: bool,
        neighbours: Neighbours = ALONE,
    ) -> None:
        """`neighbours` are the processes that run the other parts of a divided model. The pool may
        also hold the streams of other shards.

        Raises: LayoutError if the pool's streams do not match the model's.
        """
        kinds = kinds_of(layers)
        wanted = build_layout(
            kinds,
            page_size=pool.layout.page_size,
            num_pages=pool.layout.num_pages,
            num_rows=int(have_rows(layers)),
            fingerprint=pool.layout.fingerprint,
        )
        partly = any(int(kind.whole) or int(kind.replicas) > 1 for kind in kinds)
        if found := differences(wanted, pool.layout, ("model", "pool"), partly=partly):
            raise LayoutError("the pool does not fit the model: " + "; ".join(found))
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._packed = packed
        self._rings = RingLayers(layers)
        self._neighbours = neighbours
        self._has_states = any(layer.has_states for layer in layers if layer)
        self._cache_argument = cache_argument(model) or ""
        self._attends = any(layer.keys for layer in layers if layer)
        self._takes_positions = "position_ids" in parameters
        self._takes_keep = "logits_to_keep" in parameters
        self._page_size, self.device = pool.layout.page_size, torch.device(pool.device)
        self._place = place_on(self.device)
        self._cache = PagedCache(layers, pool)
        self._ahead: DecodeSteps | None = None
        self._memory = KeptMemory()
        self._recorded = RecordedSteps(self._call_packed)
        self._with_hidden = False

    @torch.inference_mode()
    def forward(self, rows: list[Row]) -> torch.Tensor:
        """Compute every row's new tokens.

        Returns the wanted logits [tokens, vocabulary], in row order. A stage that is not the last
        returns an empty tensor [0, any].

        Every sequence must have pages for all of its tokens, including the new ones, and a row if
        the pool has rows. All processes of a model must receive the same rows, in the same order.

        Raises: LostError if one of these processes is gone, or the step was aborted.
        """
        with self._neighbours.step(rows):
            logits = self._forward_packed(rows) if self._packed else self._forward_each_length(rows)
        return logits if self._neighbours.returns_logits else logits[:0]

    def _forward_each_length(self, rows: list[Row]) -> torch.Tensor:
        # Decoding rows form one left-padded batch; prompt chunks are computed one by one.
        decoding = [r for r in rows if r.new == 1 and r.sequence.computed]
        parts: dict[int, torch.Tensor] = {}
        if decoding:
            logits = self._forward_padded(decoding)
            parts.update((id(r.sequence), logits[i : i + 1]) for i, r in enumerate(decoding))
        for r in rows:
            if r.new > 1 or not r.sequence.computed:
                parts[id(r.sequence)] = self._forward_padded([r])
        return torch.cat(
            [parts[id(r.sequence)] for r in rows if r.logits]
            or [torch.empty(0, 1, device=self.device)]
        )

    def forward_with_hidden(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the rows like `forward`, and return the last hidden states along with the logits.

        The hidden states are the inputs of the model's output layer, [tokens, hidden], for the same
        tokens and in the dtype of the logits.
        """
        self._with_hidden = True
        try:
            both = self.forward(rows)
        finally:
            self._with_hidden = False
        width = both.shape[-1] - hidden_size_of(self._model) if both.shape[0] else both.shape[-1]
        return both[:, :width], both[:, width:]

    def rest(self) -> None:
        """Release the states kept for the next step. Call this when no step follows soon."""
        self._ahead, self._memory = None, KeptMemory()
        self._neighbours.rest()

    def _forward_packed(self, rows: list[Row]) -> torch.Tensor:
        step = self._packed_step(rows)
        current.step, current.rings = step, self._rings
        self._cache.step = step
        try:
            # Hidden states are read by a hook, which a recording does not have. Other processes
            # exchange tensors within the forward.
            if step is self._ahead and self._neighbours is ALONE and not self._with_hidden:
                return self._recorded(step.ids, step.positions, step.logits_to_keep)
            return self._call_packed(step.ids, step.positions, step.logits_to_keep)
        finally:
            current.step = None

    def _call_packed(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int
    ) -> torch.Tensor:
        logits = self._call(ids[None], positions[None], keep, None)
        return logits if self._takes_keep or isinstance(keep, int) else logits[keep]

    def _packed_step(self, rows: list[Row]) -> Step:
        if self._ahead is not None and self._ahead.advance(rows):
            return self._ahead
        self._ahead = None
        if all(r.new == 1 and r.sequence.computed for r in rows):
            self._ahead = DecodeSteps(rows, self._page_size, self._place, self._memory)
            return self._ahead
        step = Step(rows, self._page_size, self._place)
        step.pack()
        return step

    def _forward_padded(self, rows: list[Row]) -> torch.Tensor:
        step = Step(rows, self._page_size, self._place)
        new = rows[0].new
        # Without attention, a model gets no mask: mamba would multiply the new tokens by it.
        if not self._attends:
            step.batch, mask = len(rows), None
        elif (mask := step.pad(new)) is None and not self._takes_positions:
            mask = torch.ones(step.batch, step.past + new, dtype=torch.long, device=self.device)
        self._cache.step = step
        count = max(1, rows[0].logits)
        # Each prompt chunk is a separate batch, so all rows of a batch have a state, or none has.
        places = self._place(
            np.concatenate([rows[i].sequence.rows for i in step.order]).astype(np.int64)
        )
        if self._has_states:
            self._cache.states.gather(places, new=not rows[0].sequence.computed)
        logits = self._call(
            step.ids.view(step.batch, new), step.positions.view(step.batch, new), count, mask
        )
        if self._has_states:
            self._cache.states.scatter(places)
        return logits[step.last] if step.batch > 1 else logits[-count:]

    def _call(
        self, ids: torch.Tensor, positions: torch.Tensor, keep: Any, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Call the model, and return logits [tokens, vocabulary].

        For a single row, these are the logits of all tokens for which the model returns them. For
        several rows, they are the logits of each row's last token. If hidden states are wanted,
        those of each token are appended to its logits.
        """
        more: dict[str, Any] = {"attention_mask": mask, self._cache_argument: self._cache}
        if self._takes_positions:
            more["position_ids"] = positions
        if self._takes_keep:
            more["logits_to_keep"] = keep
        seen: list[torch.Tensor] = []
        hook = _on_hidden(self._model, seen.append) if self._with_hidden else None
        try:
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=True, **more).logits
        except StageEnd as end:
            self._neighbours.send(end)
            return torch.zeros(
                ids.shape[0] if ids.shape[0] > 1 else ids.shape[1], 1, device=ids.device
            )
        finally:
            if hook is not None:
                hook.remove()
        # Concatenate both, so that each later selection of tokens applies to both.
        if seen:
            hidden = seen[0].to(logits.dtype).reshape(*logits.shape[:-1], seen[0].shape[-1])
            logits = torch.cat((logits, hidden), dim=-1)
        return logits[:, -1] if ids.shape[0] > 1 else logits[0]


def hidden_size_of(model: Any) -> int:
    """Return the width of the output layer's input for one token; 0 if it is not available."""
    return int(getattr(model.get_output_embeddings(), "in_features", 0))


def _on_hidden(model: Any, see: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call `see` with the input of the output layer in every forward of this thread, until the
    returned hook is removed.

    Forwards of the same model in other threads are ignored.
    """
    mine = threading.get_ident()

    def seen(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() == mine:
            see(given[0])

    hook: RemovableHandle = model.get_output_embeddings().register_forward_pre_hook(seen)
    return hook


def set_packed(model: Any, packed: bool) -> bool:
    """Switch the model to kvflow's attention function or back to its own.

    Returns False if the model does not support this.
    """
    if packed:
        model.set_attn_implementation(NAME)
        return bool(model.config.get_text_config()._attn_implementation == NAME)
    if model.config.get_text_config()._attn_implementation == NAME:
        model.set_attn_implementation(
            "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        )
    return True
