"""Programs that tests need: `.ci/packages.py` with a stand-in for apt-get."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS

SCRIPT = Path(__file__).parents[3] / ".ci" / "packages.py"
APT_GET = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
if [ -x "$FAKE_POLICY" ]; then "$FAKE_POLICY" redis-server start; echo "policy $?" >> "$FAKE_LOG"; fi
case "$*" in
  update*) echo "no network" >&2; exit 100 ;;
  *prometheus*) echo "E: Unable to locate package prometheus" >&2; exit 100 ;;
  *--no-download*) printf '#!/bin/sh\\n' > "$FAKE_BIN/$FAKE_COMMAND"; chmod +x "$FAKE_BIN/$FAKE_COMMAND" ;;
esac
"""

SUDO = """#!/bin/sh
[ "$1" = -n ] || exit 1
shift
exec "$@"
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Debian's packages")


class Machine:
    """A path with a few commands, and a log of the calls of apt-get.

    Args:
        directory: Where all of it lies.
    """

    def __init__(self, directory: Path) -> None:
        self.bin, self.log, self.policy = directory / "bin", directory / "log", directory / "policy-rc.d"
        self.bin.mkdir()
        for name in ("sh", "env", "timeout", "true", "install", "rm", "chmod"):
            (self.bin / name).symlink_to(shutil.which(name))

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def packages(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        fake = {"LOG": self.log, "POLICY": self.policy, "BIN": self.bin, "COMMAND": "redis-server"}
        environment = {"PATH": str(self.bin), **{f"FAKE_{name}": str(value) for name, value in fake.items()}}
        return subprocess.run(
            [sys.executable, str(SCRIPT), "--policy", str(self.policy), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def debian(machine):
    machine.add("apt-get", APT_GET)
    machine.add("sudo", SUDO)
    machine.add("update-rc.d", '#!/bin/sh\necho "update-rc.d $@" >> "$FAKE_LOG"\n')
    return machine


def test_installs_without_a_service_now_or_at_boot(debian):
    done = debian.packages("redis-server")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"redis-server: {debian.bin / 'redis-server'}" in done.stdout
    calls = debian.calls()
    downloaded, installed = [call for call in calls if call.startswith("install")]
    assert "--download-only" in downloaded
    assert "--no-download" in installed
    assert all("--no-install-recommends" in call for call in (downloaded, installed))
    assert calls.count("policy 101") == 3
    assert calls[-1] == "update-rc.d redis-server disable"
    assert not debian.policy.exists()


def test_one_that_fails_is_reported_and_the_others_are_installed(debian):
    debian.add("google-chrome", "#!/bin/sh\n")
    done = debian.packages()
    assert done.returncode == 1
    reported = dict(line.removeprefix("packages: ").split(": ", 1) for line in done.stdout.splitlines())
    assert set(reported) == set(PROGRAMS)
    assert "E: Unable to locate package prometheus" in reported["prometheus"]
    assert "skipped" in reported["prometheus"]
    assert reported["chromium"].endswith("google-chrome")
    assert reported["redis-server"].endswith("redis-server")


def test_policy_of_the_machine_is_kept_and_decides(debian):
    debian.policy.write_text("#!/bin/sh\nexit 0\n")
    debian.policy.chmod(0o755)
    done = debian.packages("redis-server")
    assert done.returncode == 1
    assert "lets packages start services" in done.stdout
    assert debian.calls() == []
    debian.policy.write_text("#!/bin/sh\nexit 101\n")
    assert debian.packages("redis-server").returncode == 0
    assert debian.policy.read_text() == "#!/bin/sh\nexit 101\n"
