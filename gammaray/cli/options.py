"""Options shared by commands: the connection (address, key, TLS, timeout) and prompts from a file."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from gammaray.client.async_client import AsyncClient
from gammaray.program.values import GIVEN_FILE

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class Connection:
    address: str  # host:port of the gRPC API, or URL of the HTTP API
    api_key: str | None
    timeout_s: float
    tls: bool | None  # whether to use TLS; None: only if a file or the address implies it
    ca_file: Path | None  # PEM file of the trusted authorities
    cert_file: Path | None  # PEM file of the client certificate
    key_file: Path | None  # PEM file of its private key

    def call(self, work: Callable[[AsyncClient], Awaitable[_Result]]) -> _Result:
        """Connect to the gRPC API, do `work`, and return its result."""

        async def run() -> _Result:
            async with AsyncClient(**asdict(self)) as client:
                return await work(client)

        return asyncio.run(run())


def connection_options(timeout_s: float, *, http: bool = False) -> Callable[[_Function], _Function]:
    """Add the connection options, which the command receives as one argument, `connection`.

    With `http` the command uses the HTTP API: `--url` instead of `--address`.
    """
    names, place, form, limited = ["--address", "-a"], "127.0.0.1:9000", "HOST:PORT", "of the call"
    meaning = "The cluster's gRPC API; https://HOST:PORT uses TLS."
    if http:
        names, place, form, limited = ["--url"], "127.0.0.1:8000", "URL", "without data from the server"
        meaning = "The cluster's HTTP API; https:// uses TLS."
    options = (
        _option(*names, "address", default=place, metavar=form, help=meaning),
        _option("--api-key", metavar="KEY", help="Key of a cluster that requires one."),
        click.option(
            *("--timeout", "timeout_s"),
            type=float,
            default=timeout_s,
            metavar="SECONDS",
            help=f"Timeout {limited}.",
        ),
        click.option("--tls", is_flag=True, default=None, help="Use TLS and trust the system's CAs."),
        _option("--ca-file", type=_FILE, help="PEM file of the CAs to trust; implies --tls."),
        click.option(
            "--cert-file", type=_FILE, help="PEM file of a client certificate for mutual TLS; implies --tls."
        ),
        click.option("--key-file", type=_FILE, help="PEM file of its private key, if in another file."),
    )

    def connection(given: dict[str, Any]) -> Connection:
        return Connection(**{field.name: given.pop(field.name) for field in fields(Connection)})

    return _collected("connection", connection, options)


def _collected(
    name: str, collect: Callable[[dict[str, Any]], Any], options: Sequence[Callable[..., Any]]
) -> Callable[[_Function], _Function]:
    """Return a decorator that adds options; the command receives as one argument what `collect` takes."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def collected(*args: Any, **given: Any) -> Any:
            return function(*args, **{name: collect(given)}, **given)

        decorated: Any = collected
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def form_options(function: _Function) -> _Function:
    """Add the options for the form of a text, which the command receives as one argument, `form`."""
    file: dict[str, Any] = {"type": GIVEN_FILE, "metavar": "FILE"}
    options = (
        click.option("--json-schema", **file, help="Produce JSON that matches this schema."),
        click.option("--regex", metavar="TEXT", help="Produce a text that matches this as a whole."),
        click.option("--choice", multiple=True, metavar="TEXT", help="Produce one of these; repeatable."),
        click.option("--grammar", **file, help="Follow this grammar, in llguidance's Lark."),
    )
    return _collected("form", _form, options)(function)


def _form(given: dict[str, Any]) -> dict[str, Any]:
    values = {name: given.pop(name) for name in ("json_schema", "regex", "choice", "grammar")}
    asked = {name: value for name, value in values.items() if value not in (None, ())}
    if len(asked) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise click.UsageError(f"{names} exclude each other")
    if "json_schema" in asked:
        asked["json_schema"] = _read_json(asked["json_schema"], "--json-schema")
    if "grammar" in asked:
        asked["grammar"] = _read_text(asked["grammar"], "--grammar")
    return asked


def _read_text(path: Path, option: str) -> str:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        message = f"{path.name} is no UTF-8: an invalid byte at offset {error.start}"
        raise click.BadParameter(message, param_hint=option) from None
    except OSError as error:
        raise click.BadParameter(f"{path.name}: {error.strerror}", param_hint=option) from None
    if not text.strip():
        raise click.BadParameter(f"{path.name} is empty", param_hint=option)
    return text


def _read_json(path: Path, option: str) -> Any:
    try:
        found = json.loads(_read_text(path, option))
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path.name} is no JSON: {error}", param_hint=option) from None
    if not isinstance(found, (dict, bool)):
        raise click.BadParameter(f"{path.name} is no JSON schema, which is an object", param_hint=option)
    return found


def _option(name: str, *others: str, **attributes: Any) -> Callable[[_Function], _Function]:
    variable = f"GAMMARAY_{name.removeprefix('--').replace('-', '_').upper()}"
    return click.option(name, *others, envvar=variable, show_envvar=True, **attributes)
