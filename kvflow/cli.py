"""The command line: kvflow prefill | decode | router | up | top | demo | bench | plan | sim |
doctor | keygen | declare-dead.

Options are generated from the fields of `config.settings.Settings`, so that flags, environment and
file always agree. Commands import heavy modules only when they run: `kvflow --help` loads neither
torch nor transformers.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

import kvflow
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.serve.config import catalog
from kvflow.serve.config.settings import Role, Settings
from kvflow.serve.config.sources import resolve, resolve_other
from kvflow.usage import App

app = App(
    name="kvflow",
    help=(
        "Moves the KV cache of a prompt from the machine that computed it to the machine that goes "
        "on generating."
    ),
)
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


def _option(name: str, role: str) -> Any:
    """Return the typer option for one setting.

    Numbers stay strings, because `config` checks the values of flags, environment and file in the
    same way.
    """
    kind = catalog.base_type(name)
    default = catalog.default_of(name, role)
    shown = f"default {_shown(default)}, " if default not in ("", (), None) else ""
    text = f"{catalog.describe(name)} ({shown}env {catalog.env_of(name)})"
    flags = [
        catalog.flag_of(name),
        *(catalog.flag_of(alias) for alias in catalog.ALIASES.get(name, ())),
    ]
    page: dict[str, Any] = {
        "help": text,
        "show_default": False,
        "rich_help_panel": catalog.group_of(name).capitalize(),
    }
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{flags[0]}/--no-{flags[0][2:]}", **page)]
    if get_origin(kind) is tuple:
        return Annotated[list[str] | None, typer.Option(*flags, metavar="URL", **page)]
    choices = get_origin(kind) is Literal
    metavar = "|".join(c for c in get_args(kind) if c) if choices else _METAVARS[kind]
    return Annotated[str | None, typer.Option(*flags, metavar=metavar, **page)]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _with_settings(
    role: str,
) -> Callable[[Callable[[dict[str, Any], str | None], None]], Callable[..., None]]:
    """Return a decorator that makes a command with the settings of `role` as options.

    The decorated function receives the value of each option, or None if the option is not given,
    and then the path of the config file.
    """

    def decorate(function: Callable[[dict[str, Any], str | None], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            path = given.pop("config")
            function(
                {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}, path
            )

        file_option = Annotated[
            str | None,
            typer.Option("--config", help="TOML file (env KVFLOW_CONFIG).", metavar="FILE"),
        ]
        names = [
            name
            for group in catalog.GROUPS.values()
            for name in group
            if name in catalog.FIELDS_OF_ROLE[role]
        ]
        hints = {name: _option(name, role) for name in names} | {"config": file_option}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(n, kind, default=None, annotation=hint) for n, hint in hints.items()
        ]
        # Typer reads the options of a command from its signature, and the help from its docstring.
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = hints
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        return command

    return decorate


def _run(
    role: Literal["prefill", "decode", "router"], given: Mapping[str, Any], path: str | None
) -> None:
    settings = resolve(role, given, config=path)
    # The imports below may import torch, and the limit has no effect after that.
    _limit_threads(settings.threads)
    from kvflow.serve.launch import process

    # The router must not import `roles`, because that would load the engine.
    if role == "router":
        from kvflow.serve.launch.router import run_router

        return process.run_role(role, run_router, settings)
    from kvflow.serve.launch import roles

    def settings_of(other: Role) -> Settings:
        return resolve_other(other, given, config=path)

    main = roles.run_prefill if role == "prefill" else roles.run_decode
    process.run_role(role, functools.partial(main, settings_of=settings_of), settings)
    return None


def _limit_threads(threads: int) -> None:
    """Limit torch's threads. Roles that share cores would slow each other down by spinning.

    The limit has no effect once torch is imported.
    """
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        help="PEM file of the certificates that a server at an https:// URL must prove; the "
        "system's when empty.",
        envvar="KVFLOW_TLS_CA",
    ),
]
TlsServerName = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        help="Name in the server's certificate, where it is not the host of its URL.",
        envvar="KVFLOW_TLS_SERVER_NAME",
    ),
]


@app.command()
@_with_settings("prefill")
def prefill(given: dict[str, Any], path: str | None) -> None:
    """Serve prefill: compute prompts and write their KV to decode."""
    _run("prefill", given, path)


@app.command("prefill-rank", hidden=True)
def prefill_rank() -> None:
    """Run one rank of a prefill. The first rank starts this command."""
    from kvflow.serve.launch.ranks import PrefillRankSpec

    spec = PrefillRankSpec.from_environment()
    _limit_threads(spec.settings.threads)
    from kvflow.serve.launch import process
    from kvflow.serve.launch.group import run_rank

    process.run_role("prefill", lambda _: run_rank(spec), spec.settings)


@app.command("decode-rank", hidden=True)
def decode_rank() -> None:
    """Run one shard of a decode. The first shard starts this command."""
    from kvflow.serve.launch.ranks import DecodeRankSpec

    spec = DecodeRankSpec.from_environment()
    _limit_threads(spec.settings.threads)
    from kvflow.serve.launch import process
    from kvflow.serve.launch.shards import run_shard

    process.run_role("decode", lambda _: run_shard(spec), spec.settings)


@app.command()
@_with_settings("decode")
def decode(given: dict[str, Any], path: str | None) -> None:
    """Serve decode: lend pages to prefill and generate."""
    _run("decode", given, path)


@app.command()
@_with_settings("router")
def router(given: dict[str, Any], path: str | None) -> None:
    """Serve clients: pair prefill and decode for each request."""
    _run("router", given, path)


@app.command()
@_with_settings("up")
def up(given: dict[str, Any], path: str | None) -> None:
    """Run router, prefill and decode on this machine.

    Each role is a process; when one ends, the others are ended too.
    """
    settings = resolve("up", given, config=path)
    from kvflow.serve.launch.logs import set_up_logging
    from kvflow.serve.launch.supervisor import run_up

    set_up_logging(settings.log_level, log_format=settings.log_format, role="up")
    raise typer.Exit(asyncio.run(run_up(settings, given, path)))


@app.command()
def top(
    url: Annotated[
        str, typer.Option("--url", help="URL of the router.", metavar="URL", envvar="KVFLOW_URL")
    ] = "http://127.0.0.1:8000",
    interval_s: Annotated[
        float,
        typer.Option("--interval", help="Seconds between two pictures.", min=1.0, max=3600.0),
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and exit, for scripts.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one snapshot as a JSON object and exit.")
    ] = False,
    admin_api_key: Annotated[
        str,
        typer.Option(
            "--admin-api-key",
            help="The operator's key of the router.",
            envvar="KVFLOW_ADMIN_API_KEY",
        ),
    ] = "",
    tls_ca: TlsCa = "",
    tls_server_name: TlsServerName = "",
) -> None:
    """Show what a router and its workers do, live in the terminal.

    The page at /ui of the router shows the same figures. Without a terminal, the pictures follow
    each other.
    """
    from kvflow.http.tls import ClientContext
    from kvflow.top.following import Source, show_top

    router = Source(url, admin_api_key, ClientContext(tls_ca, tls_server_name))
    show_top(router, interval_s, once=once, as_json=as_json)


@app.command()
def demo(
    model: Annotated[
        str,
        typer.Option(
            "--model", "--model-path", help="Directory or name; the packaged model when empty."
        ),
    ] = "",
    transfer_backend: Annotated[
        str,
        typer.Option(
            "--transfer-backend",
            help="A data plane, as of the roles; local and mooncake when empty.",
            metavar="local|mooncake|nixl|...",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per data plane on stdout.")
    ] = False,
    requests: Annotated[
        int, typer.Option(help="Distinct prompts to complete.", min=1, max=64)
    ] = 16,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens of each completion.", min=2, max=512)
    ] = 64,
) -> None:
    """Compare three local processes with stock transformers.

    One further request is aborted in mid-transfer. The exit status is 0 when all outputs are
    identical and every page is free again.
    """
    from kvflow.serve.demo.run import run_demo

    _limit_threads(0)
    raise typer.Exit(
        run_demo(model, transfer_backend, as_json=as_json, requests=requests, new_tokens=new_tokens)
    )


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Check packages, libraries and limits; print what to install."""
    from kvflow.serve.launch.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


