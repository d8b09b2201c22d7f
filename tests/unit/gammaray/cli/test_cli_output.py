"""Tables of the command line in a pipe: plain aligned columns; help without imports."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gammaray
from gammaray.cli import main
from gammaray.program.output import columns, output_console
from tests.support.cli_helpers import invoke

ROOT = Path(gammaray.__file__).parents[1]


def test_piped_tables_have_aligned_untruncated_columns_without_boxes_and_colours(capsys):
    long = "x" * 300
    table = columns("NAME", "HEADING")
    table.add_row("a", "[red]b[/]")
    table.add_row(long, "c d")
    output_console().print(table)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{'NAME':<302}HEADING", f"{'a':<302}b", f"{long}  c d"]


def modules_after(*commands):
    """Return the modules that a process has imported after each of some commands."""
    script = f"""
import json, sys
from gammaray.cli import main
for arguments in {list(commands)!r}:
    try:
        main(arguments)
    except SystemExit:
        pass
    print(json.dumps(["modules", *sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, cwd=ROOT, check=True
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith('["modules"')]


def test_help_imports_no_command_and_none_of_their_packages():
    """Help of a command imports no other command."""
    *general, of_keys = modules_after(["--help"], ["--version"], ["dance"], ["keys", "--help"])
    assert len(general) == 3
    for found in general:
        assert not found & {"grpc", "google.protobuf", "pydantic", "rich", "yaml", "asyncio"}
        assert {name for name in found if name.startswith("gammaray.cli.")} == set()
    names = {f"gammaray.cli.commands.{name}" for name in main.list_commands(None)}
    assert of_keys & names == {"gammaray.cli.commands.keys"}


@pytest.mark.parametrize("name", main.list_commands(None))
def test_listed_commands_exist_with_their_short_help(name):
    command = main.get_command(None, name)
    assert command.name == name
    listed = re.search(rf"^  {name} +(.*)", invoke("--help").stdout, re.MULTILINE)[1]
    first_words = listed.rstrip(".").split(",")[0].split(":")[0]
    assert command.help.startswith(first_words), (command.help, listed)
