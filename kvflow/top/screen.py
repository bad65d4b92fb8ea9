"""One picture of the overview, as rich draws it. Missing figures are dashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

NONE = "–"
MAX_ROOMS_WITHOUT_TERMINAL = 20
_OLD_S = 4.0


def screen(snapshot: Mapping[str, Any], url: str, height: int | None = None) -> ConsoleRenderable:
    """Return the picture of one snapshot. With `height`, rooms fill the rest of these lines."""
    parts: list[ConsoleRenderable] = [_head(snapshot, url), *_problems(snapshot)]
    parts += [_throughput(snapshot), _latencies(snapshot), _workers(snapshot)]
    if doubtful := _doubtful(snapshot):
        parts.append(doubtful)
    if ranks := _ranks(snapshot):
        parts.append(ranks)
    used = sum(_lines(part) for part in parts)
    most = MAX_ROOMS_WITHOUT_TERMINAL if height is None else max(0, height - used - 3)
    parts.append(_rooms(snapshot.get("rooms", []), most))
    return Group(*parts)


def lost(snapshot: Mapping[str, Any] | None, url: str, reason: str) -> ConsoleRenderable:
    """Return the picture while the router does not answer: the reason, and the last figures."""
    line = Text.assemble(("Reconnecting ", "bold red"), f"to {url}: {reason}")
    if snapshot is None:
        return line
    at = _clock(snapshot["now"]["at_unix_s"])
    return Group(line, Text(f"The figures below are of {at}.", "red"), screen(snapshot, url, 24))


def _lines(part: ConsoleRenderable) -> int:
    return part.row_count + 2 if isinstance(part, Table) else 1


def _head(snapshot: Mapping[str, Any], url: str) -> Text:
    router = snapshot["router"]
    serving = (
        ("shutting down", "yellow")
        if router["draining"]
        else ("not serving", "bold red")
        if router["trouble"]
        else ("serving", "green")
    )
    at = _clock(snapshot["now"]["at_unix_s"])
    return Text.assemble(
        ("kvflow  ", "bold"),
        router["model"],
        "  ",
        serving,
        f"  {url}  {at}",
    )


def _problems(snapshot: Mapping[str, Any]) -> list[Text]:
    found = []
    if snapshot["router"]["trouble"]:
        found.append(Text(f"! {snapshot['router']['trouble']}", "bold red"))
    for one in snapshot["workers"]:
        name = f"{one['role']} {_host(one['url'])}"
        if one["trouble"]:
            found.append(Text(f"! {name} gets no requests: {one['trouble']}", "red"))
        elif one["not_seen"]:
            found.append(Text(f"! {name} does not tell its figures: {one['not_seen']}", "yellow"))
    return found


def _throughput(snapshot: Mapping[str, Any]) -> Table:
    now = snapshot["now"]
    return _figures(
        ("tokens/s", rate(now["tokens_per_s"])),
        ("requests/s", rate(now["requests_per_s"])),
        ("failed/s", rate(now["failed_per_s"])),
        ("running", str(now["running"])),
        ("waiting", str(now["waiting"])),
        ("KV moved", _per_second(now["bytes_per_s"])),
        ("quarantine", str(now["quarantine_pages"])),
    )


def _latencies(snapshot: Mapping[str, Any]) -> Table:
    now = snapshot["now"]
    return _figures(
        ("TTFT p50 / p95", _both(now, "first_token")),
        ("ITL p50 / p95", _both(now, "inter_token")),
        ("transfer p50 / p95", _both(now, "transfer")),
    )


def _figures(*columns: tuple[str, str]) -> Table:
    """Return a table of one row. Its columns keep their width, so that figures stay in place."""
    table = _table()
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True, min_width=17 if "/ p" in name else 10)
    table.add_row(*(value for _, value in columns))
    return table


def _workers(snapshot: Mapping[str, Any]) -> Table:
    table = _table(
        ("worker", "left"),
        ("state", "left"),
        *((name, "right") for name in ("run", "wait", "rate", "used", "cached", "free", "pages")),
        *((name, "right") for name in ("quarantine", "hits", "host")),
    )
    for one in snapshot["workers"]:
        pages, cache = one["pages"], one["cache"] or {}
        total, free = pages.get("total"), pages.get("free", 0)
        cached, quarantine = pages.get("cache", 0), pages.get("quarantine", 0)
        is_prefill = one["role"] == "prefill"
        figure = (
            _per_second(one["bytes_per_s"]) if is_prefill else rate(one["tokens_per_s"], " t/s")
        )
        known = total is not None
        host = f"{cache['host_pages']}/{cache['host_limit_pages']}" if cache else NONE
        table.add_row(
            f"{one['role']} {_host(one['url'])}",
            _state(one),
            _or_dash(one["running"] if one["running"] is not None else one["requests"]),
            _or_dash(one["waiting"]),
            figure,
            str(total - free - cached - quarantine) if known else NONE,
            str(cached) if known else NONE,
            str(free) if known else NONE,
            str(total) if known else NONE,
            Text(str(one["quarantine_pages"]), "red" if one["quarantine_overdue_pages"] else ""),
            NONE if one["hit_share"] is None else f"{one['hit_share']:.0%}",
            host,
            style="dim" if _is_old(one) else "",
        )
    return table


def _doubtful(snapshot: Mapping[str, Any]) -> Table | None:
    """Return the peers that are silent or hold pages, or None if there are none."""
    found = [
        (one, peer)
        for one in snapshot["workers"]
        for peer in one["peers"]
        if peer["phase"] != "up" or peer["quarantine_pages"] or peer["pinned_pages"]
    ]
    if not found:
        return None
    table = _table(("at", "left"), ("peer in doubt", "left"), ("link", "left"), ("heard", "right"))
    table.add_column("quarantine", justify="right")
    table.add_column("pinned", justify="right")
    for one, peer in found:
        heard = NONE if peer["heard_ago_s"] is None else f"{peer['heard_ago_s']:.0f} s ago"
        pages = str(peer["quarantine_pages"]), str(peer["pinned_pages"])
        at = f"{one['role']} {_host(one['url'])}"
        table.add_row(at, peer["incarnation"], peer["phase"], heard, *pages)
    return table


def _ranks(snapshot: Mapping[str, Any]) -> Table | None:
    found = [(one, rank) for one in snapshot["workers"] for rank in one["ranks"]]
    if not found:
        return None
    table = _table(("worker", "left"), ("rank", "right"), ("state", "left"), ("free", "right"))
    for name in ("pages", "requests", "moved"):
        table.add_column(name, justify="right")
    for one, rank in found:
        up = Text("up", "green") if rank["up"] else Text("down", "bold red")
        figures = [str(rank[name]) for name in ("pages_free", "pages_total", "requests")]
        figures.append(size(rank["bytes_moved"]))
        name = f"{one['role']} {_host(one['url'])}"
        table.add_row(name, str(rank["rank"]), up, *(figures if rank["up"] else [NONE] * 4))
    return table


def _rooms(rooms: Sequence[Mapping[str, Any]], most: int) -> ConsoleRenderable:
    if not rooms:
        return Text("No room yet. A room opens with each request.", "dim")
    table = _table(("room", "left"), ("age", "right"), ("prefill", "left"), ("landed", "right"))
    table.add_column("decode", no_wrap=True)
    table.add_column("cause", no_wrap=True, overflow="ellipsis")
    for room in rooms[:most]:
        prefill, decode = room["prefill"] or {}, room["decode"] or {}
        done, total = prefill.get("bytes_landed"), prefill.get("bytes_total")
        landed = NONE if not total else size(total)
        if total and done != total:
            landed = f"{size(done)} of {landed}"
        age = NONE if room["opened_ago_s"] is None else f"{room['opened_ago_s']:.1f} s"
        cause = decode.get("cause") or prefill.get("cause") or ""
        table.add_row(room["room"], age, _phase(prefill), landed, _phase(decode), Text(cause))
    return table


def _phase(half: Mapping[str, Any]) -> Text:
    if not half:
        return Text(NONE)
    name = half["phase"].replace("_", " ")
    if half["stale"]:
        return Text(f"{name}, not seen", "dim")
    wanted = (half["cause"] or "").startswith(("client_gone", "aborted"))
    if not half["ended"]:
        return Text(name, "blue")
    return Text(name, "green" if half["phase"] == "success" else "dim" if wanted else "red")


def _state(one: Mapping[str, Any]) -> Text:
    if not one["up"]:
        return Text("down" if one["not_seen"] or _is_old(one) else "refusing", "bold red")
    for name, is_so in (("leaving", one["leaving"]), ("draining", one["draining"])):
        if is_so:
            return Text(name, "yellow")
    return Text("unpaired", "yellow") if one["trouble"] else Text("up", "green")


def _is_old(one: Mapping[str, Any]) -> bool:
    return one["answered_ago_s"] is None or one["answered_ago_s"] > _OLD_S


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _both(now: Mapping[str, Any], name: str) -> str:
    return f"{duration(now[f'{name}_p50_s'])} / {duration(now[f'{name}_p95_s'])}"


def duration(seconds: float | None) -> str:
    """Return a time with its unit: "12.3 ms", "1.50 s"."""
    if seconds is None:
        return NONE
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(count: float | None) -> str:
    """Return a number of bytes with a decimal unit: "65.5 kB"."""
    if count is None:
        return NONE
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def rate(per_s: float | None, unit: str = "") -> str:
    return (
        NONE if per_s is None else f"{per_s:,.0f}{unit}" if per_s >= 100 else f"{per_s:.3g}{unit}"
    )


def _per_second(count: float | None) -> str:
    return NONE if count is None else f"{size(count)}/s"


def _or_dash(value: object) -> str:
    return NONE if value is None else str(value)


def _host(url: str) -> str:
    return url.partition("://")[2]


def _clock(at_unix_s: float) -> str:
    return datetime.fromtimestamp(at_unix_s).strftime("%H:%M:%S")
