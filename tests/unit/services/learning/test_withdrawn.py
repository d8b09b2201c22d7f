"""Streams on disk: what is kept, bounds, deletion beside working workers, and files that cannot be read."""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gammaray.learning.folder import LearningFolder, RecordName
from services.learning.records import MAX_AGE_S, MAX_FILES, MAX_POSITIONS, Buffer, Recorder
from services.learning.versions import MAX_DRAFTERS, LoadedDrafters
from tests.support.cli_helpers import invoke
from tests.support.learning_helpers import ended, publish, records
from tests.support.small_files import largest_file
from tests.support.workers.redis_helpers import wait_until

OTHER_UID = 65534


def states(start, end):
    """States that are the numbers of their positions."""
    return torch.arange(start, end, dtype=torch.float32)[:, None, None].expand(-1, 2, 3)


def filled(start, end):
    buffer = Buffer()
    buffer.take(start, states(start, end))
    return buffer


def record(versions, name, began=None):
    """End a session, which began earlier or now."""
    began = began or versions.begin(name, 10)
    began.buffer.take(0, torch.zeros(99, 2, 3))
    versions.record(ended(name, range(100)), began)


@pytest.fixture
def folder(tmp_path):
    found = LearningFolder(tmp_path / "learn")
    found.consent("acme", "own")
    return found


def forget(folder):
    return invoke("drafters", "--folder", folder.path, "forget", "acme")


def test_forget_says_which_workers_have_confirmed(folder, monkeypatch):
    monkeypatch.setattr("gammaray.cli.commands.train.CONFIRM_WAIT_S", 0.5)
    versions = [LoadedDrafters("base", str, folder) for _ in range(2)]
    try:
        record(versions[0], "acme:1")
        wait_until(lambda: records(folder.path, "tenant-acme"))
        found = forget(folder)
        assert (found.exit_code, found.stderr.count(": confirmed")) == (0, 2)
        assert not records(folder.path, "tenant-acme")
        (folder.path / "tenants.json").write_text("{")  # neither knows what comes now
        monkeypatch.setattr("services.learning.versions.PERIOD_S", 60)
        time.sleep(0.2)
        (folder.path / "tenants.json").unlink()
        folder.consent("acme", "own")
        folder.forget("acme")
        folder.forget("acme")
        found = forget(folder)
        assert (found.exit_code, found.stderr.count(": not confirmed")) == (1, 2)
        assert "a worker has not confirmed within 0.5 s" in found.stderr
    finally:
        monkeypatch.setattr("services.learning.versions.PERIOD_S", 0.02)
        for one in versions:
            one.close()
    assert "confirmed" not in forget(folder).stderr, "none is at work"


