"""The cycle over fakes: all, none, some, empty; cuts at every index; drafters that fail or lie."""

import asyncio
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.blocks import Shape, Verdict
from gammaray.errors import InternalError, InvalidArgumentError, UnavailableError
from gammaray.types import (
    DrafterKind,
    FinishReason,
    Proposal,
    SparseDistribution,
    TokenOrigin,
    VerificationMethod,
)
from orchestrator.cycle.run import run_cycle
from orchestrator.drafting.head import TargetHead
from tests.support.cycle_helpers import (
    EOS,
    PROMPT,
    ConstantGamma,
    FunctionDrafter,
    ScriptedTarget,
    make_session,
    perfect_drafter,
    run_to_end,
)

ACCEPTED, CORRECTION, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS
TOKENS = tuple(range(3, 23))
END = 24
"""A stop token, whose text is shown."""


async def one_cycle(proposal, *, target=None, session=None):
    session = session or make_session()
    drafter = FunctionDrafter(lambda session, gamma: proposal)
    controller = ConstantGamma(4)
    cycle = await run_cycle(session, drafter, target or ScriptedTarget(TOKENS), controller)
    assert session.token_ids[len(PROMPT) :] == list(cycle.token_ids)
    assert controller.cycles == [cycle]
    return cycle


@pytest.mark.parametrize(
    ("proposed", "emitted", "origins", "tested"),
    [
        pytest.param((3, 4, 5, 6), (3, 4, 5, 6, 7), [ACCEPTED] * 4 + [BONUS], 4, id="all"),
        pytest.param((9, 4, 5, 6), (3,), [CORRECTION], 1, id="none"),
        pytest.param((3, 4, 9, 6), (3, 4, 5), [ACCEPTED] * 2 + [CORRECTION], 3, id="some"),
        pytest.param((), (3,), [BONUS], 0, id="empty"),
    ],
)
async def test_cycle_proposal_emits_accepted_and_one_more(proposed, emitted, origins, tested):
    cycle = await one_cycle(Proposal(proposed))
    assert cycle.token_ids == emitted
    assert list(cycle.origins) == origins
    assert cycle.num_tested == tested
    assert cycle.num_drafted == len(proposed)
    assert cycle.text == "".join(chr(ord("a") + t) for t in emitted)
    assert not cycle.draft_failed


def plain(tokens, max_tokens, stop):
    """Return the token ids, text and finish reason of plain decoding; the last token repeats."""
    token_ids, text = [], ""
    while True:
        token_ids.append(tokens[min(len(token_ids), len(tokens) - 1)])
        if token_ids[-1] == EOS:
            return token_ids, text, FinishReason.STOP
        text += chr(ord("a") + token_ids[-1])
        if found := [len(one) for one in stop if text.endswith(one)]:
            return token_ids, text[: -max(found)], FinishReason.STOP
        if token_ids[-1] == END:
            return token_ids, text, FinishReason.STOP
        if len(token_ids) == max_tokens:
            return token_ids, text, FinishReason.LENGTH


@given(
    st.lists(st.sampled_from([3, 4] * 6 + [END, EOS]), min_size=1, max_size=30),
    st.lists(st.text("de", min_size=1, max_size=4), max_size=3),
    *(st.integers(1, 25), st.integers(0, 6), st.randoms(use_true_random=False)),
)
def test_cycle_output_is_that_of_plain_decoding_whatever_is_drafted(tokens, stop, max_tokens, gamma, rng):
    session = make_session(max_tokens=max_tokens, stop=stop, stop_token_ids=[END])
    target = ScriptedTarget(tokens)

    def scatter(session, gamma):
        assert 0 < gamma < session.remaining, "the target's own token takes one place"
        if rng.random() < 0.1:
            raise UnavailableError("gone")
        length, right = rng.randrange(gamma + 2), rng.randrange(gamma + 2)
        drafted = [target.token_at(session.num_emitted + index) for index in range(length)]
        drafted[right:] = [rng.choice((3, 4, END, EOS)) for _ in drafted[right:]]
        is_tree = rng.random() < 0.3
        return Proposal(
            tuple(drafted), tuple(rng.randrange(-1, n) for n in range(length)) if is_tree else None
        )

    cycles = asyncio.run(run_to_end(session, FunctionDrafter(scatter), target, gamma))
    text = "".join(cycle.text for cycle in cycles)
    assert (session.token_ids[len(PROMPT) :], text, session.finish_reason) == plain(tokens, max_tokens, stop)
    assert [token for cycle in cycles for token in cycle.token_ids] == session.token_ids[len(PROMPT) :]
    for cycle in cycles:
        num_accepted = min(len(cycle.token_ids), cycle.num_accepted)
        assert [origin is ACCEPTED for origin in cycle.origins] == [
            index < num_accepted for index in range(len(cycle.token_ids))
        ]


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(FunctionDrafter(Mock(side_effect=UnavailableError("gone"))), id="gone"),
        pytest.param(FunctionDrafter(Mock(side_effect=InternalError("broken"))), id="broken"),
        pytest.param(FunctionDrafter(lambda s, gamma: Proposal(TOKENS[: gamma + 1])), id="too-long"),
        pytest.param(FunctionDrafter(lambda s, gamma: Proposal(TOKENS[:5], (-1, 0, 1, 2, 3))), id="too-deep"),
        pytest.param(FunctionDrafter(lambda s, gamma: Proposal(TOKENS[:9], (-1,) * 9)), id="too-wide"),
    ],
)
async def test_cycle_bad_drafter_costs_only_speed(drafter):
    session, target = make_session(max_tokens=6), ScriptedTarget(TOKENS)
    cycles = await run_to_end(session, drafter, target, 4)
    assert session.token_ids[len(PROMPT) :] == list(TOKENS[:6])
    bad = [c for c in cycles if c.draft_failed]
    assert bad
    assert all(c.num_drafted == 0 and c.origins == (BONUS,) for c in bad)
    assert all(len(p) <= 4 for p in target.proposals)


