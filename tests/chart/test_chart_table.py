"""What values give, as a table of values, paths into the rendered release, and what stands there."""

import itertools

import helm_python
import pytest

import gammaray
from gammaray.config import OrchestratorSettings
from gammaray.deploy.serve_config import WORKER_PORT
from tests.support.chart.chart_helpers import (
    DIGEST,
    EVERYTHING,
    NAME,
    NAMESPACE,
    ROLES,
    TWO_MODELS,
    VARIANTS,
    at,
    chart,
    release,
    render_texts,
)

WORKERS = ("draft", "target")
POOLS = ("orchestrator", *WORKERS)
HTTP_NAMES = ",".join(
    f"{NAME}-http{end}"
    for end in ("", f".{NAMESPACE}", f".{NAMESPACE}.svc", f".{NAMESPACE}.svc.cluster.local")
)
INGRESS = {"ingress": {"enabled": True, "httpHost": "a.example", "grpcHost": "b.example"}}
HOSTS = "args orchestrator settings allowed_hosts"
DRAFT_TARGET, DRAIN = "args draft settings target", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
ENDPOINT, EXPORTERS = "env draft OTEL_EXPORTER_OTLP_ENDPOINT", "collector service pipelines traces exporters"
NVIDIA, MIG, AMD = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "amd.com/gpu"
OF_MIG = {"draft": {"gpuResource": MIG}, "target": {"gpus": 2}}
TLS = {"certManager": {"enabled": True, "issuerRef": {"name": "letsencrypt"}}}
EGRESS = {"networkPolicy": {"egress": {"enabled": True}}}
URL, ON = {"urlSecret": {"name": "mine"}}, {"enabled": True}
PREFIX = f"{NAMESPACE}.{NAME}"
VERSION, GPU, HEAD = gammaray.__version__, "gammaray-worker-gpu", "gammaray-orchestrator"


def secret(name, key):
    return {"secretKeyRef": {"name": name, "key": key}}


def pool(role, bounds, replicas, budget):
    """Return the rows of a pool with these bounds; only pools whose bounds differ need the autoscaler."""
    scales = bounds[0] < bounds[1] or None
    return {
        f"groups {role} minReplicas": bounds[0],
        f"groups {role} maxReplicas": bounds[1],
        f"groups {role} replicas": replicas,
        f"pdb-{role} spec minAvailable": budget,
        f"pdb-{role} spec maxUnavailable": None,  # pods of an operator can be counted only by a number
        "cluster enableInTreeAutoscaling": scales,
        "cluster autoscalerOptions securityContext allowPrivilegeEscalation": scales and False,
    }


def gpus(**pools):
    """Return the rows of pools' GPUs: asked for as one resource, and counted for Ray, which knows few."""
    rows = {}
    for role, (resource, count) in pools.items():
        for kind, name in itertools.product(("limits", "requests"), (NVIDIA, MIG, AMD)):
            rows[f"containers {role} resources {kind} {name}"] = str(count) if name == resource else None
        rows[f"groups {role} rayStartParams num-gpus"] = str(count) if role in WORKERS else None
    return rows


def images(target, orchestrator):
    return {"containers target image": target, "containers head image": orchestrator}


