"""API keys: the file, the command, and authentication."""

import json
import math
import os
import time

import pytest

from gammaray.errors import InvalidArgumentError, UnauthenticatedError
from gammaray.security.keys import create_key, hash_key, make_secret, read_keys, revoke_key
from gammaray.security.tenants import name_of
from gammaray.wire.metadata import TIMEOUT_HEADER
from orchestrator.access import reloaded
from orchestrator.access.caller import ANONYMOUS, PRIORITY_HEADER, Authenticator, Caller
from tests.support.cli_helpers import invoke


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch):
    monkeypatch.setattr(reloaded, "RELOAD_PERIOD_S", 0.0)


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_create_key_stores_no_secret_in_a_file_readable_by_its_owner_only(path):
    made = [create_key(path, "acme", "laptop") for _ in range(10)]
    key, secret = made[0]
    assert len({key.id for key, _ in made}) == len({secret for _, secret in made}) == 10
    assert secret not in path.read_text()
    assert secret.split("_", 2)[2] not in path.read_text()
    assert os.stat(path).st_mode & 0o077 == 0
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert read_keys(path) == tuple(key for key, _ in made)
    assert key.matches(secret)
    assert not key.matches(secret[:-1])
    assert not key.matches(make_secret())


def test_create_key_odd_tenant_is_refused(path):
    for tenant in ("", "A", "a:b", "-a", "a" * 33, "é"):
        with pytest.raises(InvalidArgumentError, match="tenant"):
            create_key(path, tenant)
    assert not path.exists()


def test_read_keys_malformed_file_is_refused_without_its_content(path):
    for content in (b"", b"[]", b'{"keys": [{"id": "zz"}]}', b'{"keys": [], "secret": "hunter2"}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match="api_keys_file") as caught:
            read_keys(path)
        assert "hunter2" not in str(caught.value)


def test_command_creates_lists_and_revokes(path):
    def keys(command, *arguments):
        return invoke("keys", command, "-f", path, *arguments)

    made = keys("create", "-t", "acme", "--note", "ci")
    assert made.exit_code == 0
    (entry,) = json.loads(keys("list", "--json").stdout)["keys"]
    assert (entry["tenant"], entry["note"]) == ("acme", "ci")
    assert entry.keys() == {"id", "tenant", "created_at", "note"}
    assert entry["id"] in keys("list").stdout
    assert Authenticator(path).identify(bearer(made.stdout.strip())).tenant == "acme"
    assert keys("revoke", entry["id"]).exit_code == 0
    assert keys("revoke", entry["id"]).exit_code == 1
    assert read_keys(path) == ()
    assert keys("list", "-f", path.parent / "none.json").exit_code == 2


def test_identify_without_configured_keys_accepts_anonymous_callers():
    assert Authenticator().identify({}) == ANONYMOUS
    assert Authenticator().identify(bearer("whatever")) == ANONYMOUS


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic dXNlcjpwYXNz"},
        bearer("sk-something"),
        bearer(make_secret()),
        bearer("gr_" + "é" * 52),
    ],
)
def test_identify_without_a_valid_key_is_rejected(path, headers):
    create_key(path, "acme")
    additional = make_secret()
    door = Authenticator(path, hash_key(additional))
    assert door.identify(bearer(additional)).tenant == "gammaray-probe"
    with pytest.raises(UnauthenticatedError) as caught:
        door.identify(headers)
    given = headers.get("authorization", "").partition(" ")[2]
    assert not given or given not in str(caught.value)


def test_rotation_takes_effect_without_a_restart(path):
    old, old_secret = create_key(path, "acme")
    door = Authenticator(path)
    _, new_secret = create_key(path, "acme")
    assert door.identify(bearer(new_secret)).tenant == "acme"
    assert door.identify(bearer(old_secret)).tenant == "acme"
    swapped = "_".join([*old_secret.split("_", 2)[:2], new_secret.split("_", 2)[2]])
    with pytest.raises(UnauthenticatedError):  # a secret of another id
        door.identify(bearer(swapped))
    revoke_key(path, old.id)
    with pytest.raises(UnauthenticatedError, match=old.id):
        door.identify(bearer(old_secret))
    assert door.identify(bearer(new_secret)).tenant == "acme"


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_unreadable_key_file_keeps_the_current_keys(path, spoil, caplog):
    _, secret = create_key(path, "acme")
    door = Authenticator(path)
    spoil(path)
    assert door.identify(bearer(secret)).tenant == "acme"
    assert "keeping the current ones" in caplog.text
    with pytest.raises(UnauthenticatedError):
        door.identify(bearer(make_secret()))


def test_authenticator_without_a_key_does_not_start(path):
    key, _ = create_key(path, "acme")
    revoke_key(path, key.id)
    with pytest.raises(InvalidArgumentError, match="at least one key"):
        Authenticator(path)
    with pytest.raises(InvalidArgumentError, match="api_keys_file"):
        Authenticator(path.parent / "none.json")


def test_identify_reads_deadline_and_priority():
    before = time.monotonic()
    caller = Authenticator().identify({TIMEOUT_HEADER: "1500", PRIORITY_HEADER: "-3"})
    assert caller.priority == -3
    assert before + 1.4 < caller.deadline < time.monotonic() + 1.6
    assert Authenticator().identify({}).deadline == math.inf


@pytest.mark.parametrize("name", [TIMEOUT_HEADER, PRIORITY_HEADER])
def test_identify_invalid_header_is_named(name, subtests):
    for text in ["", "x", "1.5", "-", "--1", "11e3", "9" * 30, "²", "-11"]:
        with subtests.test(str(text)[:80]):
            with pytest.raises(InvalidArgumentError, match=f"^{name}: got"):
                Authenticator().identify({name: text})


def test_qualified_names_of_tenants_never_collide():
    tenants = [Caller(tenant) for tenant in ("", "a", "a-b", "b")]
    names = ["", "a", "b", "a-b", "a.b", "-", "a_"]
    qualified = {caller.qualify(name) for caller in tenants for name in names}
    assert len(qualified) == len(tenants) * len(names)
    assert all(name_of(caller.qualify(name)) == name for caller in tenants for name in names)
    for name in ("b:x", "a:b:x", "../x", "x" * 129):
        with pytest.raises(InvalidArgumentError, match="session_id"):
            Caller("a").qualify(name)
