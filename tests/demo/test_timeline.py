"""A room drawn from both sides: in the order of time, and in 80 columns."""

from __future__ import annotations

from typing import Any

from kvflow.serve.demo.timeline import WIDTH, draw


def side(opened_unix_s: float, *events: tuple[float, str, str, str]) -> dict[str, Any]:
    told = [dict(zip(("at_s", "what", "phase", "text"), event, strict=True)) for event in events]
    return {"opened_unix_s": opened_unix_s, "events": told}


def test_both_sides_in_the_order_of_time() -> None:
    drawn = draw(
        {
            "decode": side(
                1000.0,
                (0.001, "lent", "waiting_for_input", ""),
                (0.200, "chunk_landed", "success", ""),
            ),
            "prefill": side(
                999.5,
                (0.502, "matched", "waiting_for_input", ""),
                (0.600, "chunk_queued", "transferring", ""),
                (0.650, "write_ended", "success", "chunk 0, 7 pages: landed"),
            ),
        }
    )
    assert drawn == [
        "     ms decode                                       prefill",
        "  501.0 lent                     │                 │",
        "  502.0                          │── pages lent ──▶│ matched",
        "  600.0                          │◁╌ chunk queued ╌│ chunk queued",
        "  650.0                          │◀═══ 7 pages ════│ write ended: chunk 0, 7",
        "                                 │                 │ pages: landed -> success",
        "  700.0 chunk landed -> success  │◀── chunk done ──│",
    ]


def test_long_texts_and_times_stay_within_the_width() -> None:
    text = "client_gone: " + "a reader of the tokens has stopped " * 5 + "x" * 200
    drawn = draw(
        {"decode": side(0.0, (0.0, "lent", "", ""), (99_999.0, "ended_locally", "draining", text))}
    )
    assert max(map(len, drawn)) <= WIDTH + 2  # a day in milliseconds
    assert "x" * 20 in "".join(drawn)


def test_a_write_that_was_cancelled_does_not_arrive() -> None:
    drawn = draw(
        {"prefill": side(0.0, (0.0, "write_ended", "draining", "chunk 0, 32 pages: cancelled"))}
    )
    assert "│╳═══ 32 pages ═══│" in drawn[1]
