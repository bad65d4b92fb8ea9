"""Bring every mutant before its judges, first in a process that has imported the tree.

What survives there, and ran while the tree was imported, is imported anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic

from tests.proof.mutants.cells import change_cell
from tests.proof.mutants.forks import in_a_child
from tests.proof.mutants.install import Functions, import_with, module_name
from tests.proof.mutants.judge import Judges, Suite
from tests.proof.mutants.mutant import Mutant
from tests.proof.mutants.plan import Plan
from tests.proof.mutants.pool import Say, Verdict, judged

Verdicts = list[tuple[Mutant, Verdict]]
SAY_EVERY_S = 20.0


class Run:
    def __init__(
        self, suite: Suite, plan: Plan, workers: int, until_s: float = float("inf")
    ) -> None:
        """`until_s`: what has no verdict by then gets none."""
        self._suite, self._plan, self._workers, self._until_s = suite, plan, workers, until_s

    def judge(self, mutants: list[Mutant]) -> Verdicts:
        judges = {mutant: self._plan.judges_of(mutant) for mutant in mutants}
        found: Verdicts = [
            (mutant, Verdict("unreached")) for mutant in mutants if not judges[mutant]
        ]
        reached = [mutant for mutant in mutants if judges[mutant]]
        warm = [mutant for mutant in reached if self._plan.is_warm(mutant)]
        cold = [mutant for mutant in reached if not self._plan.is_warm(mutant)]
        if warm:
            for mutant, verdict in in_a_child(lambda: self._judge_warm(warm))():
                if verdict.outcome == "cold" or (
                    verdict.outcome == "survived" and not self._plan.is_conclusive(mutant)
                ):
                    cold.append(mutant)
                else:
                    found.append((mutant, verdict))
        return found + self._judge_all(cold, self._work_cold, "imported anew")

    def _judge_warm(self, mutants: list[Mutant]) -> Verdicts:
        found: Verdicts = []

        def work(judges: Judges) -> None:
            functions = Functions({str(self._suite.root / mutant.file) for mutant in mutants})

            def one(mutant: Mutant, say: Say) -> None:
                if mutant.cell is not None:
                    change_cell(sys.modules[module_name(mutant.file)], mutant.cell)
                    say.ends(*_asked(self._plan.judges_of(mutant), judges, say))
                elif functions.change(self._suite.root / mutant.file, mutant):
                    asked = self._plan.judges_of(mutant, in_place=True)
                    say.ends(*_asked(asked, judges, say))
                else:
                    say.ends("cold")

            found.extend(self._judge_all(mutants, one, "changed in place"))

        if not self._suite.collected(work):
            raise RuntimeError("the judges ended before all mutants were judged")
        return found

    def _work_cold(self, mutant: Mutant, say: Say) -> None:
        """Import the mutant, then one file of judges after the other."""
        import_with(self._suite.root, mutant)
        files: dict[str, list[str]] = {}
        for judge in self._plan.judges_of(mutant):
            files.setdefault(judge.partition("::")[0], []).append(judge)
        verdict = ("survived", "")
        for path, wanted in files.items():
            verdict = self._asked_anew(path, wanted, say)
            if verdict[0] == "killed":
                break
        say.ends(*verdict)

    def _asked_anew(self, path: str, wanted: list[str], say: Say) -> tuple[str, str]:
        found = [("killed", f"{path} cannot be imported")]

        def ask(judges: Judges) -> None:
            found[0] = _asked(wanted, judges, say)

        self._suite._replace(paths=(path,)).collected(ask)
        return found[0]

    def _judge_all(
        self, mutants: list[Mutant], work: Callable[[Mutant, Say], None], how: str
    ) -> Verdicts:
        found: Verdicts = []
        began = said = monotonic()
        for mutant, verdict in judged(
            iter(mutants), work, self._plan.patience_s, self._workers, self._until_s
        ):
            found.append((mutant, verdict))
            # A judge that hangs is a dear one to begin with.
            if verdict.outcome == "killed" and not verdict.is_hung:
                self._plan.note_killer(mutant, verdict.by)
            elif verdict.outcome == "survived":
                print(f"  survived: {mutant.key}", file=sys.stderr, flush=True)
            if monotonic() - said > SAY_EVERY_S:
                said = monotonic()
                alive = sum(one.outcome == "survived" for _, one in found)
                line = (
                    f"  {how}: {len(found)} of {len(mutants)} in {said - began:.0f} s, {alive} "
                    "survived"
                )
                print(line, file=sys.stderr, flush=True)
        return found


def _asked(wanted: list[str], judges: Judges, say: Say) -> tuple[str, str]:
    failed = judges.first_that_fails(wanted, say.starts)
    return ("killed" if failed else "survived", failed)
