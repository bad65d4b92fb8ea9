"""Decode steps without transformers' modules: the torch calls of a step are recorded, and later
steps of the same shape repeat them.

A small model spends half of a decode step between the calls of torch: in modules, decorators and
checks. Which calls a forward makes, and with which arguments, follows from the number of rows
alone, unless the model looks at the values of tensors or at the number of earlier tokens. So two
steps are recorded, and their calls are repeated only if both made the same ones. They run the same
kernels with the same shapes, so the results have the same bits.

The states that a layer reads grow with its sequences. The first step in which they have another
shape than before is recorded too. If its calls are the same again, any shape is taken from then on,
because no causal model of transformers makes other calls from a certain number of tokens on.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvflow.serve.engine.model.step import current

log = logging.getLogger("kvflow.serve.engine")

# Steps of a shape before it is recorded: a shape that hardly ever occurs is not worth it.
STEPS_BEFORE = 8
# With more shapes than this, others run without a recording. One takes 20 KB for each layer.
MOST_SHAPES = 64

Keep = torch.Tensor | int
Forward = Callable[[torch.Tensor, torch.Tensor, Keep], torch.Tensor]


class RecordedSteps:
    """Runs a model's forward over rows of one token each, from recordings where it has them."""

    def __init__(self, forward: Forward) -> None:
        """`forward` takes ids [rows], positions [rows], and the rows whose logits are wanted (0:
        all), and returns logits [any, vocabulary]. It must make all calls of torch in this thread.
        """
        self._forward = forward
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self.why_not = ""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, keep: Keep) -> torch.Tensor:
        # A tensor of no rows is another shape than 0, which means all rows.
        key = (len(ids), -1 - keep if isinstance(keep, int) else len(keep))
        shape = self._shapes.get(key)
        if shape is None:
            if self.why_not or len(self._shapes) >= MOST_SHAPES:
                return self._forward(ids, positions, keep)
            shape = self._shapes[key] = _Shape()
        if shape.repeat is not None:
            try:
                return shape.repeat(ids, positions, keep)
            except _OtherShapeError:
                # What the calls have written so far is written again.
                pass
            except Exception as error:  # noqa: BLE001 - the forward raises the model's again
                return self._without(error, ids, positions, keep)
        shape.steps += 1
        past = None if current.step is None else current.step.past
        # Two steps with equally many earlier tokens make the same calls even if that number has a
        # part in them.
        if shape.steps <= STEPS_BEFORE or (past is not None and past == shape.past):
            return self._forward(ids, positions, keep)
        try:
            return self._record(shape, ids, positions, keep)
        except Exception as error:  # noqa: BLE001 - the forward raises the model's again
            return self._without(error, ids, positions, keep)

    def _record(
        self, shape: _Shape, ids: torch.Tensor, positions: torch.Tensor, keep: Keep
    ) -> torch.Tensor:
        recorder = Recorder(ids=ids, positions=positions, keep=keep)
        current.recorder = recorder
        try:
            with _ValuesUnseen(), recorder:  # type: ignore[no-untyped-call]
                logits = self._forward(ids, positions, keep)
        finally:
            current.recorder = None
        made = recorder.recording(logits)
        if shape.recording is None:
            shape.recording = made
            shape.past = None if current.step is None else current.step.past
        elif not made.same(shape.recording):
            self._give_up("two steps of a shape make different calls")
        else:
            shape.recording.allow_shapes_of(made)
            if shape.repeat is None:
                repeat = shape.recording.program()
                if torch.equal(repeat(ids, positions, keep), logits):
                    shape.repeat = repeat
                else:
                    # The repeated calls have written other states, too.
                    logits = self._forward(ids, positions, keep)
                    self._give_up("the repeated calls have other results")
        return logits

    def _without(
        self, error: Exception, ids: torch.Tensor, positions: torch.Tensor, keep: Keep
    ) -> torch.Tensor:
        """Run the step without a recording, and give up if only the recording failed."""
        logits = self._forward(ids, positions, keep)
        self._give_up(str(error) or type(error).__name__)
        return logits

    def _give_up(self, why: str) -> None:
        log.info("decode steps run through the model's modules: %s", why)
        self.why_not = why
        self._shapes.clear()


