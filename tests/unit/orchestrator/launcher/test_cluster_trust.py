"""The launcher's keys, before anything starts."""

import pytest

from gammaray.checks import is_loopback
from gammaray.config import ClusterSettings, OrchestratorSettings
from gammaray.errors import InvalidArgumentError, UnauthenticatedError
from gammaray.security.keys import create_key, hash_key
from orchestrator.access.caller import Authenticator, make_authenticator
from orchestrator.launcher.trust import arrange_trust, check_access


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    create_key(path, "acme")
    return str(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_check_access_loopback_needs_no_keys(host):
    assert is_loopback(host)
    check_access(ClusterSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org"])
def test_check_access_public_address_needs_keys_or_none_by_name(host, keys):
    with pytest.raises(InvalidArgumentError, match=r"host: got .*allowed: .*gammaray keys create"):
        check_access(ClusterSettings(host=host))
    check_access(ClusterSettings(host=host, api_keys_file=keys))
    check_access(ClusterSettings(host=host, api_keys_file="none"))


def test_check_access_key_file_without_keys_is_reported(keys, tmp_path):
    with pytest.raises(InvalidArgumentError, match="api_keys_file"):
        check_access(ClusterSettings(api_keys_file=str(tmp_path / "none")))
    with pytest.raises(InvalidArgumentError, match="receipt_keys_file"):
        check_access(ClusterSettings(receipt_keys_file=keys))
    empty = tmp_path / "empty.json"
    empty.write_text('{"version": 1, "keys": []}')
    with pytest.raises(InvalidArgumentError, match="api_keys_file"):
        check_access(ClusterSettings(api_keys_file=str(empty)))


def test_arrange_trust_gives_the_launcher_a_key_of_its_own(keys):
    trust = arrange_trust(ClusterSettings(api_keys_file=keys))
    assert trust.api_key is not None
    settings = OrchestratorSettings(**trust.orchestrator)
    assert trust.probe_key_sha256 == hash_key(trust.api_key)
    assert trust.api_key not in repr(settings)
    door = make_authenticator(settings, trust.probe_key_sha256, trust.local_only)
    caller = door.identify({"authorization": f"Bearer {trust.api_key}"})
    assert caller.tenant == "gammaray-probe"


def test_arrange_trust_without_keys_stays_on_this_machine():
    trust = arrange_trust(ClusterSettings())
    assert trust.api_key is None
    settings = OrchestratorSettings(**trust.orchestrator)
    door = make_authenticator(settings, trust.probe_key_sha256, trust.local_only)
    for peer in ("", "ipv4:127.0.0.1:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "unix:"):
        assert door.identify({}, peer).tenant == ""
    for peer in ("ipv4:10.0.0.1:5", "ipv6:[fe80::1]:5", "ipv4:128.0.0.1:127"):
        with pytest.raises(UnauthenticatedError):
            door.identify({}, peer)
    assert Authenticator().identify({}, "ipv4:10.0.0.1:5").tenant == ""


def test_settings_do_not_show_the_password_of_redis():
    url = "redis://:hunter2@h:1/0"
    for settings in (ClusterSettings(redis_url=url), OrchestratorSettings(redis_url=url)):
        assert "hunter2" not in repr(settings)
        assert "hunter2" not in str(settings)
