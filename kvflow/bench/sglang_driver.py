"""A driver for SGLang's prefill/decode pair, which benchmarks compare with kvflow's.

It runs under the peer's Python, and imports no module of kvflow.

    PEER_PYTHON sglang_driver.py DIR      (DIR holds the harness: ctl.py, node.py, sgkit.py)

It reads commands and writes replies as JSON lines, like `worker.py`: setup, rooms, abort, quit. The
manager, the sender and the receiver are SGLang's released ones. The harness polls them in a loop,
and `rooms` takes the polling interval as an argument.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

# Without these settings SGLang cannot move scattered pages over Mooncake TCP at all.
QUEUE_ENV = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "120000",
    "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES": "512",
}


def main(harness: str) -> None:
    sys.path.insert(0, harness)
    ctl = importlib.import_module("ctl")
    pair: Any = None
    room = 1
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "quit":
            break
        # stdout carries the replies, so whatever the peer prints goes to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            if do == "setup":
                pair = ctl.Pair(env={**QUEUE_ENV, **command.pop("settings")}, **command)
                reply: dict[str, object] = {}
            elif do == "abort":
                reply = abort(pair, room, **command)
                room += 1
            else:
                reply = rooms(pair, list(range(room, room + command["count"])), command)
                room += command["count"]
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    if pair is not None:
        pair.close()


def rooms(pair: Any, numbers: list[int], command: dict[str, Any]) -> dict[str, object]:
    prefill, decode = pair.rooms(
        numbers, command["concurrency"], command["pages"], command["poll_ms"]
    )
    failed = {**prefill["fails"], **decode["fails"]}
    if failed:
        return {"error": f"{len(failed)} rooms failed: {list(failed.values())[:1]}"}
    return {
        "opened": decode["opened"],
        "done": decode["done"],
        "sends": prefill["sends"],
        "prefill_cpu_s": prefill["cpu"],
        "decode_cpu_s": decode["cpu"],
    }


def abort(pair: Any, room: int, pages: int, after_s: float) -> dict[str, object]:
    """Abort one room `after_s` seconds after its first byte.

    Returns the seconds until its pages were free, and how many of its pages late writes then hit.
    """
    pair.send("prefill", "abort_prefill", room=room, npages=pages, chunk=pages)
    pair.send("decode", "abort_decode", room=room, npages=pages, abort_after=after_s, watch=0.7)
    decode = pair.recv("decode")
    pair.recv("prefill")
    if decode.get("late"):
        return {"aborted": False}
    if decode["prefill_failed"] or decode["timed_out"]:
        return {"error": f"the peer's prefill failed by itself: {decode}"}
    seconds = decode["t_rel"] - decode["t_abort"]
    return {"aborted": True, "pages_hit": decode["pages"], "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1])
