"""An operator's commands to a running decode."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import msgspec

from kvflow.http.authorization import bearer
from kvflow.http.errors import Failure
from kvflow.protocols.errors import LostError, MisuseError

TIMEOUT_S = 10.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def declare_dead(
    url: str, key: str, incarnation: str, why: str, tls: ssl.SSLContext | None = None
) -> None:
    """Run `kvflow declare-dead`: declare a prefill dead, and print the server's answer.

    `tls` verifies a server at an https:// URL; without it, the system's certificates do.

    Raises: MisuseError if the server refuses; LostError if it does not answer.
    """
    path = (
        f"/peers/{urllib.parse.quote(incarnation, safe='')}/"
        f"declare_dead?{urllib.parse.urlencode({'why': why})}"
    )
    if not url.startswith(("http://", "https://")):
        raise MisuseError(f"--url: {url!r} is not an http:// or https:// URL")
    request = urllib.request.Request(url.rstrip("/") + path, method="POST", headers=bearer(key))
    # Only this server may receive the operator's key, so no proxy or redirect is used.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), _NoRedirects
    )
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            document = msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as error:
        raise MisuseError(
            f"{url} refused ({error.code}): {Failure.read(error.code, error.read()).message}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise LostError(f"{url}: {error}") from None
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
