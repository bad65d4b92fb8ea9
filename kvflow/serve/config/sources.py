"""The sources of settings: command-line flags, KVFLOW_* variables, a TOML file, defaults.

Precedence: flag > environment > the role's table in the file > the file's top level > default. A
value outside its limits is refused with one line that names the setting, its source, the value and
the limits.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.catalog import (
    ALIASES,
    CANONICAL,
    FIELDS,
    FIELDS_OF_ROLE,
    HINTS,
    base_type,
    env_of,
    flag_of,
    limits_of,
)
from kvflow.serve.config.kv_events import KvEvents
from kvflow.serve.config.settings import DEFAULT_PORTS, ENV_PREFIX, Role, Settings

# These variables are not settings. They give the config file, three values that a process passes to
# its children, the URL for `declare-dead` and examples/chat.py, and the seed of the tests.
_OTHER_VARIABLES = ("CONFIG", "READY_FD", "PARENT_PID", "RANK", "URL", "SEED")
_LAST_PORT = 65535
_SECRETS = ("api_key", "admin_api_key")
_BALANCE = ("balance_abs_threshold", "balance_rel_threshold")
_PASSED_LIMIT = re.compile(r"^Expected `(int|float)` [<>]")
# With one of these prefixes, a path cannot be the name of a model on a hub.
_LOCAL = ("/", "./", "../", "~")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?", re.ASCII)


class ConfigError(MisuseError):
    """An unusable setting. The text is one line for the user."""


def resolve(
    role: Role,
    flags: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    config: str | None = None,
) -> Settings:
    """Return the settings of one role. A flag that is None was not given. Raises: ConfigError."""
    env = os.environ if env is None else env
    # A misspelt variable would otherwise be ignored silently.
    if unknown := unknown_variables(env):
        raise ConfigError(f"environment {unknown[0]}")
    given = {name: value for name, value in flags.items() if value is not None}
    values: dict[str, Any] = {}
    allowed = FIELDS_OF_ROLE[role]
    for name, (value, source) in _from_file(role, config or env.get(ENV_PREFIX + "CONFIG")).items():
        values[name] = _convert(name, value, source)
    for name in allowed:
        # The canonical name is read last, so that it takes precedence over its aliases.
        for key in (*ALIASES.get(name, ()), name):
            if env_of(key) in env:
                values[name] = _convert(name, env[env_of(key)], f"environment {env_of(key)}")
    for name, value in given.items():
        values[name] = _convert(name, value, flag_of(name))
    values.setdefault("port", DEFAULT_PORTS[role])
    settings = Settings(**values)
    _check(role, settings)
    return settings


def resolve_other(other: Role, flags: Mapping[str, Any], config: str | None = None) -> Settings:
    """Return the settings of a worker started with `flags` for the role `other`.

    Raises: ConfigError.
    """
    mode = "disaggregation_mode"
    # --disaggregation-mode names the role in which the worker started, which is not `other`.
    flags = {
        name: value
        for name, value in flags.items()
        if name in FIELDS_OF_ROLE[other] and name != mode
    }
    env = {name: value for name, value in os.environ.items() if name != env_of(mode)}
    return msgspec.structs.replace(
        resolve(other, flags, config=config, env=env), disaggregation_mode=""
    )


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Return one line for each unknown KVFLOW_* variable, with the closest known name."""
    known = {env_of(name): name.upper() for name in (*FIELDS, *CANONICAL, *_OTHER_VARIABLES)}
    unknown = [
        key.removeprefix(ENV_PREFIX)
        for key in sorted(env)
        if key.startswith(ENV_PREFIX) and key not in known
    ]
    return [
        f"{ENV_PREFIX}{key}: unknown variable{_closest(key, known.values(), ENV_PREFIX)}"
        for key in unknown
    ]


def _closest(name: str, known: Iterable[str], prefix: str = "") -> str:
    found = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def _from_file(role: str, path: str | None) -> dict[str, tuple[Any, str]]:
    if not path:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from None
    found: dict[str, tuple[Any, str]] = {}
    # `prefill` and `decode` are tables (dicts) or settings of the router (lists).
    tables = {
        key: value
        for key, value in document.items()
        if key in DEFAULT_PORTS and isinstance(value, dict)
    }
    common = {key: value for key, value in document.items() if key not in tables}
    own = tables.pop(role, {})
    # The role's own table comes last and wins. In other roles' tables, only names are checked.
    for table_role, table in (*tables.items(), ("", common), (role, own)):
        where = f"config file {path}: {f'[{table_role}] ' if table_role else ''}"
        for key, value in table.items():
            name = _name_in_file(key, table_role, where)
            if table_role in ("", role) and name in FIELDS_OF_ROLE[role]:
                found[name] = (value, f"{where}{key}")
    return found


