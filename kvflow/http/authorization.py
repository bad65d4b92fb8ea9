"""Access to routes. Clients have one key, and the operator of the servers has another.

`ROUTES` assigns every route of every role to a class of access. `build_app` refuses an application
with any other route. The classes are those of SGLang, with one difference. If a server has an API
key and no operator's key, SGLang accepts the API key on the operator's routes, but kvflow refuses
every caller there. The operator's key also opens the routes of clients.
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
    """The callers that a route admits."""

    OPEN = "everybody, for probes and scrapers"
    CLIENT = "who has the API key, or everybody where there is none"
    OPERATOR = "who has the operator's key, or everybody where there is no key at all"
    CONTROL = "who has the operator's key, and nobody where there is none"


class Keys(NamedTuple):
    """The bearer keys of a server. An empty string means that the server has no such key."""

    api: str = ""
    admin: str = ""

    @property
    def of_operator(self) -> str:
        """The key that an operator sends: the operator's key, or the API key if there is none."""
        return self.admin or self.api


NO_KEYS = Keys()
ROUTES: dict[Access, frozenset[str]] = {
    Access.OPEN: frozenset(
        {
            *("GET /livez", "GET /health", "GET /health_generate"),
            *("GET /metrics", "GET /engine_metrics"),
            # The page has no figures in it: it asks for a key, and reads /overview with it.
            *("GET /ui", "GET /ui/{file}"),
        }
    ),
    Access.CLIENT: frozenset(
        {
            *("POST /generate", "POST /v1/completions", "POST /v1/chat/completions"),
            *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses"),
            *("POST /tokenize", "POST /v1/tokenize", "POST /detokenize", "POST /v1/detokenize"),
            *("GET /v1/models", "GET /v1/models/{model}", "GET /version"),
            *("GET /model_info", "GET /get_model_info"),
            # Routers and decodes call these routes with the clients' key.
            *("GET /server_info", "GET /get_server_info", "GET /get_load", "GET /get_loads"),
            "GET /ranks",
        }
    ),
    Access.OPERATOR: frozenset(
        {
            *("GET /flush_cache", "POST /flush_cache", "POST /abort_request"),
            *("GET /rooms", "GET /rooms/{room}", "GET /peers"),
            *("GET /workers", "GET /workers/{worker_id}"),
            *("GET /overview", "GET /overview/events"),
            "PUT /ranks/{rank}",  # decodes connect to the address in this request
        }
    ),
    Access.CONTROL: frozenset(
        {
            # A worker that joins receives clients' requests, so only operators may add one.
            *("POST /workers", "DELETE /workers/{worker_id}"),
            *("POST /switch_role", "POST /peers/{incarnation}/declare_dead"),
        }
    ),
}
_ACCESS_OF = {route: access for access, routes in ROUTES.items() for route in routes}


def bearer(key: str) -> dict[str, str]:
    """Return the request header that carries `key`, or no header if `key` is empty."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def authorized(keys: Keys) -> Middleware:
    """Return the middleware that responds with 401 to a missing or wrong key.

    It responds with 403 on a route that needs an operator's key, if the server has none.
    """

    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = _refusal(request, keys)
        return await handler(request) if refusal is None else refusal.response(request.path)

    return checked


def check_routes(app: web.Application) -> None:
    """Raise AssertionError if `ROUTES` lacks a route of `app`."""
    missing = [route for route in routes_of(app) if route not in _ACCESS_OF]
    if missing:
        raise AssertionError(
            f"routes that stand in no class of authorization.ROUTES: {', '.join(missing)}"
        )


def routes_of(app: web.Application) -> Iterable[str]:
    """Yield the routes of an application, written as in `ROUTES`, but without HEAD routes."""
    for route in app.router.routes():
        if route.resource is not None and route.method != "HEAD":
            yield f"{route.method} {route.resource.canonical}"


def _refusal(request: web.Request, keys: Keys) -> Failure | None:
    """Return a failure if the request lacks the key for its route, or None if it may pass."""
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
    """Return the class of a request's route, or `CLIENT` for an unknown path."""
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    if resource is None:
        return Access.CLIENT
    return _ACCESS_OF.get(f"{method} {resource.canonical}", Access.CLIENT)


def _has_one_of(request: web.Request, *keys: str) -> bool:
    """Return True if the request carries one of these keys. Comparisons take constant time."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if not scheme:
        # Clients of Anthropic send their key in a header of its own.
        scheme, given = "bearer", request.headers.get("x-api-key", "")
    token = _bytes_of(given) if scheme.lower() == "bearer" else b""
    # All keys are compared, so that the time does not reveal which of them matched.
    matches = [hmac.compare_digest(token, _bytes_of(key)) for key in keys if key]
    return any(matches)


def _bytes_of(key: str) -> bytes:
    """Encode a key, which may be any string. Different keys have different bytes."""
    # Python decodes bytes that are not UTF-8 to surrogates, which a plain `encode` refuses.
    return key.encode("utf-8", "surrogatepass")
