"""Durations in a simulated run, and the longest ones that the rules allow, in seconds."""

from __future__ import annotations

from kvflow.protocols.decode.core import MAX_REPEAT_AFTER_S

Span = tuple[float, float]

# --- the control network

FRAME_S: Span = (0.0001, 0.003)
A_MOMENT_S = 0.01  # slack for a late timer and for a frame on its way
DELAY_S: Span = (0.02, 0.8)
# Least time between two frames on a link, because timers for the same moment have no order.
TICK_S = 1e-9

# --- data planes

PAGE_S: Span = (0.0002, 0.004)  # time to land one page
SLOW_PAGE_S: Span = (0.05, 0.3)
STUCK_S: Span = (0.2, 2.0)  # delay of a stuck write
STALL_LOOK_S: Span = (0.02, 0.06)  # time between two checks for the end of a stall
LATE_S: Span = (0.01, 3.0)  # delay of the rest of an unproven write
POST_S: Span = (0.0001, 0.015)  # delay of a call that was posted to a node's thread
# Time for which a thread of an engine without an event loop is preempted in the middle of a call.
PREEMPTED_S: Span = (0.0, 0.02)
LONG_PREEMPTED_S: Span = (0.02, 0.5)
POLL_S: Span = (0.0005, 0.015)  # time between two polls of such an engine
LOOK_FOR_PAGES_S: Span = (0.01, 0.05)  # time between two polls that wait only for pages
THREAD_S: Span = (0.0005, 0.02)  # time for work in an executor, such as a model step
COPY_S: Span = (0.0002, 0.01)  # time for half of a copy to host memory or back
SLOW_COPY_S: Span = (0.02, 0.15)
HUNG_COPY_S: Span = (0.3, 1.5)

# --- one run

FAULTS_END_S = 3.0
REST_S = 6.0  # time to come to rest after the faults
# Rest takes longer after lost messages, because nodes repeat them less and less often.
SETTLE_S = REST_S + MAX_REPEAT_AFTER_S
FENCED_S = 0.5  # time to free every page after the death of every writer
FENCE_SLACK_S = 0.1  # time from a fence's answer to the end of every loan

# --- both sides of a room

# While the link is up, the other side of a failed room learns of it within this time.
HEAR_S = 1.0
PATIENCE_S = 2.2  # silence for this long is normal after trouble
RECOVER_S = 1.2  # time for both sides to learn of a failure, once the link is up
