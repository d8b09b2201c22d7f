"""The cycle over fakes: all, none, some, empty; cuts at every index; drafters that fail or lie."""

import random
from dataclasses import replace

import pytest

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


async def one_cycle(proposal, *, gamma=4, target=None, session=None):
    session = session or make_session()
    drafter = FunctionDrafter(lambda session, gamma: proposal)
    controller = ConstantGamma(gamma)
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


async def test_cycle_tree_proposal_follows_the_accepted_path():
    # Roots 9 and 3; under 3 the nodes 8 and 4; under 4 node 5.
    cycle = await one_cycle(Proposal((9, 3, 8, 4, 5), (-1, -1, 1, 1, 3)))
    assert cycle.token_ids == (3, 4, 5, 6)
    assert cycle.origins == (ACCEPTED, ACCEPTED, ACCEPTED, BONUS)


async def test_cycle_gamma_zero_never_asks_the_drafter():
    target, drafter, session = ScriptedTarget(TOKENS), FunctionDrafter(None), make_session(max_tokens=5)
    cycles = await run_to_end(session, drafter, target, 0)
    assert drafter.gammas == []
    assert [c.token_ids for c in cycles] == [(t,) for t in TOKENS[:5]]
    assert all(c.origins == (BONUS,) for c in cycles)
    assert all(len(p) == 0 for p in target.proposals)


@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
@pytest.mark.parametrize("max_tokens", range(1, 9))
async def test_cycle_max_tokens_is_met_exactly_and_never_drafted_past(gamma, max_tokens):
    target = ScriptedTarget(TOKENS)
    drafter, session = perfect_drafter(target), make_session(max_tokens=max_tokens)
    cycles = await run_to_end(session, drafter, target, gamma)
    assert session.token_ids[len(PROMPT) :] == list(TOKENS[:max_tokens])
    assert session.finish_reason is FinishReason.LENGTH
    assert sum(len(c.token_ids) for c in cycles) == max_tokens
    # The target's own token takes one place, so no proposal reaches past the end.
    assert all(len(c.token_ids) == c.gamma + 1 for c in cycles)


@pytest.mark.parametrize("kind", ["eos", "stop token"])
@pytest.mark.parametrize("index", range(6))
async def test_cycle_end_token_at_each_index_of_the_block_cuts_there(kind, index):
    end = EOS if kind == "eos" else 24
    tokens = [*TOKENS[:index], end, *TOKENS[index:]]
    target = ScriptedTarget(tokens)
    session = make_session(stop_token_ids=[24])
    cycles = await run_to_end(session, perfect_drafter(target), target, 5)
    assert session.token_ids[len(PROMPT) :] == tokens[: index + 1]
    assert session.finish_reason is FinishReason.STOP
    assert len(cycles) == 1
    assert cycles[0].origins == (*[ACCEPTED] * min(index + 1, 5), *([BONUS] if index == 5 else []))
    text = "".join(chr(ord("a") + t) for t in TOKENS[:index])
    assert cycles[0].text == (text if kind == "eos" else text + "y")


@pytest.mark.parametrize("index", range(6))
async def test_cycle_stop_string_completed_at_each_index_cuts_text_before_and_tokens_behind(index):
    # The stop string takes two tokens, the second of which stands at `index`.
    first = max(index - 1, 0)
    tokens = [*TOKENS[:first], 23, 24, *TOKENS]
    target, session = ScriptedTarget(tokens), make_session(stop=["xy"])
    cycles = await run_to_end(session, perfect_drafter(target), target, 5)
    assert session.token_ids[len(PROMPT) :] == tokens[: first + 2]
    assert "".join(c.text for c in cycles) == "".join(chr(ord("a") + t) for t in tokens[:first])
    assert session.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("gamma", range(5))
async def test_cycle_stop_string_across_blocks_never_leaks_its_start(gamma):
    tokens = [3, 23, 23, 24, 5, 23, 24, 25]
    target, session = ScriptedTarget(tokens), make_session(stop=["xyz", "xyf", "xxyfx"], eos=[])
    cycles = await run_to_end(session, perfect_drafter(target), target, gamma)
    assert "".join(c.text for c in cycles) == "dx"
    assert session.token_ids[len(PROMPT) :] == [3, 23, 23, 24, 5]


async def test_cycle_held_back_text_is_released_when_no_stop_string_comes():
    target = ScriptedTarget([3, 23, 24])
    session = make_session(stop=["xyz"], max_tokens=3)
    cycles = await run_to_end(session, perfect_drafter(target), target, 0)
    assert [c.text for c in cycles] == ["d", "", "xy"]


def failing(error):
    def propose(session, gamma):
        raise error

    return FunctionDrafter(propose)


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(failing(UnavailableError("gone")), id="gone"),
        pytest.param(failing(InternalError("broken")), id="broken"),
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
    class Liar:
        async def verify(self, session, draft):
            return Verdict(path, 7, BONUS, 1)

    with pytest.raises(InternalError, match="no path"):
        await one_cycle(Proposal((3, 4)), target=Liar())


@pytest.mark.parametrize("index", range(4))
async def test_cycle_logprobs_are_cut_with_their_tokens(index):
    tokens = [*TOKENS[:index], EOS, *TOKENS[index:]]
    target = ScriptedTarget(tokens)
    session = make_session(num_top_logprobs=0)
    (cycle,) = await run_to_end(session, perfect_drafter(target), target, 4)
    assert [entry.logprob for entry in cycle.logprobs] == [-float(i) for i in range(index + 1)]


async def test_cycle_missing_logprobs_are_an_internal_error():
    class Forgetful(ScriptedTarget):
        async def verify(self, session, draft):
            return Verdict((), 3, BONUS, 0)

    with pytest.raises(InternalError, match="log-probabilities"):
        await one_cycle(Proposal(), target=Forgetful(TOKENS), session=make_session(num_top_logprobs=2))


async def test_cycle_output_does_not_depend_on_the_drafter():
    rng = random.Random(7)
    tokens = [rng.randrange(4) for _ in range(60)]
    plain = make_session(max_tokens=60, stop=["abab", "cc"])
    plain_cycles = await run_to_end(plain, FunctionDrafter(None), ScriptedTarget(tokens), 0)

    def scatter(session, gamma):
        length = rng.randrange(gamma + 2)
        if rng.random() < 0.1:
            raise UnavailableError("gone")
        parents = tuple(rng.randrange(-1, node) for node in range(length)) if rng.random() < 0.5 else None
        return Proposal(tuple(rng.randrange(4) for _ in range(length)), parents)

    for _ in range(30):
        session = make_session(max_tokens=60, stop=["abab", "cc"])
        cycles = await run_to_end(session, FunctionDrafter(scatter), ScriptedTarget(tokens), 5)
        assert session.token_ids == plain.token_ids
        assert session.finish_reason == plain.finish_reason
        assert "".join(c.text for c in cycles) == "".join(c.text for c in plain_cycles)
        assert len(session.token_ids) - len(PROMPT) == sum(len(c.token_ids) for c in cycles)


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
    class Heads(ConstantGamma):
        def next_shape(self):
            return Shape(depth, nodes, drafter=DrafterKind.HEAD)

    target, session = HeadedTarget(TOKENS, drafted), make_session(**fields)
    return await run_cycle(session, TargetHead(), target, Heads(depth)), target


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
