"""Entry point of the `kvflow` script and of `python -m kvflow`.

It runs the command line. If an optional package is missing, it prints one line that names the extra
to install.
"""

from __future__ import annotations

import os
import sys

from kvflow.extras import missing_extra


def main() -> None:
    """Run the command line. The exit status is 2 if an optional package is missing."""
    # Python processes that libraries start must not import from the working directory.
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
