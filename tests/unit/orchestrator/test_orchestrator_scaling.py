"""The number of orchestrators, and the configuration for Serve."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig

from gammaray.config import PoolSize, ScalingSettings
from gammaray.deploy.serve_config import OrchestratorArguments, autoscaling_config
from orchestrator.app import orchestrator
from orchestrator.scaling_policy import IN_FLIGHT, OrchestratorPolicy, wanted_orchestrators

SETTINGS = ScalingSettings(orchestrator_load=10)


@pytest.mark.parametrize(
    ("num_requests", "now", "wanted"),
    [
        *((0, 1, 1), (10, 1, 1), (11, 1, 2), (45, 1, 5), (45, 5, 5)),
        *((29, 5, 5), (28, 5, 4), (0, 5, 4), (8, 2, 2), (7, 2, 1)),
    ],
)
def test_number_follows_the_requests_with_a_dead_band(num_requests, now, wanted):
    assert wanted_orchestrators(num_requests, now, SETTINGS) == wanted


def decide(reports, target, bounds=(1, 4), running=None):
    context = SimpleNamespace(
        aggregated_metrics={IN_FLIGHT: reports},
        running_replicas=list(reports) if running is None else running,
        target_num_replicas=target,
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
    )
    number, state = OrchestratorPolicy({"orchestrator_load": 10})(context)
    assert state == {}
    return number


def test_policy_keeps_to_its_bounds():
    assert decide({"a": 25.0}, 1) == 3
    assert decide({"a": 500.0}, 1) == 4
    assert decide({"a": 0.0, "b": 0.0}, 2, bounds=(2, 4)) == 2


def test_number_does_not_change_while_replicas_start():
    assert decide({"a": 50.0}, 2) == 2
    assert decide({"a": 0.0}, 2) == 2
    assert decide({}, 1) == 1


def test_stopped_replica_does_not_count():
    assert decide({"a": 5.0, "gone": 90.0}, 1, running=["a"]) == 1


def test_configuration_is_valid_by_serves_own_schema():
    config = autoscaling_config("orchestrator", PoolSize(2, 6), SETTINGS)
    parsed = AutoscalingConfig(**config)
    assert (parsed.min_replicas, parsed.max_replicas, parsed.initial_replicas) == (2, 6, 2)


@pytest.mark.parametrize(("given", "expected"), [(3, "3"), ("3", "3"), ("2:5", "2:5")])
def test_number_may_be_fixed_or_a_range(given, expected):
    arguments = {"settings": {}, "replicas": given, "scaling": {"orchestrator_load": 7}}
    assert str(OrchestratorArguments(**arguments).replicas) == expected
    assert orchestrator(arguments) is not None


def test_wrong_threshold_is_refused_where_the_application_is_built():
    with pytest.raises(ValidationError, match="orchestrator_load"):
        orchestrator({"settings": {}, "replicas": "1:2", "scaling": {"orchestrator_load": 0}})


@pytest.mark.parametrize("bad", [0, "0:2", "3:2", "many", 65])
def test_number_out_of_bounds_is_refused(bad):
    with pytest.raises(ValidationError, match="replicas"):
        OrchestratorArguments(settings={}, replicas=bad)
