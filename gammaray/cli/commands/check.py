"""`gammaray check`: whether the tokens of receipts follow from the target, the parameters and the seed.

Exit codes in addition to those of every command: 0 all receipts are valid; 1 at least one is not; 2 none is
invalid, but at least one cannot be checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gammaray.cli.program import WORKER_PACKAGES, Program, become, check_packages
from gammaray.cli.values import FloatRange

PARAMS: tuple[click.Parameter, ...] = (
    click.Argument(
        ["path"], metavar="RECEIPTS", type=click.Path(exists=True, dir_okay=False, path_type=Path)
    ),
    click.Option(
        ["--target"],
        required=True,
        help="Directory or hub name; 'demo' is the demo pair's.",
    ),
    click.Option(
        ["--key"],
        metavar="FILE|URL",
        help="Public keys that the server published at /v1/receipts/key; without them no signature is "
        "checked.",
    ),
    click.Option(
        ["--margin"],
        type=FloatRange(0, 100),
        help="How far two logits may move towards each other to make a token the argmax, in nats.  [default: "
        "by the dtype of the server's target, see docs/receipts.md]",
    ),
    click.Option(
        ["--dtype"],
        type=click.Choice(["float32", "bfloat16", "float16"]),
        help="Refuse receipts of another dtype.  [default: the dtypes that the key set names, else any]",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print a JSON object per receipt."),
)


@click.command(
    cls=Program,
    params=list(PARAMS),
    help="Check receipts of completions against the target.\n\nRECEIPTS is a file with one receipt per line; "
    "each takes one forward pass. The target is loaded as its worker would, with the settings of the "
    "environment.",
)
def check(**options: Any) -> None:
    check_packages("check", WORKER_PACKAGES, "worker")
    become("services.receipts")