def _name_in_file(key: str, table_role: str, where: str) -> str:
    spelt = key.replace("-", "_")
    name = CANONICAL.get(spelt, spelt)
    allowed = FIELDS_OF_ROLE[table_role] if table_role else tuple(FIELDS)
    if name not in FIELDS:
        known = [*allowed, *(alias for alias, of in CANONICAL.items() if of in allowed)]
        tables = () if table_role else DEFAULT_PORTS
        raise ConfigError(f"{where}unknown setting {key!r}{_closest(spelt, (*known, *tables))}")
    if name not in allowed:
        roles = ", ".join(role for role, names in FIELDS_OF_ROLE.items() if name in names)
        raise ConfigError(f"{where}{key!r} is not a setting of {table_role}, but of {roles}")
    return name


def _convert(name: str, value: Any, source: str) -> Any:
    hint = HINTS[name]
    from_text = isinstance(value, str)
    if base_type(name) == tuple[str, ...] and from_text:
        value = tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        # Text is converted to the setting's type. Any other TOML value must already have that type.
        return msgspec.convert(value, hint, strict=not from_text)
    except msgspec.ValidationError as error:
        # The error may end up in a log, so it must not contain a key.
        shown = "***" if name in _SECRETS else repr(value)
        raise ConfigError(f"{source}: {shown}: {_expected(name, str(error))}") from None


def _expected(name: str, error: str) -> str:
    kind = base_type(name)
    # msgspec names only the violated limit, and no choices. The user needs the whole range.
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(repr(choice) for choice in get_args(kind))}"
    if _PASSED_LIMIT.search(error):
        return f"expected {kind.__name__} {' and '.join(limits_of(name))}"
    return f"{error[:1].lower()}{error[1:].replace('`', '')}"


def _check_events(role: Role, settings: Settings) -> None:
    try:
        config = KvEvents.parse(settings.kv_events_config)
        if config is not None and role == "up":
            config.check_workers(settings.prefill_workers + settings.decode_workers)
    except MisuseError as error:
        raise ConfigError(f"--kv-events-config: {error}") from None
    if settings.prefix_cache == "off":
        raise ConfigError(
            "--kv-events-config with --prefix-cache off: nothing is cached, and there are no events"
        )


def _check_storage(role: Role, settings: Settings) -> None:
    flag = f"--l3 {settings.l3}"
    if not settings.cache_host_bytes:
        raise ConfigError(f"{flag} needs --cache-host-bytes")
    if settings.l3 == "file" and not settings.l3_dir:
        raise ConfigError(f"{flag} needs --l3-dir")
    if settings.l3 == "mooncake" and not settings.mooncake_master and role != "up":
        raise ConfigError(f"{flag} needs --mooncake-master, the host:port of a mooncake_master")


def _check_memory(settings: Settings) -> None:
    if settings.cache_host_bytes and settings.prefix_cache == "off":
        raise ConfigError(
            f"--cache-host-bytes {settings.cache_host_bytes} with --prefix-cache off: nothing is "
            "cached"
        )
    for name in ("num_pages", "pool_bytes") if settings.mem_fraction else ():
        if (value := getattr(settings, name)) != FIELDS[name].default:
            raise ConfigError(
                f"--mem-fraction {settings.mem_fraction:g} with {flag_of(name)} {value}: each of "
                "them sizes the pool; leave one out"
            )


