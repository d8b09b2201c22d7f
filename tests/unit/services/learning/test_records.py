"""Streams on disk: which positions are kept, bounds, and deletion."""

import hashlib
import time

import numpy as np
import pytest
import torch

from gammaray.learning.folder import LearningFolder, RecordName
from services.learning.records import MAX_AGE_S, MAX_POSITIONS, Buffer, Recorder
from tests.support.learning_helpers import ended
from tests.support.small_files import largest_file
from tests.support.workers.redis_helpers import wait_until


def states(start, end):
    """States that are the numbers of their positions."""
    return torch.arange(start, end, dtype=torch.float32)[:, None, None].expand(-1, 2, 3)


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
    buffer = Buffer()
    buffer.take(first, states(first, end))
    recorder.record(tmp_path, "acme", ended("session", range(50), 10), buffer)
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
    def record(name, count):
        buffer = Buffer()
        buffer.take(0, states(0, count))
        recorder.record(tmp_path, "", ended(name, range(count), 10), buffer)

    record("short", 20)
    for number in range(20):
        record(f"session {number}", 200)
        time.sleep(0.001)
    kept = files(tmp_path, recorder)
    assert 2 <= len(kept) < 20
    assert sum(path.stat().st_size for path in kept) <= 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in kept)


def test_streams_are_deleted_after_a_day_and_if_their_tenant_withdraws(tmp_path, recorder):
    for age_s in (MAX_AGE_S + 60, MAX_AGE_S - 60):
        name = RecordName(time.time_ns() - age_s * 10**9, "", "0" * 16, 20)
        (tmp_path / str(name)).write_bytes(b"")
    (tmp_path / str(name._replace(tenant="acme"))).write_bytes(b"")
    recorder.trim(tmp_path, {""})
    (kept,) = files(tmp_path, recorder)
    assert RecordName.parse(kept) == name


def test_full_disk_costs_a_stream_and_leaves_no_part_of_it(tmp_path, recorder, caplog):
    buffer = Buffer()
    buffer.take(0, states(0, 50))
    with largest_file(100):
        recorder.record(tmp_path, "", ended("a", range(50), 10), buffer)
        wait_until(lambda: caplog.records)
    assert not list(tmp_path.iterdir())
    recorder.record(tmp_path, "", ended("b", range(50), 10), buffer)
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
    buffer = Buffer()
    buffer.take(0, states(0, 50))
    for name in ("a", "b", "a"):
        recorder.record(tmp_path, "", ended(name, range(50), 10), buffer)
    recorder.forget(tmp_path, "a")
    assert len(files(tmp_path, recorder)) == 1
