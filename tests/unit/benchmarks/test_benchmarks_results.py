"""Result files: where they come from, and how two of them compare."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks.provenance
from gammaray.bench.compare import compare, load_result, warnings
from gammaray.bench.provenance import provenance, write_result
from gammaray.bench.tables import markdown
from gammaray.errors import InvalidArgumentError


def _row(system: str, speed: float, over_plain: float | None) -> dict[str, Any]:
    ratio = None if over_plain is None else {"median": over_plain, "values": [over_plain]}
    speeds = {"median": speed, "values": [speed]}
    return {
        "system": system,
        "tokens_per_s": speeds,
        "over_generate": None,
        "over_plain": ratio,
        "speculation": None,
        "between_tokens": None,
    }


def _result(speed: float) -> dict[str, Any]:
    rows = [_row("generate", 100.0, None), _row("gammaray-4", speed, speed / 90)]
    return {
        "provenance": {"hardware": {"cpu": "c", "load_average": speed}, "git": {"sha": "s", "dirty": False}},
        "settings": {"max_tokens": 128},
        "workload_fingerprint": "f",
        "points": [{"temperature": 0.0, "verification": "coupled", "concurrency": 1, "rows": rows}],
    }


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


def test_compare_gives_new_over_old_per_system() -> None:
    pairs = {pair.system: pair for pair in compare(_result(150.0), _result(180.0))}
    assert pairs["gammaray-4"].ratio == pytest.approx(1.2)
    assert pairs["gammaray-4"].new_over_plain == pytest.approx(2.0)
    assert pairs["generate"].ratio == 1.0
    assert pairs["generate"].old_over_plain is None


def test_compare_skips_what_only_one_result_has() -> None:
    old, new = _result(150.0), _result(150.0)
    del new["points"][0]["rows"][0]
    assert [pair.system for pair in compare(old, new)] == ["gammaray-4"]


def test_compare_without_common_rows_raises() -> None:
    old, new = _result(150.0), _result(150.0)
    new["points"][0]["temperature"] = 1.0
    with pytest.raises(InvalidArgumentError, match="no common rows"):
        compare(old, new)


def test_warnings_are_empty_for_equal_runs_and_name_each_difference() -> None:
    old = _result(150.0)
    assert warnings(old, _result(180.0)) == []
    new = copy.deepcopy(old)
    new["provenance"]["hardware"]["cpu"] = "other"
    new["provenance"]["git"]["dirty"] = True
    new["settings"]["max_tokens"] = 32
    new["workload_fingerprint"] = "g"
    text = "\n".join(warnings(old, new))
    for word in ("hardware", "prompts", "max_tokens", "uncommitted"):
        assert word in text


def test_markdown_has_one_line_per_row_and_empty_cells_for_missing_figures() -> None:
    lines = markdown(_result(150.0)["points"][0]["rows"]).splitlines()
    assert len(lines) == 4
    assert lines[2] == "| generate | 100.0 |  |  |  |  |  |"
    assert lines[3] == "| gammaray-4 | 150.0 | 1.67 |  |  |  |  |"


@pytest.mark.parametrize("key", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_provenance_command_omits_the_key(key: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gammaray", "bench", *key, "--tokens", "8"])
    command = provenance()["command"]
    assert "sk-1" not in command
    assert command.endswith("--tokens 8")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"provenance": 1}', "\x00"])
def test_load_result_other_files_raise_naming_the_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"x\.json"):
        load_result(path)
