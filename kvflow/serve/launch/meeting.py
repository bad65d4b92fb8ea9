"""A directory where the parts of a model meet. It is removed when the process that made it ends."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

# The kernel kills the other ranks together with the first one, so none of them could remove the
# directory. A shell removes it when its input ends: only this process holds the other end open.
_REMOVE = 'cat; exec rm -rf -- "$1"'


@contextlib.contextmanager
def meeting_directory() -> Iterator[str]:
    """Create a private directory. It is removed after the block, or if this process is killed."""
    found = tempfile.mkdtemp(prefix="kvflow-")
    remover: subprocess.Popen[bytes] | None = None
    try:
        with contextlib.suppress(OSError):  # raised if there is no shell
            remover = subprocess.Popen(
                ["/bin/sh", "-c", _REMOVE, "kvflow-meeting", found],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)
        if remover is not None:
            remover.communicate()
