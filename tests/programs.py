"""Programs outside Python that some tests run: `@pytest.mark.needs("chromium")` skips where one is missing.

`.ci/packages.py` installs their Debian packages. It runs before the virtual environment exists, so that this
file imports the standard library alone.
"""

import shutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    package: str  # its Debian package
    names: tuple[str, ...]  # commands that provide it; one on the path is enough
    purpose: str  # what the tests do with it
    service: str = ""  # system service that the package would start, to be kept off; empty if there is none

    @property
    def path(self) -> str | None:
        """Path of the first command found, None if there is none."""
        return next((path for name in self.names if (path := shutil.which(name))), None)

    @property
    def missing(self) -> str:
        """Why a test that needs it is skipped, and the command that enables it."""
        return f"{self.package} is not installed ({self.purpose}); to enable: make test-programs"


PROGRAMS = {
    program.package: program
    for program in (
        Program(
            "chromium",
            ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
            "tests of the playground page",
        ),
        Program(
            "prometheus", ("prometheus",), "tests of the documented queries, rules and alerts", "prometheus"
        ),
        Program("redis-server", ("redis-server",), "tests of Redis over TLS", "redis-server"),
    )
}