async def test_cycle_distributions_travel_only_where_they_are_needed():
    proposal = Proposal((3,), None, (SparseDistribution((3,), (16,), 4),))
    rejection, block, coupled = (VerificationMethod(name) for name in ("rejection", "block", "coupled"))
    needed = [(rejection, 1.0, True), (rejection, 0.0, False), (block, 1.0, True), (block, 0.0, False)]
    for method, temperature, wanted in [*needed, (coupled, 1.0, False)]:
        target = ScriptedTarget(TOKENS)
        session = make_session(method=method, temperature=temperature)
        await one_cycle(proposal, target=target, session=session)
        assert (target.proposals[0].draft_distributions is not None) is wanted
        cycle = await one_cycle(
            Proposal((3, 4)), session=make_session(method=method, temperature=temperature)
        )
        assert cycle.draft_failed is wanted, "without them it is not verified"
        assert cycle.token_ids == ((3,) if wanted else (3, 4, 5))


async def test_cycle_target_refuses_the_proposal_is_asked_again_without():
    def refuse(proposal):
        if len(proposal) > most:
            raise InvalidArgumentError("proposal", "this one", "another one")

    most, target = 0, ScriptedTarget(TOKENS, refuse)
    cycle = await one_cycle(Proposal((3, 4)), target=target)
    assert [len(p) for p in target.proposals] == [2, 0]
    assert (cycle.token_ids, cycle.origins, cycle.num_drafted) == ((3,), (BONUS,), 0)
    most = -1
    with pytest.raises(InvalidArgumentError, match="proposal"):
        await one_cycle(Proposal((3, 4)), target=target)


@pytest.mark.parametrize("path", [(1,), (0, 2), (2,), (-1,), (0, 0), (0, 1, 2)])
async def test_cycle_verdict_that_is_no_path_is_an_internal_error(path):
    liar = AsyncMock(**{"verify.return_value": Verdict(path, 7, BONUS, 1)})
    with pytest.raises(InternalError, match="no path"):
        await one_cycle(Proposal((3, 4)), target=liar)


@pytest.mark.parametrize("index", range(4))
async def test_cycle_logprobs_are_cut_with_their_tokens(index):
    tokens = [*TOKENS[:index], EOS, *TOKENS[index:]]
    target = ScriptedTarget(tokens)
    session = make_session(num_top_logprobs=0)
    (cycle,) = await run_to_end(session, perfect_drafter(target), target, 4)
    assert [entry.logprob for entry in cycle.logprobs] == [-float(i) for i in range(index + 1)]


async def test_cycle_missing_logprobs_are_an_internal_error():
    forgetful = AsyncMock(**{"verify.return_value": Verdict((), 3, BONUS, 0)})
    with pytest.raises(InternalError, match="log-probabilities"):
        await one_cycle(Proposal(), target=forgetful, session=make_session(num_top_logprobs=2))


class HeadedTarget(ScriptedTarget):
    """A target whose head drafts the same tokens in every cycle."""

    def __init__(self, tokens, drafted):
        super().__init__(tokens)
        self.drafted, self.asked = drafted, []

    async def verify(self, session, draft):
        self.asked.append(draft)
        verdict = await super().verify(session, self.drafted or Proposal())
        return replace(verdict, drafted=self.drafted)


async def headed_cycle(drafted, depth=3, nodes=0, **fields):
    target, controller = HeadedTarget(TOKENS, drafted), ConstantGamma(depth)
    controller.shape = Shape(depth, nodes, drafter=DrafterKind.HEAD)
    return await run_cycle(make_session(**fields), TargetHead(), target, controller), target


@pytest.mark.parametrize(
    ("drafted", "emitted", "kind"),
    [
        (Proposal((3, 4, 9)), (3, 4, 5), DrafterKind.HEAD),
        (Proposal((9, 3, 4), (-1, -1, 1)), (3, 4, 5), DrafterKind.HEAD),
        (Proposal(), (3,), DrafterKind.NONE),
        (None, (3,), DrafterKind.NONE),
    ],
)
async def test_cycle_of_a_head_is_one_call_to_the_target(drafted, emitted, kind):
    cycle, target = await headed_cycle(drafted, nodes=4)
    assert (cycle.token_ids, cycle.drafter) == (emitted, kind)
    assert cycle.num_drafted == len(drafted or ())
    assert [draft.shape.depth for draft in target.asked] == [3]
    assert not cycle.draft_failed
    assert cycle.gamma == 3


@pytest.mark.parametrize("drafted", [Proposal((3, 4, 5, 6)), Proposal((3, 9, 8, 7, 6), (-1,) * 5)])
async def test_cycle_head_that_drafts_more_than_it_was_asked_for_is_an_internal_error(drafted):
    with pytest.raises(InternalError, match="asked for"):
        await headed_cycle(drafted, nodes=4)


async def test_cycle_of_a_head_never_drafts_past_the_end():
    _, target = await headed_cycle(None, depth=4, max_tokens=3)
    assert [draft.shape.depth for draft in target.asked] == [2]
