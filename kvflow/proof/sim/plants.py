"""Planted bugs, each of which once existed, installed from outside. A simulator that misses them
proves little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim import plants_decode as d
from kvflow.proof.sim import (
    plants_dp_groups,
    plants_residency,
    plants_staging,
    plants_tables,
    plants_threads,
)
from kvflow.proof.sim import plants_goodbye as g
from kvflow.proof.sim import plants_prefill as p
from kvflow.proof.sim.run import simulate
from kvflow.protocols.errors import MisuseError


class Plant(NamedTuple):
    """One bug. `install` returns a context that contains it; `invariant` is the first one that it
    is seen to break.
    """

    name: str
    text: str
    install: Callable[[], AbstractContextManager[object]]
    invariant: str


PLANTS = (
    Plant(
        "free on timer",
        "decode takes lent pages back after a while, proof or not",
        d.free_on_timer,
        "I2",
    ),
    Plant(
        "ack before drain",
        "prefill says drained as soon as it has cancelled its writes",
        p.ack_before_drain,
        "I12",
    ),
    Plant(
        "ack popped before send",
        "an Abort that is repeated gets no answer",
        p.ack_popped_before_send,
        "I5",
    ),
    Plant(
        "abort never retried",
        "a lost Abort or AbortAck is lost for good",
        d.abort_never_retried,
        "I5",
    ),
    Plant(
        "no grant check",
        "decode takes words for a room whatever grant they name",
        d.no_grant_check,
        "I8",
    ),
    Plant(
        "no grant check at prefill",
        "an Abort ends the room of that id, whatever its grant",
        p.abort_by_room,
        "I4",
    ),
    Plant(
        "resurrect on late metadata",
        "prefill keeps no tombstones",
        p.resurrect_on_late_metadata,
        "I6",
    ),
    Plant(
        "failed slice retried",
        "a failed write is started again on the same pages",
        p.failed_slice_retried,
        "I3",
    ),
    Plant(
        "success before all ranks",
        "one rank's last chunk is enough",
        d.success_before_all_ranks,
        "I8",
    ),
    Plant(
        "double close",
        "closing a room a second time gives its pages back again",
        d.double_close,
        "I1",
    ),
    Plant(
        "tombstone unbounded",
        "every ended grant is remembered for ever",
        p.tombstone_unbounded,
        "I5",
    ),
    Plant(
        "restart taken for death",
        "a new incarnation is proof that the old one is gone",
        d.restart_taken_for_death,
        "I2",
    ),
    Plant("silence taken for proof", "loans end with the link", d.silence_taken_for_proof, "I2"),
    Plant("doubt taken for proof", "AbortAck(unproven) ends a loan", d.doubt_taken_for_proof, "I2"),
    Plant(
        "failed handle taken for landed",
        "a write in error counts as landed",
        p.failed_handle_taken_for_landed,
        "I3",
    ),
    Plant(
        "heartbeat counts queueing",
        "a prefill that says nothing of rooms is dead",
        d.heartbeat_counts_queueing,
        "I7",
    ),
    Plant(
        "handoff slot shared",
        "hand-overs of all rooms go through one slot",
        d.handoff_slot_shared,
        "I9",
    ),
    Plant(
        "second cancel skips the drain",
        "a thread is waited for once",
        p.second_cancel_skips_the_drain,
        "I13",
    ),
    Plant(
        "source let go",
        "source pages are not held while a write reads them",
        p.source_let_go,
        "I13",
    ),
    Plant("nothing said again", "prefill leaves a Resync unanswered", p.nothing_said_again, "I4"),
    Plant(
        "dropped from one table", "an ended room leaves its grant open", p.grave_of_one_room, "I5"
    ),
    Plant(
        "ack for another life",
        "prefill acknowledges what its predecessor was asked",
        p.ack_for_another_life,
        "I6",
    ),
    Plant(
        "prompts not compared", "prefill matches halves by room alone", p.prompts_not_compared, "I8"
    ),
    Plant("goodbye not said", "prefill leaves without a word", g.goodbye_not_said, "I5"),
    Plant(
        "goodbye before the drain",
        "prefill says goodbye as it begins to leave, and names nothing",
        g.goodbye_before_the_drain,
        "I2",
    ),
    Plant(
        "goodbye of another incarnation taken as proof",
        "the goodbye of a prefill's successor ends loans of its predecessor",
        g.goodbye_of_another_incarnation,
        "I2",
    ),
    Plant(
        "goodbye proves what it names",
        "decode ends the loans that prefill cannot vouch for",
        g.goodbye_proves_what_it_names,
        "I2",
    ),
    Plant(
        "earlier loans forgotten",
        "the next node over a pool hands out what an earlier one lent, from another store",
        d.earlier_loans_forgotten,
        "I1",
    ),
    Plant(
        "earlier writer unwatched",
        "the death of an earlier node's writer is not seen",
        d.earlier_writer_unwatched,
        "I5",
    ),
    Plant(
        "close taken for proof",
        "an earlier node's loans end when the next one starts",
        d.close_taken_for_proof,
        "I2",
    ),
    Plant(
        "earlier loans of a decode forgotten by prefill",
        "a prefill takes over no loans of the decode that had its pool before a switch of roles",
        p.earlier_loans_forgotten_by_prefill,
        "I5",
    ),
    Plant(
        "garbage ends the loop",
        "prefill's reader dies of a malformed frame",
        p.garbage_ends_the_loop,
        "I7",
    ),
)


def all_plants() -> tuple[Plant, ...]:
    """Return the plants of endpoints and shells, of tables and steps, of requests that leave the
    device, of staging, of data-parallel groups, and of engines without an event loop.
    """
    of_parts = (plants_dp_groups.PLANTS, plants_staging.PLANTS, plants_threads.PLANTS)
    others = (
        *plants_tables.PLANTS,
        *plants_residency.PLANTS,
        *(plant for part in of_parts for plant in part),
    )
    return (*PLANTS, *(Plant(*plant) for plant in others))


def planted(name: str) -> AbstractContextManager[object]:
    """Return a context that installs the named plant, if any. Raises: MisuseError."""
    return installed(name, all_plants())


def installed(name: str, plants: Sequence[Plant], of: str = "") -> AbstractContextManager[object]:
    """Return a context that installs one of `plants`, if any is named.

    `of` names their simulator in the error. Raises: MisuseError.
    """
    if not name:
        return nullcontext()
    known = {plant.name: plant for plant in plants}
    if name not in known:
        raise MisuseError(f"no plant {name!r}{of and f' of {of}'}; there are: {', '.join(known)}")
    return known[name].install()


def hunt(
    name: str, seeds: Sequence[int], say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Find the first seed that shows a plant, and what it broke; no seed if all pass."""
    with planted(name):
        return hunted(name, seeds, simulate, say)


def hunted(
    name: str, seeds: Sequence[int], play: Callable[[int], Outcome], say: Callable[[str], None]
) -> dict[str, Any]:
    """Hunt a plant that is installed already."""
    for seed in seeds:
        violation = play(seed).violation
        if violation is not None:
            say(f"{name}: seed {seed} breaks {violation.invariant}")
            return {"plant": name, "seed": seed, **violation._asdict()}
    say(f"{name}: NOT FOUND in {len(seeds)} seeds")
    return {"plant": name}
