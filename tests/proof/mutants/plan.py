"""The judges of each mutant, and their order."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.proof.mutants.install import module_name
from tests.proof.mutants.mutant import Mutant
from tests.proof.mutants.scout import Survey

PATIENCE_TIMES = 10.0


class Plan:
    def __init__(
        self, root: Path, survey: Survey, patience_s: float, most_s: float = float("inf")
    ) -> None:
        """`most_s` limits the time of one mutant's judges together, except for the first."""
        self._survey, self._patience_s, self._most_s = survey, patience_s, most_s
        self._lines = {
            file: (root / file).read_text(encoding="utf-8").splitlines() for file in survey.files
        }
        self._killers: dict[tuple[str, str], list[str]] = defaultdict(list)
        paths = {judge.partition("::")[0] for judge in survey.seconds}
        self._tests = {path: (root / path).read_text(encoding="utf-8") for path in paths}

    def patience_s(self, judge: str) -> float:
        return self._patience_s + PATIENCE_TIMES * self._survey.seconds.get(judge, 0.0)

    def is_warm(self, mutant: Mutant) -> bool:
        """It can be put into a process that has imported the tree, and some judge runs it there."""
        return mutant.cell is not None or bool(self._running(mutant))

    def is_conclusive(self, mutant: Mutant) -> bool:
        """Put there it shows all that it does: nothing ran it while the tree was imported."""
        if mutant.cell is not None:
            return True
        imported = self._survey.imported.get(mutant.file, set())
        return bool(mutant.function) and not imported & set(
            range(mutant.first_line, mutant.last_line + 1)
        )

    def judges_of(self, mutant: Mutant, *, in_place: bool = False) -> list[str]:
        """Those that killed its neighbours first, then cheap before dear.

        With `in_place`, the tree was imported before: judges that only import it see no change.
        """
        found, cost = self._reaching(mutant), self._survey.seconds
        if in_place and mutant.cell is None:
            found = self._running(mutant)
        killers = self._killers[mutant.file, mutant.scope]
        rank = {judge: -n for n, judge in enumerate(killers, 1)}
        asked = sorted(found, key=lambda judge: (rank.get(judge, 0), cost[judge], judge))
        spent = itertools.accumulate(cost[judge] for judge in asked)
        return [
            judge
            for n, (judge, all_s) in enumerate(zip(asked, spent, strict=True))
            if not n or all_s < self._most_s
        ]

    def note_killer(self, mutant: Mutant, judge: str) -> None:
        killers = self._killers[mutant.file, mutant.scope]
        if judge in self._survey.seconds:
            if judge in killers:
                killers.remove(judge)
            killers.append(judge)
            del killers[:-8]

    def _reaching(self, mutant: Mutant) -> set[str]:
        survey = self._survey
        if mutant.cell is not None:
            asked = survey.cells.get(
                (module_name(mutant.file), mutant.cell.phase, mutant.cell.kind), set()
            )
            return set(asked) or self._mentioning(mutant)
        found = self._running(mutant)
        return found if self.is_conclusive(mutant) else found | self._mentioning(mutant)

    def _running(self, mutant: Mutant) -> set[str]:
        """Return the judges that run its lines after the tree was imported."""
        if not mutant.function:
            return set()
        return self._at(mutant.file, range(mutant.first_line, mutant.last_line + 1))

    def _at(self, file: str, lines: Iterable[int]) -> set[str]:
        reached = self._survey.reach.get(file, {})
        return {judge for line in lines for judge in reached.get(line, ())}

    def _mentioning(self, mutant: Mutant) -> set[str]:
        """Return the judges that run a line with one of its names on it; else all.

        A line outside functions passes its own names on.
        """
        names, known, found = set(mutant.names), set[str](), set[str]()
        while names - known:
            word = re.compile(rf"\b({'|'.join(sorted(names - known))})\b")
            known |= names
            for file, lines in self._lines.items():
                hits = [number for number, line in enumerate(lines, 1) if word.search(line)]
                found |= self._at(file, hits)
                names |= {
                    m[1]
                    for n in hits
                    if (m := re.match(r"([A-Za-z_]\w*)\s*(?::[^=]+)?=", lines[n - 1]))
                }
            for path, text in self._tests.items():
                if word.search(text):
                    found |= {
                        judge for judge in self._survey.seconds if judge.startswith(path + "::")
                    }
        return found or set(self._survey.seconds)
