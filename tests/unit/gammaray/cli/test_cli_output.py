"""Tables of the command line in a pipe: plain aligned columns; help without imports."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import gammaray
from gammaray import ProcessStatus
from gammaray.cli import main
from gammaray.cli.output import columns, output_console
from gammaray.security.keys import create_key
from tests.support.sdk_helpers import ScriptedService, serve_in_thread

ROOT = Path(gammaray.__file__).parents[1]


def invoke(*arguments, **options):
    return CliRunner().invoke(main, [*map(str, arguments)], prog_name="gammaray", **options)


def test_piped_tables_have_aligned_untruncated_columns_without_boxes_and_colours(capsys):
    long = "x" * 300
    table = columns("NAME", "HEADING")
    table.add_row("a", "[red]b[/]")
    table.add_row(long, "c d")
    output_console().print(table)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"{'NAME':<302}HEADING", f"{'a':<302}b", f"{long}  c d"]


def test_status_in_a_pipe_keeps_long_values_whole():
    processes = [ProcessStatus("target", 1, f"{'h' * 120}:1", "m" * 150, True, 0)]
    with serve_in_thread(ScriptedService(status=lambda _: processes)) as address:
        lines = invoke("status", "-a", address, env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["target", "1", f"{'h' * 120}:1", "m" * 150, "yes", "0", "-", "-"]
    assert lines[0].index("MODEL") == lines[1].index("mmm")


def test_keys_in_a_pipe_keep_their_notes(tmp_path):
    note = "[red]not a colour[/] " * 10 + "│"
    create_key(tmp_path / "keys.json", "acme", note)
    lines = invoke("keys", "list", "--file", tmp_path / "keys.json").stdout.splitlines()
    assert len(lines) == 2
    assert lines[1].rstrip().endswith(note)


def modules_of(*arguments):
    """Return the modules that a command imports."""
    script = (
        "import json, sys\nfrom gammaray.cli import main\n"
        f"try: main({list(arguments)!r})\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, cwd=ROOT, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["dance"]], ids=" ".join)
def test_help_imports_no_command_and_none_of_their_packages(arguments):
    found = modules_of(*arguments)
    assert not found & {"grpc", "google.protobuf", "pydantic", "rich", "yaml", "asyncio"}
    assert {name for name in found if name.startswith("gammaray.cli.")} == set()


@pytest.mark.slow
def test_help_of_a_command_imports_no_other_command():
    names = {f"gammaray.cli.commands.{name}" for name in main.list_commands(None)}
    assert modules_of("config", "--help") & names == {"gammaray.cli.commands.config"}


@pytest.mark.parametrize("name", main.list_commands(None))
def test_listed_commands_exist_with_their_short_help(name):
    command = main.get_command(None, name)
    assert command.name == name
    listed = re.search(rf"^  {name} +(.*)", invoke("--help").stdout, re.MULTILINE)[1]
    first_words = listed.rstrip(".").split(",")[0].split(":")[0]
    assert command.help.startswith(first_words), (command.help, listed)
