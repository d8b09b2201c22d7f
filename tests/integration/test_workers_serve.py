"""Workers as Serve applications, as far as it goes without a cluster; e2e tests run them on one."""

import os
from contextlib import suppress

import pytest
from pydantic import ValidationError

from gammaray.config import DraftSettings, TargetSettings
from gammaray.errors import InvalidArgumentError, UnavailableError
from services.process.server import DRAIN_TIMEOUT_S
from services.serve.app import WorkerReplica, bind_cores, build
from tests.support.engine_helpers import tiny_model
from tests.support.serve_helpers import deployment_of, schema_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(("role", "name"), [("draft", "DraftWorker"), ("target", "TargetWorker")])
@pytest.mark.parametrize(
    "options", [{}, {"num_gpus": 1, "resources": {"large_gpu": 1}}], ids=["plain", "gpu"]
)
def test_build_binds_a_deployment_without_cpus_that_drains(role, name, options):
    application = build(role, {}, num_replicas=2, ray_actor_options=options)
    deployment = deployment_of(application)
    assert (deployment.name, deployment.num_replicas) == (name, 2)
    assert deployment.ray_actor_options == {"num_cpus": 0, **options}
    assert schema_of(application).graceful_shutdown_timeout_s > DRAIN_TIMEOUT_S


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_worker_that_may_be_on_vllm_has_longer_for_its_health_checks(role):
    def timeout_s(engine, num_gpus=0):
        options = {"num_gpus": num_gpus} if num_gpus else None
        return schema_of(build(role, {"engine": engine}, ray_actor_options=options)).health_check_timeout_s

    own = timeout_s("native")
    assert timeout_s("transformers") == own < timeout_s("vllm")
    assert (timeout_s("auto"), timeout_s("auto", 1)) == (own, timeout_s("vllm"))


@pytest.mark.parametrize("role", ["draft", "target"])
def test_build_refuses_bad_settings_and_several_workers_on_one_port(role):
    with pytest.raises(ValidationError, match="threads"):
        build(role, {"threads": 0})
    with pytest.raises(ValidationError, match="no_such"):
        build(role, {"no_such": 1})
    with pytest.raises(InvalidArgumentError, match="port 0 with 2"):
        build(role, {"listen": "127.0.0.1:5000"}, num_replicas=2)


@pytest.mark.parametrize(("role", "settings_class"), [("draft", DraftSettings), ("target", TargetSettings)])
async def test_replica_starts_reports_health_and_drains(role, settings_class, tmp_path):
    settings = settings_class(model=str(tiny_model("llama", tmp_path)), device="cpu")
    replica = WorkerReplica.__new__(WorkerReplica)
    usual = os.sched_getaffinity(0)
    try:
        await replica.__init__(role, settings, cores=(min(usual),))
        affinities = set()
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # threads come and go
                affinities.add(tuple(os.sched_getaffinity(int(thread))))
        assert affinities == {(min(usual),)}
    finally:
        bind_cores(usual)
    assert replica.worker.role == role
    assert replica.worker.address.startswith("127.0.0.1:")
    await replica.check_health()
    worker = replica.worker
    assert await replica.__del__()
    assert replica.__del__() is None
    with pytest.raises(UnavailableError):
        worker.check()
