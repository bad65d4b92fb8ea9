"""Write the references of settings and metrics for the site, and link its pages to them.

MkDocs loads this file as a hook (mkdocs.yml). The references exist only in the built site, so they
always match the code from which they were built.
"""

from __future__ import annotations

import functools
import posixpath
import re
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from prometheus_client.metrics import MetricWrapperBase

from kvflow.http.metrics import HttpMetrics
from kvflow.router.measures import RouterMeasures
from kvflow.router.vllm_engine import VllmEngine
from kvflow.router.worker_metrics import scraped_family
from kvflow.serve.config import catalog
from kvflow.serve.http.completion_service import Report
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.telemetry.histogram import QUEUE_SECONDS, Histogram

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

CONFIGURATION, METRICS = "reference/configuration.md", "reference/metrics.md"
_CODE = re.compile(r"(?<![\[`])`(?P<name>--[a-z0-9-]+|kvflow_[a-z0-9_]+)[^`\n]*`(?![\]`])")
_SUFFIXES = ("_total", "_bucket", "_count", "_sum")


class MetricFamily(NamedTuple):
    name: str
    kind: str
    text: str
    labels: tuple[str, ...]


# --- settings


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "Every setting is a flag, an environment variable and a key of the TOML file that",
        "`--config` names. A flag takes precedence over the environment, the environment over the",
        "role's table in the file, and that table over the file's top level. kvflow refuses a",
        "value outside its limits, an unknown key and an unknown `KVFLOW_*` variable with one line",
        "that names the source.",
        "",
        "This page is generated from the settings when the site is built.",
    ]
    for group, names in catalog.GROUPS.items():
        lines += ["", f"## {group.capitalize()}"]
        for name in dict.fromkeys(names):
            lines += ["", *_setting(name)]
    return "\n".join(lines) + "\n"


def _setting(name: str) -> list[str]:
    roles = [role for role, fields in catalog.FIELDS_OF_ROLE.items() if name in fields]
    facts = [
        f"Roles: {'all' if len(roles) == len(catalog.FIELDS_OF_ROLE) else ', '.join(roles)}",
        f"Environment: `{catalog.env_of(name)}`",
        f"Default: {_default(name, roles)}",
        f"Values: {_values(name)}",
    ]
    if aliases := catalog.ALIASES.get(name):
        facts.append(f"Also: {', '.join(f'`{catalog.flag_of(alias)}`' for alias in aliases)}")
    heading = f"### `{catalog.flag_of(name)}` {{ #{name} }}"
    return [heading, "", catalog.describe(name), "", f"{' · '.join(facts)}\n{{ .facts }}"]


def _default(name: str, roles: list[str]) -> str:
    defaults = {role: catalog.default_of(name, role) for role in roles}
    if len(set(defaults.values())) > 1:
        return ", ".join(f"`{value}` ({role})" for role, value in defaults.items())
    value = next(iter(defaults.values()))
    if value in ("", ()):
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _values(name: str) -> str:
    kind = catalog.base_type(name)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in choices)
    if kind is bool:
        return f"`{catalog.flag_of(name)}` or `--no-{name.replace('_', '-')}`"
    names = {int: "integer", float: "number", str: "text", tuple[str, ...]: "list of texts"}
    return " ".join([names[kind], *(f"`{limit}`" for limit in catalog.limits_of(name))])


# --- metrics


