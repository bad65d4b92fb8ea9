"""The choice whether layers with a sliding window keep K and V in rings.

A ring holds what a window needs and no more: one row for each request, where pages grow with every
token.

"auto" depends on the model alone, since prefill and decode must agree whatever pools they have. It
means rings where windows are short, and short beside the context, because a request takes its row
at its first token. Rings need kvflow's attention function; pad mode, which runs transformers' own
masks, has windows in pages.
"""

from __future__ import annotations

from typing import Literal

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.probe import Layers

SLIDING_WINDOW_ROWS = ("auto", "always", "never")
# The most tokens of a window. A request takes the whole row, however short it is: with windows of
# 1,024 tokens a pool would hold a fraction of the short requests that its pages hold.
MOST_TOKENS = 256
LEAST_WINDOWS = 8  # windows that fit into the context length, at least

RingChoice = Literal["never", "try", "need"]
"""The ways to run a model: without rings, with them if it passes its self-test so, or only with
them.
"""


def choose_rings(layers: Layers, setting: str, attention: str, context_length: int) -> RingChoice:
    """Choose for a model; `setting` is one of SLIDING_WINDOW_ROWS. Raises: MisuseError."""
    windows = [layer.window for layer in layers if layer and layer.window]
    if not windows or setting == "never":
        return "never"
    if setting == "always":
        if attention == "pad":
            raise MisuseError(
                "--sliding-window-rows always: only --attention packed keeps windows in rows, not "
                "pad"
            )
        return "need"
    fits = max(windows) <= MOST_TOKENS and context_length >= LEAST_WINDOWS * max(windows)
    return "try" if fits and attention != "pad" else "never"