@app.command()
def keygen(
    path: Annotated[
        str, typer.Argument(help="The file to write; it must not exist yet.", metavar="FILE")
    ],
) -> None:
    """Write a new control key (mode 0600) for --control-key-file.

    Every prefill and every decode needs the same key.
    """
    from kvflow.transports.control.curve import write_key

    write_key(path)


@app.command()
def declare_dead(
    incarnation: Annotated[
        str,
        typer.Argument(
            help="The prefill's incarnation, as GET /peers of the decode shows it.",
            metavar="INCARNATION",
        ),
    ],
    url: Annotated[
        str, typer.Option("--url", help="URL of the decode.", metavar="URL", envvar="KVFLOW_URL")
    ],
    admin_api_key: Annotated[
        str,
        typer.Option(
            "--admin-api-key",
            help="The operator's key of the decode.",
            envvar="KVFLOW_ADMIN_API_KEY",
        ),
    ] = "",
    tls_ca: TlsCa = "",
    tls_server_name: TlsServerName = "",
    why: Annotated[
        str, typer.Option("--why", help="Reason, for the decode's log.")
    ] = "no reason given",
) -> None:
    """Assure a decode that a prefill writes no more.

    The pages lent to that prefill leave quarantine without proof. Use it only when the prefill's
    machine is off or its process has ended: anything it still writes corrupts other requests.
    """
    from kvflow.http.tls import ClientContext
    from kvflow.serve.launch.operator import declare_dead

    tls = ClientContext(tls_ca, tls_server_name)
    declare_dead(url, admin_api_key, incarnation, why, tls)


# Another module's app parses the arguments. That module is imported only if the command runs.
_GROUP = {
    "add_help_option": False,
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # or click removes the first `--`, which that app needs
    },
}


@app.command(short_help="Measure transfers, rooms and aborts against a peer or a limit.", **_GROUP)
def bench(words: typer.Context) -> None:
    """Measure transfers, rooms and aborts against a peer or a limit."""
    from kvflow.bench.commands import app as commands

    commands(words.args, prog_name=words.command_path)


@app.command(short_help="Find how many workers a trace needs, from measured times.", **_GROUP)
def plan(words: typer.Context) -> None:
    """Find how many workers a trace needs, from measured times."""
    from kvflow.plan.commands import app as commands

    commands(words.args, prog_name=words.command_path)


@app.command(short_help="Run the protocol in a seeded simulator, with faults.", **_GROUP)
def sim(words: typer.Context) -> None:
    """Run the protocol in a seeded simulator, with faults."""
    from kvflow.proof.sim.commands import app as commands

    commands(words.args, prog_name=words.command_path)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvflow {kvflow.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `kvflow` script.

    A KvflowError is printed as one line on stderr. The exit status is then 2 for misuse, and 1 for
    any other KvflowError.
    """
    # The error does not carry the command's name, so take the name from the command line.
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    try:
        app()
    except KvflowError as error:
        text = " ".join(str(error).split())
        sys.stderr.write(f"kvflow {command}: error: {text}\n")
        raise SystemExit(2 if isinstance(error, MisuseError) else 1) from None


if __name__ == "__main__":
    main()
