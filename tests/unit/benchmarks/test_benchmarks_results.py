"""Result files: where they come from."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import benchmarks.provenance
from gammaray.bench.provenance import provenance, write_result


def test_provenance_names_commit_command_hardware_versions_and_utc_date() -> None:
    found = provenance()
    assert found.keys() == {"date_utc", "command", "git", "hardware", "versions"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found["date_utc"])
    assert found["command"]
    assert found["hardware"].keys() == {"cpu", "cores", "memory_gib", "gpu", "load_average"}
    assert found["hardware"]["cores"] >= 1
    assert found["versions"].keys() >= {"python", "torch", "transformers"}
    if found["git"] is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", found["git"]["sha"])
        assert isinstance(found["git"]["dirty"], bool)


def test_write_result_puts_the_header_before_the_figures(tmp_path: Path) -> None:
    path = write_result("x", {"figure": 1}, tmp_path / "deep" / "x.json")
    assert list(json.loads(path.read_text())) == ["name", "provenance", "figure"]
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_results_of_one_day_do_not_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks.provenance, "RESULTS", tmp_path)
    paths = [benchmarks.provenance.write_result("x", {"figure": number}) for number in range(3)]
    assert len(set(paths)) == 3
    assert [json.loads(path.read_text())["figure"] for path in paths] == [0, 1, 2]
    assert re.fullmatch(r"x-\d{4}-\d\d-\d\d-3\.json", paths[2].name)


@pytest.mark.parametrize("key", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_provenance_command_omits_the_key(key: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gammaray", "bench", *key, "--tokens", "8"])
    command = provenance()["command"]
    assert "sk-1" not in command
    assert command.endswith("--tokens 8")