def _check_effect(role: Role, settings: Settings) -> None:
    store = tuple(name for name in FIELDS if name.startswith("mooncake_"))
    for needed, is_there, names in (
        ("a prefix cache", settings.prefix_cache != "off", ("cache_state_bytes",)),
        (
            "--cache-host-bytes",
            settings.cache_host_bytes > 0,
            ("cache_write_policy", "cache_prefetch_policy"),
        ),
        ("--l3 file", settings.l3 == "file", ("l3_dir", "l3_bytes")),
        ("--l3 mooncake", settings.l3 == "mooncake", store),
        ("--policy cache_aware", settings.policy == "cache_aware", ("tokenizer_path", *_BALANCE)),
        ("--engine vllm", settings.engine == "vllm", ("legs",)),
        ("--engine kvflow", settings.engine == "kvflow", ("tokenizer_path",)),
        (
            "--kv-events-config",
            role != "up" or bool(settings.kv_events_config),
            ("tokenizer_path",),
        ),
        (
            "--kv-events-config",
            role == "router" or bool(settings.kv_events_config),
            ("kv_events_key_file",),
        ),
    ):
        for name in names:
            # A setting given at its default value looks like one that was not given.
            if not is_there and (value := getattr(settings, name)) != FIELDS[name].default:
                raise ConfigError(
                    f"{flag_of(name)} {value} without {needed}: it has no effect; leave it out"
                )


def _check_worker_ports(settings: Settings) -> None:
    first, count = settings.worker_ports, settings.prefill_workers + settings.decode_workers
    row = f"--worker-ports: the {count} workers take {first} to {first + count - 1}"
    if first + count - 1 > _LAST_PORT:
        raise ConfigError(f"{row}, the last port is {_LAST_PORT}; choose a lower one")
    if first <= settings.port < first + count:
        raise ConfigError(f"{row}, and the router {settings.port} (--port); choose other ones")


def _check_security(settings: Settings) -> None:
    if settings.api_key and settings.api_key == settings.admin_api_key:
        raise ConfigError(
            "--admin-api-key is the --api-key: every client would be an operator; give them two "
            "keys"
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        there, missing = ("cert", "key") if settings.tls_cert else ("key", "cert")
        raise ConfigError(f"--tls-{there} without --tls-{missing}: HTTPS needs both files")


def _is_missing(path: str) -> bool:
    return path.startswith(_LOCAL) and not Path(path).expanduser().is_dir()


def _check(role: Role, settings: Settings) -> None:
    if role in ("prefill", "decode") and not settings.model_path:
        raise ConfigError("no model is given; set --model-path (or KVFLOW_MODEL_PATH)")
    model = settings.model_path
    if role != "router" and _is_missing(model):
        raise ConfigError(f"model path {model!r} does not exist or is not a directory")
    if _is_missing(settings.tokenizer_path):
        raise ConfigError(
            f"--tokenizer-path {settings.tokenizer_path!r} does not exist or is not a directory"
        )
    if settings.disaggregation_mode and settings.disaggregation_mode != role:
        text = (
            f"--disaggregation-mode {settings.disaggregation_mode} does not match `kvflow {role}`; "
            "leave it out"
        )
        raise ConfigError(text)
    if not _DEVICE.fullmatch(settings.device):
        raise ConfigError(f"--device: {settings.device!r} is not auto, cpu, cuda or cuda:N")
    if (
        settings.control_port
        and (last := settings.control_port + settings.pp * settings.tp - 1) > _LAST_PORT
    ):
        raise ConfigError(
            f"--control-port: the ranks of this prefill take {settings.control_port} to {last}, "
            f"the last port is {_LAST_PORT}; choose a lower one"
        )
    if settings.worker_ports:
        _check_worker_ports(settings)
    for name in ("tp", "decode_tp"):
        if (shards := getattr(settings, name)) > 1 and settings.device.startswith("cuda"):
            raise ConfigError(
                f"{flag_of(name)} {shards} with --device {settings.device}: shards run on the CPU "
                "only; leave one out"
            )
    _check_memory(settings)
    if settings.l3 != "off":
        _check_storage(role, settings)
    if settings.kv_events_config:
        _check_events(role, settings)
    _check_effect(role, settings)
    if role == "router" and not ((settings.prefill and settings.decode) or settings.admin_api_key):
        raise ConfigError(
            "router needs at least one --prefill URL and one --decode URL, or an --admin-api-key, "
            "with which workers join it"
        )
    _check_security(settings)
    if settings.engine == "vllm" and (both := set(settings.prefill) & set(settings.decode)):
        raise ConfigError(
            f"{min(both)!r} is given as --prefill and as --decode: a vLLM server is one of them"
        )
    for name in ("prefill", "decode", "join"):
        for url in getattr(settings, name):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"--{name}: {url!r} is not an http:// or https:// URL")