HOOKS = {
    f"{kind}-redis-password metadata annotations helm.sh/{key}": value
    for kind in ("serviceaccount", "role", "rolebinding", "job")
    for key, value in {
        "hook": "pre-install,pre-upgrade",
        "hook-weight": "-5" if kind == "job" else "-10",
        "hook-delete-policy": "before-hook-creation,hook-succeeded",
    }.items()
}
RAYLET = {"path": "/api/local_raylet_healthz", "port": 52365}
PROBES = {
    f"containers {role} {kind}Probe httpGet": RAYLET for role in ROLES for kind in ("startup", "liveness")
}
PROBES["containers head livenessProbe httpGet"] = None
STORAGE = ("statefulset-redis spec volumeClaimTemplates 0 spec", "pvc-models spec")
DEFAULTS = {
    # Redis' password is made before other pods start, by a job that may only create secrets.
    **HOOKS,
    "job-redis-password spec activeDeadlineSeconds": 240,  # before Helm's timeout of 300 s: Helm says so
    "role-redis-password rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}],
    "env draft GAMMARAY_REDIS_PASSWORD": secret(f"{NAME}-redis", "password"),
    "env redis REDISCLI_AUTH": secret(f"{NAME}-redis", "password"),
    "env redis MEMORY_LIMIT resourceFieldRef": {"containerName": "redis", "resource": "limits.memory"},
    "containers redis resources limits memory": "2Gi",
    "env draft GAMMARAY_REDIS_PREFIX": None,  # the bundled Redis belongs to one release
    **{f"pods {role} volumes models emptyDir": {"sizeLimit": "100Gi"} for role in ROLES},
    "pods draft volumes shm emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"},
    **{f"containers {role} volumeMounts shm mountPath": "/dev/shm" for role in WORKERS},
    **{f"containers {role} volumeMounts shm": None for role in ("head", "orchestrator")},  # KubeRay's
    **PROBES,
    **{f"groups {role} rayStartParams dashboard-agent-listen-port": "52365" for role in ROLES},
    **{f"containers {role} readinessProbe grpc": {"port": WORKER_PORT} for role in WORKERS},
    "containers orchestrator readinessProbe httpGet": {"path": "/-/healthz", "port": 8000},
    "containers head readinessProbe httpGet port": 8265,
    "pods head topologySpreadConstraints": None,
    **gpus(draft=(NVIDIA, 1), orchestrator=(None, 0)),
    "args draft settings device": "cuda",
    DRAFT_TARGET: None,
    "args target scaling": None,
    HOSTS: HTTP_NAMES,  # without keys, of its Service and Ingress
    ENDPOINT: None,
}
OF_EVERYTHING = {
    "containers draft readinessProbe tcpSocket": {"port": WORKER_PORT},  # needs no certificate
    "containers draft readinessProbe grpc": None,
    "httproute spec rules 0 timeouts": {"request": "3600s"},
    "env target HF_TOKEN": secret("hugging-face", "token"),
    "pods target initContainers 0 name": "prepare",
    "args orchestrator settings max_gamma": 6,
    "args draft settings draft_ahead": False,
    "pod-test metadata annotations helm.sh/hook": "test",
    "env test GAMMARAY_API_KEY": secret("test-key", "key"),
    "containers test command 3": f"http://{NAME}-http:8000",
    **{f"{place} storageClassName": name for place, name in zip(STORAGE, ("fast", "shared"), strict=True)},
}
SEVERAL = {
    "redis": {**URL, "passwordSecret": {"name": "pw", "key": "p"}},
    "models": TWO_MODELS,
    "engine": "vllm",
    "pods": {"terminationGracePeriodSeconds": 60, "nodeSelector": {"pool": "a"}},
    "draft": {"modelsSize": "5Gi", "acceleratorType": "NVIDIA-L4", "settings": {"engine": "native"}},
    "target": {"gpus": 4, "shmSize": "3Gi"},
    "telemetry": {"otlpEndpoint": "http://o:4317"},
}
OF_SEVERAL = {
    "env draft GAMMARAY_REDIS_URL": secret("mine", "url"),
    "env draft GAMMARAY_REDIS_PASSWORD": secret("pw", "p"),
    **{f"env {role} GAMMARAY_REDIS_PREFIX": PREFIX for role in POOLS},
    "pods draft volumes models emptyDir": {"sizeLimit": "5Gi"},
    "pods target volumes shm emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"},
    **{f"env {role} {DRAIN}": "50" for role in ROLES},
    "pods draft nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4", "pool": "a"},
    "pods target nodeSelector": {"pool": "a"},
    "args target settings engine": "vllm",
    "args draft settings engine": "native",
    "args target settings tensor_parallel": 4,
    DRAFT_TARGET: "team/large",
    "args target settings target": None,
    ENDPOINT: "http://o:4317",
}


