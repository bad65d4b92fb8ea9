"""The value of --kv-events-config: the JSON object that vLLM and SGLang take under this name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvflow.protocols.cache.addresses import DEFAULT_ADDRESS, numbered_address
from kvflow.protocols.cache.choices import Dialect
from kvflow.protocols.errors import MisuseError

Count = Annotated[int, Meta(ge=1, le=1 << 40)]


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The publication of cache events; by default it is reachable only from this machine.

    `hwm` and `max_queue_size` are accepted without effect: kvflow has other limits for a slow
    subscriber, and announces dropped events. Two fields are kvflow's: `positional` (events as
    arrays, the older form) and `dialect` (the engine whose names the media of the tiers have).
    """

    publisher: Literal["zmq", "null"] | None = "zmq"
    enable_kv_cache_events: bool = True
    endpoint: str = DEFAULT_ADDRESS
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: str = ""
    positional: bool = False
    dialect: Dialect = "vllm"

    @staticmethod
    def parse(text: str) -> KvEvents | None:
        """Parse the value; None if no events are to be published. Raises: MisuseError."""
        try:
            found = msgspec.json.decode(text, type=KvEvents)
        except msgspec.DecodeError as error:
            raise MisuseError(str(error)) from None
        for name in ("endpoint", "replay_endpoint"):
            # Even a publisher that is switched off must be valid: a wrong address would fail later,
            # when it is switched on.
            if (given := getattr(found, name)) is not None:
                _own_address(name, given, 0)
        return found if found.enable_kv_cache_events and found.publisher == "zmq" else None

    def check_workers(self, count: int) -> None:
        """Check that `count` workers of one machine get different ports. Raises: MisuseError."""
        self.of_worker(count - 1)
        if self.replay_endpoint is None:
            return
        # Worker n binds both ports plus n, so the two ranges of `count` ports must not overlap.
        # Port 0 or * is a free one for each.
        first, other = (
            address.rpartition(":")[2] for address in (self.endpoint, self.replay_endpoint)
        )
        if (
            first.isdecimal()
            and other.isdecimal()
            and abs(int(first) - int(other)) < count
            and int(first)
        ):
            raise MisuseError(
                f"{count} workers take ports {first} to {int(first) + count - 1} for endpoint, and "
                f"{other} to {int(other) + count - 1} for replay_endpoint: choose two that are "
                f"{count} apart"
            )

    def of_worker(self, number: int) -> str:
        """Return the value for worker `number` of one machine, with each port moved by `number`.

        Raises: MisuseError if a port would be too high."""
        moved = {
            name: _own_address(name, address, number)
            for name in ("endpoint", "replay_endpoint")
            if (address := getattr(self, name)) is not None
        }
        return msgspec.json.encode(msgspec.structs.replace(self, **moved)).decode()


def _own_address(name: str, address: str, number: int) -> str:
    """Return `address` with its port moved by `number`. Raises: MisuseError."""
    # ZMQ has other transports, but subscribers may be on other machines.
    if not address.startswith("tcp://"):
        raise MisuseError(f"{name} {address!r} is not tcp://host:port")
    return numbered_address(name, address, number)
