"""The process that a route writes to."""

from __future__ import annotations

import os

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import ProcessIdentity
from kvflow.transports.host.identity import has_ended, open_process


class PeerProcess:
    """The process that a route was opened to, for as long as it is known to be the one behind the
    session.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        """Raises: TransferError when it has ended,
        or when no descriptor is left to watch it with.
        """
        self.identity = identity
        self.is_replaced = False  # another process was met at its session
        try:
            self._fd = open_process(identity)
        except TransferError:  # of another host: its end shows when a successor is met
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
        return self.is_replaced or (self._fd >= 0 and has_ended(self._fd))

    def check(self) -> None:
        """Raises: TransferError when it is gone."""
        if self.is_gone:
            raise TransferError(f"process {self.identity.pid} has ended")

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
