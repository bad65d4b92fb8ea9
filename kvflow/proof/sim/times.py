"""How long things take in a simulated run, and how long the oracles wait for what must follow
(seconds).
"""

from __future__ import annotations

from kvflow.protocols.decode.core import MAX_REPEAT_AFTER_S

Span = tuple[float, float]

# --- the control network

FRAME_S: Span = (0.0001, 0.003)
A_MOMENT_S = 0.01  # a timer that is late, and the way of a frame
DELAY_S: Span = (0.02, 0.8)
TICK_S = 1e-9  # between two frames of one link: timers of one moment have no order

# --- data planes

PAGE_S: Span = (0.0002, 0.004)  # a page takes so long
SLOW_PAGE_S: Span = (0.05, 0.3)
STUCK_S: Span = (0.2, 2.0)  # a stuck write moves on after so long
STALL_LOOK_S: Span = (0.02, 0.06)  # a worker that stood still goes on within so long
LATE_S: Span = (0.01, 3.0)  # and what was given up lands after so long
POST_S: Span = (0.0001, 0.015)  # between a call that is posted to the thread of a node, and its run
# A thread of such an engine may stand for so long in the middle of a call.
PREEMPTED_S: Span = (0.0, 0.02)
LONG_PREEMPTED_S: Span = (0.02, 0.5)
POLL_S: Span = (0.0005, 0.015)  # between two looks of such an engine at its events
LOOK_FOR_PAGES_S: Span = (0.01, 0.05)  # and where it only waits for pages
THREAD_S: Span = (0.0005, 0.02)  # work in an executor: a model step, a checksum
COPY_S: Span = (0.0002, 0.01)  # half of a copy to host memory, or back
SLOW_COPY_S: Span = (0.02, 0.15)

# --- one run

FAULTS_END_S = 3.0
REST_S = 6.0  # with the faults over, everything has come to rest within so long
# After losses: lost questions are asked again less and less often.
SETTLE_S = REST_S + MAX_REPEAT_AFTER_S
FENCED_S = 0.5  # and with every writer dead, every page is home within so long
FENCE_SLACK_S = 0.1  # between a fence's answer and the end of every loan

# --- both sides of a room

HEAR_S = 1.0  # the other side of a failed room hears of it within so long while the link is up
PATIENCE_S = 2.2  # silence for so long is no wonder when something has happened
RECOVER_S = 1.2  # and within so long after the link is up again
