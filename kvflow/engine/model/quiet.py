"""transformers kept quiet while it loads a model: its bars become reports of progress, its errors one line each."""

from __future__ import annotations

import contextlib
import logging
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
        if not text or isinstance(error, LookupError):  # a bare key says nothing without the kind of the error
            text = f"{type(error).__name__} {text}".rstrip()
        raise MisuseError(f"{what}: {text}") from error


@contextlib.contextmanager
def quiet(report: Progress) -> Iterator[None]:
    """Silence transformers' warnings, log lines and bars while loading; the bar of the weights becomes `report`."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    hub = logging.getLogger("huggingface_hub")  # logs a dozen lines when the hub cannot be reached
    hub_level = hub.level
    hub.setLevel(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    set_hook = getattr(transformers_logging, "set_tqdm_hook", lambda hook: None)
    previous = set_hook(lambda factory, args, kwargs: _with_report(report, factory, args, kwargs))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_hook(previous)
        transformers_logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            transformers_logging.enable_progress_bar()


def _with_report(report: Progress, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The iterable of transformers' bar: for the weights one that calls `report`, else what `factory` makes."""
    items = args[0] if args else kwargs.get("iterable")
    if "weights" not in str(kwargs.get("desc", "")).lower() or not hasattr(items, "__len__"):
        return factory(*args, **kwargs)
    return _reported(report, items)


def _reported(report: Progress, items: Any) -> Iterable[Any]:
    for n, item in enumerate(items):
        report("weights", n / len(items))
        yield item
    report("weights", 1.0)