SERVE = """
import os, sys
from pathlib import Path
from gammaray.learning.folder import LearningFolder
from services.learning.versions import LoadedDrafters
from tests.unit.services.learning.test_withdrawn import OTHER_UID, record, wait_until
folder = LearningFolder(Path(sys.argv[1]))
os.setgid(OTHER_UID)
os.setuid(OTHER_UID)
versions = LoadedDrafters("base", str, folder)
record(versions, "acme:1")
wait_until(lambda: folder.read().generation, timeout_s=120)
for number in range(2, 6):
    record(versions, f"acme:{number}")
sys.stdin.read()
versions.close()
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to serve as another user")
def test_root_withdraws_for_a_worker_of_another_user(monkeypatch):
    monkeypatch.setattr("gammaray.cli.commands.train.CONFIRM_WAIT_S", 60)
    with tempfile.TemporaryDirectory() as outside:  # pytest's folders are closed to other users
        os.chmod(outside, 0o755)
        folder = LearningFolder(Path(outside) / "learn")
        folder.consent("acme", "own")
        os.chown(folder.path, OTHER_UID, OTHER_UID)
        folder.secure()
        command = [sys.executable, "-c", SERVE, str(folder.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
            wait_until(lambda: records(folder.path, "tenant-acme"), timeout_s=120)
            found = forget(folder)
            worker.communicate(timeout=60)
        assert (worker.returncode, found.exit_code, found.stderr.count(": confirmed")) == (0, 0, 1)
        assert not list((folder.path / "tenant-acme").rglob("*.npz"))
        assert {path.lstat().st_uid for path in (folder.path, *folder.path.rglob("*"))} == {OTHER_UID}


@pytest.mark.parametrize("moment", ["start", "later"])
def test_consents_that_cannot_be_read_are_none(folder, moment, caplog):
    publish(folder.store("tenant-acme"), tenants=["acme"])
    folder.store("tenant-acme").promote(1)
    if moment == "start":
        (folder.path / "tenants.json").write_text("{")
    with closing(LoadedDrafters("base", lambda directory: directory, folder)) as versions:
        if moment == "later":
            wait_until(lambda: versions.begin("acme:0", 10).number == 1)
            began = versions.begin("acme:1", 10)
            (folder.path / "tenants.json").write_text("{")
        wait_until(lambda: versions.begin("acme:2", 10).name is None)
        wait_until(lambda: versions.choose("tenant-acme", ("acme:1", 0)) == (0, "base"))
        record(versions, "acme:2")
        if moment == "later":
            record(versions, "acme:1", began)
        assert versions.begin("free", 10).name is None
    assert not records(folder.path, "tenant-acme")
    assert sum("tenants.json cannot be read" in one.message for one in caplog.records) <= 2, "not each look"
    assert folder.store("tenant-acme").directory(1).is_dir(), "nothing is deleted for a damaged file"


def test_stream_that_waits_for_the_disk_is_not_kept_after_its_tenant_withdrew_and_agreed_again(folder):
    with closing(LoadedDrafters("base", str, folder)) as versions:
        before = versions.begin("acme:1", 10)
        folder.forget("acme")
        folder.consent("acme", "own")
        record(versions, "acme:1", before)
        wait_until(lambda: versions.begin("acme:2", 10).consent == folder.read().number_of("acme"))
        record(versions, "acme:2")
    assert len(records(folder.path, "tenant-acme")) == 1


def test_deleted_session_leaves_also_from_the_drafter_that_served_its_tenant_before(folder):
    with closing(LoadedDrafters("base", str, folder)) as versions:
        record(versions, "acme:1")
        wait_until(lambda: records(folder.path, "tenant-acme"))
        folder.consent("acme", "shared")
        versions.forget("acme:1")
        wait_until(lambda: not records(folder.path, "tenant-acme"))


def stream(records, age_s=0, tenant="", mtime_age_s=0, name=None):
    records.mkdir(parents=True, exist_ok=True)
    path = records / (
        name or str(RecordName(time.time_ns() - int(age_s * 1e9), tenant, f"{age_s:016.0f}", 20))
    )
    path.write_bytes(b"x")
    os.utime(path, (time.time() - mtime_age_s,) * 2)
    return path


@pytest.mark.parametrize(
    ("odd", "stays"),
    [
        ({"age_s": -400 * 86400}, True),  # the file says that it is of now
        ({"age_s": -400 * 86400, "mtime_age_s": MAX_AGE_S + 60}, False),
        ({"age_s": MAX_AGE_S + 60}, False),
        ({"age_s": -400 * 86400, "mtime_age_s": -400 * 86400}, False),
        ({"name": "backup.npz", "mtime_age_s": MAX_AGE_S + 60}, False),
        ({"name": "1_2_3_4_5.npz", "mtime_age_s": MAX_AGE_S + 60}, False),
        ({"tenant": "gone"}, False),
    ],
)
def test_what_is_odd_or_old_goes_and_the_rest_stays(tmp_path, odd, stays):
    kept = stream(tmp_path / "records", age_s=MAX_AGE_S - 60)
    other = stream(tmp_path / "records", **odd)
    (tmp_path / "records" / "folder").mkdir()
    recorder = Recorder()
    recorder.trim(tmp_path / "records", {""})
    recorder.close()
    assert (kept.exists(), other.exists()) == (True, stays)


def test_number_of_files_is_bounded(tmp_path):
    path = tmp_path / "records"
    for age_s in range(1, MAX_FILES + 200):
        stream(path, age_s=age_s)
    recorder, buffer = Recorder(), filled(0, 99)
    for number in range(50):
        recorder.record(path, "", ended(f"s{number}", range(100)), buffer)
    recorder.close()
    kept = sorted(path.iterdir(), key=RecordName.parse)
    assert len(kept) == MAX_FILES
    assert sum(RecordName.parse(one).num_answer == 92 for one in kept) == 50, "the newest stay"


def test_one_bad_drafter_harms_no_other(folder):
    (folder.path / "open").mkdir()
    (folder.path / "open" / "state.json").write_text("{")
    for name, tenants in (("tenant-acme", ["acme"]), ("shared", [])):
        publish(folder.store(name), tenants=tenants)
    old = stream(folder.path / "open" / "records", age_s=MAX_AGE_S + 60)

    def load(directory):
        if "shared" in directory:
            raise MemoryError("no memory")
        return directory

    with closing(LoadedDrafters("base", load, folder)) as versions:
        wait_until(lambda: folder.store("shared").read().versions[0].status == "rolled back")
        wait_until(lambda: not old.exists())
        drafted = {versions.begin(f"acme:{number}", 10).number for number in range(40)}
        assert drafted == {0, 1}


def test_versions_of_the_tenants_that_were_served_last_are_loaded(folder, monkeypatch):
    monkeypatch.setattr("services.learning.versions._CALM_S", 0.01)
    names = [f"t{number:02d}" for number in range(MAX_DRAFTERS + 4)]
    for name in names:
        folder.consent(name, "own")
        publish(folder.store(f"tenant-{name}"), tenants=[name])
        folder.store(f"tenant-{name}").promote(1)
    load = Mock(side_effect=str)
    with closing(LoadedDrafters("base", load, folder)) as versions:
        wait_until(lambda: load.call_count == MAX_DRAFTERS)
        wait_until(lambda: versions.begin(f"{names[-1]}:1", 10).number == 1)
        drafted = [versions.choose(f"tenant-{name}", ("x", 0))[0] for name in names]
        assert sum(drafted) <= MAX_DRAFTERS


def positions(buffer):
    start, found = buffer.states()
    assert start == buffer.start
    return found[:, 0, 0].float().tolist()


def test_buffer_follows_roll_backs_and_gaps():
    buffer = Buffer()
    buffer.take(4, states(4, 8))
    buffer.take(8, states(8, 9))
    assert positions(buffer) == [4, 5, 6, 7, 8]
    buffer.take(6, states(6, 10))
    assert positions(buffer) == [4, 5, 6, 7, 8, 9]
    buffer.take(4, states(4, 5))
    assert positions(buffer) == [4]
    buffer.take(20, states(20, 22))
    assert positions(buffer) == [20, 21]


def test_buffer_is_bounded():
    buffer = Buffer()
    for start in range(0, 6000, 500):
        buffer.take(start, states(start, start + 500))
    assert MAX_POSITIONS <= len(positions(buffer)) < MAX_POSITIONS + 500
    buffer.take(6000, states(6000, 9000))
    assert len(positions(buffer)) == MAX_POSITIONS


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr("services.learning.records.MAX_BYTES", 20_000)
    recorder = Recorder()
    yield recorder
    recorder.close()


def files(folder, recorder):
    recorder.close()
    return sorted(folder.glob("*.npz"), key=RecordName.parse)


@pytest.mark.parametrize(("first", "end"), [(0, 49), (0, 50), (30, 49), (0, 40)])
def test_states_belong_to_the_tokens_of_their_positions(tmp_path, recorder, first, end):
    """The state of a position is that of its token, also if the last token has none, or one."""
    recorder.record(tmp_path, "acme", ended("session", range(50), 10), filled(first, end))
    (path,) = files(tmp_path, recorder)
    with np.load(path) as stored:
        found = torch.from_numpy(stored["states"]).view(torch.bfloat16)[:, 0, 0]
        tokens = stored["token_ids"].tolist()
        assert float(stored["temperature"]) == 0.5
        num_prompt = int(stored["num_prompt"])
    assert found.tolist() == tokens[:-1]
    assert tokens[0] == first
    assert tokens[num_prompt] == max(10, first + 1)
    name = RecordName.parse(path)
    assert (name.tenant, name.num_answer) == ("acme", len(tokens) - num_prompt)


def test_short_streams_are_not_kept_and_old_ones_go(tmp_path, recorder):
    recorder.record(tmp_path, "", ended("short", range(20), 10), filled(0, 20))
    for number in range(20):
        recorder.record(tmp_path, "", ended(f"session {number}", range(200), 10), filled(0, 200))
        time.sleep(0.001)
    kept = files(tmp_path, recorder)
    assert 2 <= len(kept) < 20
    assert sum(path.stat().st_size for path in kept) <= 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in kept)


def test_full_disk_costs_a_stream_and_leaves_no_part_of_it(tmp_path, recorder, caplog):
    with largest_file(100):
        recorder.record(tmp_path, "", ended("a", range(50), 10), filled(0, 50))
        wait_until(lambda: caplog.records)
    assert not list(tmp_path.iterdir())
    recorder.record(tmp_path, "", ended("b", range(50), 10), filled(0, 50))
    assert len(files(tmp_path, recorder)) == 1


def test_what_a_killed_worker_wrote_of_a_stream_leaves_with_its_session_or_tenant(tmp_path, recorder):
    folder = LearningFolder(tmp_path)
    folder.consent("acme", "own")
    records = tmp_path / "tenant-acme" / "records"
    records.mkdir(parents=True)
    digest = hashlib.sha256(b"acme:a").hexdigest()[:16]
    for session in (digest, "0" * 16):
        (records / str(RecordName(time.time_ns(), "acme", session, 20))).with_suffix(".new").write_bytes(b"")
    recorder.forget(records, "acme:a")
    recorder.close()
    (left,) = records.iterdir()
    assert RecordName.parse(left).session != digest
    folder.forget("acme")
    assert not list(records.iterdir())


def test_deleted_session_leaves_also_if_it_waits_for_the_disk(tmp_path, recorder):
    for name in ("a", "b", "a"):
        recorder.record(tmp_path, "", ended(name, range(50), 10), filled(0, 50))
    recorder.forget(tmp_path, "a")
    assert len(files(tmp_path, recorder)) == 1
