"""The files of examples/monitoring: valid, and true of the metrics that kvflow exports.

tests/e2e/test_prometheus.py runs them with a real Prometheus and a real fleet.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from docs.scripts import reference
from kvflow.router import worker_metrics
from kvflow.router.worker_metrics import Exposition, merged
from kvflow.serve.http.completion_service import Report
from kvflow.serve.http.metrics import RoleMetrics
from tests.monitoring import DASHBOARD, FOLDER, binary, expressions

ALERTS = FOLDER / "alerts.yml"
RULES: list[Any] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
PANELS: list[Any] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Prometheus adds the first two to what it scrapes, and /engine_metrics the other two.
ADDED = {"instance", "job", "role", "worker"}
_SELECTOR = re.compile(r"\b(kvflow_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"')
_GROUPED = re.compile(r"\bby \(([^)]*)\)(.*?)(?=\bby \(|$)", re.DOTALL)
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def labels_of(name: str) -> set[str]:
    """The labels that samples of a metric may have. Raises: KeyError for an unknown metric."""
    if name == "up":
        return ADDED
    known = {family.name: family for family in reference.families()}
    for suffix in ("_bucket", "_count", "_sum"):
        base = name.removesuffix(suffix)
        if base != name and base in known and known[base].kind == "histogram":
            bucket = {"le"} if suffix == "_bucket" else set()
            return {*known[base].labels, *ADDED, *bucket}
    family = known[name]
    # The bare name of a histogram has no samples.
    assert family.kind != "histogram", name
    return {*family.labels, *ADDED}


def faults(expression: str, *texts: str) -> Iterator[str]:
    """What an expression, or a text beside it, names that no metric has."""
    every: set[str] = set()
    for name, matchers in _SELECTOR.findall(expression):
        try:
            labels = labels_of(name)
        except (KeyError, AssertionError):
            yield f"no metric {name}"
            continue
        every |= labels
        yield from (
            f"{name} has no {label}" for label in _MATCHER.findall(matchers) if label not in labels
        )
    for grouped, rest in _GROUPED.findall(expression):
        (name, _), *_ = _SELECTOR.findall(rest)
        labels = set(re.findall(r"\w+", grouped))
        yield from (f"{name} has no {label}" for label in labels - labels_of(name))
        every &= labels
    for label in _SHOWN.findall(" ".join(texts)):
        if label not in every:
            yield f"no label {label} in the result of {expression}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_names_metrics_and_labels_that_exist(rule: Any) -> None:
    assert not list(faults(rule["expr"], *rule["annotations"].values()))
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_names_metrics_and_labels_that_exist(panel: Any) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        assert not list(faults(target["expr"], target["legendFormat"]))


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(kvflow_pagez)", "no metric kvflow_pagez"),
        ("kvflow_retracts", "no metric kvflow_retracts"),
        ("rate(kvflow_queue_seconds[5m])", "no metric kvflow_queue_seconds"),
        ('kvflow_pages{owners="free"}', "kvflow_pages has no owners"),
        ("sum by (space) (kvflow_pages)", "kvflow_pages has no space"),
        (
            "sum by (worker) (rate(kvflow_pages[5m])) / sum by (le) (kvflow_rows)",
            "kvflow_rows has no le",
        ),
        ("sum by (role) (kvflow_pages)", "no label owner in the result"),
    ],
)
def test_a_wrong_name_is_found(expression: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults(expression, "{{owner}}"))


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    titles = [panel["title"] for panel in PANELS]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == variables | {"__rate_interval"}
    assert DASHBOARD["uid"] == "kvflow" and DASHBOARD["schemaVersion"] >= 36
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat")
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in sources)


def test_no_two_panels_overlap_and_none_leaves_the_page() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_example_scrapes_the_routes_of_a_router() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    paths = {
        job["job_name"]: job.get("metrics_path", "/metrics") for job in config["scrape_configs"]
    }
    assert paths == {"kvflow-router": "/metrics", "kvflow-workers": worker_metrics.PATH}
    assert set(re.findall(r'job="([^"]+)"', ALERTS.read_text())) <= paths.keys()


# --- promtool


class Case(NamedTuple):
    """Series that make an alert fire within half an hour, its labels and its text."""

    series: dict[str, str]
    labels: dict[str, str]
    summary: str


W = {"role": "decode", "worker": "http://d"}
_W = 'role="decode",worker="http://d"'
_SPACE = "kvflow_quarantine_{}_pages{{" + _W + "}}"
FIRING = {
    "KvflowRouterDown": Case(
        {'up{job="kvflow-router",instance="r"}': "0x40"},
        {"job": "kvflow-router", "instance": "r"},
        "The router r does not answer.",
    ),
    "KvflowNoWorker": Case(
        {'kvflow_router_worker_up{role="prefill",worker="p",instance="r"}': "1x10 0x30"},
        {"instance": "r", "role": "prefill"},
        "No prefill gets requests, so no request can be served.",
    ),
    "KvflowWorkerDown": Case(
        {
            f"kvflow_router_worker_up{{{_W}}}": "0x40",
            'kvflow_router_worker_up{role="decode",worker="other"}': "1x40",
        },
        W,
        "decode http://d gets no requests. GET /server_info at the router has the reason.",
    ),
    "KvflowWorkerNotScraped": Case(
        {f"kvflow_router_worker_scraped{{{_W}}}": "0x40"},
        W,
        "decode http://d does not answer /metrics, so other alerts cannot see it.",
    ),
    "KvflowRankDown": Case(
        {f'kvflow_rank_up{{rank="1",{_W}}}': "1x5 0x40"},
        {**W, "rank": "1"},
        "Rank 1 of decode http://d is gone.",
    ),
    "KvflowRequestsFail": Case(
        {
            'kvflow_router_errors_total{code="peer_lost",instance="r"}': "0+6x40",
            'kvflow_router_errors_total{code="bad_request",instance="r"}': "0+60x40",
            f'kvflow_router_worker_tries_total{{instance="r",{_W}}}': "0+60x40",
        },
        {"instance": "r"},
        "10% of the requests at r fail after all tries.",
    ),
    "KvflowRoomsFail": Case(
        {
            f'kvflow_rooms_failed_total{{phase="transfer",reason="peer_lost",{_W}}}': "0+6x40",
            f'kvflow_rooms_ended_total{{ending="success",{_W}}}': "0+54x40",
            f'kvflow_rooms_ended_total{{ending="failed:peer_lost",{_W}}}': "0+6x40",
        },
        W,
        "10% of the rooms of decode http://d fail; kvflow_rooms_failed_total says where and why.",
    ),
    "KvflowRequestsRefused": Case(
        {f'kvflow_requests_refused_total{{reason="capacity",{_W}}}': "0+60x40"},
        W,
        "decode http://d refuses 1.0 requests/s for lack of room.",
    ),
    "KvflowInternalErrors": Case(
        # The first sample of the series is the error.
        {f'kvflow_internal_errors_total{{where="a loop",{_W}}}': "_x20 1x20"},
        {**W, "where": "a loop"},
        "decode http://d survived an internal error in a loop. Please report it, with the log.",
    ),
    "KvflowChecksumMismatch": Case(
        {f"kvflow_chunks_mismatched_total{{{_W}}}": "0x10 1x30"},
        W,
        "Bytes arrived at decode http://d that prefill did not send. Look at the network and the "
        "data plane.",
    ),
    "KvflowQuarantine": Case(
        {_SPACE.format("overdue"): "3x40", _SPACE.format("limit"): "100x40"},
        W,
        "3 pages of http://d wait for proof that their writer is gone. GET /peers at the decode "
        "names it.",
    ),
    "KvflowQuarantineNearLimit": Case(
        {_SPACE.format("overdue"): "90x40", _SPACE.format("limit"): "100x40"},
        W,
        "Quarantine of http://d is at 90% of the limit, above which it refuses requests.",
    ),
    "KvflowStagingStuck": Case(
        {f'kvflow_staging_waiting_rooms{{state="stuck",{_W}}}': "2x40"},
        {**W, "state": "stuck"},
        "2 rooms of http://d want more staging than is left (--staging-bytes).",
    ),
    "KvflowDecodePoolTooSmall": Case(
        {
            f"kvflow_retracts_total{{{_W}}}": "0+30x40",
            f'kvflow_completions_total{{outcome="finished",stream="true",{_W}}}': "0+60x40",
        },
        {"worker": "http://d"},
        "http://d retracts 0.5 times per completion: its pool is too small for its load.",
    ),
    "KvflowCacheStorageLeftAlone": Case(
        {
            f"kvflow_cache_storage_readable{{{_W}}}": "1x40",
            f"kvflow_cache_storage_writable{{{_W}}}": "0x40",
        },
        W,
        "decode http://d leaves the storage of its prefix cache (--l3) alone after errors.",
    ),
    "KvflowSlowFirstToken": Case(
        {
            'kvflow_router_time_to_first_token_seconds_bucket{instance="r",le="10.0"}': "0+1x40",
            'kvflow_router_time_to_first_token_seconds_bucket{instance="r",le="20.0"}': "0+60x40",
            'kvflow_router_time_to_first_token_seconds_bucket{instance="r",le="+Inf"}': "0+60x40",
        },
        {"instance": "r"},
        "p95 of the time to first token is 19.49s.",
    ),
    "KvflowSlowTokens": Case(
        {
            f'kvflow_inter_token_seconds_bucket{{le="0.2",{_W}}}': "0+10x40",
            f'kvflow_inter_token_seconds_bucket{{le="0.4",{_W}}}': "0+110x40",
            f'kvflow_inter_token_seconds_bucket{{le="+Inf",{_W}}}': "0+110x40",
        },
        {"worker": "http://d"},
        "p95 between two tokens of http://d is 389ms.",
    ),
}
# What a fleet exports that does well; no alert may fire.
HEALTHY = {
    'up{job="kvflow-router",instance="r"}': "1x40",
    f'kvflow_router_worker_up{{instance="r",{_W}}}': "1x40",
    f'kvflow_router_worker_scraped{{instance="r",{_W}}}': "1x40",
    'kvflow_router_errors_total{code="bad_request",instance="r"}': "0+60x40",
    'kvflow_router_errors_total{code="peer_lost",instance="r"}': "1x40",
    f'kvflow_router_worker_tries_total{{instance="r",{_W}}}': "0+60x40",
    f'kvflow_rooms_failed_total{{phase="transfer",reason="peer_lost",{_W}}}': "0+1x40",
    f'kvflow_rooms_ended_total{{ending="success",{_W}}}': "0+60x40",
    f'kvflow_requests_refused_total{{reason="bad_request",{_W}}}': "0+60x40",
    f'kvflow_internal_errors_total{{where="a loop",{_W}}}': "1x40",
    f"kvflow_chunks_mismatched_total{{{_W}}}": "0x40",
    _SPACE.format("overdue"): "0x40",
    _SPACE.format("limit"): "100x40",
    f'kvflow_staging_waiting_rooms{{state="queued",{_W}}}': "2x40",
    f"kvflow_retracts_total{{{_W}}}": "0+1x40",
    f'kvflow_completions_total{{outcome="finished",stream="true",{_W}}}': "0+60x40",
    f"kvflow_cache_storage_readable{{{_W}}}": "1x40",
    f'kvflow_inter_token_seconds_bucket{{le="0.2",{_W}}}': "0+110x40",
    f'kvflow_inter_token_seconds_bucket{{le="+Inf",{_W}}}': "0+110x40",
}


def _promtool(*arguments: str, text: str | None = None) -> str:
    command = [binary("promtool"), *arguments]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    assert f"{len(RULES)} rules found" in _promtool("check", "rules", str(ALERTS))
    assert "is valid prometheus config" in _promtool(
        "check", "config", str(FOLDER / "prometheus.yml")
    )


def test_each_alert_fires_for_its_reason_and_none_without(tmp_path: Path) -> None:
    names = [rule["alert"] for rule in RULES]
    assert sorted(FIRING) == sorted(names)
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    tests = [
        _test(case.series, [_expected(name, case, severity[name])]) for name, case in FIRING.items()
    ]
    quiet = _test(HEALTHY, [{"eval_time": "30m", "alertname": name} for name in names])
    unit = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [*tests, quiet]}
    (path := tmp_path / "alerts.test.yml").write_text(yaml.safe_dump(unit))
    assert "SUCCESS" in _promtool("test", "rules", str(path))


def _test(series: dict[str, str], expected: list[Any]) -> Any:
    found = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": found, "alert_rule_test": expected}


def _expected(name: str, case: Case, severity: str) -> Any:
    alert = {
        "exp_labels": {**case.labels, "severity": severity},
        "exp_annotations": {"summary": case.summary},
    }
    return {"eval_time": "30m", "alertname": name, "exp_alerts": [alert]}


def test_promtool_has_nothing_to_say_about_the_metrics_of_a_fleet() -> None:
    report = reference._filled(Report)
    metrics = RoleMetrics(lambda: report, role="decode")
    metrics.answered("/generate", 200, 0.1)
    body = metrics.response().body
    assert isinstance(body, bytes)
    # Servers switch these series off when they start.
    text = re.sub(r"(?m)^.*_created\b.*\n", "", body.decode())
    found, malformed = merged([Exposition("decode", url, text) for url in ("u1", "u2")])
    assert not malformed and b"kvflow_queue_seconds_bucket" in found
    assert _promtool("check", "metrics", text=found.decode()) == ""


def test_promtool_parses_the_expressions_of_all_panels(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(expressions("5m"))
    ]
    (path := tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    assert f"{len(rules)} rules found" in _promtool("check", "rules", str(path))
