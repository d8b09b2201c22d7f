"""Jobs and scripts that run once: Redis' password, the download of models, `helm test`, the head's probe."""

import base64
import contextlib
import itertools
import os
import re
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from gammaray.config import DraftSettings, OrchestratorSettings
from gammaray.demo_pair import resolve_model
from gammaray.deploy import serve_config
from gammaray.deploy.redis_connection import OLDEST_VERSION, SUPPORTED_SERVERS
from gammaray.errors import UnavailableError
from orchestrator.app import orchestrator
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.redis_server import redis_binary
from services.serve.app import draft, target
from tests.support.chart.chart_helpers import (
    CACHED,
    CHART,
    NAME,
    ROLES,
    ROOT,
    application,
    at,
    cluster,
    container,
    environment,
    groups,
    merged,
    of_component,
    passing_pods,
    pods,
    release,
    render,
)
from tests.support.scripted_http import scripted
from tests.support.serve_helpers import schema_of
from tests.support.tls_helpers import Authority, role_certificates
from tests.support.workers.redis_helpers import wait_until

NOWHERE = "http://127.0.0.1:9"


def run(only, *more, env=None):
    """Run a container's command, a Python script, as the image's Python would."""
    program, *arguments = only["command"]
    assert program == "python"
    command, env = [sys.executable, *arguments, *more], {"PATH": "/usr/bin:/bin", **(env or {})}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    """What Kubernetes mounts of a service account, and a server's side of its TLS."""
    folder = tmp_path_factory.mktemp("account")
    made = role_certificates(Authority(folder, "ca"))["server"]
    (folder / "ca.crt").write_bytes(made.ca.read_bytes())
    (folder / "token").write_text("the-token\n")
    (folder / "namespace").write_text("somewhere\n")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.cert, made.key)
    return folder, tls


def make_password(account, status):
    """Run the job against Kubernetes' API; return how it ended, and path, body and headers of its request."""
    asked = []

    def reply(path, body):
        asked.append((path, body))
        return status, b"the reason"

    with scripted(reply, account[1]) as (url, headers):
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": url.rpartition(":")[2]}
        ended = run(container(passing_pods()["redis-password"]), str(account[0]), env=place)
    ((path, body),) = asked
    return ended, path, body, headers[0]


