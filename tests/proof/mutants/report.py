"""The verdicts in figures, and the survivors in full."""

from __future__ import annotations

import json
import resource
from collections import Counter
from typing import Any

from tests.proof.mutants.mutant import Mutant
from tests.proof.mutants.pool import Verdict


class Report:
    def __init__(self, mutants: list[Mutant], equivalent: dict[str, str], files: set[str]) -> None:
        self._mutants = mutants
        keys = {mutant.key for mutant in mutants}
        self._equivalent = {key for key in equivalent if key in keys}
        self._stale = [
            key for key in equivalent if key not in keys and key.partition(" :: ")[0] in files
        ]
        self.verdicts: list[tuple[Mutant, Verdict]] = []
        self.wanted = 0
        self.no_judges: list[str] = []  # they fail without any mutant
        self.seconds = 0.0

    def to_judge(self, recheck: bool) -> list[Mutant]:
        return [mutant for mutant in self._mutants if recheck or mutant.key not in self._equivalent]

    @property
    def survivors(self) -> list[tuple[Mutant, Verdict]]:
        return [
            (mutant, verdict)
            for mutant, verdict in sorted(self.verdicts, key=lambda one: one[0].key)
            if verdict.outcome != "killed" and mutant.key not in self._equivalent
        ]

    @property
    def wrongly_equivalent(self) -> list[tuple[Mutant, Verdict]]:
        return [
            (m, v) for m, v in self.verdicts if v.outcome == "killed" and m.key in self._equivalent
        ]

    @property
    def is_clean(self) -> bool:
        return not (self.survivors or self.wrongly_equivalent or self._stale or self.no_judges)

    def add(self, other: Report) -> None:
        self._mutants = [*self._mutants, *other._mutants]
        self._equivalent |= other._equivalent
        self._stale += other._stale
        self.verdicts += other.verdicts
        self.wanted += other.wanted
        self.no_judges += other.no_judges

    def figures(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        killed = [verdict for _, verdict in self.verdicts if verdict.outcome == "killed"]
        return {
            "total": len(self._mutants),
            "judged": len(self.verdicts),
            "not_judged": self.wanted - len(self.verdicts),
            "killed": len(killed),
            "by_time_limit": sum(verdict.is_hung for verdict in killed),
            "equivalent": len(self._equivalent),
            "survivors": len(self.survivors),
            "unreached": sum(verdict.outcome == "unreached" for _, verdict in self.survivors),
            "wrongly_equivalent": len(self.wrongly_equivalent),
            "stale": len(self._stale),
            "seconds": round(self.seconds),
            "cpu_seconds": round(used.ru_utime + used.ru_stime),
        }

    def as_dict(self) -> dict[str, Any]:
        mutants = [{"key": mutant.key, **verdict._asdict()} for mutant, verdict in self.verdicts]
        return {**self.figures(), "mutants": mutants, "stale_keys": self._stale}

    def text(self, stubs: bool) -> str:
        lines = [self._by_file()]
        if stubs and self.survivors:
            keys = "\n".join(
                f"    {json.dumps(mutant.key, ensure_ascii=False)}," for mutant, _ in self.survivors
            )
            lines.append(f'[[equivalent]]\nreason = ""\nkeys = [\n{keys}\n]')
        else:
            lines += [f"SURVIVED{_unreached(v)}  {m.key}{_after(m)}" for m, v in self.survivors]
        lines += [
            f"NOT EQUIVALENT  {m.key}\n    killed by {v.by}" for m, v in self.wrongly_equivalent
        ]
        lines += [f"NO JUDGE, for it fails without any mutant  {name}" for name in self.no_judges]
        lines += [f"STALE in equivalent.toml  {key}" for key in self._stale]
        lines.append("  ".join(f"{name} {value}" for name, value in self.figures().items()))
        return "\n".join(lines)

    def _by_file(self) -> str:
        judged = Counter(mutant.file for mutant, _ in self.verdicts)
        alive = Counter(mutant.file for mutant, _ in self.survivors)
        wide = max((len(file) for file in judged), default=4)
        rows = [f"{file:<{wide}}  {judged[file]:>6}  {alive[file]:>8}" for file in sorted(judged)]
        return "\n".join([f"{'file':<{wide}}  judged  survived", *rows])


def _unreached(verdict: Verdict) -> str:
    return " (no judge reaches it)" if verdict.outcome == "unreached" else ""


def _after(mutant: Mutant) -> str:
    return (
        f"\n    line {mutant.first_line}, becomes {mutant.edit.new.decode().strip()!r}"
        if mutant.edit
        else ""
    )
