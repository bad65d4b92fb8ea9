"""In a forked prefill (PYTEST_PLANTED): its model step raises for prompts that begin with token 7,
once some pages have left.
"""

from __future__ import annotations

import sys
from typing import Any

if sys.argv[1] == "prefill":
    from kvflow.serve.engine.scheduler.prefill_steps import PrefillSteps

    step = PrefillSteps._step

    def failing(self: Any, rows: Any, jobs: Any) -> Any:
        if any(row.sequence.tokens[0] == 7 and row.sequence.computed for row in rows):
            raise RuntimeError("planted")
        return step(self, rows, jobs)

    PrefillSteps._step = failing  # type: ignore[assignment,method-assign]