def test_password_is_made_as_a_secret_of_the_release_once_and_a_refusal_fails_the_job(account):
    ended, path, secret, headers = make_password(account, 201)
    assert ended.returncode == 0, ended.stderr
    assert path == "/api/v1/namespaces/somewhere/secrets"
    assert headers["authorization"] == "Bearer the-token"
    assert secret["metadata"]["name"] == f"{NAME}-redis"
    assert secret["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
    password = base64.b64decode(secret["data"]["password"]).decode()
    assert len(password) == 43
    assert password not in ended.stdout + ended.stderr
    assert secret != make_password(account, 201)[2]
    for status, code in ((409, 0), (403, 1)):  # it exists; it is forbidden
        ended, _, body, _ = make_password(account, status)
        assert (ended.returncode, body["kind"]) == (code, "Secret")
        assert ("the reason" in ended.stderr) is bool(code)


def hub(files):
    commit, model = "0" * 40, "/api/models/team/small"

    def reply(path, body):
        place = path.split("?")[0]
        if place.startswith(f"{model}/tree/"):
            kinds = {"type": "file", "oid": "0"}
            return 200, [{"path": name, "size": len(data), **kinds} for name, data in files.items()]
        if place.startswith(model):
            siblings = [{"rfilename": name} for name in files]
            return 200, {"id": "team/small", "modelId": "team/small", "sha": commit, "siblings": siblings}
        name = place.removeprefix(f"/team/small/resolve/{commit}/")
        if name not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        return 200, files[name], {"ETag": f'"{hash(name):x}"', "X-Repo-Commit": commit}

    return reply


def download(values, folder, reply):
    """Run the download job in a folder; return how it ended, its mark, and its variables."""
    command, mark = container(passing_pods(values)["models"])["command"], folder / "ready" / "team--small"
    moved = [str(mark.parent) if part == "/models/ready" else part for part in command]
    with scripted(reply) as (url, _):
        env = {"HF_HOME": str(folder), "HOME": str(folder), "HF_ENDPOINT": url}
        return run({"command": moved}, env=env), mark, env


@pytest.mark.slow
@pytest.mark.nightly
def test_download_fetches_the_files_that_workers_read_and_then_writes_the_mark(tmp_path):
    own = Path(resolve_model("demo", "draft"))
    files = {path.name: path.read_bytes() for path in own.iterdir() if path.is_file()}
    others = {"pytorch_model.bin": b"pickled", "model.gguf": b"other", "onnx/model.onnx": b"other"}
    values = {"modelCache": {"enabled": True}, "models": {"target": "team/small", "draft": "team/small"}}
    ended, mark, env = download(values, tmp_path, hub(files | others))
    assert ended.returncode == 0, ended.stderr
    assert mark.is_file()
    assert {path.name for path in tmp_path.glob("**/snapshots/*/**/*")} == files.keys()
    # As the pods read it: by name, without the hub.
    code = "from transformers import AutoConfig, AutoTokenizer\nname = 'team/small'\n"
    code += "config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)\n"
    code += "print(config.vocab_size, len(tokenizer))"
    offline = {**env, "HF_HUB_OFFLINE": environment(groups(values)["draft"]["template"])["HF_HUB_OFFLINE"]}
    read = run({"command": ["python", "-c", code]}, env=offline)
    assert read.stdout.split() == ["2048", "2048"], read.stderr


@pytest.mark.slow
def test_failed_download_leaves_no_mark(tmp_path):
    ended, mark, _ = download(CACHED, tmp_path, lambda *_: (404, {}, {"X-Error-Code": "RepoNotFound"}))
    assert ended.returncode == 1
    assert "team/large" in ended.stderr
    assert not mark.exists()


def test_download_job_leaves_a_model_alone_that_workers_may_read(tmp_path):
    (tmp_path / "ready").mkdir()
    for name in ("team--large", "team--small"):
        (tmp_path / "ready" / name).touch()
    ended, *_ = download(CACHED, tmp_path, lambda *_: (500, b""))
    assert ended.stdout == "team/large: is there\nteam/small: is there\n", ended.stderr
    assert ended.returncode == 0


def test_download_job_exists_only_for_hub_models_in_a_shared_volume():
    for values, models in (
        ({"models": {"target": "team/large"}}, ["team/large"]),
        ({"models": {"target": "a/b", "draft": "a/b"}}, ["a/b"]),
        ({"models": {"target": "a/b", "draft": "early-exit:4"}}, ["a/b"]),
        ({"models": {"target": "a/b", "draft": "c/d"}, "draft": {"workers": "0"}}, ["a/b"]),
        (CACHED, ["team/large", "team/small"]),
        ({"models": {"target": "/data/m", "draft": "demo"}}, None),
        ({"models": {"target": "a/b"}, "modelCache": {"download": {"enabled": False}}}, None),
        ({"models": {"target": "a/b"}, "modelCache": {"enabled": False}}, None),
    ):
        command = at(release(merged({"modelCache": {"enabled": True}}, values)), "containers models command")
        assert (command and command[4:]) == models


def test_changed_models_images_and_placement_change_the_name_of_the_job():
    """A Job cannot be changed: a changed one must have another name."""
    changes = [
        {},
        {"image": {"registry": "r", "tag": "2"}},
        {"models": {"draft": "team/other"}},
        of_component("models", {"tolerations": [{"operator": "Exists"}], "labels": {"a.com/b": "c"}}),
    ]
    variants = [merged(CACHED, change) for change in changes]
    names = {render(values)["job-models.yaml"]["metadata"]["name"] for values in variants}
    assert len(names) == len(variants)


def test_head_is_alive_only_if_its_node_and_its_control_service_respond():
    command = container(groups()["head"]["template"])["livenessProbe"]["exec"]["command"]
    ports = ("52365/api/local_raylet_healthz", "8265/api/gcs_healthz")
    assert command[-2:] == [f"http://127.0.0.1:{port}" for port in ports]
    with scripted(lambda path, _: (int(path.strip("/")), b"success")) as (url, _):
        for good, other in itertools.product((f"{url}/200",), (f"{url}/200", f"{url}/503", NOWHERE)):
            for urls in ((good, other), (other, good)):
                ended = run({"command": [*command[:-2], *urls]})
                assert ended.returncode == (good != other), urls


@pytest.mark.parametrize(
    ("keys", "own", "status", "code"),
    [
        ("k", "t", 200, 0),
        ("k", "", 401, 0),  # without a key of its own, a rejection is expected
        ("k", "", 200, 1),
        ("k", "", 500, 1),
        ("", "", 401, 1),
    ],
)
def test_helm_test_asks_for_health_and_a_completion(keys, own, status, code):
    asked = []

    def reply(path, body):
        asked.append(path)
        answer = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 8}}
        return (200, {"status": "ok"}) if path == "/health" else (status, answer)

    values = {"apiKeysSecret": {"name": keys}, "helmTest": {"apiKeySecret": {"name": own, "key": "key"}}}
    command = container(passing_pods(values)["test"])["command"]
    with scripted(reply) as (url, headers):
        moved = [url if part.startswith("http://") else part for part in command]
        ended = run({"command": moved}, env={"GAMMARAY_API_KEY": "gr_x"} if own else {})
    assert ended.returncode == code, ended.stderr
    assert asked == ["/health", "/v1/completions"]
    assert headers[-1].get("authorization") == ("Bearer gr_x" if own else None)
    assert (f": {status} " in ended.stderr) is bool(code)


