"""The process that a route writes to."""

from __future__ import annotations

import os

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.host.identity import has_ended, open_process


class PeerProcess:
    """The process that a route was opened to. It may have ended or been replaced since."""

    def __init__(self, identity: ProcessIdentity) -> None:
        """Begin to watch the process.

        Raises: TransferError when it is gone, or when no descriptor is left to watch it with.
        """
        self.identity = identity
        self.is_replaced = False  # True after another process answered at its address
        try:
            self._fd = open_process(identity)
        except TransferError:
            # A process on another host cannot be watched. Its end shows when a successor answers.
            self._fd = -1
            return
        except OSError as error:
            raise TransferError(
                f"cannot watch process {identity.pid}: {error.strerror}; try again"
            ) from error
        if self._fd < 0:
            raise TransferError(f"process {identity.pid} has ended")

    @property
    def is_gone(self) -> bool:
        """True once the process is known to have ended."""
        return self.is_replaced or (self._fd >= 0 and has_ended(self._fd))

    def check(self) -> None:
        """Raise TransferError if the process is known to have ended."""
        if self.is_gone:
            raise TransferError(f"process {self.identity.pid} has ended")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
