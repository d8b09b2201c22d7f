"""Allowed connections, as a table over every component and port of the release with everything enabled."""

from typing import NamedTuple

from ray.serve._private import constants

from tests.support.chart.chart_helpers import EVERYTHING, NOTHING, container, every_pod, groups, pods, render

OWN_NAMESPACE = {"kubernetes.io/metadata.name": "somewhere"}


class Pod(NamedTuple):
    """One end of a connection: labels of the pod and of its namespace, by default that of the release."""

    labels: dict[str, str]
    namespace: dict[str, str] = OWN_NAMESPACE


def may_reach(policies, source, goal, port):
    """Return whether `source` may open a TCP port of `goal`, a pod in the release's namespace.

    A pod that no policy selects is open to all; else some rule of some policy must allow it.
    """
    return is_allowed(policies, "Ingress", goal, source, port)


def may_leave(policies, source, goal, port):
    return is_allowed(policies, "Egress", source, goal, port)


def is_allowed(policies, direction, selected, peer, port):
    specs = [policy["spec"] for policy in policies if direction in policy["spec"]["policyTypes"]]
    selecting = [spec for spec in specs if selects(spec["podSelector"], selected.labels)]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower()) or []]
    peers = "from" if direction == "Ingress" else "to"
    return not selecting or any(allows(rule, peers, peer, port) for rule in rules)


def allows(rule, key, source, port):
    ports, peers = rule.get("ports"), rule.get(key)
    is_port = not ports or any(one["port"] <= port <= one.get("endPort", one["port"]) for one in ports)
    return is_port and (not peers or any(is_peer(peer, source) for peer in peers))


def is_peer(peer, source):
    unknown = peer.keys() - {"podSelector", "namespaceSelector"}
    assert not unknown, f"not understood: {unknown}"
    is_near = source.namespace == OWN_NAMESPACE
    if "namespaceSelector" in peer:
        is_near = selects(peer["namespaceSelector"], source.namespace)
    return is_near and ("podSelector" not in peer or selects(peer["podSelector"], source.labels))


def selects(selector, labels):
    unknown = selector.keys() - {"matchLabels"}
    assert not unknown, f"not understood: {unknown}"
    return labels.items() >= selector.get("matchLabels", {}).items()


RAY = {"head", "orchestrator", "draft", "target"}
INSIDE = {*RAY, "redis", "jaeger", "collector"}
ELSEWHERE = {"kubernetes.io/metadata.name": "elsewhere"}
NEIGHBOUR = {"app.kubernetes.io/part-of": "gammaray", "app.kubernetes.io/instance": "other-release"}
OUTSIDE = {
    "stranger": Pod({"app": "web"}),
    "impostor": Pod({"app.kubernetes.io/component": "orchestrator"}),
    "neighbour": Pod({**NEIGHBOUR, "app.kubernetes.io/component": "orchestrator", "gammaray.io/ray": "true"}),
    "client": Pod({"app": "chat"}, {"name": "clients"}),
    "far stranger": Pod({"app": "web"}, ELSEWHERE),
    "operator": Pod({"app.kubernetes.io/name": "kuberay-operator"}, ELSEWHERE),
    "prometheus": Pod({"app.kubernetes.io/name": "prometheus"}, ELSEWHERE),
    "dns": Pod({"k8s-app": "kube-dns"}, ELSEWHERE),
    "telemetry": Pod({"app": "collector"}, {"name": "telemetry"}),
}
WORKER, HTTP, GRPC, METRICS, RAY_METRICS = 50051, 8000, 9000, 9464, 8080

TABLE = {
    # The point of it all: blocks come from orchestrators alone.
    ("draft", WORKER): {"orchestrator"},
    ("target", WORKER): {"orchestrator"},
    ("orchestrator", HTTP): {"client", "operator", "test"},
    ("orchestrator", GRPC): {"client", "operator", "test"},
    ("redis", 6379): RAY,
    ("jaeger", 4317): {*RAY, "collector"},
    ("jaeger", 16686): set(),
    ("collector", 4317): RAY,
    ("head", 6379): RAY,
    ("head", 8265): {*RAY, "operator"},
    # Serve's own proxy, to which HAProxy forwards on every node.
    ("head", 8500): RAY,
    ("head", 9500): RAY,
    ("head", 10001): set(),  # Ray's client port runs whatever it is sent
    **{(role, METRICS): {"prometheus"} for role in ("orchestrator", "draft", "target")},
    **{(role, RAY_METRICS): {"prometheus"} for role in RAY},
    # Ray's own processes: raylet, objects, agents, core workers.
    **{(role, port): RAY for role in RAY for port in (6380, 6381, 6382, 6383, 10002, 19999)},
    **{(role, 52365): RAY for role in RAY - {"head"}},
    ("head", 52365): {*RAY, "operator"},
    # Serve's proxies to replicas on other nodes.
    **{("orchestrator", port): RAY for port in (30000, 31000, 40000, 41000)},
    **{(role, port): set() for role in ("draft", "target") for port in (HTTP, GRPC, 30000, 40000, 22)},
}