@pytest.mark.slow
def test_head_can_build_every_application_without_torch():
    """Serve builds the applications on the head, whose image has no torch."""
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def hide(name, *rest): return None if name.partition('.')[0] == 'torch' else find(name, *rest)\n"
        "PathFinder.find_spec = hide\n"
        "import services.serve.app, orchestrator.app, yaml\n"
        f"for entry in yaml.safe_load(open({str(CHART / 'files/serve.yaml')!r}))['applications']:\n"
        "    module, _, function = entry['import_path'].partition(':')\n"
        "    getattr(sys.modules[module], function)(entry['args'])\n"
        "print('built')\n"
    )
    ended = run({"command": ["python", "-c", code]}, env={"PYTHONPATH": str(ROOT)})
    assert ended.stdout == "built\n", ended.stderr


PASSWORDS = [
    "https://user:pass@host/0?db=1",
    "'\"\\$(id)`id` $HOME $$ %s\tp@ss:w/rd#1%41?&=+ x Gänge ☃, ends with a newline\n",
]
MIB = 2**20


def expanded(text, variables):
    """Return what Kubernetes makes of a container's argument."""
    return re.sub(r"\$\(([^()]+)\)", lambda m: str(variables.get(m[1], m[0])), text.replace("$$", "$"))


@contextlib.contextmanager
def bundled(tmp_path, password, limit=1024 * MIB, values=None):
    """Run the container of the chart's StatefulSet; yields its port and process."""
    only = container(pods(values)["redis"])
    (port,), folder, data = free_ports("127.0.0.1", 1), tmp_path / "bin", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    (folder / "redis-server").symlink_to(redis_binary())
    variables = environment(pods(values)["redis"])
    given = {
        **{name: value for name, value in variables.items() if isinstance(value, str)},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "REDISCLI_AUTH": password,
        "MEMORY_LIMIT": str(limit),
        "DATA_DIR": str(data),
        "PORT": str(port),
    }
    command = [expanded(part, given) for part in (*only["command"], *only["args"])]
    process = subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password=password) as client:
            wait_until(lambda: bool(client.ping()))
        yield port, process
    finally:
        process.terminate()
        assert process.wait(20) == 0  # the signal reaches Redis itself, which ends in order


def url_of(port):
    """Return the URL that the chart gives to Ray pods, but for the address."""
    given = environment(groups()["draft"]["template"])["GAMMARAY_REDIS_URL"]
    return given.replace(f"{NAME}-redis:6379", f"127.0.0.1:{port}")


def test_bundled_redis_and_the_docs_are_within_the_supported_versions():
    image = container(pods()["redis"])["image"]
    shown, major, minor = re.match(r"redis:((\d+)\.(\d+))", image).groups()
    assert OLDEST_VERSION <= (int(major), int(minor)) < (9, 0)
    assert SUPPORTED_SERVERS == "Redis 6.2 or newer, or Valkey 7.2 or newer"
    page = (ROOT / "docs/install.md").read_text()
    assert f"instead of the chart's ({shown}): Redis 6.2 to 8, or Valkey 7.2 or newer" in page


@pytest.mark.slow
@pytest.mark.parametrize("password", PASSWORDS)
def test_workers_and_orchestrators_can_use_any_password(tmp_path, password):
    assert url_of(6379) == "redis://127.0.0.1:6379/0"
    with bundled(tmp_path, password) as (port, process):
        for settings in (OrchestratorSettings, DraftSettings):
            given = settings(redis_url=url_of(port), redis_password=password)
            assert redis.Redis.from_url(given.redis_login_url).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url_of(port)).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, password=password + "x").ping()
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"redis-server" in arguments
        assert password.encode() not in arguments


@pytest.mark.parametrize(("percent", "limit"), [(60, 512 * MIB), (40, 3 * 2**30)])
def test_redis_rejects_writes_above_maxmemory_below_the_pod_limit(tmp_path, percent, limit):
    values = {"redis": {"maxMemoryPercent": percent}}
    with bundled(tmp_path, "secret", limit, values) as (port, _):
        client = redis.Redis(port=port, password="secret")
        config = client.config_get("*")
        assert int(config["maxmemory"]) == pytest.approx(limit * percent / 100, rel=1e-6)
        assert config["maxmemory-policy"] == "noeviction"
        assert config["appendonly"] == "yes"
        assert config["save"] == ""
        client.set("kept", "x")
        client.config_set("maxmemory", 3 * MIB)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            list(map(client.set, range(10_000), [b"x" * 10_000] * 10_000))
        assert client.get("kept") == b"x"


