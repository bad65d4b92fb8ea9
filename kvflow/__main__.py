"""The `kvflow` script, and `python -m kvflow`: the command line, or one line that names the extra
it needs.
"""

from __future__ import annotations

import os
import sys

from kvflow.extras import missing_extra


def main() -> None:
    """Exit status 2 when a package of an extra is missing."""
    # Libraries start Python processes too, `multiprocessing` among them: they would import from the
    # working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        from kvflow.cli import main as run

        run()
    except ModuleNotFoundError as error:
        text = missing_extra(error)
        if not text:
            raise
        sys.stderr.write(f"kvflow: error: {text}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
