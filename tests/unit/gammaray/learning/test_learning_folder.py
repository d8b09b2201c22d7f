"""Versions of learnt drafters on disk: publishing, promotion, rollback, pins, and data that are withdrawn."""

import json
import os
import stat

import pytest

from gammaray.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gammaray.learning.folder import DrafterFolder, LearningFolder, RecordName
from gammaray.security.keys import replace_file
from tests.support.cli_helpers import invoke
from tests.support.learning_helpers import publish, version


@pytest.fixture
def store(tmp_path):
    return DrafterFolder(tmp_path / "open")


def statuses(store):
    return [one.status for one in store.read().versions]


def test_candidate_becomes_stable_and_former(store):
    assert store.read().stable == 0
    stale = store.directory(1)  # of a publisher that died
    stale.mkdir(parents=True)
    (stale / "half").write_text("")
    assert publish(store).number == 1
    assert list(store.directory(1).iterdir()) == []
    assert store.read().candidate == 1
    assert publish(store) is None, "one candidate at a time"
    store.promote(1)
    assert publish(store, parent=1).number == 2
    store.promote(1)  # no candidate any more
    store.promote(2)
    assert statuses(store) == ["former", "stable"]
    assert store.read().stable == 2
    assert store.directory(2).is_dir()


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
    assert [folder.read().drafter_of(name) for name in ("acme", "solo", "else", "")] == [
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
    assert folder.read().tenants == {"acme-x": "shared", "solo": "own"}
    with pytest.raises(FailedPreconditionError, match="deleted"):
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
        folder.read()
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
        return invoke("drafters", "--folder", tmp_path, *arguments)

    assert drafters("allow", "acme").exit_code == 0
    records = tmp_path / "open" / "records"
    records.mkdir()
    (records / str(RecordName(1, "", "0" * 16, 20))).write_bytes(b"")
    listed = json.loads(drafters("list", "--json").stdout)
    untrained = "no process trains: no worker is at work, or its log says why"
    assert listed["progress"] == {
        "open": {"streams": 1, "tokens": 20, "training": untrained},
        "tenant-acme": {"streams": 0, "tokens": 0, "training": untrained},
    }
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


@pytest.mark.parametrize("command", [("list",), ("pin", "open", "0"), ("forget", "acme"), ("unpin", "open")])
def test_folder_in_which_nothing_learns_is_an_error(tmp_path, command):
    for folder in (tmp_path, tmp_path / "missing"):
        found = invoke("drafters", "--folder", folder, *command)
        assert found.exit_code == 2
        assert found.stderr.startswith(f"gammaray: folder: got {folder}, allowed: one in which workers learn")
    assert not list(tmp_path.iterdir())


def test_old_versions_are_deleted_but_for_what_may_serve_again(store):
    """Each third version is promoted; the last ones, and those that rollback reaches, keep their weights."""
    for number in range(1, 61):
        publish(store, parent=store.read().stable)
        if number % 3:
            store.roll_back(number, "worse")
        else:
            store.promote(number)
    found = store.read()
    kept = sorted(int(path.name) for path in (store.path / "versions").iterdir())
    assert kept == sorted(found.kept())
    assert {51, 54, 57, 60} <= set(kept) <= set(range(51, 61))
    assert len(found.versions) < 30
    assert [store.roll_back(number, "by hand") for number in (60, 57, 54)] == [57, 54, 51]
    with pytest.raises(FailedPreconditionError, match="weights of version 45 were deleted"):
        store.pin(45)
    assert publish(store, parent=51).number == 61


@pytest.mark.parametrize("made", ["allow", "mkdir", "before"])
def test_all_of_it_is_for_its_owner_alone_whatever_made_it(tmp_path, made):
    folder, before = LearningFolder(tmp_path / "learn"), os.umask(0)
    try:
        if made == "mkdir":
            folder.path.mkdir()
        if made == "before":  # as gammaray wrote it before it took care
            (folder.path / "tenant-acme" / "records").mkdir(parents=True)
            (folder.path / "tenant-acme" / "records" / "a.npz").write_bytes(b"")
        folder.secure()
        folder.consent("acme", "own")
        publish(folder.store("tenant-acme"), tenants=["acme"])
        made = (folder.path, *folder.path.rglob("*"))
        modes = {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in made}
        assert modes == {(True, 0o700), (False, 0o600)}
    finally:
        os.umask(before)


def test_folder_of_other_things_is_not_taken_and_links_out_of_it_are_not_followed(tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    notes = tmp_path / "home" / "notes"
    notes.write_text("")
    notes.chmod(0o644)
    with pytest.raises(InvalidArgumentError, match=r"learn: got .*, which holds notes, allowed: a folder"):
        LearningFolder(tmp_path / "home").secure()
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    folder = LearningFolder(tmp_path / "learn")
    records = folder.path / "open" / "records"
    records.mkdir(parents=True)
    (records / "link").symlink_to(notes)
    os.link(notes, records / "hard")
    folder.secure()
    assert stat.S_IMODE(notes.stat().st_mode) == 0o644


class KilledError(BaseException):
    """What a killed process does: nothing after it runs."""


STEPS = {
    "pathlib.Path.unlink": None,
    "shutil.rmtree": None,
    "gammaray.learning.folder.replace_file": replace_file,
    "os.replace": os.replace,
}
"""What a deletion calls -> the function itself where the first call, which writes the consents, ends."""


@pytest.mark.parametrize("tenant", ["acme", "shared-one", ""])
@pytest.mark.parametrize("step", STEPS)
def test_deletions_that_were_interrupted_are_completed(tmp_path, tenant, step, monkeypatch):
    folder = LearningFolder(tmp_path)
    folder.consent("acme", "own")
    folder.consent("shared-one", "shared")
    for name, of in (("tenant-acme", "acme"), ("shared", "shared-one"), ("open", "")):
        store = folder.store(name)
        (store.path / "records").mkdir(parents=True)
        (store.path / "records" / str(RecordName(1, of, "0" * 16, 20))).write_bytes(b"")
        publish(store, tenants=[of])
        (store.path / "new").mkdir()
    name = folder.read().drafter_of(tenant)
    passing = [STEPS[step]] if STEPS[step] else []

    def killed(*given, **options):
        if not passing:
            raise KilledError
        return passing.pop()(*given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(step, killed)
        with pytest.raises(KilledError):
            folder.forget(tenant)
    assert folder.read().pending == (tenant,)
    assert not folder.read().covers({tenant: 0}), "what rests on it is published no more"
    LearningFolder(tmp_path).complete()
    left = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["state.json"]
    others = {"tenant-acme", "shared", "open"} - {store.path.name for store in folder.stores_of(tenant)}
    assert all((tmp_path / other / "new").exists() for other in others)
    assert all(list((tmp_path / other / "records").iterdir()) for other in others)


@pytest.mark.parametrize(("tenant", "name"), [("acme", "tenant-acme"), ("", "open")])
def test_version_that_rests_on_a_withdrawn_consent_is_not_published(tmp_path, tenant, name):
    folder = LearningFolder(tmp_path)
    store = folder.store(name)
    if tenant:
        folder.consent(tenant, "own")
    folder.forget(tenant)
    if tenant:
        folder.consent(tenant, "own")
    assert publish(store, tenants=[tenant]) is None, "agreed again, but not for this"
    assert not (store.path / "new").exists()
    (store.path / "new").mkdir(parents=True)
    new = version(1).model_copy(update={"tenants": {tenant: folder.read().number_of(tenant)}})
    assert store.publish(store.path / "new", lambda _: new) == new
