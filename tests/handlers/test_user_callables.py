"""Callables of users raise and return anything: rooms end, and the node closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError, LostError
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.testing.pair import Pair, pair, until
from tests.handlers.scenes import PROMPT, success
from tests.handlers.test_group import Ranks, group

TIMING = Timing(
    heartbeat_s=0.02, lost_after_s=0.2, repeat_after_s=0.02, rendezvous_s=0.2, register_s=0.2
)
DEADLINE_S = 0.3
Act = Callable[..., Any]


class Strange(BaseException):
    """As a framework's own cancellation is: no Exception."""


def raising(error: BaseException) -> Act:
    def act(*_: Any, **__: Any) -> Any:
        raise error

    return act


def returning(value: Any) -> Act:
    return lambda *_, **__: value


ACTS: dict[str, Act] = {
    "LostError": raising(LostError("gone")),
    "CapacityError": raising(CapacityError("things", 2, 1)),
    "ValueError": raising(ValueError("what is that")),
    "RuntimeError": raising(RuntimeError("can't start new thread")),
    "TypeError": raising(TypeError("no such argument")),
    "OSError": raising(ConnectionRefusedError(111, "refused")),
    "TimeoutError": raising(TimeoutError("took too long")),
    "StopIteration": raising(StopIteration()),
    "CancelledError": raising(asyncio.CancelledError()),
    "Strange": raising(Strange("from elsewhere")),
    "None": returning(None),
    "a number": returning(7),
    "a text": returning("text"),
    "a list": returning([]),
    "a list of None": returning([None]),
    "an object": returning(object()),
}
NEVER = "never"  # of what is awaited: it does not end


def awaited(act: Act | str) -> Act:
    async def call(*of: Any, **by: Any) -> Any:
        if isinstance(act, str):
            await asyncio.Event().wait()
        else:
            return act(*of, **by)

    return call


class Instead:
    def __init__(self, whole: Any, **replaced: Any) -> None:
        self._whole, self._replaced = whole, replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._whole, name)


def with_property(thing: Any, name: str, act: Act) -> None:
    thing.__class__ = type("Odd", (type(thing),), {name: property(act, lambda *_: None)})


# --- what is misused: each is put in before the two halves of a room are opened


def resolve(p: Pair, act: Act | str) -> None:
    p.decode._resolve = awaited(act)


def resolve_without_awaiting(p: Pair, act: Act) -> None:
    p.decode._resolve = act


def connect(p: Pair, act: Act) -> None:
    p.decode.shell.connections._connect = act


def socket_of_decode(**names: bool) -> Callable[[Pair, Act], None]:
    def put(p: Pair, act: Act) -> None:
        def connected(*to: Any) -> Any:
            socket = p.network.connect(*to)
            for name, is_awaited in names.items():
                if name == "lockout_reason":
                    with_property(socket, name, act)
                else:
                    setattr(socket, name, awaited(act) if is_awaited else act)
            return socket

        p.decode.shell.connections._connect = connected

    return put


def socket_of_prefill(name: str) -> Callable[[Pair, Act], None]:
    return lambda p, act: setattr(
        p.prefill.shell.socket, name, awaited(act) if name == "receive" else act
    )


def store_of_decode(*names: str) -> Callable[[Pair, Act], None]:
    def put(p: Pair, act: Act) -> None:
        p.decode.shell.stores.pages = Instead(p.decode.pages, **dict.fromkeys(names, act))

    return put


def store_of_prefill(*names: str) -> Callable[[Pair, Act], None]:
    def put(p: Pair, act: Act) -> None:
        p.prefill.shell.pages = Instead(p.prefill.pages, **dict.fromkeys(names, act))

    return put


def plane_connects(p: Pair, act: Act | str) -> None:
    p.plane(p.prefill).connect = awaited(act)  # type: ignore[method-assign]


def plane_stalls(p: Pair, act: Act) -> None:
    with_property(p.plane(p.prefill), "stalled_s", act)


