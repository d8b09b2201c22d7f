"""Orchestrators in Serve: their number and configuration, their log, and the leases that they renew."""

import asyncio
import logging
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig

from gammaray.config import PoolSize, ScalingSettings
from gammaray.deploy.serve_config import OrchestratorArguments, autoscaling_config
from orchestrator.app import is_true, orchestrator
from orchestrator.scaling_policy import IN_FLIGHT, OrchestratorPolicy, wanted_orchestrators
from orchestrator.sessions import leases
from orchestrator.sessions.leases import LeaseManager
from tests.support.workers.scripted_workers import make_session, until

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


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), TypeError("a bug")])
async def test_renewals_go_on_after_an_unexpected_error(monkeypatch, caplog, error):
    monkeypatch.setattr(leases, "LEASE_S", 0.03)
    store = AsyncMock(**{"renew.side_effect": error, "running.return_value": []})
    manager = LeaseManager(store, lambda *_: None)
    manager.start()
    with manager.holding(make_session()):
        await until(lambda: store.renew.await_count >= 3)
    await asyncio.wait_for(manager.close(), 10)
    assert any(str(error) in str(record.exc_info[1]) for record in caplog.records if record.exc_info)


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("CALL gammaray OK 30008.1ms", False),
        ("10.0.0.7 CALL gammaray CANCELLED 12.0ms", False),
        ("CALL failed: UNAVAILABLE", True),
        ("COMPLETION unavailable 30008.1ms", True),
        ("POST /v1/completions 503 30008.1ms", True),
    ],
)
def test_calls_without_an_outcome_are_left_out(message, kept):
    assert is_true(logging.LogRecord("ray.serve", logging.INFO, "", 0, message, (), None)) is kept


@pytest.mark.parametrize(("end", "kept"), [(GeneratorExit, False), (RuntimeError, True), (None, True)])
def test_client_that_leaves_is_no_error(end, kept):
    error = (end, end(), None) if end else None
    record = logging.LogRecord("ray.serve", logging.ERROR, "", 0, "Request failed.", (), error)
    assert is_true(record) is kept
