"""Options that a command and the program that it becomes both read (`gammaray.cli.program`)."""

from __future__ import annotations

import click

from gammaray.program.values import GIVEN_FILE, FloatRange

START_OPTIONS = (
    click.Option(
        ["--wait-ready"], is_flag=True, help="Print `ready http=... grpc=...` once the cluster is ready."
    ),
    click.Option(
        ["--die-with-parent"], is_flag=True, help="Stop when the process that started this one ends."
    ),
    click.Option(
        ["--start-timeout-s"],
        type=FloatRange(0, 86_400, min_open=True),
        default=300.0,
        help="Fail if the cluster is not ready after this time.",
    ),
)
"""Options of a start, which are no settings of the cluster."""

CHECK_PARAMS: tuple[click.Parameter, ...] = (
    click.Argument(["path"], metavar="RECEIPTS", type=GIVEN_FILE),
    click.Option(["--target"], required=True, help="Directory or hub name; 'demo' is the demo pair's."),
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
