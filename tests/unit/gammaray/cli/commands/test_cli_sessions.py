"""`gammaray sessions` and `gammaray trace`, and the clients' session calls, over a scripted service."""

import json

import pytest

from gammaray import SessionInfo, SessionState
from gammaray.errors import InternalError
from gammaray.types import EmittedToken, FinishReason, TokenOrigin
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import types_pb2
from gammaray.wire.convert import token_to_proto
from gammaray.wire.sessions import info_from_proto, info_to_proto
from tests.support.cli_helpers import invoke
from tests.support.sdk_helpers import ScriptedService, answer, last, piece, serve_in_thread

RUNNING = SessionInfo("mine", 1, SessionState.RUNNING, None, 5, 7, 2**64 - 1, 3, 1_700_000_000_000, 59_400)
CANCELLED = SessionInfo("old", 0, SessionState.FINISHED, FinishReason.CANCELLED, 5, 2, 1, 2, 0, 1000)
DETACHED = SessionInfo("left", 0, SessionState.DETACHED, None, 5, 2, 1, 2, 0, 1000)
TOKEN = EmittedToken(9, TokenOrigin.BONUS, b"x", -0.5)


class Sessions(ScriptedService):
    """Knows three sessions, and the cycles of another one."""

    cycles = ()

    async def GetSession(self, request, context):
        return pb.GetSessionResponse(session=info_to_proto(RUNNING), tokens=[token_to_proto(TOKEN)])

    async def ListSessions(self, request, context):
        self.limit = request.limit
        return pb.ListSessionsResponse(sessions=map(info_to_proto, (RUNNING, CANCELLED, DETACHED)))

    async def Cancel(self, request, context):
        return pb.CancelResponse(session=info_to_proto(CANCELLED))

    async def DeleteSession(self, request, context):
        return pb.DeleteSessionResponse(existed=request.session_id == "old")

    async def GetSessionTrace(self, request, context):
        assert request.session_id == "s1"
        return pb.GetSessionTraceResponse(cycles=self.cycles)


@pytest.fixture
def service():
    return Sessions(answer(piece("the "), last("rest")))


@pytest.fixture
def run(service):
    with serve_in_thread(service) as address:

        def output_of(*arguments):
            result = invoke("sessions", *arguments, "--address", address)
            assert result.exit_code == 0, result.output
            return result.output

        yield output_of


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


def cycle(index: int, **fields: object) -> pb.CycleRecord:
    """Return a cycle of 4 ms: propose 1, of which 0.5 computing; verify 2, of which 2 computing; other 1."""
    draft, target = (types_pb2.WorkerTiming(compute_us=us, batch_size=n) for us, n in ((500, 1), (2000, 3)))
    given = {"start_us": 1_700_000_000_000_000 + 4000 * index, "base_position": 10 + 3 * index, "epoch": 1}
    given |= {"total_us": 4000, "propose_us": 1000, "verify_us": 2000, "gamma": 4, "gamma_reason": "best"}
    given |= {"drafted": 4, "tested": 3, "accepted": 2, "emitted": 3}
    given |= {"next_origin": types_pb2.TOKEN_ORIGIN_CORRECTION, "drafter": types_pb2.DRAFTER_KIND_MODEL}
    given |= {"draft": pb.WorkerCall(address="d:1", blocks=1, timing=draft)}
    given |= {"target": pb.WorkerCall(address="t:1", blocks=1, timing=target)}
    return pb.CycleRecord(**{**given, **fields})


def trace(cycles: list[pb.CycleRecord], *options: str):
    service = Sessions()
    service.cycles = cycles
    with serve_in_thread(service) as address:
        result = invoke("trace", "s1", "-a", address, *options)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_trace_has_a_line_per_cycle_with_a_bar_divided_by_phase():
    lines = trace([cycle(0), cycle(1)]).splitlines()
    rows = [line for line in lines if "●●○○+c" in line]
    assert [row.split()[:2] for row in rows] == [["0.0", "4.00"], ["4.0", "4.00"]]
    bar = rows[0].split()[2]
    parts = [bar.count(mark) for mark in "█░·"]
    assert parts[0] == pytest.approx(5 * parts[1], abs=3)  # 0.5 + 2.0 ms computed, 0.5 ms waited
    assert parts[2] == pytest.approx(2 * parts[1], abs=2)
    assert "best, model, target batch of 3" in rows[0]
    assert lines[-1] == (
        "2 cycles, 6 tokens in 8.0 ms; 3.00 tokens per cycle; alpha 0.667; propose 25%, verify 50%, other 25%"
    )


def test_trace_shows_errors_and_owners():
    failed = pb.WorkerCall(address="d:2", blocks=2, refed_tokens=9, error="DeadlineExceededError")
    plain = {"drafted": 0, "tested": 0, "accepted": 0, "emitted": 1}
    output = trace(
        [
            cycle(0),
            cycle(1, epoch=2, draft=failed, draft_failed=True, **plain),
            cycle(2, epoch=2, draft_ahead_hit=True, next_origin=types_pb2.TOKEN_ORIGIN_UNSPECIFIED),
        ]
    )
    assert "owner's epoch 1" in output
    assert "owner's epoch 2" in output
    assert "draft d:2: DeadlineExceededError" in output
    assert "draft: 2 blocks, 9 tokens sent again" in output
    assert "1 proposals prepared ahead" in output


def test_trace_last_and_json_give_the_latest_cycles():
    output = json.loads(trace([cycle(0), cycle(1), cycle(2)], "--last", "2", "--json"))
    assert output["session_id"] == "s1"
    assert [entry["base_position"] for entry in output["cycles"]] == [13, 16]
    first = output["cycles"][0]
    assert first["next_origin"] == "correction"
    assert first["drafter"] == "model"
    assert first["target"]["compute_s"] == pytest.approx(0.002)
    assert first["target"]["batch_size"] == 3
