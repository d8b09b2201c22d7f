"""schemathesis against the HTTP API: requests drawn from its OpenAPI document, and from what that forbids.

It checks statuses, content types, headers and bodies of the answers against the document, that what the
document forbids is refused, and that methods which it does not name are.
"""

import asyncio
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.campaign import Campaign

SURFACE = "openapi"
CONFIG = Path(__file__).with_name("schemathesis.toml")
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")
MIN_S = 45.0
"""In less than this little more than the document would be read on a busy machine."""

GRACE_S = 60.0
_COUNTED = re.compile(r"(\d+) generated")


async def fuzz_openapi(base_url: str, campaign: Campaign, seed: int) -> None:
    """Run schemathesis until the campaign is over; skip it in campaigns that are too short."""
    if campaign.left_s < MIN_S:
        return
    seconds = int(campaign.left_s)
    options = ("--phases", "coverage,fuzzing", "--max-time", str(seconds))
    await schemathesis(base_url, campaign, seed, seconds + GRACE_S, *options)


async def schemathesis(base_url: str, campaign: Campaign, seed: int, timeout_s: float, *options: str) -> None:
    """Run schemathesis, and count its requests and findings; it must end in time."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(CONFIG)),
        *("run", f"{base_url}/openapi.json", "--wait-for-schema", "60", "--warnings", "off"),
        *("--seed", str(seed), "--continue-on-failure", *options),
    ]
    with TemporaryDirectory() as directory:  # where it would leave what it saw
        env = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
        into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        run = partial(subprocess.run, command, cwd=directory, env=env, timeout=timeout_s, check=False, **into)
        try:
            process = await asyncio.to_thread(run)
        except subprocess.TimeoutExpired:
            campaign.count(SURFACE, "hang", wrong=f"schemathesis has not ended {GRACE_S:g} s after its time")
            return
    text = process.stdout
    counted = _COUNTED.search(text)
    campaign.counts[SURFACE, "generated"] += int(counted[1]) if counted else 0
    if process.returncode or counted is None:
        campaign.blame(f"schemathesis, exit status {process.returncode}:\n{text}")
