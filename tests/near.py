"""Numbers of a model, compared as far as they are the same in every batch."""

from __future__ import annotations

import math


class Near(float):
    """A number that equals all numbers within a thousandth of it.

    Sums of a model differ in their last bits with the batch. Rounded numbers would differ whenever
    two such sums lie on either side of where rounding changes.
    """

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and math.isclose(
            self, other, rel_tol=0.0, abs_tol=0.001
        )

    def __ne__(self, other: object) -> bool:
        return not self == other
