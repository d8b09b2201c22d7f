"""`gammaray chat`: talk to the model in a terminal."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from gammaray.cli.options import Connection, connection_options, form_options
from gammaray.cli.render import printable
from gammaray.client.chat import Chat
from gammaray.client.structured import OutputOptions
from gammaray.errors import GammarayError, UnavailableError
from gammaray.types import DrafterKind, VerificationMethod

_HELP = "/reset starts a new chat, /exit quits, Ctrl-C stops a response."


@click.command()
@connection_options(timeout_s=120.0, http=True)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--max-tokens", type=int, help="Maximum tokens per response.  [default: the rest of the context]"
)
@click.option("--temperature", type=float, help="Divides the logits; 0 is greedy.")
@click.option("--seed", type=int, help="Seed for reproducible responses.")
@form_options
@click.option("--verification", type=click.Choice([m.value for m in VerificationMethod]))
@click.option("--drafter", type=click.Choice([d.value for d in DrafterKind]), help="Drafter to use.")
@click.option("--gamma", type=int, help="Draft tokens per cycle.  [default: adaptive]")
def chat(connection: Connection, system: str | None, form: OutputOptions, **options: Any) -> None:
    """Chat with the model; /reset starts a new chat, /exit quits, Ctrl-C stops a response.

    Responses go to standard output, everything else to standard error.
    """
    given = {name: value for name, value in options.items() if value is not None}
    own = {name: given.pop(name) for name in ("verification", "drafter", "gamma") if name in given}
    how = asdict(connection)
    conversation = Chat(how.pop("address"), system=system or "", options={**given, "gammaray": own}, **how)
    if sys.stdin.isatty():
        click.echo(_HELP, err=True)
    while (text := _read()) is not None:
        if text == "/exit":
            break
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            click.echo(_HELP, err=True)
        elif text:
            _answer(conversation, text, form)


def _read() -> str | None:
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  # adds history and editing to `input`; not available on every system

    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None


def _answer(conversation: Chat, text: str, form: OutputOptions) -> None:
    """Print the answer to a message. All other errors are printed, and the conversation continues."""
    pieces = conversation.ask(text, **form)
    try:
        for piece in pieces:
            click.echo(printable(piece.text), nl=piece.finish_reason is not None, color=True)
            if piece.finish_reason is not None:
                _summary(piece.speculation)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        click.echo()
    except UnavailableError:
        raise
    except GammarayError as error:
        click.echo(f"gammaray: {error}", err=True)


def _summary(speculation: dict[str, Any]) -> None:
    alpha, speedup = speculation["alpha"], speculation["speedup_estimate"]
    parts = [
        f"{len(speculation['token_ids'])} tokens in {speculation['time_ms']['total'] / 1000:.2f} s",
        f"{speculation['tokens_per_cycle']:.2f} per cycle",
        "alpha unknown" if alpha is None else f"alpha {alpha:.2f}",
        "" if speedup is None else f"speedup {speedup:.2f}x (estimated)",
        f"seed {speculation['seed']}",
    ]
    click.echo(f"[{', '.join(part for part in parts if part)}]", err=True)
