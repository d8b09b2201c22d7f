"""Runs the programs that commands of `gammaray` become (`gammaray.cli.program`)."""

from __future__ import annotations

from collections.abc import Callable

import click
import torch
from transformers.utils import logging as transformers_logging

from gammaray.errors import GammarayError, InvalidArgumentError


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
    except GammarayError as error:
        message, status = str(error), 2 if isinstance(error, InvalidArgumentError) else 1
    except torch.OutOfMemoryError as error:
        message, status = str(error).splitlines()[0], 1
    except KeyboardInterrupt:
        return 130
    click.echo(f"gammaray: {message}", err=True)
    return status
