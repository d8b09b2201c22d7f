"""Tables of the command line: plain aligned columns in a pipe, styled on a terminal; help without imports."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Group
from rich.rule import Rule
from rich.table import Table

import gammaray
from gammaray import ProcessStatus
from gammaray.cli import main
from gammaray.cli.output import output_console
from gammaray.security.keys import create_key
from tests.support.sdk_helpers import ScriptedService, serve_in_thread

ROOT = Path(gammaray.__file__).parents[1]
BOX = re.compile("[\u2500-\u257f\x1b]")
PRINT_A_TABLE = """
from rich.table import Table
from gammaray.cli.output import output_console
table = Table("NAME", title="A title")
table.add_row("value")
output_console().print(table)
"""


def invoke(*arguments, **options):
    return CliRunner().invoke(main, [*map(str, arguments)], prog_name="gammaray", **options)


def table(*rows):
    made = Table("NAME", "LONG\nHEADING", title="A title")
    for row in rows:
        made.add_row(*row)
    return made


def test_piped_tables_have_aligned_untruncated_columns_without_boxes(capsys):
    long = "x" * 300
    output_console().print(table(("a", "[red]b[/]"), (long, "c d")))
    assert capsys.readouterr().out.splitlines() == [
        "A title",
        f"{'NAME':<302}LONG HEADING",
        f"{'a':<302}b",
        f"{long}  c d",
        "",
    ]


def test_tables_within_groups_and_rules_are_plain_too(capsys):
    output_console().print(Group("first", Rule("part"), table(("a", "b")), Group(table(("c", "d")))))
    out = capsys.readouterr().out
    assert not BOX.search(out)
    assert out.splitlines()[:4] == ["first", "part", "A title", "NAME  LONG HEADING"]


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
    assert lines[1].endswith(note)


def test_tables_on_a_terminal_have_a_box():
    reader, writer = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", PRINT_A_TABLE], stdout=writer, env=environment) as process:
        os.close(writer)
        shown = b""
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:  # Linux tells the end of a terminal this way
                break
            if not part:
                break
            shown += part
        assert process.wait(100) == 0
    os.close(reader)
    assert BOX.search(shown.decode())


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
    assert modules_of("status", "--help") & names == {"gammaray.cli.commands.status"}


@pytest.mark.parametrize("name", main.list_commands(None))
def test_listed_commands_exist_with_their_short_help(name):
    command = main.get_command(None, name)
    assert command.name == name
    listed = re.search(rf"^  {name} +(.*)", invoke("--help").stdout, re.MULTILINE)[1]
    first_words = listed.rstrip(".").split(",")[0].split(":")[0]
    assert command.help.startswith(first_words), (command.help, listed)