def policies(values):
    return [manifest for manifest in render(values).values() if manifest["kind"] == "NetworkPolicy"]


def sources(values):
    inside = {name: Pod(template["metadata"]["labels"]) for name, template in every_pod(values).items()}
    return inside | OUTSIDE


def who_reaches(component, port, values):
    everybody, rules = sources(values), policies(values)
    return {name for name, pod in everybody.items() if may_reach(rules, pod, everybody[component], port)}


def test_connections_are_those_of_the_table_which_covers_every_declared_port():
    everybody, rules = sources(EVERYTHING), policies(EVERYTHING)
    reached = {place: who_reaches(*place, EVERYTHING) for place in TABLE}
    assert {place: names for place, names in reached.items() if names != TABLE[place]} == {}
    assert set(pods(EVERYTHING)) == {component for component, _ in TABLE} == INSIDE
    for component, template in pods(EVERYTHING).items():
        declared = {(component, entry["containerPort"]) for entry in container(template)["ports"]}
        assert declared - TABLE.keys() <= ({("head", HTTP)} if component == "head" else set())
    # The rows hold for the way out, too, for every pod that a policy restricts.
    for (goal, port), names in TABLE.items():
        for name in names & INSIDE:
            assert may_leave(rules, everybody[name], everybody[goal], port), (name, goal, port)


def test_apis_accept_all_pods_unless_clients_are_configured_and_workers_only_without_policies():
    assert who_reaches("orchestrator", GRPC, {}) >= {"stranger", "far stranger", "client", "operator"}
    assert who_reaches("draft", WORKER, {}) == {"orchestrator"}
    values = {"networkPolicy": {"enabled": False}}
    assert policies(NOTHING) == policies(values) == []
    assert who_reaches("draft", WORKER, values) == set(sources(values))


CLOSED = {"networkPolicy": {"egress": {"enabled": True}}}
TRIED = (53, 80, 443, 4317, 6443)
NAMED = {("dns", 53), *(("telemetry", port) for port in TRIED)}
LEAVES = {
    # Where each pod may go, of those that the release does not run.
    **dict.fromkeys(("orchestrator", "draft", "target", "collector"), NAMED),
    # Kubernetes itself is no pod: Ray's autoscaler may use its ports anywhere.
    "head": NAMED | {(name, port) for name in OUTSIDE for port in (443, 6443)},
    "redis": set(),
    "jaeger": set(),
}


def test_egress_is_limited_to_the_configured_destinations():
    everybody, rules = sources(EVERYTHING), policies(EVERYTHING)
    for component, expected in LEAVES.items():
        goals = [(name, port) for name in OUTSIDE for port in TRIED]
        pod = everybody[component]
        assert {goal for goal in goals if may_leave(rules, pod, everybody[goal[0]], goal[1])} == expected
    # No pool scales: nor does the head reach Kubernetes.
    everybody, rules = sources(CLOSED), policies(CLOSED)
    assert not may_leave(rules, everybody["head"], everybody["stranger"], 443)
    values = {"telemetry": {"jaeger": {"enabled": True}}}
    everybody, rules = sources(values), policies(values)
    for name in ("redis", "jaeger"):  # never
        assert not any(may_leave(rules, everybody[name], goal, 443) for goal in everybody.values())
    assert may_leave(rules, everybody["draft"], everybody["far stranger"], 443)


def test_ports_of_policies_follow_the_start_parameters_of_ray_and_serve():
    rules, everybody = policies(EVERYTHING), sources(EVERYTHING)
    names = ("node-manager", "object-manager", "runtime-env-agent", "min-worker", "max-worker")
    names += ("dashboard-agent-grpc", "dashboard-agent-listen")
    for group in groups(EVERYTHING).values():
        params = group["rayStartParams"]
        for port in (int(params[f"{name}-port"]) for name in names):
            assert may_reach(rules, everybody["head"], everybody["target"], port)
        last = int(params["max-worker-port"])
        assert not int(params["min-worker-port"]) <= WORKER <= last
        assert not may_reach(rules, everybody["head"], everybody["target"], last + 1)
    ingress = [f"DIRECT_INGRESS_{end}_{kind}" for end in ("MIN", "MAX") for kind in ("HTTP", "GRPC")]
    proxies = [f"FALLBACK_PROXY_{kind}" for kind in ("HTTP", "GRPC")]
    for goal, kinds in (("head", proxies), ("orchestrator", ingress)):
        for port in (getattr(constants, f"RAY_SERVE_{kind}_PORT") for kind in kinds):
            assert all(may_reach(rules, everybody[role], everybody[goal], port) for role in RAY), port
