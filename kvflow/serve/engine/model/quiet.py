"""transformers kept quiet while it loads a model: its bars become reports of progress, its errors
one line each.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformers.utils import logging as transformers_logging

from kvflow.protocols.errors import MisuseError

Progress = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, 0 to 1; from the loading thread."""


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn what transformers raises for a user's files, which may be anything, into one line."""
    try:
        yield
    except MisuseError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
        # A bare key says nothing without the kind of the error.
        if not text or isinstance(error, LookupError):
            text = f"{type(error).__name__} {text}".rstrip()
        raise MisuseError(f"{what}: {text}") from error


class _Reporting(threading.local):
    """To whom the loading thread reports."""

    report: Progress | None = None


class _Silence:
    """Of the whole process, while there are loads under way."""

    def __init__(self) -> None:
        self.lock, self.loads, self.undo = threading.Lock(), 0, contextlib.ExitStack()


_reporting, _silence = _Reporting(), _Silence()


@contextlib.contextmanager
def quiet(report: Progress) -> Iterator[None]:
    """Silence transformers' warnings, log lines and bars while loading; the bar of the weights
    becomes `report`.

    Threads may load at once: all of that belongs to the process, so the first to come changes it,
    and it is changed back when the last has gone.
    """
    with _silence.lock:
        if not _silence.loads:
            _fall_silent(_silence.undo)
        _silence.loads += 1
    _reporting.report = report
    try:
        yield
    finally:
        _reporting.report = None
        with _silence.lock:
            _silence.loads -= 1
            if not _silence.loads:
                _silence.undo.close()


def _fall_silent(undo: contextlib.ExitStack) -> None:
    verbosity, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity(logging.CRITICAL)
    undo.callback(transformers_logging.set_verbosity, verbosity)
    hub = logging.getLogger("huggingface_hub")  # logs a dozen lines when the hub cannot be reached
    undo.callback(hub.setLevel, hub.level)
    hub.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    if bars:
        undo.callback(transformers_logging.enable_progress_bar)
    set_hook = getattr(transformers_logging, "set_tqdm_hook", lambda hook: None)
    previous = set_hook(_with_report)
    undo.callback(set_hook, previous)
    undo.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")


def _with_report(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The iterable of transformers' bar: for the weights one that reports, else what `factory`
    makes.
    """
    report = _reporting.report
    items = args[0] if args else kwargs.get("iterable")
    if (
        report is None
        or "weights" not in str(kwargs.get("desc", "")).lower()
        or not hasattr(items, "__len__")
    ):
        return factory(*args, **kwargs)
    return _reported(report, items)


def _reported(report: Progress, items: Any) -> Iterable[Any]:
    for n, item in enumerate(items):
        report("weights", n / len(items))
        yield item
    report("weights", 1.0)
