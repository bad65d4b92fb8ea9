"""The value of --kv-events-config: a JSON object, with the fields that vLLM and SGLang accept."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvflow.protocols.cache.addresses import DEFAULT_ADDRESS, numbered_address
from kvflow.protocols.cache.choices import Dialect
from kvflow.protocols.errors import MisuseError

Count = Annotated[int, Meta(ge=1, le=1 << 40)]


class KvEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of --kv-events-config. With the default endpoint, only this machine can subscribe.

    `hwm` and `max_queue_size` are accepted for compatibility and have no effect: kvflow has its own
    bounds on what it queues for a slow subscriber, and subscribers can detect dropped events. Two
    fields exist only in kvflow: `positional` encodes events as arrays, the older format, and
    `dialect` selects the engine whose names are used for the storage tiers.
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
        """Parse the value. Return None if the value turns events off. Raises: MisuseError."""
        try:
            found = msgspec.json.decode(text, type=KvEvents)
        except msgspec.DecodeError as error:
            raise MisuseError(str(error)) from None
        for name in ("endpoint", "replay_endpoint"):
            # A wrong address is refused even while the publisher is off.
            if (given := getattr(found, name)) is not None:
                _own_address(name, given, 0)
        return found if found.enable_kv_cache_events and found.publisher == "zmq" else None

    def check_workers(self, count: int) -> None:
        """Check that `count` workers on one machine get different ports. Raises: MisuseError."""
        self.of_worker(count - 1)
        if self.replay_endpoint is None:
            return
        # Worker n adds n to both ports, so the ranges must not overlap. 0 and * pick free ports.
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
        """Return --kv-events-config with `number` added to its ports. Raises: MisuseError."""
        moved = {
            name: _own_address(name, address, number)
            for name in ("endpoint", "replay_endpoint")
            if (address := getattr(self, name)) is not None
        }
        return msgspec.json.encode(msgspec.structs.replace(self, **moved)).decode()


def _own_address(name: str, address: str, number: int) -> str:
    # Other ZMQ transports, such as ipc://, cannot reach subscribers on other machines.
    if not address.startswith("tcp://"):
        raise MisuseError(f"{name} {address!r} is not tcp://host:port")
    return numbered_address(name, address, number)
