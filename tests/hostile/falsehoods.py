"""Messages that are valid and false: one field of a true one, however deep, holds another value it
may hold.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.codec import encode

Path = tuple[str | int, ...]
SMALL = (0, 1, 2, 3, 7, 16, 255, 4096)
LARGE = (2**31, 2**32, 2**40, 2**62, 2**63)
LIMITS = (2**31 - 1, 2**63 - 1, 2**64 - 1, -1, -(2**63))
NUMBERS = SMALL + LARGE + LIMITS
ADDRESSES = ("fd:0", "fd:1", "fd:999999999", "127.0.0.1:1", "127.0.0.1:22", "localhost:65535")
WORDS: tuple[str, ...] = (
    "",
    "x",
    "\0",
    "x" * 4000,
    "../../etc/passwd",
    "local",
    "mooncake",
    "uint8",
    "opaque",
)
WORDS += ADDRESSES


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every field of a message, those of the structs in it too; a list counts as a field, and its
    first element.
    """
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from paths(getattr(value, name), (*at, name))
        return
    yield at
    if isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
        yield from paths(value[0], (*at, 0))


def name_of(message: Any, path: Path) -> str:
    return ".".join((type(message).__name__, *(str(step) for step in path)))


def lie(
    rng: random.Random,
    message: Any,
    path: Path,
    parse: Callable[[bytes], Any],
    known: tuple[int, ...],
) -> Any:
    """`message` with another value at `path`, which `parse` takes.

    `known` are numbers that mean something here.
    """
    for _ in range(200):
        false = _with(message, path, lambda value: _other(rng, value, known))
        try:
            if false != message and parse(encode(false)) == false:
                return false
        except (WireError, OverflowError):
            continue  # no value it may hold
    raise AssertionError(f"nothing false can stand in {name_of(message, path)}")


def _with(value: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(value)
    step, *rest = path
    if isinstance(step, int):
        return (*value[:step], _with(value[step], tuple(rest), change), *value[step + 1 :])
    return msgspec.structs.replace(
        value, **{step: _with(getattr(value, step), tuple(rest), change)}
    )


def _other(rng: random.Random, value: Any, known: tuple[int, ...]) -> Any:
    match value:
        case bool():
            return not value
        case enum.Enum():
            return rng.choice(list(type(value)))
        case int():
            near = value + rng.choice((-2, -1, 1, 2, 4096))
            return rng.choice(
                (near, rng.choice(NUMBERS), rng.choice(known), rng.getrandbits(rng.randint(1, 63)))
            )
        case str():
            return rng.choice(
                (value + "x", value[:-1], rng.choice(WORDS), f"fd:{rng.randrange(64)}")
            )
        case bytes():
            sizes = (
                len(value),
                len(value) + 4,
                max(0, len(value) - 4),
                4 * rng.randrange(64),
                rng.randrange(64),
            )
            return rng.choice(
                (
                    rng.randbytes(rng.choice(sizes)),
                    bytes(rng.choice(sizes)),
                    value[::-1],
                    value + value,
                )
            )
        case tuple():
            odd = tuple(rng.choice(NUMBERS) for _ in range(rng.randrange(4)))
            return rng.choice((value[:-1], value + value, odd, value * 100))
        case _:
            raise AssertionError(value)
