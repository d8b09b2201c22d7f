"""A cluster with API keys and worker TLS, called by tenants and by clients without keys."""

from pathlib import Path

import httpx
import openai
import psutil
import pytest

from gammaray import Client, UnauthenticatedError
from gammaray.security.keys import create_key
from tests.support.cluster.cluster_helpers import running_cluster
from tests.support.tls_helpers import Authority, role_certificates

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    return tmp_path_factory.mktemp("trust") / "keys.json"


@pytest.fixture(scope="module")
def keys(key_file):
    return {tenant: create_key(key_file, tenant) for tenant in ("acme", "beta")}


@pytest.fixture(scope="module")
def guarded(keys, key_file):
    files = role_certificates(Authority(key_file.parent, "ca"))["both"]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GAMMARAY_TLS_DIR", str(files.cert.parent))
        with running_cluster("--api-keys-file", str(key_file)) as cluster:
            yield cluster


def test_client_without_a_key_is_rejected_by_both_apis(guarded):
    for api_key in (None, "gr_00000000_" + "x" * 43):
        with Client(guarded.grpc, api_key=api_key) as client:
            with pytest.raises(UnauthenticatedError):
                client.complete(PROMPT, max_tokens=2)
            with pytest.raises(UnauthenticatedError):
                client.status()
    with httpx.Client(base_url=guarded.http) as http:
        assert http.get("/health").status_code == 200
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/none")):
            answer = http.request(method, path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_tenant_completes_over_both_apis(guarded, keys):
    _, secret = keys["acme"]
    with Client(guarded.grpc, api_key=secret) as client:
        completion = client.complete(PROMPT, max_tokens=8, seed=1, session_id="mine", ignore_eos=True)
        assert len(completion.tokens) == 8
        assert completion.session_id == "mine"
    official = openai.OpenAI(base_url=f"{guarded.http}/v1", api_key=secret, max_retries=0)
    assert official.completions.create(model="", prompt=PROMPT, max_tokens=4).usage.completion_tokens == 4


def test_no_secret_in_arguments_environment_or_logs(guarded, keys):
    (redis,) = [process for process, command in guarded.commands() if "valkey-server" in command[0]]
    redis_directory = Path(redis.cwd())
    secrets = [secret for _, secret in keys.values()]
    with Client(guarded.grpc, api_key=secrets[0]) as client:
        status = repr(client.status())
    assert not any(secret in status for secret in secrets)
    assert "@" not in status
    for process in [psutil.Process(guarded.launcher.pid), *guarded.processes()]:
        try:
            command = " ".join(process.cmdline())
            environment = Path(f"/proc/{process.pid}/environ").read_text(errors="ignore")
        except (psutil.Error, OSError):
            continue  # it ended
        assert not any(secret in command + environment for secret in secrets), process
        assert "redis://" not in command, process
    for log in (redis_directory.parent / "ray").rglob("*.log"):
        text = log.read_text(errors="ignore")
        assert not any(secret in text for secret in secrets), log
        assert "redis://:" not in text, log