class UnrecordableError(Exception):
    """A model's step cannot be recorded."""


class _OtherShapeError(Exception):
    """The states of a layer have a shape for which no step was recorded."""


class _Shape:
    """What is known of the steps of one shape."""

    __slots__ = ("past", "recording", "repeat", "steps")

    def __init__(self) -> None:
        self.steps = 0
        # The earlier tokens of the longest row when the recording was made, if that is known.
        self.past: int | None = None
        self.recording: Recording | None = None
        self.repeat: Forward | None = None


class _Exchange:
    """A call of a layer's cache. `shapes` are those that its results must have (None: any)."""

    __slots__ = ("function", "shapes")

    def __init__(self, function: Callable[..., Any], results: Any) -> None:
        self.function = function
        self.shapes: list[torch.Size | None] = [each.shape for each in _in_a_tuple(results)]

    def __call__(self, *args: Any) -> Any:
        results = self.function(*args)
        for result, shape in zip(_in_a_tuple(results), self.shapes, strict=True):
            if shape is not None and result.shape != shape:
                raise _OtherShapeError
        return results

    def allow_shapes_of(self, other: _Exchange) -> None:
        self.shapes = [
            mine if mine == its else None
            for mine, its in zip(self.shapes, other.shapes, strict=True)
        ]


def _in_a_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


_WHOLE = torch._C.DispatchKey.CompositeImplicitAutograd


class _ValuesUnseen(TorchDispatchMode):
    """Lets no call return what depends on the values of a tensor, except in another tensor."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_number(func, args)
        ):
            raise UnrecordableError(f"the model looks at values: {func}")
        kwargs = kwargs or {}
        # In inference mode, a call that consists of others arrives whole. `decompose` would prefer
        # torch's decompositions in Python, some of which make other calls than its kernels do.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _WHOLE):
            with self:
                return func._op_dk(_WHOLE, *args, **kwargs)
        return func(*args, **kwargs)


def _indexes_by_number(func: Any, args: Any) -> bool:
    return func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


class Call(NamedTuple):
    """One call of torch, or of kvflow's cache or attention, as text of a Python program."""

    result: str
    function: str
    arguments: str


class Recording(NamedTuple):
    """The calls of one step. `constants` are what they use besides their inputs and results."""

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    constants: tuple[Any, ...]
    result: str

    def same(self, other: Recording) -> bool:
        """Return True if both make the same calls, with the same tensors of the model."""
        return (
            (self.calls, self.result) == (other.calls, other.result)
            and len(self.constants) == len(other.constants)
            and all(map(_same, self.constants, other.constants))
        )

    def allow_shapes_of(self, other: Recording) -> None:
        """Let the states of layers also have the shapes of `other`, which makes the same calls."""
        for mine, its in zip(self.constants, other.constants, strict=True):
            if isinstance(mine, _Exchange):
                mine.allow_shapes_of(its)

    def program(self) -> Forward:
        """Return a function that makes the calls."""
        names = [f"c{i}" for i in range(len(self.constants))]
        # As arguments with defaults, the constants are local variables.
        given = ", ".join([*self.inputs, *(f"{name}={name}" for name in names)])
        lines = [f"def repeat({given}):"]
        ends = self._last_uses()
        for at, call in enumerate(self.calls):
            lines.append(f"    {call.result} = {call.function}({call.arguments})")
            # Memory of a result is free for the following calls as soon as no call needs it.
            lines.extend(f"    del {name}" for name in ends.get(at, ()))
        lines.append(f"    return {self.result}")
        space = dict(zip(names, self.constants, strict=True))
        exec(compile("\n".join(lines), "<recorded step>", "exec"), space)
        repeat: Forward = space["repeat"]
        return repeat

    def _last_uses(self) -> dict[int, list[str]]:
        """Return the results that no call needs after the call at an index."""
        last: dict[str, int] = {}
        for at, call in enumerate(self.calls):
            last[call.result] = at
            last.update(dict.fromkeys(re.findall(r"\bv\d+\b", call.arguments), at))
        last.pop(self.result.partition("[")[0], None)
        ends: dict[int, list[str]] = {}
        for name, at in last.items():
            ends.setdefault(at, []).append(name)
        return ends


