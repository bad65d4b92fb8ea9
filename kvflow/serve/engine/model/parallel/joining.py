"""Loading one part of a model, in step with the processes that load the other parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.parallel.agreement import Agreement, OtherRankError
from kvflow.serve.engine.model.parallel.division import annotated, observe
from kvflow.serve.engine.model.parallel.neighbours import ALONE, Neighbours, hidden_links
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from kvflow.serve.engine.model.parallel.shards import ShardGroup
from kvflow.serve.engine.model.parallel.tensor import divide
from kvflow.serve.engine.model.probe import Layers
from kvflow.serve.engine.model.runner import set_packed
from kvflow.serve.engine.model.selftest import Fit, Mode, choose_fit
from kvflow.serve.engine.model.windows import RingChoice


class _PartFit(msgspec.Struct, frozen=True):
    """How one part runs, as stated to the others. `rings` is None if the part has no windows."""

    fingerprint: str
    stages: int
    shards: int
    mode: Mode
    rings: bool | None
    whole_prompts: bool
    has_states: bool


class Joined:
    """One part of a model while it is being loaded.

    The processes of all parts make the same calls in the same order.
    """

    def __init__(self, part: ModelPart, meeting: Meeting, agreement: Agreement) -> None:
        self.part, self._meeting, self._agreement = part, meeting, agreement
        self._shards: ShardGroup | None = None
        self.has_states = False
        """True if some part of the model keeps conv or recurrent states. Set by `choose_fit`."""

    def divide(self, model: Any, layers: Layers, name: str) -> Layers:
        """Divide the layers, and return this shard's streams. Raises: MisuseError, LostError."""
        if self.part.shards == 1:
            return layers
        before = observe(model)
        # Loading may take minutes, and the shard group's timeout is too short for that.
        self._agreement.wait_for_weights()
        self._shards = ShardGroup(self.part, self._meeting, self._agreement)
        divide(model, self._shards, name)
        return annotated(layers, before, observe(model), self.part, name)

    def choose_fit(
        self,
        model: Any,
        layers: Layers,
        name: str,
        attention: str,
        rings: RingChoice,
        fingerprint: str,
    ) -> Fit:
        """Run the self-test, and agree with all other parts on how to run the model.

        All parts must run in the same way, because a packed row in one stage cannot be a padded
        batch in the next.

        Raises: MisuseError, LostError.
        """
        fit = choose_fit(model, layers, name, attention, rings)
        found = self._agreement.exchange("fit", self._stated(fit, fingerprint))
        for rank, other in enumerate(found):
            if (other.fingerprint, other.stages, other.shards) != (
                fingerprint,
                self.part.stages,
                self.part.shards,
            ):
                raise MisuseError(
                    f"rank {rank} has loaded a part of {other.stages} x {other.shards} of "
                    f"{other.fingerprint!r}, rank {self.part.rank} of {self.part.stages} x "
                    f"{self.part.shards} of {fingerprint!r}"
                )
        mode: Mode = "pad" if any(other.mode == "pad" for other in found) else "packed"
        in_rings = all(other.rings is not False for other in found) and mode == "packed"
        mine = self._stated(fit, fingerprint)
        if mine.mode != mode or mine.rings not in (None, in_rings):
            if rings == "need":
                raise MisuseError(
                    f"--sliding-window-rows always: other stages of model {name!r} run so that it "
                    "cannot be"
                )
            set_packed(model, False)
            fit = choose_fit(model, layers, name, mode, "try" if in_rings else "never")
        settled = self._agreement.exchange("settled", self._stated(fit, fingerprint))
        if (
            len({(s.mode, s.rings) for s in settled if s.rings is not None} | {(mode, in_rings)})
            > 1
        ):
            raise MisuseError(
                f"the stages of model {name!r} do not agree on an attention mode; give --attention "
                "pad"
            )
        self.has_states = any(other.has_states for other in settled)
        return fit._replace(whole_prompts=any(other.whole_prompts for other in settled))

    def neighbours(self) -> Neighbours:
        """Open the links to the parts around this one. Raises: MisuseError if that fails."""
        source, sink = hidden_links(self.part, self._meeting.directory)
        return Neighbours(source, sink, self._shards)

    def close(self) -> None:
        if self._shards is not None:
            self._shards.close()

    def _stated(self, fit: Fit, fingerprint: str) -> _PartFit:
        windows = [bool(layer.ring) for layer in fit.layers if layer and layer.window]
        states = any(layer.has_states for layer in fit.layers if layer)
        return _PartFit(
            fingerprint,
            self.part.stages,
            self.part.shards,
            fit.mode,
            any(windows) if windows else None,
            fit.whole_prompts,
            states,
        )


class Whole:
    """The stand-in for `Joined` when one process has the whole model."""

    has_states = False

    def divide(self, model: Any, layers: Layers, name: str) -> Layers:
        return layers

    def choose_fit(
        self,
        model: Any,
        layers: Layers,
        name: str,
        attention: str,
        rings: RingChoice,
        fingerprint: str,
    ) -> Fit:
        return choose_fit(model, layers, name, attention, rings)

    def neighbours(self) -> Neighbours:
        return ALONE


@contextlib.contextmanager
def joined(part: ModelPart, meeting: Meeting | None) -> Iterator[Joined | Whole]:
    """Yield the part to load. If loading fails, report that to the processes of the other parts.

    Raises: MisuseError if the part needs a meeting directory, and there is none or other users may
    enter it.
    """
    if part.ranks == 1:
        yield Whole()
        return
    if meeting is None:
        raise MisuseError(f"{part} of a model needs a meeting directory, where it finds the others")
    agreement = Agreement(part, meeting)
    found = Joined(part, meeting, agreement)
    try:
        yield found
    except BaseException as error:
        if not isinstance(error, OtherRankError):
            agreement.fail(error)
        found.close()
        raise
