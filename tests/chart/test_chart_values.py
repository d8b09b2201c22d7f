"""Values: documented, generated from, refused when wrong, and free of secrets."""

import json
import re
import sys
from pathlib import Path

import helm_python
import pytest

from tests.support.chart.chart_helpers import CHART, EVERYTHING, ROOT, VARIANTS, chart, render

SCRIPTS = ROOT / "helm"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def read(path):
    sys.path.insert(0, str(SCRIPTS))
    try:
        from values_doc import read_values
    finally:
        sys.path.remove(str(SCRIPTS))
    return read_values(path)


def test_generated_readme_documents_every_value():
    readme = (CHART / "README.md").read_text()
    for value in read(CHART / "values.yaml"):
        if not value.is_section:
            assert f"| `{'.'.join(value.path)}` |" in readme


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"modles": {}}, "modles"),
        ({"models": {"target": ""}}, "target"),
        ({"target": {"workers": "0:2"}}, "workers"),
        ({"draft": {"settings": {"modle": "x"}}}, "modle"),
        ({"draft": {"settings": {"threads": 0}}}, "threads"),
        ({"draft": {"settings": {"redis_url": "redis://:secret@host"}}}, "redis_url"),
        ({"orchestrator": {"settings": {"max_gamma": 65}}}, "max_gamma"),
        ({"engine": "sglang"}, "engine"),
        ({"head": {"tolerationz": []}}, "tolerationz"),
        ({"jaeger": {"sidecars": []}}, "jaeger"),
        ({"redis": {"password": "hunter2"}}, "password"),
        ({"apiKeysSecret": {"value": "hunter2"}}, "value"),
        ({"image": {"workerCpu": {"digest": "sha256:12"}}}, "digest"),
        ({"image": {"tag": DIGEST}}, "/image/tag.*does not match"),
        ({"image": {"workerGpu": {"tag": f"1@{DIGEST}"}}}, "/workerGpu/tag.*does not match"),
        ({"image": {"orchestrator": {"repository": f"r/g@{DIGEST}"}}}, "repository.*does not match"),
        ({"image": {"orchestrator": {"repository": "r:5000/g:1"}}}, "repository.*does not match"),
        ({"image": {"registry": "https://r.example.com"}}, "registry.*does not match"),
        ({"redis": {"image": "redis:sha256:12"}}, "/redis/image.*does not match"),
        ({"redis": {"size": "8gb"}}, "size"),
        ({"head": {"resources": {"limits": {"memory": "4 GiB"}}}}, "memory"),
    ],
)
def test_schema_rejects_values_and_names_them(values, reason):
    with pytest.raises(helm_python.HelmValuesError, match=reason):
        chart().validate_schema(values)


@pytest.mark.parametrize(
    "image",
    [
        "redis:7.4.2-alpine",
        "r.example.com:5000/team/redis",
        f"redis@{DIGEST}",
        f"localhost:5000/redis:7@{DIGEST}",
    ],
)
def test_schema_accepts_every_form_of_a_reference(image):
    chart().validate_schema({"redis": {"image": image}})


def test_no_value_holds_a_secret():
    """No value is named like a secret but references to Secrets, which are a name and a key."""
    for value in read(CHART / "values.yaml"):
        if value.is_section or not re.search(
            r"(?i)password|token|secret|api_?key|credential", value.path[-1]
        ):
            continue
        is_reference = isinstance(value.default, dict) and value.default.keys() == {"name", "key"}
        is_name = value.path[-1] in ("secretName", "pullSecrets", "orchestratorSecret", "workerSecret")
        assert is_reference or is_name, value.path
        assert not is_reference or value.default["name"] == ""


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_no_manifest_holds_a_secret(values):
    texts = json.dumps(render(values))
    assert '"kind": "Secret"' not in texts
    for name in ("PASSWORD", "HF_TOKEN", "REDISCLI_AUTH", "GAMMARAY_API_KEY"):
        for found in re.findall(rf'"name": "\w*{name}", "(\w+)"', texts):
            assert found == "valueFrom"


def test_chart_package_contains_the_files_that_templates_read(tmp_path):
    from helm_python import Chart

    packed = Path(Chart.load(CHART).save(tmp_path))
    again = Chart.load(packed)
    assert again.render(EVERYTHING, name="x") == chart().render(EVERYTHING, name="x")
    read = {
        name
        for path in (CHART / "templates").iterdir()
        for name in re.findall(r'Files\.Get "([^"]+)"', path.read_text())
    }
    assert {"files/gammaray.yaml", "files/serve.yaml", "files/alerts.yaml", "files/redis.sh"} <= read
    assert read <= {file["name"] for file in again.files}
