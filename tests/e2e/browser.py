"""Chromium without a window, spoken to over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER_TIMEOUT_S = 60.0
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--hide-scrollbars", "--window-size=1100,900", "--remote-debugging-pipe"),
)
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)  # where the browser looks for commands
os.dup2(int(sys.argv[2]), 4)  # and where it writes answers
os.execv(sys.argv[3], sys.argv[3:])
"""
BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return the browser's path, None where there is none."""
    return next((path for name in BINARIES if (path := shutil.which(name))), None)


class Page:
    """One tab.

    Args:
        commands: Where commands are written.
        answers: Where answers are read.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the answer to a command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page as PNG."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        )

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(self._answers, 1 << 16)
            assert read, "the browser ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser_page(binary: str) -> Iterator[Page]:
    """Start a browser and yield its page; the browser and its files are gone afterwards."""
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    starter = [sys.executable, "-c", START]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [*starter, str(command_end), str(answer_end), binary, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(command_end, answer_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        try:
            yield Page(commands, answers)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(commands)
            os.close(answers)
