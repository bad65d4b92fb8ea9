"""Access to routes: clients have one key, the operator of the servers another one.

Every route of every role stands in one class of `ROUTES`; an application with a route that stands
in none is not built. The levels are SGLang's, but for one case: where there is an API key and no
operator's, SGLang takes the API key for both, and here nobody is the operator. The operator's key
opens what a client's opens, too.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvflow.http.errors import Failure


class Access(Enum):
    """Callers that a route admits."""

    OPEN = "everybody, for probes and scrapers"
    CLIENT = "who has the API key, or everybody where there is none"
    OPERATOR = "who has the operator's key, or everybody where there is no key at all"
    CONTROL = "who has the operator's key, and nobody where there is none"


class Keys(NamedTuple):
    """The bearer keys of a server; an empty one does not exist."""

    api: str = ""
    admin: str = ""

    @property
    def of_operator(self) -> str:
        """The key that an operator sends: the API key, where there is none for operators."""
        return self.admin or self.api


NO_KEYS = Keys()
ROUTES: dict[Access, frozenset[str]] = {
    Access.OPEN: frozenset({"GET /livez", "GET /health", "GET /health_generate", "GET /metrics"}),
    Access.CLIENT: frozenset(
        {
            *("POST /generate", "POST /v1/completions", "POST /v1/chat/completions"),
            *("POST /tokenize", "POST /v1/tokenize", "POST /detokenize", "POST /v1/detokenize"),
            *(
                "GET /v1/models",
                "GET /v1/models/{model}",
                "GET /model_info",
                "GET /get_model_info",
                "GET /version",
            ),
            # Routers and decodes have the clients' key, and ask for these.
            *(
                "GET /server_info",
                "GET /get_server_info",
                "GET /get_load",
                "GET /get_loads",
                "GET /ranks",
            ),
        }
    ),
    Access.OPERATOR: frozenset(
        {
            *("GET /flush_cache", "POST /flush_cache", "POST /abort_request"),
            *(
                "GET /rooms",
                "GET /rooms/{room}",
                "GET /peers",
                "GET /workers",
                "GET /workers/{worker_id}",
            ),
            "PUT /ranks/{rank}",  # decodes dial what stands there
        }
    ),
    Access.CONTROL: frozenset(
        {
            *("POST /workers", "DELETE /workers/{worker_id}"),  # who joins is sent what clients ask
            *("POST /switch_role", "POST /peers/{incarnation}/declare_dead"),
        }
    ),
}
_ACCESS_OF = {route: access for access, routes in ROUTES.items() for route in routes}


def bearer(key: str) -> dict[str, str]:
    """The header of a caller that has `key`; none where that is empty."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def authorized(keys: Keys) -> Middleware:
    """The middleware that answers 401 without the key of the route's class, and 403 where no key
    could open it.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, keys)
        return await handler(request) if refusal is None else refusal.response()

    return checked


def check_routes(app: web.Application) -> None:
    """Raises: AssertionError for routes of `app` that stand in no class."""
    missing = [route for route in routes_of(app) if route not in _ACCESS_OF]
    if missing:
        raise AssertionError(
            f"routes that stand in no class of authorization.ROUTES: {', '.join(missing)}"
        )


def routes_of(app: web.Application) -> Iterable[str]:
    """The routes of an application as `ROUTES` has them: HEAD is part of GET."""
    for route in app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            yield f"{route.method} {route.resource.canonical}"


def _refusal(request: web.Request, keys: Keys) -> Failure | None:
    """The answer to a request without the key that its route needs; None where the request may
    pass.
    """
    access = _access(request)
    if access is Access.OPEN or (access is not Access.CONTROL and not any(keys)):
        return None
    if access is Access.CLIENT:
        if not keys.api or _has_one_of(request, *keys):
            return None
        return Failure(
            401, "unauthorized", "the API key is missing or wrong; send `Authorization: Bearer KEY`"
        )
    if not keys.admin:
        text = (
            "this is a route for operators, and this server has no key for them; start it with "
            "--admin-api-key"
        )
        return Failure(403, "forbidden", text)
    if _has_one_of(request, keys.admin):
        return None
    text = (
        "the operator's key (--admin-api-key) is missing or wrong; send `Authorization: Bearer KEY`"
    )
    return Failure(401, "unauthorized", text)


def _access(request: web.Request) -> Access:
    """The class of a request's route.

    A path without one needs a client's key, as most routes do.
    """
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    return (
        Access.CLIENT
        if resource is None
        else _ACCESS_OF.get(f"{method} {resource.canonical}", Access.CLIENT)
    )


def _has_one_of(request: web.Request, *keys: str) -> bool:
    """True for a request with one of these keys.

    A comparison takes as long for a wrong key as for the right one.
    """
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    token = _bytes_of(given) if scheme.lower() == "bearer" else b""
    matches = [hmac.compare_digest(token, _bytes_of(key)) for key in keys if key]
    return any(matches)


def _bytes_of(key: str) -> bytes:
    """A key as bytes, for any text: two different keys never have the same ones."""
    # A command line and a header turn bytes that are no UTF-8 into surrogates, which a plain
    # `encode` refuses.
    return key.encode("utf-8", "surrogatepass")