def fence(of: Callable[[Pair], Any]) -> Callable[[Pair, Act | str], None]:
    def put(p: Pair, act: Act | str) -> None:
        p.plane(of(p)).fence = awaited(act)  # type: ignore[method-assign]

    return put


def route(**names: Act) -> Callable[[Pair, Act], None]:
    def put(p: Pair, act: Act) -> None:
        plane = p.plane(p.prefill)
        connected = plane.connect

        async def connect(address: PlaneAddress, layout: PoolLayout) -> Any:
            found = await connected(address, layout)
            return Instead(
                found,
                **{
                    name: lambda *of, make=make: make(found, act, *of)
                    for name, make in names.items()
                },
            )

        plane.connect = connect  # type: ignore[method-assign]

    return put


def odd_write(name: str) -> Act:
    def write(found: Any, act: Act, *pages: Any) -> Any:
        made = found.write(*pages)
        if name in ("landed_bytes", "error"):
            made = Instead(made)
            with_property(made, name, act)
        elif name == "done":
            odd = asyncio.get_running_loop().create_future()
            try:
                odd.set_result(act())
            except asyncio.CancelledError:
                odd.cancel()
            except StopIteration:
                odd.set_exception(RuntimeError("StopIteration"))
            except BaseException as error:  # noqa: BLE001
                # Whatever it is, the write is told to have ended in it.
                odd.set_exception(error)
            return Instead(made, done=odd)
        else:
            setattr(made, name, act)
        return made

    return write


def on_end(p: Pair, act: Act) -> None:
    for node in (p.prefill, p.decode):
        opened = node.room

        def room(*of: Any, opened: Any = opened, **by: Any) -> Any:
            handle = opened(*of, **by)
            handle.on_end(act)
            handle.on_end(lambda: setattr(handle, "told", True))
            return handle

        node.room = room  # type: ignore[method-assign]


SYNC: dict[str, Callable[[Pair, Act], None]] = {
    "resolve, not awaitable": resolve_without_awaiting,
    "connect": connect,
    "send at decode": socket_of_decode(send=False),
    "receive at decode": socket_of_decode(receive=True),
    "lockout_reason": socket_of_decode(lockout_reason=False),
    "close of decode's socket": socket_of_decode(close=False),
    "send at prefill": socket_of_prefill("send"),
    "receive at prefill": socket_of_prefill("receive"),
    "sender_address": socket_of_prefill("sender_address"),
    "take_room": store_of_decode("take_room"),
    "give_back": store_of_decode("give_back"),
    "move": store_of_decode("move"),
    "every method of decode's store": store_of_decode(
        "take_room", "give_back", "move", "hold", "unhold"
    ),
    "hold at prefill": store_of_prefill("hold"),
    "unhold at prefill": store_of_prefill("unhold"),
    "stalled_s": plane_stalls,
    "write": route(write=lambda found, act, *_: act()),
    "close of a route": route(close=lambda found, act: act()),
    "done of a write": route(write=odd_write("done")),
    "landed_bytes of a write": route(write=odd_write("landed_bytes")),
    "error of a write": route(write=odd_write("error")),
    "cancel of a write": route(write=odd_write("cancel")),
    "on_end": on_end,
}
AWAITED: dict[str, Callable[[Pair, Any], None]] = {
    "resolve": resolve,
    "connect of a plane": plane_connects,
    "fence at decode": fence(lambda p: p.decode),
    "fence at prefill": fence(lambda p: p.prefill),
}
PLACES: dict[str, Callable[[Pair, Any], None]] = {**SYNC, **AWAITED}


async def prefill_leg(p: Pair, room: PrefillRoom) -> None:
    taken = p.prefill.pages.take(5, "engine")

    async def send() -> None:
        await room.matched()
        room.send(taken[:2])
        room.send(taken[2:], last=True, handoff=b"handoff")
        await room.done()

    await asyncio.gather(send(), return_exceptions=True)
    room.close()
    await room.released()
    p.prefill.pages.give_back(taken, "engine")


async def decode_leg(room: DecodeRoom) -> None:
    with suppress(KvflowError):
        await room.opened()
        await room.landed()
    with suppress(Exception, Strange, asyncio.CancelledError):  # of a store: raised at who closes
        room.close()
    for answer in (room.when_opened, room.when_landed):
        with suppress(KvflowError):
            await answer.get()


