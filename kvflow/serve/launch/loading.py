"""Progress of loading a model, as a bar on a terminal or as log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_log = logging.getLogger("kvflow.load")


class LoadingProgress:
    """A display of the progress that `load_model` reports from its thread."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._stage = ""
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(f"loading {model}", total=1.0)

    def report(self, stage: str, done: float) -> None:
        """Show the current stage, and the share of it that is done, from 0 to 1."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{self._model}: {stage}", completed=done)
        elif stage != self._stage:
            _log.info("loading %s: %s", self._model, stage)
        self._stage = stage

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
