"""Runs the programs that commands of `gammaray` become (`gammaray.cli.program`)."""

from __future__ import annotations

from collections.abc import Callable

import click
import torch
from transformers.utils import logging as transformers_logging

from gammaray.program.failures import failure_of, shown


def run_program(work: Callable[[], int]) -> int:
    """Return the exit status of `work`, or that of its error, which becomes one line on stderr."""
    # transformers does not type these two.
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return work()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except torch.OutOfMemoryError as error:
        status, message = 1, str(error).splitlines()[0]
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (failure := failure_of(error)) is None:
            raise
        status, message = failure
    click.echo(f"gammaray: {shown(message)}", err=True)
    return status
