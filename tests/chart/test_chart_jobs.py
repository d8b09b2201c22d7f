"""Jobs and scripts that run once: Redis' password, the download of models, `helm test`, the head's probe."""

import base64
import json
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.chart.chart_helpers import (
    CHART,
    NAME,
    ROOT,
    at,
    container,
    environment,
    groups,
    merged,
    of_component,
    passing_pods,
    release,
    render,
)
from tests.support.tls_helpers import Authority, role_certificates

DOWNLOADS = {"modelCache": {"enabled": True}, "models": {"target": "team/large", "draft": "team/small"}}


class Answers:
    """What a server was asked, and what it answers: a function of method, path and body."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []


@contextmanager
def serving(answers, tls=None):
    class Handler(BaseHTTPRequestHandler):
        def do(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            answers.asked.append(
                (self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            )
            status, headers, answer = answers.answer(self.command, self.path, body)
            self.send_response(status)
            for name, value in {"content-length": len(answer), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_HEAD = do_POST = do

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def run(only, *more, env=None):
    """Run a container's command, a Python script, as the image's Python would."""
    program, *arguments = only["command"]
    assert program == "python"
    return subprocess.run(
        [sys.executable, *arguments, *more],
        env={"PATH": "/usr/bin:/bin", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


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


def make_password(account, answer):
    answers = Answers(answer)
    with serving(answers, account[1]) as port:
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        ended = run(container(passing_pods()["redis-password"]), str(account[0]), env=place)
    return ended, answers.asked


def test_password_is_made_as_a_secret_of_the_release_once_and_a_refusal_fails_the_job(account):
    ended, ((method, path, headers, body),) = make_password(account, lambda *_: (201, {}, b"{}"))
    assert ended.returncode == 0, ended.stderr
    assert (method, path) == ("POST", "/api/v1/namespaces/somewhere/secrets")
    assert headers["authorization"] == "Bearer the-token"
    secret = json.loads(body)
    assert secret["metadata"]["name"] == f"{NAME}-redis"
    assert secret["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"
    password = base64.b64decode(secret["data"]["password"]).decode()
    assert len(password) == 43
    assert password not in ended.stdout + ended.stderr
    assert body != make_password(account, lambda *_: (201, {}, b"{}"))[1][0][3]
    for status, code in ((409, 0), (403, 1)):  # it exists; it is forbidden
        ended, asked = make_password(account, lambda *_, status=status: (status, {}, b"the reason"))
        assert ended.returncode == code
        assert [method for method, *_ in asked] == ["POST"]
        assert ("the reason" in ended.stderr) is bool(code)


class Hub:
    """A hub with one model that is the demo draft, and files that no worker reads."""

    def __init__(self, folder):
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.files |= {"pytorch_model.bin": b"pickled", "model.gguf": b"other", "onnx/model.onnx": b"other"}
        self.fetched = set()

    def __call__(self, method, path, body):
        commit, place = "0" * 40, path.split("?")[0]
        if place.startswith("/api/models/team/small/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{hash(name):x}"}
                for name, data in self.files.items()
            ]
            return 200, {"content-type": "application/json"}, json.dumps(listed).encode()
        if place == "/api/models/team/small" or place.startswith("/api/models/team/small/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            answer = {"id": "team/small", "modelId": "team/small", "sha": commit, "siblings": siblings}
            return 200, {"content-type": "application/json"}, json.dumps(answer).encode()
        name = place.removeprefix(f"/team/small/resolve/{commit}/")
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if method == "GET":
            self.fetched.add(name)
        data = self.files[name]
        return 200, {"ETag": f'"{hash(name):x}"', "X-Repo-Commit": commit, "content-length": len(data)}, data


def download(values, folder, answer):
    """Run the download job in a folder; return how it ended, its mark, and its variables."""
    command, mark = container(passing_pods(values)["models"])["command"], folder / "ready" / "team--small"
    moved = [str(mark.parent) if part == "/models/ready" else part for part in command]
    with serving(Answers(answer)) as port:
        env = {"HF_HOME": str(folder), "HOME": str(folder), "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
        return run({"command": moved}, env=env), mark, env


@pytest.mark.slow
def test_download_fetches_the_files_that_workers_read_and_then_writes_the_mark(tmp_path):
    from gammaray.demo_pair import resolve_model

    hub = Hub(Path(resolve_model("demo", "draft")))
    values = {"modelCache": {"enabled": True}, "models": {"target": "team/small", "draft": "team/small"}}
    ended, mark, env = download(values, tmp_path, hub)
    assert ended.returncode == 0, ended.stderr
    assert mark.is_file()
    assert hub.fetched == hub.files.keys() - {"pytorch_model.bin", "model.gguf", "onnx/model.onnx"}
    # As the pods read it: by name, without the hub.
    code = "from transformers import AutoConfig, AutoTokenizer\nname = 'team/small'\n"
    code += "config, tokenizer = AutoConfig.from_pretrained(name), AutoTokenizer.from_pretrained(name)\n"
    code += "print(config.vocab_size, len(tokenizer))"
    offline = {**env, "HF_HUB_OFFLINE": environment(groups(values)["draft"]["template"])["HF_HUB_OFFLINE"]}
    read = run({"command": ["python", "-c", code]}, env=offline)
    assert read.stdout.split() == ["2048", "2048"], read.stderr


@pytest.mark.slow
def test_failed_download_leaves_no_mark(tmp_path):
    ended, mark, _ = download(DOWNLOADS, tmp_path, lambda *_: (404, {"X-Error-Code": "RepoNotFound"}, b"{}"))
    assert ended.returncode == 1
    assert "team/large" in ended.stderr
    assert not mark.exists()


def test_download_job_exists_only_for_hub_models_in_a_shared_volume():
    for values, models in (
        ({"models": {"target": "team/large"}}, ["team/large"]),
        ({"models": {"target": "a/b", "draft": "a/b"}}, ["a/b"]),
        ({"models": {"target": "a/b", "draft": "early-exit:4"}}, ["a/b"]),
        ({"models": {"target": "a/b", "draft": "c/d"}, "draft": {"workers": "0"}}, ["a/b"]),
        (DOWNLOADS, ["team/large", "team/small"]),
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
        of_component("models", {"tolerations": [{"operator": "Exists"}]}),
        of_component("models", {"labels": {"example.com/team": "other"}}),
    ]
    variants = [merged(DOWNLOADS, change) for change in changes]
    names = {render(values)["job-models.yaml"]["metadata"]["name"] for values in variants}
    assert len(names) == len(variants)


def test_head_is_alive_only_if_its_node_and_its_control_service_respond():
    command = container(groups()["head"]["template"])["livenessProbe"]["exec"]["command"]
    ports = ("52365/api/local_raylet_healthz", "8265/api/gcs_healthz")
    assert command[-2:] == [f"http://127.0.0.1:{port}" for port in ports]
    for raylet, control, status in ((200, 200, 0), (503, 200, 1), (200, 503, 1), (200, None, 1)):
        with serving(Answers(lambda *_, raylet=raylet: (raylet, {}, b"success"))) as first:
            with serving(Answers(lambda *_, control=control: (control or 200, {}, b"success"))) as second:
                urls = [f"http://127.0.0.1:{port}/" for port in (first, second)]
                ended = run({"command": [*command[:-2], *urls]})
            if control is None:  # nothing listens any more
                ended = run({"command": [*command[:-2], *urls]})
        assert ended.returncode == status


def helm_test(answer, values=None, **env):
    answers = Answers(answer)
    only = container(passing_pods(values)["test"])
    with serving(answers) as port:
        command = [
            f"http://127.0.0.1:{port}" if part.startswith("http://") else part for part in only["command"]
        ]
        return run({"command": command}, env=env), answers.asked


def completion(method, path, body):
    if path == "/health":
        return 200, {}, b'{"status": "ok"}'
    answer = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 8}}
    return 200, {}, json.dumps(answer).encode()


def test_helm_test_asks_for_health_and_a_completion_with_its_key():
    values = {"apiKeysSecret": {"name": "k"}, "helmTest": {"apiKeySecret": {"name": "t", "key": "key"}}}
    ended, asked = helm_test(completion, values, GAMMARAY_API_KEY="gr_x")
    assert ended.returncode == 0, ended.stderr
    assert [(method, path) for method, path, *_ in asked] == [("GET", "/health"), ("POST", "/v1/completions")]
    assert asked[-1][2]["authorization"] == "Bearer gr_x"


def test_helm_test_without_a_key_expects_a_rejection_if_keys_are_required():
    for keys, status, code in (("k", 401, 0), ("k", 200, 1), ("k", 500, 1), ("", 401, 1), ("", 500, 1)):

        def answer(method, path, body, status=status):
            return (status, {}, b"{}") if path != "/health" else completion(method, path, body)

        ended, _ = helm_test(answer, {"apiKeysSecret": {"name": keys}})
        assert ended.returncode == code
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
