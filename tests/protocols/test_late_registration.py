"""What decode withdrew while its registration was still unanswered is asked for at once when it is
accepted (I4).

Found by the bare simulator: prefill drops the Abort of a decode that it does not know yet, and by
the time the Register had got through, decode asked once in eight seconds only.
"""

from __future__ import annotations

from typing import Any

from kvflow.protocols.wire.messages import Abort
from tests.protocols.alone import LoneDecode, registered


def aborts(told: list[Any]) -> int:
    return sum(isinstance(entry, tuple) and isinstance(entry[1], Abort) for entry in told)


def pass_time(decode: LoneDecode, after_s: float) -> list[Any]:
    """Everything asked for until nothing is due any more."""
    told: list[Any] = []
    decode.now += after_s
    while decode.endpoint.next_tick() <= decode.now:
        told += decode.tick()
    return told


def test_a_withdrawal_is_repeated_at_once_when_the_link_comes_up() -> None:
    decode = LoneDecode(timing=None)
    assert aborts(decode.close(decode.open())) == 1
    # Unanswered for five seconds, it is repeated less and less often.
    assert 1 < sum(aborts(pass_time(decode, 0.1)) for _ in range(50)) < 6
    assert aborts(decode.hear(registered(fresh_from=1)) + pass_time(decode, 0.0)) == 1
    assert aborts(pass_time(decode, 0.9)) == 1, "and from here on as often as at first"
