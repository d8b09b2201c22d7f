"""Versions of learnt drafters on disk: publishing, promotion, rollback, pins, and data that are withdrawn."""

import json

import pytest
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gammaray.learning.folder import DrafterStore, LearningFolder, RecordName
from tests.support.learning_helpers import publish


@pytest.fixture
def store(tmp_path):
    return DrafterStore(tmp_path / "open")


def statuses(store):
    return [one.status for one in store.read().versions]


def test_candidate_becomes_stable_and_former(store):
    assert store.read().stable == 0
    assert publish(store).number == 1
    assert store.read().candidate == 1
    assert publish(store) is None, "one candidate at a time"
    store.promote(1)
    assert publish(store, parent=1).number == 2
    store.promote(1)  # no candidate any more
    store.promote(2)
    assert statuses(store) == ["former", "stable"]
    assert store.read().stable == 2
    assert store.directory(2).is_dir()


def test_directory_of_a_publisher_that_died_is_replaced(store):
    stale = store.directory(1)
    stale.mkdir(parents=True)
    (stale / "half").write_text("")
    assert publish(store).number == 1
    assert list(store.directory(1).iterdir()) == []


def test_rollback_returns_to_what_served_before(store):
    publish(store)
    store.promote(1)
    publish(store, parent=1)
    assert store.roll_back(2, "worse") == 1
    assert statuses(store) == ["stable", "rolled back"]
    assert store.read().versions[1].reason == "worse"
    assert store.roll_back(1, "by hand") == 0
    assert store.roll_back(1, "again") == 0
    assert statuses(store) == ["rolled back", "rolled back"]
    publish(store)
    store.promote(3)
    publish(store, parent=3)
    store.promote(4)
    assert store.roll_back(4, "worse") == 3
    with pytest.raises(NotFoundError, match="no version 9 of 4"):
        store.roll_back(9, "")


def test_pinned_version_stays(store):
    publish(store)
    store.promote(1)
    publish(store, parent=1)
    store.pin(1)
    assert statuses(store) == ["stable", "rolled back"]
    assert publish(store, parent=1) is None
    store.unpin()
    assert publish(store, parent=1).number == 3
    store.pin(0)
    assert store.read().stable == 0
    with pytest.raises(NotFoundError):
        store.pin(4)


def test_withdrawn_data_retire_versions_and_delete_streams(tmp_path):
    folder = LearningFolder(tmp_path)
    folder.consent("acme", "shared")
    folder.consent("acme-x", "shared")
    folder.consent("solo", "own")
    assert [folder.drafter_of(name, folder.consents()) for name in ("acme", "solo", "else", "")] == [
        "shared",
        "tenant-solo",
        None,
        "open",
    ]
    store = folder.store("shared")
    records = store.path / "records"
    records.mkdir(parents=True)
    for at, tenant in enumerate(("acme", "acme-x", "acme")):
        (records / str(RecordName(at, tenant, "0" * 16, 20))).write_bytes(b"")
    publish(store, tenants=("acme-x",))
    store.promote(1)
    publish(store, parent=1, tenants=("acme", "acme-x"))
    store.promote(2)
    publish(store, parent=2, tenants=("acme", "acme-x"))
    assert folder.forget("acme") == {"shared": [2, 3]}
    assert statuses(store) == ["stable", "retired", "retired"]
    assert store.read().stable == 1
    assert not store.directory(2).exists()
    assert [RecordName.parse(path).tenant for path in records.iterdir()] == ["acme-x"]
    assert folder.consents() == {"acme-x": "shared", "solo": "own"}
    with pytest.raises(FailedPreconditionError, match="retired"):
        store.pin(2)


def test_damaged_files_and_names_are_refused(tmp_path):
    folder = LearningFolder(tmp_path)
    with pytest.raises(InvalidArgumentError, match="tenant"):
        folder.consent("No Tenant", "own")
    for name in ("tenant-", "../open", "other"):
        with pytest.raises(InvalidArgumentError, match="drafter"):
            folder.store(name)
    (tmp_path / "tenants.json").write_text("{")
    with pytest.raises(FailedPreconditionError, match=r"tenants\.json"):
        folder.consents()
    store = folder.store("open")
    store.path.mkdir()
    (store.path / "state.json").write_text('{"stable": "x"}')
    with pytest.raises(FailedPreconditionError, match=r"state\.json"):
        store.read()


def test_command_lists_pins_and_rolls_back(tmp_path, store):
    publish(store)
    store.promote(1)
    publish(store, parent=1)

    def drafters(*arguments):
        return CliRunner().invoke(main, ["drafters", "--folder", str(tmp_path), *arguments])

    assert drafters("allow", "acme").exit_code == 0
    listed = json.loads(drafters("list", "--json").stdout)
    assert listed["tenants"] == {"acme": "own"}
    assert [one["status"] for one in listed["drafters"]["open"]["versions"]] == ["stable", "candidate"]
    assert "candidate" in drafters("list").stdout
    found = drafters("rollback", "open", "2")
    assert (found.exit_code, found.stderr) == (0, "version 1 of open serves\n")
    assert drafters("pin", "open", "0").exit_code == 0
    assert store.read().is_pinned
    assert drafters("unpin", "open").exit_code == 0
    assert drafters("forget", "acme").exit_code == 0
    failed = drafters("pin", "open", "7")
    assert (failed.exit_code, failed.stderr) == (1, "gammaray: no version 7 of 2\n")
