"""`gammaray sessions` and the clients' session calls, over a scripted service."""

import json

import pytest
from click.testing import CliRunner

from gammaray import SessionInfo, SessionState
from gammaray.cli import main
from gammaray.errors import InternalError
from gammaray.types import EmittedToken, FinishReason, TokenOrigin
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import token_to_proto
from gammaray.wire.sessions import info_from_proto, info_to_proto
from tests.support.sdk_helpers import ScriptedService, last, piece, serve_in_thread

RUNNING = SessionInfo("mine", 1, SessionState.RUNNING, None, 5, 7, 2**64 - 1, 3, 1_700_000_000_000, 59_400)
CANCELLED = SessionInfo("old", 0, SessionState.FINISHED, FinishReason.CANCELLED, 5, 2, 1, 2, 0, 1000)
DETACHED = SessionInfo("left", 0, SessionState.DETACHED, None, 5, 2, 1, 2, 0, 1000)
TOKEN = EmittedToken(9, TokenOrigin.BONUS, b"x", -0.5)


class Sessions(ScriptedService):
    """Knows three sessions."""

    async def GetSession(self, request, context):
        return pb.GetSessionResponse(session=info_to_proto(RUNNING), tokens=[token_to_proto(TOKEN)])

    async def ListSessions(self, request, context):
        self.limit = request.limit
        return pb.ListSessionsResponse(sessions=map(info_to_proto, (RUNNING, CANCELLED, DETACHED)))

    async def Cancel(self, request, context):
        return pb.CancelResponse(session=info_to_proto(CANCELLED))

    async def DeleteSession(self, request, context):
        return pb.DeleteSessionResponse(existed=request.session_id == "old")


@pytest.fixture
def service():
    async def rest(request, attempt):
        yield piece("the ")
        yield last("rest")

    return Sessions(rest)


@pytest.fixture
def run(service):
    with serve_in_thread(service) as address:

        def invoke(*arguments):
            result = CliRunner().invoke(main, ["sessions", *arguments, "--address", address])
            assert result.exit_code == 0, result.output
            return result.output

        yield invoke


def test_list_shows_each_session(run, service):
    rows = [line.split() for line in run("list", "--limit", "3").splitlines()]
    assert rows[0][:3] == ["SESSION", "TURN", "STATE"]
    assert rows[1] == ["mine", "1", "running", "5", "7", "3", "59", "s"]
    assert rows[2][:4] == ["old", "0", "finished", "(cancelled)"]
    assert rows[3][:3] == ["left", "0", "detached"]
    assert service.limit == 3
    found = json.loads(run("list", "--json"))["sessions"]
    assert [info["seed"] for info in found] == [2**64 - 1, 1, 1]


def test_resume_cancel_and_delete(run, service):
    assert run("resume", "mine", "--turn", "1", "--offset", "4") == "the rest\n"
    (request,) = service.requests
    assert (request.session_id, request.turn, request.resume_from) == ("mine", 1, 4)
    assert run("cancel", "old") == "old: finished (cancelled), 2 tokens\n"
    assert run("delete", "old") == "old: deleted\n"
    assert run("delete", "none") == "none: not found\n"


def test_session_in_an_unknown_state_is_refused():
    with pytest.raises(InternalError, match="state 0"):
        info_from_proto(pb.SessionInfo(session_id="s"))