async def one_room(place: str, act: str) -> None:
    async with pair(timing=TIMING) as p:
        PLACES[place](p, NEVER if act == NEVER else ACTS[act])
        source = p.prefill.room(7, PROMPT, deadline_s=DEADLINE_S)
        target = p.decode.room(7, "sim", PROMPT, deadline_s=DEADLINE_S)
        async with asyncio.timeout(60):
            await asyncio.gather(prefill_leg(p, source), decode_leg(target))
        async with asyncio.timeout(60):
            await p.prefill.close()
            await p.decode.close()
        assert source.ended and target.ended
        assert place != "on_end" or (vars(source)["told"] and vars(target)["told"])
        assert not p.prefill.shell.rooms and not p.prefill.shell.endpoint.rooms
        assert not p.decode.shell.endpoint.rooms
        # A store that lets go of nothing.
        assert place == "unhold at prefill" or p.prefill.pool.places.at_rest()


@pytest.mark.parametrize("place", PLACES)
async def test_every_room_ends_and_the_nodes_close(place: str) -> None:
    acts = [*ACTS, NEVER] if place in AWAITED else list(ACTS)
    found = await asyncio.gather(*(one_room(place, act) for act in acts), return_exceptions=True)
    assert {
        act: repr(error) for act, error in zip(acts, found, strict=True) if error is not None
    } == {}


FOREIGN = ["ValueError", "StopIteration", "CancelledError", "Strange"]


@pytest.mark.parametrize("act", FOREIGN)
@pytest.mark.parametrize(
    "place",
    ["resolve", "connect", "take_room", "connect of a plane", "write", "on_end", "stalled_s"],
)
async def test_what_is_no_error_of_kvflow_is_counted_and_the_next_room_succeeds(
    place: str, act: str
) -> None:
    """It happens once; the loops, links and tasks that met it go on."""
    met: list[None] = []

    async with pair(timing=TIMING) as p:
        store, socket = p.decode.shell.stores.pages, p.decode.shell.connections._connect
        asked, plane = p.decode._resolve, p.plane(p.prefill)
        connected, kind = plane.connect, type(plane)

        def once(*of: Any, **by: Any) -> Any:
            met.append(None)
            p.decode.shell.stores.pages, p.decode.shell.connections._connect, p.decode._resolve = (
                store,
                socket,
                asked,
            )
            plane.connect, plane.__class__ = connected, kind  # type: ignore[method-assign]
            return ACTS[act](*of, **by)

        PLACES[place](p, once)
        source = p.prefill.room(7, PROMPT, deadline_s=DEADLINE_S)
        target = p.decode.room(7, "sim", PROMPT, deadline_s=DEADLINE_S)
        async with asyncio.timeout(20):
            await asyncio.gather(prefill_leg(p, source), decode_leg(target))
        assert met and p.prefill.counts.handler_errors + p.decode.counts.handler_errors == len(met)
        for node in (p.prefill, p.decode):
            vars(node).pop("room", None)
            node.counts.handler_errors = 0
        if place != "write":  # that route is odd for good
            await until(lambda: not p.decode.shell.endpoint.rooms)
            await success(p, 8)


# --- a group of ranks


def group_places() -> dict[str, Callable[[Ranks, Any], None]]:
    def put(name: str, is_awaited: bool) -> Callable[[Ranks, Any], None]:
        return lambda ranks, act: setattr(
            ranks.members[1], name, awaited(act) if is_awaited else act
        )

    return {"ready": put("_ready", True), "open_room": put("_open_room", False)}


GROUP = [("open_room", act) for act in ACTS] + [
    ("ready", act) for act in ACTS if act not in ("None",)
]


