"""TLS contexts of a role, from its settings."""

from __future__ import annotations

import ssl

from kvflow.http.tls import ClientContext, ServerContext, shake_hands
from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.settings import Settings


def check_tls(settings: Settings) -> None:
    """Check the TLS files before a model is loaded. Raises: MisuseError."""
    server_tls(settings)
    client_tls(settings)


def server_tls(settings: Settings) -> ServerContext | None:
    """Return the context with which a role serves HTTP, or None for plain HTTP.

    Raises: MisuseError.
    """
    return ServerContext(settings.tls_cert, settings.tls_key) if settings.tls_cert else None


def client_tls(settings: Settings) -> ClientContext | None:
    """Return the context with which a role asks servers at https:// URLs, or None for the default.

    Raises: MisuseError.
    """
    if not (settings.tls_ca or settings.tls_server_name):
        return None
    return ClientContext(settings.tls_ca, settings.tls_server_name)


def registry_tls(settings: Settings) -> ClientContext | None:
    """Return the context with which decode asks registries, or None for plain HTTP.

    A request names a registry by host and port, without a scheme. Raises: MisuseError.
    """
    if not (settings.tls_cert or settings.tls_ca):
        return None
    return client_tls(settings) or ClientContext()


def check_fleet_tls(settings: Settings, host: str) -> None:
    """Check that the roles of one machine, which meet at `host`, trust each other's certificate.

    They share one. Raises: MisuseError.
    """
    server, client = server_tls(settings), client_tls(settings) or ClientContext()
    if server is None:
        return
    try:
        shake_hands(server, client, host)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message.rstrip(".")
        raise MisuseError(
            f"--tls-cert {settings.tls_cert}: router and workers, which meet at {host}, would not "
            f"trust it: {why}; name its authority with --tls-ca, and the name in it with "
            "--tls-server-name"
        ) from None
