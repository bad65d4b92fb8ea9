"""The decision whether layers with a sliding window keep their K and V in rings.

In rings, these K and V take one row of the pool per request, with a slot for each token of the
window, however long the request is. In pages, they grow with every token.

The setting "auto" depends on the model alone, since prefill and decode must agree even if their
pools differ. It chooses rings if the windows are short, both in tokens and relative to the context
length, because a request takes a whole row at its first token. Rings need kvflow's attention
function. Pad mode, which uses transformers' own masks, keeps windows in pages.
"""

from __future__ import annotations

from typing import Literal

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.probe import Layers

SLIDING_WINDOW_ROWS = ("auto", "always", "never")
# The longest window, in tokens, that "auto" keeps in rings.
# With windows of 1,024 tokens, a pool would hold far fewer short requests in rings than in pages.
MOST_TOKENS = 256
# "auto" uses rings only if the context is at least this many times as long as the longest window.
LEAST_WINDOWS = 8

RingChoice = Literal["never", "try", "need"]
"""Whether to use rings. "try" and "need" use them if the model passes its self-test with them.
Otherwise "try" uses pages, and "need" refuses the model.
"""


def choose_rings(layers: Layers, setting: str, attention: str, context_length: int) -> RingChoice:
    """Choose whether a model uses rings. `setting` is one of SLIDING_WINDOW_ROWS.

    Raises: MisuseError if `setting` is "always" and `attention` is "pad".
    """
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
