"""Options shared by commands: the connection (address, key, TLS, timeout) and prompts from a file."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from gammaray.client.async_client import AsyncClient

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_FILE = click.Path(path_type=Path)


@dataclass(frozen=True)
class Connection:
    """Connection options of a command.

    Args:
        address: host:port of the gRPC API, or the URL of the HTTP API.
        tls: Whether to use TLS; None: only if a file or the address implies it.
        ca_file: PEM file of the trusted authorities.
        cert_file: PEM file of the client certificate, and `key_file` that of its private key.
    """

    address: str
    api_key: str | None
    timeout_s: float
    tls: bool | None
    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None

    def client(self) -> AsyncClient:
        """Return a client of the gRPC API."""
        return AsyncClient(**asdict(self))

    def call(self, work: Callable[[AsyncClient], Awaitable[_Result]]) -> _Result:
        """Connect, do `work`, and return its result."""

        async def run() -> _Result:
            async with self.client() as client:
                return await work(client)

        return asyncio.run(run())


def connection_options(timeout_s: float, *, http: bool = False) -> Callable[[_Function], _Function]:
    """Add the connection options, which the command receives as one argument, `connection`.

    Args:
        timeout_s: Default of `--timeout`.
        http: The command uses the HTTP API: `--url` instead of `--address`.
    """
    names = ("address", "api_key", "timeout_s", "tls", "ca_file", "cert_file", "key_file")
    options = (
        _option(
            "--url" if http else "--address",
            *(() if http else ("-a",)),
            "address",
            default="127.0.0.1:8000" if http else "127.0.0.1:9000",
            show_default=True,
            metavar="URL" if http else "HOST:PORT",
            help="The cluster's HTTP API; https:// uses TLS."
            if http
            else "The cluster's gRPC API; https://HOST:PORT uses TLS.",
        ),
        _option("--api-key", metavar="KEY", help="Key of a cluster that requires one."),
        click.option(
            "--timeout",
            "timeout_s",
            type=float,
            default=timeout_s,
            show_default=True,
            metavar="SECONDS",
            help="Timeout without data from the server." if http else "Timeout of the call.",
        ),
        click.option(
            "--tls",
            is_flag=True,
            default=None,
            help="Use TLS and trust the system's CAs.",
        ),
        _option("--ca-file", type=_FILE, help="PEM file of the CAs to trust; implies --tls."),
        click.option(
            "--cert-file", type=_FILE, help="PEM file of a client certificate for mutual TLS; implies --tls."
        ),
        click.option("--key-file", type=_FILE, help="PEM file of its private key, if in another file."),
    )

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def collected(*args: Any, **given: Any) -> Any:
            connection = Connection(**{name: given.pop(name) for name in names})
            return function(*args, connection=connection, **given)

        decorated: Any = collected
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def form_options(function: _Function) -> _Function:
    """Add the options for the form of a text, which the command receives as one argument, `form`.

    It has at most one of the keyword arguments of `gammaray.client.structured.OutputOptions`.
    """
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = (
        click.option(
            "--json-schema", type=file, metavar="FILE", help="Produce JSON that matches this schema."
        ),
        click.option("--regex", metavar="TEXT", help="Produce a text that matches this as a whole."),
        click.option("--choice", multiple=True, metavar="TEXT", help="Produce one of these; repeatable."),
        click.option(
            "--grammar", type=file, metavar="FILE", help="Follow this grammar, in llguidance's Lark."
        ),
    )

    @functools.wraps(function)
    def collected(*args: Any, **given: Any) -> Any:
        schema, regex = given.pop("json_schema"), given.pop("regex")
        choice, grammar = given.pop("choice"), given.pop("grammar")
        form = {
            "json_schema": None if schema is None else _read_json(schema, "--json-schema"),
            "regex": regex,
            "choice": choice or None,
            "grammar": None if grammar is None else _read_text(grammar, "--grammar"),
        }
        asked = {name: value for name, value in form.items() if value is not None}
        if len(asked) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
            raise click.UsageError(f"{names} exclude each other")
        return function(*args, form=asked, **given)

    decorated: Any = collected
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


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


def read_prompts(path: Path, option: str) -> list[str]:
    """Return the prompts of a file: one per line, or, in a `.json` file, a list of strings."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise click.BadParameter(f"{path.name}: {error.strerror}", param_hint=option) from None
    if path.suffix != ".json":
        found: Any = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"{path.name}: {error}", param_hint=option) from None
    if not isinstance(found, list) or not found or not all(isinstance(p, str) and p for p in found):
        raise click.BadParameter(f"{path.name} contains no prompts", param_hint=option)
    return found
