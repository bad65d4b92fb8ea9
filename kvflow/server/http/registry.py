"""The bootstrap registry beside each prefill: which rank serves where. One process writes, decodes ask.

PUT /ranks/{rank}  RankInfo as JSON; a restarted rank replaces itself
GET /ranks         all ranks, by number
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvflow.protocols.errors import LostError, WireError
from kvflow.protocols.wire.ranks import RankInfo, rank_from_json, rank_to_json
from kvflow.server.http.app import build_app
from kvflow.server.http.errors import RequestError
from kvflow.server.http.metrics import Metrics
from kvflow.server.http.pipeline import json_response


class RankTable:
    """The ranks of one prefill. Registering again replaces, so a restart never counts twice."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankInfo] = {}

    def put(self, info: RankInfo) -> None:
        """Take a rank in; a changed world size forgets the ranks of the old world."""
        self._ranks = {rank: known for rank, known in self._ranks.items() if known.world_size == info.world_size}
        self._ranks[info.rank] = info

    def all(self) -> list[RankInfo]:
        return [self._ranks[rank] for rank in sorted(self._ranks)]


def registry_app(table: RankTable, metrics: Metrics, api_key: str = "") -> web.Application:
    """The registry as an application of its own port."""

    async def put(http: web.Request) -> web.StreamResponse:
        try:
            info = rank_from_json(msgspec.json.decode(await http.read()))
        except (WireError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(str(error)) from None
        if http.match_info["rank"] != str(info.rank):
            raise RequestError(f"rank {info.rank} was put to /ranks/{http.match_info['rank'][:20]}")
        table.put(info)
        return json_response({"ranks": len(table.all())})

    async def get(_: web.Request) -> web.StreamResponse:
        return json_response({"ranks": [rank_to_json(info) for info in table.all()]})

    async def health(_: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    routes = [web.put("/ranks/{rank}", put), web.get("/ranks", get), web.get("/health", health)]
    return build_app(routes, metrics, api_key)


class RegistryClient:
    """Asks registries. `resolve` is what a node calls before it knows a prefill, and again after it lost one."""

    def __init__(self, api_key: str = "", timeout_s: float = 5.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s))

    async def register(self, prefill: str, info: RankInfo) -> None:
        """Announce a rank. Raises: LostError (nobody answers), WireError (declined)."""
        await self._call("PUT", f"http://{prefill}/ranks/{info.rank}", rank_to_json(info))

    async def resolve(self, prefill: str) -> list[RankInfo]:
        """All ranks of the prefill at "host:port".

        Raises: LostError when the registry does not answer or is incomplete, WireError when it talks nonsense.
        """
        document = await self._call("GET", f"http://{prefill}/ranks", None)
        listed = document.get("ranks") if isinstance(document, dict) else None
        if not isinstance(listed, list):
            raise WireError(f"registry {prefill}: no list of ranks")
        ranks = [rank_from_json(entry) for entry in listed]
        if not ranks or [info.rank for info in ranks] != list(range(ranks[0].world_size)):
            raise LostError(f"registry {prefill}: {len(ranks)} ranks have registered so far")
        return ranks

    async def close(self) -> None:
        await self._session.close()

    async def _call(self, method: str, url: str, body: Any) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, url, data=data) as answer:
                raw = await answer.read()
                if answer.status != 200:
                    raise WireError(f"{url}: answered {answer.status}")
                return msgspec.json.decode(raw)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LostError(f"{url}: {str(error) or 'no answer in time'}") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise WireError(f"{url}: {error}") from None