def stored(given, shown):
    own = {"storageClassName": given}
    rows = {f"{place} storageClassName": shown for place in STORAGE}
    return {"redis": own, "modelCache": {"enabled": True, **own}}, rows


TABLE = [
    ({}, DEFAULTS),
    (EVERYTHING, OF_EVERYTHING),
    (SEVERAL, OF_SEVERAL),
    *itertools.starmap(stored, (("", None), ("-", ""), ("123", "123"))),
    (
        {"modelCache": {"enabled": True, "size": "7Gi", "accessMode": "ReadWriteOnce"}},
        {
            "pvc-models spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "7Gi"}},
            }
        },
    ),
    # A field of version 1.2 of the gateway API.
    (
        {"gateway": {"enabled": True, "parentRefs": [{"name": "a"}]}},
        {"httproute spec rules 0 timeouts": None},
    ),
    ({"nameOverride": "x"}, {"rayservice metadata name": "demo-x"}),
    ({"fullnameOverride": "y"}, {"service-grpc metadata name": "y-grpc"}),
    ({"pods": {"terminationGracePeriodSeconds": 5}}, {f"env {role} {DRAIN}": "0" for role in ROLES}),
    # Images, each of which may have its own repository.
    ({"image": {"registry": "r.com/t/"}}, images(f"r.com/t/{GPU}:{VERSION}", f"r.com/t/{HEAD}:{VERSION}")),
    (
        {"image": {"registry": "r", "tag": "7", "workerGpu": {"tag": "8", "repository": "s.com/gpu"}}},
        images("s.com/gpu:8", f"r/{HEAD}:7"),
    ),
    (
        {"image": {"registry": "r", "tag": "7", "workerGpu": {"repository": "s:5000/g", "digest": DIGEST}}},
        images(f"s:5000/g@{DIGEST}", f"r/{HEAD}:7"),
    ),
    # Pools: bounds, budgets, GPUs.
    ({"draft": {"workers": "3"}}, pool("draft", (3, 3), 3, 2)),
    ({"draft": {"workers": "1:4"}}, pool("draft", (1, 4), 1, 0)),
    ({"draft": {"workers": "0:4"}}, pool("draft", (0, 4), 1, 0)),
    ({"draft": {"workers": "0"}}, {"groups draft": None, "groups target minReplicas": 1}),
    *(
        (
            {"orchestrator": {"replicas": replicas}, "scaling": {"orchestrator_load": 7}},
            {
                **pool("orchestrator", bounds, bounds[0], bounds[0] - 1),
                "args orchestrator replicas": "2:6" if replicas == "2:6" else 3,
                "args orchestrator scaling": {"orchestrator_load": 7} if replicas == "2:6" else None,
                "args draft scaling": None,  # workers that stay report nothing
            },
        )
        for replicas, bounds in ((3, (3, 3)), ("2:6", (2, 6)))
    ),
    ({"target": {"workers": "3:6"}}, pool("target", (3, 6), 3, 2)),
    ({"pods": {"disruptionBudget": {"maxUnavailable": 2}}}, {"pdb-orchestrator spec minAvailable": 0}),
    ({"target": {"disruptionBudget": {"maxUnavailable": 0}}}, {"pdb-target spec minAvailable": 1}),
    (OF_MIG, gpus(draft=(MIG, 1), target=(NVIDIA, 2))),
    ({**OF_MIG, "gpuResource": AMD}, gpus(draft=(MIG, 1), target=(AMD, 2))),
    ({"draft": {"gpuResource": MIG, "gpus": 0}}, gpus(draft=(None, 0), target=(NVIDIA, 1))),
    # Settings of the processes.
    (VARIANTS["cpu-trial"], {"args draft settings device": "cpu", "args target settings tensor_parallel": 1}),
    ({"draft": {"workers": "1:3"}}, {"args target scaling": {}}),  # reports its load if others scale
    *(
        ({"models": TWO_MODELS, "draft": {"settings": {"target": given}}}, {DRAFT_TARGET: given})
        for given in ("", "/tokenizers/large")
    ),
    # Without API keys, the HTTP API answers to the names of its Service and Ingress.
    (INGRESS, {HOSTS: f"{HTTP_NAMES},a.example"}),
    ({"orchestrator": {"settings": {"allowed_hosts": "c.example"}}}, {HOSTS: "c.example"}),
    ({**INGRESS, "apiKeysSecret": {"name": "keys"}}, {HOSTS: None}),
    # Telemetry.
    ({"telemetry": {"jaeger": ON}}, {ENDPOINT: f"http://{NAME}-jaeger:4317"}),
    ({"telemetry": {"collector": ON}}, {EXPORTERS: ["debug"], "collector exporters debug": {}}),
    (
        {"telemetry": {"otlpEndpoint": "https://o:4317", "collector": ON}},
        {ENDPOINT: f"http://{NAME}-collector:4317", EXPORTERS: ["otlp/remote"]},
    ),
    (
        {"telemetry": {"jaeger": ON, "collector": ON}},
        {EXPORTERS: ["otlp/jaeger"], "collector exporters otlp/jaeger tls": {"insecure": True}},
    ),
]


