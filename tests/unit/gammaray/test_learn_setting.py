"""Which workers of a cluster learn, and where nothing can."""

import pytest

from gammaray.config import ClusterSettings, TargetSettings
from gammaray.deploy.serve_config import role_settings
from gammaray.errors import InvalidArgumentError


def learning(**fields):
    roles = role_settings(ClusterSettings(target="t", learn="/l", **fields))
    return [roles[role].get("learn") for role in ("target", "draft")]


def test_the_workers_that_draft_learn():
    assert learning(head="h") == ["/l", None]
    assert learning(head="h", engine="vllm") == ["/l", None]


@pytest.mark.parametrize(
    ("settings", "fields", "allowed"),
    [
        (ClusterSettings, {"target": "t"}, "empty without a head, which alone learns"),
        (ClusterSettings, {"target": "t", "draft": "d"}, "empty without a head, which alone learns"),
        (TargetSettings, {"model": "t"}, "empty without a head, which alone learns"),
        (
            ClusterSettings,
            {"target": "t", "head": "h", "engine": "vllm", "api_keys_file": "k"},
            "empty with the engine vllm and API keys",
        ),
    ],
)
def test_nothing_to_learn_with_is_refused(settings, fields, allowed):
    with pytest.raises(InvalidArgumentError, match=f"learn: got x, allowed: {allowed}"):
        settings(learn="x", **fields)