def test_password_is_put_into_urls_that_have_none():
    for url, password, expected in (
        ("redis://host:6379/0", "", "redis://host:6379/0"),
        ("redis://host:6379/0", "a b+c/@:#%", "redis://:a%20b%2Bc%2F%40%3A%23%25@host:6379/0"),
        ("redis://user@host", "x", "redis://user:x@host"),
        ("rediss://host?ssl_ca_certs=/a@b", "x", "rediss://:x@host?ssl_ca_certs=/a@b"),
        ("redis://:own@host/0", "x", "redis://:own@host/0"),
        ("unix:///run/redis.sock", "x", "unix://:x@/run/redis.sock"),
        ("", "x", ""),
    ):
        assert DraftSettings(redis_url=url, redis_password=password).redis_login_url == expected


def test_readiness_probe_requires_a_pong():
    (_, _, script) = container(pods()["redis"])["readinessProbe"]["exec"]["command"]
    assert script == "redis-cli ping | grep -qx PONG"
    for answer, status in (("PONG", 0), ("LOADING Redis is loading the dataset in memory", 1), ("", 1)):
        fake = f"redis-cli() {{ echo '{answer}'; }}; {script}"
        assert subprocess.run(["bash", "-c", fake], timeout=20).returncode == status


BUILDERS = {"orchestrator": orchestrator, "draft": draft, "target": target}


def test_other_models_and_timeouts_of_their_download_leave_the_cluster_as_it_is():
    """KubeRay starts a second cluster if anything but the number of pods differs."""
    for change in (
        {"models": {"draft": "team/other"}},
        {"models": {"target": "team/other"}},
        {"models": {"target": "/data/large", "draft": "demo"}},
        {"modelCache": {"download": {"timeoutSeconds": 99}}},
    ):
        assert cluster(merged(CACHED, change)) == cluster(CACHED), change
    without = cluster(merged(CACHED, {"modelCache": {"download": {"enabled": False}}}))
    assert without != cluster(CACHED)  # HF_HUB_OFFLINE


def test_each_application_waits_for_the_marks_of_its_own_models():
    folder, *downloaded = container(passing_pods(CACHED)["models"])["command"][3:]
    assert downloaded == ["team/large", "team/small"]
    large, small = f"{folder}/team--large", f"{folder}/team--small"
    for values, expected in (
        (CACHED, {"orchestrator": [large], "draft": [large, small], "target": [large]}),
        ({"models": {"draft": "early-exit:2"}}, {"draft": [large]}),
        ({"models": {"target": "/data/large"}}, {"orchestrator": None, "draft": [small], "target": None}),
        ({"modelCache": {"download": {"enabled": False}}}, dict.fromkeys(BUILDERS)),
        ({"modelCache": {"enabled": False}}, dict.fromkeys(BUILDERS)),
    ):
        for role, marks in expected.items():
            assert application(role, merged(CACHED, values))["args"].get("after") == marks, values
    offline = release(CACHED)
    assert {role for role in ROLES if at(offline, f"env {role} HF_HUB_OFFLINE")} == set(BUILDERS)
    mount = {"name": "models", "mountPath": "/models"}
    for role, group in groups(CACHED).items():  # the head builds applications
        assert mount in container(group["template"])["volumeMounts"], role


@pytest.mark.parametrize("role", BUILDERS)
def test_serve_builds_an_application_only_once_its_models_are_downloaded(role, tmp_path, monkeypatch):
    marks, slept = [tmp_path / "team--large", tmp_path / "team--small"], []

    def sleep(seconds):
        marks[len(slept)].touch()
        slept.append(seconds)

    monkeypatch.setattr(serve_config, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    args = {**application(role, CACHED)["args"], "after": [str(mark) for mark in marks]}
    assert schema_of(BUILDERS[role](args)).name
    assert len(slept) == len(marks)
    assert schema_of(BUILDERS[role](args)).name
    assert len(slept) == len(marks)


def test_waiting_for_a_model_ends_after_a_day_with_the_name_of_the_mark(monkeypatch):
    now = iter((0.0, 3600.0, 25 * 3600.0))
    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None)
    monkeypatch.setattr(serve_config, "time", clock)
    with pytest.raises(UnavailableError, match="within a day: /nowhere/team--large"):
        target({"settings": {}, "after": ["/nowhere/team--large"]})
