"""The judges: tests, collected and run by pytest inside this process, in any order."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Own options instead of the project's: no output, no cache, one seed, and no shrinking of what
# hypothesis finds.
ARGUMENTS: tuple[str, ...] = (
    "-o",
    "addopts=",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-qq",
    "-s",
)
ARGUMENTS += ("-m", "not gpu and not slow", "-W", "ignore::pytest.PytestAssertRewriteWarning")
# pytest-timeout ends the process, and counts the time that others have taken of a busy machine; the
# pool has a clock of its own.
ARGUMENTS += (
    "-p",
    "no:timeout",
    "-W",
    "ignore::pytest.PytestUnknownMarkWarning",
    "-W",
    "ignore::pytest.PytestConfigWarning",
)
SEED = "1"


class Judges:
    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._reports: list[pytest.TestReport] = []
        self.on_set_up: Callable[[], None] = lambda: None
        self.items = {item.nodeid: item for item in session.items}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        if report.when == "setup":
            self.on_set_up()

    def passes(self, name: str, following: str = "") -> bool:
        """Run one test. `following` is the one that is run next, which may share its fixtures."""
        self._reports.clear()
        item, after = self.items[name], self.items.get(following)
        self._session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        return not any(report.failed for report in self._reports)

    def first_that_fails(self, names: Iterable[str], starting: Callable[[str], None]) -> str:
        """Run these tests in order up to the first that fails; its name, or "" when all pass."""
        waiting = [name for name in names if name in self.items]
        for name, following in zip(waiting, [*waiting[1:], ""], strict=True):
            starting(name)
            if not self.passes(name, following):
                return name
        return ""


class _Plugin:
    def __init__(self, work: Callable[[Judges], None]) -> None:
        self._work = work
        self.has_worked = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:  # nothing failed to be imported
            judges = Judges(session)
            session.config.pluginmanager.register(judges)
            self._work(judges)
            self.has_worked = True
        return True


class Suite(NamedTuple):
    root: Path
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()

    def collected(self, work: Callable[[Judges], None]) -> bool:
        """Collect the judges and do `work` with them; False when one could not even be imported."""
        os.chdir(self.root)
        os.environ["KVFLOW_SEED"] = SEED
        _settle_hypothesis()
        plugin = _Plugin(work)
        pytest.main(
            [*ARGUMENTS, *self.options, "--rootdir", str(self.root), *self.paths], plugins=[plugin]
        )
        return plugin.has_worked


def import_what_lasts() -> None:
    """Import what no mutant changes, which halves the cost of a mutant.

    Without threads: a fork would copy their locks.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    for name in (
        "_pytest.assertion.rewrite",
        "hypothesis.stateful",
        "msgspec",
        "numpy",
        "pytest_asyncio",
        "uvloop",
        "zmq.asyncio",
    ):
        importlib.import_module(name)


def _settle_hypothesis() -> None:
    """Keep no examples between mutants, and shrink none: that one fails is enough."""
    from hypothesis import HealthCheck, Phase, settings

    quick: dict[str, Any] = {
        "database": None,
        "deadline": None,
        "suppress_health_check": list(HealthCheck),
    }
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), **quick)
    settings.load_profile("mutants")
