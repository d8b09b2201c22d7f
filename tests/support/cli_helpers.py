"""The `gammaray` command in this process."""

from typing import Any

from click.testing import CliRunner, Result

from gammaray.cli import main


def invoke(*arguments: object, **options: Any) -> Result:
    """Run the command with arguments; the options are those of click's runner, such as `env` and `input`."""
    return CliRunner().invoke(main, [*map(str, arguments)], prog_name="gammaray", **options)