@pytest.mark.slow
def test_values_give_what_the_table_says():
    releases = [(values, release(values), rows) for values, rows in TABLE]
    for values, found, rows in releases:
        assert {path: at(found, path) for path in rows} == rows, values
    for values, found, rows in releases:  # what is absent is absent from something that is there
        for path in (path for path, expected in rows.items() if expected is None):
            elsewhere = (at(other, path) for _, other, _ in releases)
            beside = at(found, path.rpartition(" ")[0]) or any(value is not None for value in elsewhere)
            assert beside, (values, path)


def test_bounded_orchestrator_hosts_are_a_setting_of_the_package():
    OrchestratorSettings(allowed_hosts=f"{HTTP_NAMES},a.example", redis_prefix=PREFIX)


REFUSED = [
    ({"modles": {}}, "modles"),
    ({"models": {"target": ""}}, "target"),
    ({"target": {"workers": "0:2"}}, "workers"),
    ({"draft": {"settings": {"threads": 0}}}, "threads"),
    ({"draft": {"settings": {"redis_url": "redis://:secret@host"}}}, "redis_url"),
    ({"orchestrator": {"settings": {"max_gamma": 65}}}, "max_gamma"),
    ({"engine": "sglang"}, "engine"),
    ({"head": {"tolerationz": []}}, "tolerationz"),
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
]
"""By the schema of the values, naming the value."""

CONTRADICTING = [
    ({"gateway": {"enabled": True}}, "gateway[.]parentRefs"),
    ({"gateway": {"enabled": True, "className": "c"}}, "tls[.]secretName"),
    ({"tls": TLS}, "ingress[.]enabled"),
    ({"tls": {"certManager": {"enabled": True}}, "ingress": {"enabled": True}}, "issuerRef[.]name"),
    ({"workerTls": {"enabled": True}}, "workerTls[.]issuerRef[.]name"),
    ({"redis": URL, **EGRESS}, "networkPolicy[.]egress[.]rules"),
    ({"models": {"target": "team/large"}, **EGRESS}, "networkPolicy[.]egress[.]rules"),
    ({"ray": {"faultTolerance": {"enabled": True, "username": "ray"}}}, "username: needs ray[.]fault"),
    ({"redis": URL, "ray": {"faultTolerance": {"enabled": True}}}, "ray[.]faultTolerance[.]redisAddress"),
]
"""By templates, with the reason."""


def test_wrong_and_contradicting_values_are_refused_with_the_reason():
    for values, reason in REFUSED:
        with pytest.raises(helm_python.HelmValuesError, match=reason):
            chart().validate_schema(values)
    for image in (
        *("redis:7.4.2-alpine", "r.example.com:5000/team/redis"),
        *(f"redis@{DIGEST}", f"localhost:5000/redis:7@{DIGEST}"),
    ):
        chart().validate_schema({"redis": {"image": image}})
    for values, reason in CONTRADICTING:
        with pytest.raises(helm_python.HelmRenderError, match=reason):
            render_texts(values)