class Recorder(TorchFunctionMode):
    """Records the calls of torch that this thread makes while the mode is entered."""

    def __init__(self, **inputs: Any) -> None:
        super().__init__()
        self._inputs = tuple(inputs)
        self._calls: list[Call] = []
        self._constants: list[Any] = []
        self._constant_names: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._named: dict[int, weakref.ref[torch.Tensor]] = {}
        for name, value in inputs.items():
            self._name(value, name)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _BEHIND_TORCH:
            raise UnrecordableError(f"the model looks at values: {func.__name__}")
        result = func(*args, **kwargs)
        # Shapes, dtypes and the like follow from the shape of the step. `to` and others return
        # their argument if they have nothing to do.
        if (result is None or any(_tensors(result))) and not (
            func in _MAY_DO_NOTHING and result is args[0]
        ):
            self._add(func, args, kwargs, result)
        return result

    def attend(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call kvflow's attention, which looks at the step, and record it as one call."""
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        self._add(function, args, kwargs, result)
        return result

    def exchange(self, function: Callable[..., Any], *args: torch.Tensor) -> Any:
        """Call a layer's cache, and record it as one call whose results may have other shapes in
        other steps.
        """
        with torch._C.DisableTorchFunction():
            results = function(*args)
        self._add(_Exchange(function, results), args, {}, results)
        return results

    def recording(self, result: torch.Tensor) -> Recording:
        """Return what was recorded. `result` is what the program is to return."""
        if id(result) not in self._names:
            raise UnrecordableError("the logits come from a call that was not recorded")
        named = self._names[id(result)]
        return Recording(self._inputs, tuple(self._calls), tuple(self._constants), named)

    def _add(self, function: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        arguments = [self._text(value) for value in args]
        arguments += [f"{name}={self._text(value)}" for name, value in kwargs.items()]
        name = f"v{len(self._calls)}"
        self._calls.append(Call(name, self._constant(function), ", ".join(arguments)))
        self._name(result, name)

    def _name(self, value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            key = id(value)
            self._names[key] = name
            # Python gives the id of an object to another one once the first is gone.
            self._named[key] = weakref.ref(value, lambda _: self._names.pop(key, None))
        elif isinstance(value, tuple | list):
            for i, each in enumerate(value):
                self._name(each, f"{name}[{i}]")

    def _text(self, value: Any) -> str:
        """Return a value as an expression of the program."""
        if id(value) in self._names:
            return self._names[id(value)]
        if value is None or value is Ellipsis or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._text, parts))})"
        if type(value) in (tuple, torch.Size):
            return "(" + "".join(f"{self._text(each)}, " for each in value) + ")"
        if type(value) is list:
            return f"[{', '.join(map(self._text, value))}]"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        if id(value) not in self._constant_names:
            self._constant_names[id(value)] = f"c{len(self._constants)}"
            self._constants.append(value)
        return self._constant_names[id(value)]


# These return values of a tensor without a call of torch that could be seen.
_BEHIND_TORCH = frozenset(
    {"numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "storage", "untyped_storage"}
)
_MAY_DO_NOTHING = frozenset({torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.float})


def _tensors(value: Any) -> Iterator[bool]:
    if isinstance(value, torch.Tensor):
        yield True
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _same(one: Any, other: Any) -> bool:
    # A tensor that each step makes anew is none that a later step may use.
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, _Exchange):
        return isinstance(other, _Exchange) and bool(one.function == other.function)
    return one is other or bool(type(one) is type(other) and one == other)
