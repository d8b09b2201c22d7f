"""The public surface is frozen here: names, methods, and the cost of an import."""

import inspect
import re
from pathlib import Path

import pytest

import gammaray
from docs.make_telemetry import ATTRIBUTES, SPANS
from gammaray.telemetry import names as telemetry
from gammaray.v1 import generation_service_pb2 as pb
from tests.support.own_process import run_code

ROOT = Path(gammaray.__file__).parents[1]


def test_all_is_frozen_and_sorted():
    names = """
        ADAPTIVE AsyncClient CancelledError Chunk Client Completion DeadlineExceededError DrafterKind
        EmittedToken FailedPreconditionError FinishReason GammaPolicy GammarayError GenerateOptions
        GenerationRequest IncompleteOutputError InternalError InvalidArgumentError ModelChangedError
        NotFoundError ProcessStatus PromptLogprobs ResourceExhaustedError RetryPolicy SamplingParams
        SessionInfo SessionState SpeculationSummary TokenOrigin TopLogprob UnauthenticatedError
        UnavailableError Usage VerificationMethod __version__
    """
    assert gammaray.__all__ == names.split()
    assert gammaray.__all__ == sorted(gammaray.__all__)


def test_every_error_class_is_public():
    families = gammaray.GammarayError.__subclasses__()
    classes = {cls.__name__ for family in families for cls in (family, *family.__subclasses__())}
    public = {name for name in gammaray.__all__ if name.endswith("Error")}
    ours = {cls for cls in classes if getattr(gammaray.errors, cls, None)}
    assert ours | {"GammarayError"} == public


SAME = {"GetSession", "ListSessions", "Cancel", "DeleteSession"}
"""RPCs whose methods of the clients have their names."""


def test_every_rpc_has_a_method_on_both_clients_with_equal_arguments():
    rpcs = set(pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name)
    assert rpcs == {"Generate", "GetStatus", "GetSessionTrace", *SAME}
    methods = {re.sub("(?<!^)(?=[A-Z])", "_", name).lower() for name in SAME}
    assert {"generate", "status", "session_trace"} | methods <= set(dir(gammaray.AsyncClient))

    def surface(cls):
        return {
            name: list(inspect.signature(member).parameters.values())
            for name, member in vars(cls).items()
            if inspect.isfunction(member) and (not name.startswith("_") or name == "__init__")
        }

    assert surface(gammaray.Client) == surface(gammaray.AsyncClient)


def test_version_is_that_of_the_project():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.M)[1] == gammaray.__version__


HEAVY = {"torch", "ray", "redis", "transformers", "numpy", "fastapi", "services", "orchestrator"}
CLIENT = {"grpc", "google", "pydantic", "click", "rich", "asyncio"}


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import gammaray", HEAVY | CLIENT),
        ("from gammaray import *; import gammaray.cli.commands.generate", HEAVY),
    ],
)
def test_import_loads_no_heavy_package(code, unwanted):
    script = f"{code}\nimport sys\nprint(sorted({unwanted} & set(sys.modules)))"
    assert run_code(script).stdout.strip() == "[]"


def test_telemetry_names_are_distinct_and_each_is_documented():
    names = [attribute.name for attribute in ATTRIBUTES]
    constants = {name: value for name, value in vars(telemetry).items() if name.isupper()}
    assert len(names) > 40
    assert sorted(names) == sorted(v for n, v in constants.items() if not n.startswith("SPAN_"))
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"(gammaray|gen_ai|error)(\.[a-z_]+)+", name) for name in names)
    assert all(re.fullmatch(r"[A-Z`h].{10,}\.", one.meaning, re.S) for one in ATTRIBUTES)
    assert {name for span in SPANS for name in (*span.always, *span.sometimes)} == set(names)
    sides = [(span.name, span.kind) for span in SPANS]
    assert len(sides) == len(set(sides))
    assert {span.name for span in SPANS} == {v for n, v in constants.items() if n.startswith("SPAN_")}
    assert {span.parent for span in SPANS} - {""} <= {span.name for span in SPANS}