@functools.cache
def families() -> tuple[MetricFamily, ...]:
    """Return every metric of every role, in the order of `/metrics`."""
    report: Report = _filled(Report)
    router, engine = RouterMeasures(), VllmEngine()
    pages = (
        RoleMetrics(lambda: report, role="decode", model="model", sglang=True),
        HttpMetrics(lambda _: [*router.families((), 0, 0), scraped_family(), *engine.families()]),
    )
    found: dict[str, MetricFamily] = {}
    for collector in [one for page in pages for one in list(page.registry._collector_to_names)]:
        if isinstance(collector, MetricWrapperBase):
            labels = tuple(collector._labelnames)
            (family,) = collector.collect()
            entries = [(family, labels)]
        else:
            entries = [(one, tuple(getattr(one, "_labelnames", ()))) for one in collector.collect()]
        for family, labels in entries:
            name = family.name + "_total" if family.type == "counter" else family.name
            described = MetricFamily(name, family.type, family.documentation, labels)
            found.setdefault(name, described)
    return tuple(found.values())


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` answers in Prometheus' text format. Which metrics a process has depends on",
        "its role and its settings. Sizes are in bytes and times in seconds.",
        "",
        "This page is generated from the code that answers `/metrics` when the site is built.",
    ]
    own = [family for family in families() if family.name.startswith("kvflow_")]
    router = [family for family in own if family.name.startswith("kvflow_router_")]
    rank = [family for family in own if family.name.startswith("kvflow_rank_")]
    cache = [family for family in own if family.name.startswith("kvflow_cache_")]
    worker = [family for family in own if family not in (*router, *rank, *cache)]
    for title, chosen in (
        ("Prefill and decode", worker),
        ("Prefix cache", cache),
        ("Ranks", rank),
        ("Router", router),
        ("SGLang's names", [family for family in families() if family not in own]),
    ):
        lines += ["", f"## {title}"]
        if title.startswith("SGLang"):
            lines += ["", "A worker adds these with `--sglang-metrics`."]
        for family in chosen:
            facts = [family.kind.capitalize()]
            if family.labels:
                facts.append(f"Labels: {', '.join(f'`{label}`' for label in family.labels)}")
            heading = f"### `{family.name}` {{ #{family.name.replace(':', '-')} }}"
            lines += ["", heading, "", family.text, "", f"{' · '.join(facts)}\n{{ .facts }}"]
    return "\n".join(lines) + "\n"


def _filled(kind: Any) -> Any:
    """Return a value of `kind` with every optional part, so that every metric is made."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _filled(next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return tuple(_filled(arg) for arg in args if arg is not Ellipsis)
    if origin is dict or kind is dict:
        return {}
    if kind in (bool, int, float, str):
        return kind(1)
    if kind is Histogram:
        return Histogram(QUEUE_SECONDS)  # the names of SGLang need these bounds
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{name: _filled(hint) for name, hint in get_type_hints(kind).items()})
    return kind()


# --- MkDocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for place, text in ((CONFIGURATION, configuration()), (METRICS, metrics())):
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link each flag and each metric that a page names to its entry in the references."""
    place = page.file.src_uri
    return markdown if place in (CONFIGURATION, METRICS) else with_links(markdown, place)


# --- links


def with_links(markdown: str, place: str) -> str:
    """Return the page at `place` with each flag and each metric in its text linked to its entry."""
    here = posixpath.dirname(place)
    lines, is_code = [], False
    for line in markdown.split("\n"):
        is_code ^= line.lstrip().startswith("```")
        is_text = not is_code and not line.startswith("#")
        lines.append(_CODE.sub(lambda found: _linked(found, here), line) if is_text else line)
    return "\n".join(lines)


def _linked(found: re.Match[str], here: str) -> str:
    place = place_of(found["name"])
    return f"[{found[0]}]({posixpath.relpath(place, here or '.')})" if place else found[0]


def place_of(name: str) -> str | None:
    """Return the reference entry of a flag or a metric; None for a name that has none."""
    if name.startswith("--"):
        setting = name[2:].replace("-", "_")
        setting = catalog.CANONICAL.get(setting, setting)
        return f"{CONFIGURATION}#{setting}" if setting in catalog.FIELDS else None
    known = {family.name for family in families()}
    spellings = (name, f"{name}_total", *(name.removesuffix(suffix) for suffix in _SUFFIXES))
    return next((f"{METRICS}#{one}" for one in spellings if one in known), None)
