"""Keeping transformers quiet: progress bars become reports, and errors become single lines."""

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
"""A callback that the loading thread calls with a stage and the share of it that is done."""


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn any error that transformers raises for a user's files into a one-line MisuseError."""
    try:
        yield
    except MisuseError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
        # A LookupError's text is often just a key, which means little without the error's type.
        if not text or isinstance(error, LookupError):
            text = f"{type(error).__name__} {text}".rstrip()
        raise MisuseError(f"{what}: {text}") from error


class _Reporting(threading.local):
    report: Progress | None = None


class _Silence:
    """The number of loads under way, and how to undo the silence after the last one."""

    def __init__(self) -> None:
        self.lock, self.loads, self.undo = threading.Lock(), 0, contextlib.ExitStack()


_reporting, _silence = _Reporting(), _Silence()


@contextlib.contextmanager
def quiet(report: Progress) -> Iterator[None]:
    """Silence transformers' warnings, logs and progress bars; call `report` while weights load.

    Several threads may load at once, and these settings belong to the process. So the first load
    changes them, and the last one restores them.
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
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    undo.callback(transformers_logging.set_verbosity, verbosity)
    # The hub's client logs a dozen lines when the hub cannot be reached.
    hub = logging.getLogger("huggingface_hub")
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
    """Replace the progress bar for weights with an iterable that reports; keep other bars."""
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
