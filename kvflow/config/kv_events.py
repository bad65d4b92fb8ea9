"""The value of --kv-events-config: the JSON object that vLLM and SGLang take under this name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1 << 40)]


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where events of the prefix cache go. `hwm` and `max_queue_size` are accepted: what a subscriber does not take is
    dropped, and announced, by limits of kvflow's own. `positional` (kvflow's): events as arrays, the older form."""

    publisher: Literal["zmq", "null"] | None = "zmq"
    enable_kv_cache_events: bool = True
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: str = ""
    positional: bool = False

    @staticmethod
    def parse(text: str) -> KvEvents | None:
        """None where nothing is to be published. Raises: ValueError that says what is wrong."""
        try:
            found = msgspec.json.decode(text, type=KvEvents)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from None
        for name in ("endpoint", "replay_endpoint"):
            if (given := getattr(found, name)) is not None:
                _check(name, given)
        return found if found.enable_kv_cache_events and found.publisher == "zmq" else None

    def of_worker(self, number: int) -> str:
        """As text, for worker `number` of one machine: ports after those of the workers before it."""
        replay = self.replay_endpoint
        moved = msgspec.structs.replace(
            self,
            endpoint=_moved(self.endpoint, number),
            replay_endpoint=None if replay is None else _moved(replay, number),
        )
        return msgspec.json.encode(moved).decode()


def _check(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host.startswith("tcp://") or len(host) == len("tcp://") or not (port == "*" or port.isdecimal()):
        raise ValueError(f"{name} {address!r} is not tcp://host:port")
    if port != "*" and int(port) > 65535:
        raise ValueError(f"{name} {address!r}: the last port is 65535")


def _moved(address: str, number: int) -> str:
    host, _, port = address.rpartition(":")
    return address if port == "*" or port == "0" else f"{host}:{int(port) + number}"
