"""What outlives an owner: its advice to the next one, and the tokens as bytes."""

import re
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from gammaray.blocks import TokenLogprobs
from gammaray.errors import CancelledError, FailedPreconditionError, GammarayError, UnavailableError
from gammaray.maths.acceptance import SpeculationCounters
from gammaray.types import Proposal, TokenOrigin
from orchestrator.cycle.handover import SessionHandover
from orchestrator.storage.token_records import TokenRecords
from orchestrator.workers.verifier import TRIES, FencedVerifier

ORIGINS = [TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS]
SESSION = SimpleNamespace(session_id="s")
LOGPROBS = [
    TokenLogprobs(-0.25, ((5, -0.25), (6, -1.5))),
    TokenLogprobs(-2.0, ((1, -0.5),)),
    TokenLogprobs(0.0),
]


def test_heritage_there_and_back():
    counters, times = SpeculationCounters(), {"draft_s": 0.1, "verify_s": 0.2}
    counters.observe(gamma=4, tested=3, accepted=2, emitted=3, draft_worker="host:1", **times)
    handover = SessionHandover(counters, 1.5, "host:2", "host:1")
    again = SessionHandover.from_bytes(handover.to_bytes())
    assert vars(again.counters) == vars(handover.counters)
    assert (again.elapsed_s, again.target, again.draft) == (1.5, "host:2", "host:1")


@pytest.mark.parametrize(
    "data",
    [b"", b"no json", b"[]", b"{}", b'{"counters": {}, "elapsed_s": 0, "target": "", "draft": ""}'],
)
def test_heritage_that_makes_no_sense_is_none(data):
    assert vars(SessionHandover.from_bytes(data).counters) == vars(SpeculationCounters())


@pytest.mark.parametrize("num_top", [None, 0, 1, 2])
def test_records_there_and_back(num_top):
    records = TokenRecords(num_top)
    token_ids = [7, 0, 2**32 - 1]
    data = records.pack(token_ids, ORIGINS, () if num_top is None else LOGPROBS)
    assert len(data) == 3 * records.size
    expected = [None] * 3
    if num_top is not None:
        expected = [TokenLogprobs(entry.logprob, entry.top[:num_top]) for entry in LOGPROBS]
    assert records.unpack(data) == tuple(zip(token_ids, ORIGINS, expected, strict=True))
    assert records.unpack(data[:-1]) == records.unpack(data)[:2]  # a torn record


async def verified(times, error=None):
    """Return the verdict, how often a worker that drops the session at first was asked, and the renewals."""
    dropped = [CancelledError("session s was released")] * times
    verify, renew = AsyncMock(side_effect=[*dropped, "verdict"]), AsyncMock(side_effect=error)
    verifier = FencedVerifier(SimpleNamespace(verify=verify), renew)
    try:
        found = await verifier.verify(SESSION, Proposal())
    except GammarayError as failure:
        found = failure
    return found, verify.await_count, [given.args[0].session_id for given in renew.await_args_list]


@pytest.mark.parametrize("times", [1, 2, TRIES - 1])
async def test_fenced_verifier_goes_on_when_the_session_is_its_own(times):
    assert await verified(times) == ("verdict", times + 1, ["s"] * times)


async def test_fenced_verifier_never_takes_a_workers_word_for_a_cancellation():
    failure, num_calls, _ = await verified(1000)
    assert type(failure) is UnavailableError
    assert re.search(r"session s: workers dropped it .* was released", str(failure))
    assert num_calls == TRIES


@pytest.mark.parametrize(
    "error", [CancelledError("s was cancelled"), FailedPreconditionError("another owner")]
)
async def test_fenced_verifier_stops_when_it_is_not(error):
    assert await verified(1, error) == (error, 1, ["s"])
