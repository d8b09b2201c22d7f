"""Pools of pods: bounds, autoscaling, spreading and disruption budgets."""

import pytest

from gammaray.deploy.effective import effective_of_serve
from tests.support.chart.chart_helpers import application, cluster, groups, render, serve_config


@pytest.mark.parametrize(
    ("workers", "bounds", "replicas"),
    [("3", (3, 3), 3), (2, (2, 2), 2), ("1:4", (1, 4), 1), ("0:4", (0, 4), 1)],
)
def test_pool_has_the_bounds_asked_for(workers, bounds, replicas):
    values = {"draft": {"workers": workers}}
    group = groups(values)["draft"]
    assert (group["minReplicas"], group["maxReplicas"]) == bounds
    assert group["replicas"] == replicas
    scales = bounds[0] < bounds[1]
    assert cluster(values).get("enableInTreeAutoscaling", False) is scales
    assert ("autoscalerOptions" in cluster(values)) is scales


def test_pool_without_drafters_is_left_out():
    assert set(groups({"draft": {"workers": "0"}})) == {"head", "orchestrator", "target"}


def test_pods_of_a_role_are_spread_and_have_a_disruption_budget():
    manifests = render()
    for role in ("orchestrator", "draft", "target"):
        (constraint,) = groups()[role]["template"]["spec"]["topologySpreadConstraints"]
        labels = groups()[role]["template"]["metadata"]["labels"]
        assert labels.items() >= constraint["labelSelector"]["matchLabels"].items()
        budget = manifests[f"pdb-{role}.yaml"]["spec"]
        assert labels.items() >= budget["selector"]["matchLabels"].items()
    assert "topologySpreadConstraints" not in groups()["head"]["template"]["spec"]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, {"orchestrator": 1, "draft": 0, "target": 0}),
        ({"orchestrator": {"replicas": 5}, "draft": {"workers": 3}}, {"orchestrator": 4, "draft": 2}),
        ({"draft": {"workers": "0:8"}, "target": {"workers": "3:6"}}, {"draft": 0, "target": 2}),
        ({"pods": {"disruptionBudget": {"maxUnavailable": 2}}}, {"orchestrator": 0, "target": 0}),
        ({"target": {"workers": 2, "disruptionBudget": {"maxUnavailable": 0}}}, {"target": 2}),
    ],
)
def test_budgets_let_nodes_be_drained(values, kept):
    """Pods of an operator can be counted only by a `minAvailable` that is a number."""
    manifests = render(values)
    for role, count in kept.items():
        budget = manifests[f"pdb-{role}.yaml"]["spec"]
        assert budget["minAvailable"] == count
        assert "maxUnavailable" not in budget


@pytest.mark.parametrize(("replicas", "bounds"), [(3, (3, 3)), ("3", (3, 3)), ("2:6", (2, 6))])
def test_orchestrators_have_the_bounds_asked_for(replicas, bounds):
    values = {"orchestrator": {"replicas": replicas}, "scaling": {"orchestrator_load": 7}}
    group = groups(values)["orchestrator"]
    assert (group["minReplicas"], group["maxReplicas"], group["replicas"]) == (*bounds, bounds[0])
    scales = bounds[0] < bounds[1]
    assert cluster(values).get("enableInTreeAutoscaling", False) is scales
    args = application("orchestrator", values)["args"]
    assert args["replicas"] == ("2:6" if scales else 3)
    assert args.get("scaling") == ({"orchestrator_load": 7} if scales else None)
    assert "scaling" not in application("draft", values)["args"]  # workers that stay report nothing
    assert render(values)["pdb-orchestrator.yaml"]["spec"]["minAvailable"] == bounds[0] - 1
    shown = effective_of_serve(serve_config(values))["orchestrator"]
    assert shown["replicas"] == args["replicas"]
    assert ("scaling" in shown) is scales
