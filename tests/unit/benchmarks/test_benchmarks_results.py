"""Result files: where they come from."""

import sys

import pytest

from gammaray.bench.provenance import provenance


@pytest.mark.parametrize("key", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_provenance_command_omits_the_key(key, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gammaray", "bench", *key, "--tokens", "8"])
    command = provenance()["command"]
    assert "sk-1" not in command
    assert command.endswith("--tokens 8")
