"""What the builders of Ray Serve applications made, without a cluster."""

from ray import serve
from ray.serve.deployment import deployment_to_schema
from ray.serve.schema import DeploymentSchema


def deployment_of(application: serve.Application) -> serve.Deployment:
    """Return the deployment that an application is bound to; Serve has no public name for it."""
    return application._bound_deployment  # noqa: SLF001


def schema_of(application: serve.Application) -> DeploymentSchema:
    """Return the options of that deployment as a Serve configuration file states them."""
    return deployment_to_schema(deployment_of(application))
