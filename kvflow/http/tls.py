"""TLS of HTTP connections: contexts over PEM files, which are read again when they change.

A renewed certificate needs no restart: each new connection uses the files as they are, and
connections that exist keep what they began with. If the new files cannot be used (a renewed
certificate beside its old key, for example), the former ones stay in use, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvflow.http.errors import Failure
from kvflow.protocols.errors import MisuseError

_log = logging.getLogger("kvflow.http")
_FLIGHTS = 4  # TLS 1.2 and 1.3 need fewer
_BODY = msgspec.json.encode(
    Failure(400, "http_400", "plain HTTP at a port that serves HTTPS: use an https:// URL").body
)
_PLAIN_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_BODY), _BODY)
)


class _FileContext(ssl.SSLContext):
    """A context that hands each new connection to a context made from files as they are now.

    asyncio, uvloop and http.client create connections with `wrap_bio` and `wrap_socket` only.
    """

    _protocol = ssl.PROTOCOL_TLS_CLIENT

    def __new__(cls, *_: object) -> _FileContext:  # noqa: PYI034 # the base class says Self
        return super().__new__(cls, cls._protocol)

    def __init__(self, *files: str) -> None:
        self._files = files
        self._seen = tuple(map(_stamp, files))
        self._current = self._load()

    def __repr__(self) -> str:
        # aiohttp puts it into the text of its errors.
        return f"<{type(self).__name__} of {', '.join(self._files) or 'the system'}>"

    def _load(self) -> ssl.SSLContext:
        """Return a context from the files. Raises: MisuseError."""
        raise NotImplementedError

    def _newest(self) -> ssl.SSLContext:
        # Asking for the times of two files takes microseconds, and a handshake takes hundreds.
        seen = tuple(map(_stamp, self._files))
        if seen != self._seen:
            self._seen = seen
            try:
                self._current = self._load()
            except MisuseError as error:
                _log.error("TLS files have changed, but the former ones stay in use: %s", error)
            else:
                _log.info("read TLS files again: %s", ", ".join(self._files))
        return self._current

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._newest().wrap_bio(*args, **options)

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return self._newest().wrap_socket(*args, **options)


def _stamp(path: str) -> tuple[int, int, int] | None:
    # Kubernetes replaces a link, certbot a file: the inode tells two files of one time apart.
    with suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


class ServerContext(_FileContext):
    """Context for a server with the certificate chain and the private key of two PEM files.

    A client that speaks plain HTTP receives an answer in plain HTTP, with status 400.
    """

    _protocol = ssl.PROTOCOL_TLS_SERVER

    def __init__(self, certificate: str, key: str) -> None:
        """Read the files. Raises: MisuseError if they are unusable, or the dates do not fit."""
        super().__init__(certificate, key)

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, _ServerConnection)
        made.outgoing = outgoing
        return made

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._files
        _check_marker("--tls-cert", certificate, "BEGIN CERTIFICATE", "certificate")
        if "ENCRYPTED" in _check_marker("--tls-key", key, "PRIVATE KEY", "private key"):
            raise MisuseError(f"--tls-key {key}: the key is encrypted; store it without a password")
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.sslobject_class = _ServerConnection
        try:
            made.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            if error.reason in _ANOTHER_KEY:
                raise MisuseError(
                    f"--tls-key {key} is not the key of the first certificate in --tls-cert "
                    f"{certificate}"
                ) from None
            raise MisuseError(
                f"--tls-cert {certificate}, --tls-key {key}: {error.reason or error}"
            ) from None
        # A client that trusts these very certificates finds what is wrong with them: their dates,
        # and what they may be used for.
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.load_verify_locations(certificate)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            shake_hands(made, client)
        except ssl.SSLCertVerificationError as error:
            raise MisuseError(f"--tls-cert {certificate}: {error.verify_message}") from None
        return made


class ClientContext(_FileContext):
    """Context for a client that trusts the certificates of a PEM file, or else the system's.

    With `server_name`, servers prove that name in place of the host of their URL.
    """

    def __init__(self, authorities: str = "", server_name: str = "") -> None:
        """Read the file. Raises: MisuseError if it is unusable, or all of it has expired."""
        self._server_name = server_name
        super().__init__(*([authorities] if authorities else []))

    def _load(self) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        # A certificate in the file is trusted by itself, so it need not be an authority's.
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if not self._files:
            made.load_default_certs()
            return made
        (authorities,) = self._files
        _check_marker("--tls-ca", authorities, "BEGIN CERTIFICATE", "certificate")
        try:
            made.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise MisuseError(f"--tls-ca {authorities}: {error.reason or error}") from None
        ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in made.get_ca_certs()]
        if ends and max(ends) < time.time():
            raise MisuseError(f"--tls-ca {authorities}: certificate has expired")
        return made

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return super().wrap_bio(*args, **self._named(options))

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, **self._named(options))

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        return options | ({"server_hostname": self._server_name} if self._server_name else {})


# OpenSSL looks for the certificate of a key among those of the key's own type.
_ANOTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


class _ServerConnection(ssl.SSLObject):
    """A server's end of one connection.

    A request in plain HTTP would end a handshake with an error, and its client would only see that
    the connection closes. This object answers in plain HTTP, and then lets the event loop believe
    in a connection that its client has already closed.
    """

    outgoing: ssl.MemoryBIO
    _is_plain = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST":
                raise
            self._is_plain = True
            self.outgoing.write(_PLAIN_HTTP)

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        if self._is_plain:
            return b"" if buffer is None else 0
        return super().read(len, buffer)

    def unwrap(self) -> None:
        if not self._is_plain:
            super().unwrap()

    def getpeercert(self, binary_form: bool = False) -> Any:
        return None if self._is_plain else super().getpeercert(binary_form)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> None:
    """Connect two contexts in memory. Raises: SSLError if one of them refuses the other."""
    upstream, downstream = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(downstream, upstream, server_hostname=host),
        server.wrap_bio(upstream, downstream, server_side=True),
    )
    for _ in range(_FLIGHTS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _check_marker(flag: str, path: str, marker: str, what: str) -> str:
    """Return the text of a PEM file. Raises: MisuseError if it has no block of this kind."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MisuseError(f"{flag} {path}: {error.strerror or error}") from None
    if marker not in text:
        raise MisuseError(f"{flag} {path}: there is no {what} in PEM format")
    return text
