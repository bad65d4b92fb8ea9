"""CURVE for the control link: one key for a whole deployment, in a file that every prefill and
decode reads.

ZMQ's handshake rejects a peer without the key, and none of its frames reaches our code. The key
pair is the server's identity at prefill and the client's at decode, so each side authenticates the
other, and all frames are encrypted. Cache events can be protected by such a key too; their
subscribers then need it. The data plane is not covered (see `mooncake`).
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
import threading
from typing import Any, NamedTuple

import msgspec
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from kvflow.protocols.errors import MisuseError

_log = logging.getLogger(__name__)


class Authentication(NamedTuple):
    """A running authenticator, which admits only clients that have the key."""

    authenticator: AsyncioAuthenticator

    def close(self) -> None:
        # Only the authenticated sockets use the context, so it is terminated too. A thread does
        # that, because `term` blocks while the sockets linger.
        context = self.authenticator.context
        self.authenticator.stop()
        threading.Thread(target=context.term, name="kvflow-zmq-term", daemon=True).start()


class ControlKey(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85 text. Every process of a deployment has both halves."""

    public: bytes
    secret: bytes

    def callback(self, _domain: str, client: bytes) -> bool:
        """Return True for a client with our key. `zmq.auth` prescribes this method's name."""
        return hmac.compare_digest(client, self.public)

    def arm_server(self, *sockets: zmq.Socket[Any]) -> Authentication:
        """Demand the key from every client of `sockets`.

        Call this before the sockets are bound, and close the returned `Authentication` after use.
        The context must have no other sockets, because ZMQ allows one authenticator per context.
        """
        authenticator = AsyncioAuthenticator(sockets[0].context)
        authenticator.start()
        authenticator.configure_curve_callback(credentials_provider=self)
        for socket in sockets:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        return Authentication(authenticator)

    def arm_client(self, socket: zmq.Socket[Any]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def write_key(path: str) -> None:
    """Write a new key into a new file that only its owner can read (`kvflow keygen`).

    Raises: MisuseError when the file exists or cannot be written.
    """
    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
    except OSError as error:
        raise MisuseError(f"key file {path}: {error.strerror}") from None


def open_new_key() -> int:
    """Write a new key into anonymous memory and return its open descriptor.

    Child processes read the key at /dev/fd/N. The key is gone when the last process closes the
    descriptor.
    """
    _, secret = zmq.curve_keypair()
    descriptor = os.memfd_create("kvflow-control-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, secret + b"\n")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_key(path: str) -> ControlKey | None:
    """Return the key in the file at `path`; None for an empty path.

    Raises: MisuseError when the file cannot be read or holds no key. The error never shows the
    content of the file.
    """
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            mode, secret = os.fstat(file.fileno()).st_mode, file.read(1024).strip()
        public = zmq.curve_public(secret)
    except OSError as error:
        raise MisuseError(f"key file {path}: {error.strerror}") from None
    except (ValueError, zmq.ZMQError):
        raise MisuseError(f"key file {path}: not a key written by `kvflow keygen`") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        _log.warning("key file %s is readable by every user of this machine", path)
    return ControlKey(public, secret)