@pytest.mark.parametrize(
    ("place", "act"), [case for case in GROUP if not (case[0] == "ready" and " " in case[1])]
)
async def test_a_rank_whose_engine_fails_fails_the_request_on_every_rank(
    place: str, act: str
) -> None:
    async with group(2, rests=False) as ranks:
        group_places()[place](ranks, ACTS[act])
        request = ranks.leader.open(7, bytes(PROMPT))
        target = ranks.nodes.decode.room(7, "sim", PROMPT)
        async with asyncio.timeout(20):
            with pytest.raises(KvflowError):
                await request.decided()
            with pytest.raises(KvflowError):
                await target.landed()
            await until(lambda: not any(shell.member.tickets for shell in ranks.members))
        assert not any(node.shell.endpoint.rooms for node in ranks.nodes.prefills)


async def test_who_waits_for_a_group_that_stops_is_told() -> None:
    async with group(2, rests=False) as ranks:

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        ranks.members[1]._ready = never
        request = ranks.leader.open(7, bytes(PROMPT))
        await until(lambda: ranks.members[1].requests)
        (mine,) = ranks.members[1].requests.values()
        await ranks.members[1].stop()
        with pytest.raises(KvflowError, match="shutting down"):
            await mine.settled()
        await ranks.leader.close()
        with pytest.raises(KvflowError, match="shutting down"):
            await request.decided()


# --- the orders of events that a task cannot see


@pytest.mark.parametrize("turn", range(20))
async def test_patience_ends_where_nothing_is_fed_any_more(turn: int) -> None:
    """A timer of uvloop may fire up to a millisecond early, by the node's clock."""
    async with pair() as p:
        await p.decode.shell.stop()
        async with asyncio.timeout(20):
            await p.decode.shell.wait_while(lambda: True, 0.001 + turn * 0.0001)


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_room_opened_by_name_ends_with_its_node_however_early(turns: int) -> None:
    async with pair() as p:
        p.decode._resolve = awaited(NEVER)
        room = p.decode.room(7, "sim", PROMPT)
        for _ in range(turns):
            await asyncio.sleep(0)
        closing = asyncio.create_task(p.decode.close())
        async with asyncio.timeout(20):
            for waiting in (room.opened(), room.landed()):
                with pytest.raises(KvflowError, match="shutting down"):
                    await waiting
            await room.released()
            await closing


async def test_a_resolver_that_is_deaf_to_its_end_does_not_keep_the_node_from_closing() -> None:
    async with pair(timing=TIMING) as p:
        ends = asyncio.Event()

        async def deaf(_: str) -> Any:
            while not ends.is_set():
                with suppress(asyncio.CancelledError):
                    await ends.wait()

        p.decode._resolve = deaf
        room = p.decode.room(7, "sim", PROMPT)
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await p.decode.close()
            await room.released()
        ends.set()


async def test_what_comes_as_the_last_parts_of_a_node_close_asks_no_resolver() -> None:
    """Nothing would end such a task any more: the shell has ended its tasks."""
    async with pair(timing=TIMING) as p:
        closes, may_close = asyncio.Event(), asyncio.Event()
        close = p.plane(p.decode).close

        async def held_up() -> None:
            closes.set()
            await may_close.wait()
            await close()

        p.plane(p.decode).close = held_up  # type: ignore[method-assign]
        p.decode._resolve = awaited(NEVER)
        closing = asyncio.create_task(p.decode.close())
        await closes.wait()
        p.decode.refuse(6, "sim", Cause(Code.CLIENT_GONE, "it has gone"))
        room = p.decode.room(7, "sim", PROMPT)
        may_close.set()
        await closing
        with pytest.raises(KvflowError, match="this node is shutting down"):
            await room.landed()
        assert not p.decode.shell._tasks and not p.decode._asking


@pytest.mark.parametrize("node", ["prefill", "decode"])
async def test_a_plane_that_cannot_close_lets_the_rest_close_and_its_error_out(node: str) -> None:
    async with pair() as p:
        await success(p)
        which: PrefillNode | DecodeNode = getattr(p, node)
        plane = p.plane(which)
        close = plane.close
        plane.close = awaited(ACTS["RuntimeError"])  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="new thread"):
            await which.close()
        assert which.shell.stopped and not which.shell._tasks
        (p.prefills if node == "prefill" else p.decodes).clear()
        await close()
