"""The orchestrator relays features to a head on a draft worker: failovers, cycles of others, nonsense."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gammaray.blocks import Shape
from gammaray.types import DrafterKind, Proposal, SamplingParams, VerificationMethod
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle
from orchestrator.workers.drafter import LONG_CONTEXT, Readiness, RemoteDrafter
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import RemoteVerifier
from services.target import worker as target_worker
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, bigram_head, bigram_target
from tests.support.workers.fleet_helpers import ListRegistry
from tests.support.workers.scripted_workers import NoText, Steady, make_session, scripted, until_so
from tests.support.workers.workers_helpers import running

pytestmark = [pytest.mark.integration, pytest.mark.slow]

VOCAB, COUNT = 97, 60
PROMPT = tuple(random_tokens(20, seed=3))
_numbers = itertools.count()


class Ready:
    """Chooses gamma 4 when the drafter is ready, as the real controllers do."""

    def __init__(self, session: Session, drafter: RemoteDrafter) -> None:
        self._session, self._drafter = session, drafter

    def next_shape(self) -> Shape:
        is_ready = self._drafter.prepare(self._session) is Readiness.READY
        return Shape(4 if is_ready else 0, drafter=DrafterKind.MODEL)

    def observe(self, cycle: Cycle) -> None:
        pass


@dataclass
class Run:
    """A session with its clients."""

    session: Session
    drafter: RemoteDrafter
    verifier: RemoteVerifier

    async def cycle(self, proposes: Any = None) -> Cycle:
        controller = Ready(self.session, self.drafter)
        return await run_cycle(self.session, proposes or self.drafter, self.verifier, controller)

    async def finish(self) -> list[Cycle]:
        cycles = []
        while self.session.finish_reason is None:
            cycles.append(await self.cycle())
            if len(cycles) > 1:  # the worker may be reading
                await until_so(self._is_read, 2.0)
        return cycles

    async def _is_read(self) -> bool:
        return self.session.features.count < LONG_CONTEXT

    @property
    def tokens(self) -> list[int]:
        return self.session.token_ids[len(self.session.prompt) :]


def begin(fleet, temperature=0.0, prompt=PROMPT, count=COUNT, name=None, **options) -> Run:
    params = SamplingParams(temperature=temperature, seed=5)
    name = name or f"s{next(_numbers)}"
    method = VerificationMethod.COUPLED
    session = Session(name, tuple(prompt), params, method, count, NoText(), **{"epoch": 1, **options})
    spec = session_spec(session, frozenset(), shares_caches=True)
    drafter = RemoteDrafter(fleet.drafts, spec, timeout_s=30.0, prefill_timeout_s=30.0, vocab_size=VOCAB)
    return Run(session, drafter, RemoteVerifier(fleet.targets, spec, timeout_s=30.0, wait_s=30.0))


async def plain(fleet, temperature=0.0, prompt=PROMPT, count=COUNT) -> list[int]:
    one = begin(fleet, temperature, prompt, count)
    while one.session.finish_reason is None:
        await run_cycle(one.session, one.drafter, one.verifier, Steady(0))
    return one.tokens


@asynccontextmanager
async def fleet_of(targets, drafts):
    fleet = Fleet(
        ListRegistry(),
        VOCAB,
        target_addresses=",".join(link.address for link, _ in targets),
        draft_addresses=",".join(link.address for link, _ in drafts),
    )
    await fleet.start(30.0)
    try:
        yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def cluster(target, head, **settings):
    """Two target workers, two draft workers with the head, and an orchestrator's fleet."""
    verifies = {"features": str(head), "deterministic": True, **settings}
    drafts = {"target_model": str(target)}
    async with (
        running("target", target, **verifies) as first,
        running("target", target, **verifies) as second,
        running("draft", head, **drafts) as third,
        running("draft", head, **drafts) as fourth,
        fleet_of([first, second], [third, fourth]) as fleet,
    ):
        workers = {link.address: worker for link, worker in (first, second, third, fourth)}
        yield fleet, workers


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3), DATA / "llama"


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory):
    """A target, and a head that predicts it exactly, from any features."""
    folder = tmp_path_factory.mktemp("bigrams")
    target = bigram_target(folder / "target")
    return target, bigram_head(folder / "head", target)


async def test_head_drafts_in_every_cycle_but_the_first(bigrams):
    async with cluster(*bigrams) as (fleet, _):
        one = begin(fleet)
        cycles = await one.finish()
        assert one.tokens == await plain(fleet)
        assert [cycle.num_drafted for cycle in cycles[:-1]] == [0, *[4] * (len(cycles) - 2)]
        assert all(cycle.num_accepted == 4 for cycle in cycles[1:-1])
        width = 32
        assert [cycle.features_received for cycle in cycles[:3]] == [20 * (width + 4), *[5 * (width + 4)] * 2]
        assert [cycle.features_sent for cycle in cycles[:3]] == [0, 20 * (width + 4), 5 * (width + 4)]
        assert not any(cycle.draft_failed for cycle in cycles)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("role", ["draft", "target"])
async def test_tokens_stay_the_same_through_the_death_of_a_worker(random_pair, temperature, role):
    async with cluster(*random_pair) as (fleet, workers):
        one, cycles = begin(fleet, temperature), []
        for number in itertools.count():
            if one.session.finish_reason is not None:
                break
            if number == 5:
                address = (one.drafter if role == "draft" else one.verifier).address
                await workers[address].stop()
                assert await until_so(lambda address=address: _is_down(fleet, address))
            cycles.append(await one.cycle())
        drafted = [cycle.num_drafted for cycle in cycles]
        assert one.tokens == await plain(fleet, temperature)
        assert sum(drafted) > 3 * len(drafted)
        # The new worker's head starts with the features that came since; nothing is computed again.
        assert drafted[5] == 4
        assert 0 < cycles[5].features_sent <= 5 * (32 + 4)
        assert 0 < cycles[5].features_received <= 5 * (32 + 4)


async def _is_down(fleet, address):
    links = {**fleet.targets.links, **fleet.drafts.links}
    return not links[address].is_up


async def test_features_travel_while_others_propose(bigrams):
    class Others:
        async def propose(self, session, shape):
            return Proposal((5, 6), drafter=DrafterKind.NGRAM)

    async with cluster(*bigrams) as (fleet, _):
        one = begin(fleet)
        for _ in range(9):
            cycle = await one.cycle(Others())
            assert cycle.features_sent == 0
        waiting = one.session.features.waiting()
        assert (waiting.start, waiting.end) == (0, one.session.num_committed - 1)
        cycle = await one.cycle()
        assert (cycle.num_drafted, cycle.num_accepted) == (4, 4)
        assert one.session.features.count == 5
        await one.finish()
        assert one.tokens == await plain(fleet)


async def test_long_prompt_is_read_in_the_background(bigrams):
    prompt = random_tokens(180, seed=9)
    async with cluster(*bigrams, feature_window=100) as (fleet, _):
        one = begin(fleet, prompt=prompt, count=40)
        cycles = await one.finish()
        assert [cycle.num_drafted for cycle in cycles[:4]] == [0, 0, 4, 4]
        assert cycles[0].features_received == 100 * 36
        assert one.tokens == await plain(fleet, prompt=prompt, count=40)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_continued_turn_and_takeover_draft_from_what_is_computed(random_pair, temperature):
    async with cluster(*random_pair) as (fleet, _):
        first = begin(fleet, temperature, count=20, name="kept")
        await first.finish()
        first.drafter.leave(first.session)
        first.verifier.leave(first.session)
        prompt = (*first.session.token_ids, 7, 8, 9)
        second = begin(fleet, temperature, prompt, 30, name="kept", turn=1, epoch=2)
        second.drafter.prefer(second.session, first.drafter.address)
        second.verifier.prefer(second.session, first.verifier.address)
        cycles = await second.finish()
        assert second.tokens == await plain(fleet, temperature, prompt, 30)
        assert cycles[0].features_received < 6 * 36, "the prompt's positions are cached"
        assert sum(cycle.num_drafted for cycle in cycles[1:]) > 2 * len(cycles)
        third = begin(fleet, temperature, prompt, 30, name="kept", turn=1, epoch=3)
        third.session.commit(second.tokens[:12])  # another owner
        third.drafter.prefer(third.session, second.drafter.address)
        cycles = await third.finish()
        assert third.tokens == second.tokens
        assert sum(cycle.num_drafted for cycle in cycles[1:]) > 0


@contextmanager
def spoiled(monkeypatch, change):
    """Have target workers send other features."""
    made = target_worker.features_to_proto

    def spoil(features):
        message = made(features)
        change(message)
        return message

    with monkeypatch.context() as patched:
        patched.setattr(target_worker, "features_to_proto", spoil)
        yield


def _set(**fields):
    def change(message):
        for name, value in fields.items():
            setattr(message, name, value(message))

    return change


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_set(start=lambda m: m.start + 1), id="next position"),
        pytest.param(_set(start=lambda m: max(0, m.start - 1)), id="previous position"),
        pytest.param(_set(width=lambda m: m.width + 1), id="wider"),
        pytest.param(_set(width=lambda m: 0, data=lambda m: b""), id="no values"),
        pytest.param(_set(count=lambda m: 2**32 - 1), id="too many"),
        pytest.param(_set(count=lambda m: 0), id="none"),
        pytest.param(_set(scales=lambda m: m.scales[:-1]), id="short"),
        pytest.param(_set(data=lambda m: b"\x7f" * len(m.data)), id="not a number"),
        pytest.param(_set(scales=lambda m: b"\xff" * len(m.scales)), id="no scale"),
        pytest.param(
            _set(width=lambda m: m.width // 2, data=lambda m: m.data[: len(m.data) // 2]), id="narrower"
        ),
        pytest.param(_set(data=lambda m: m.data[::-1]), id="of other positions"),
    ],
)
async def test_nonsense_from_a_target_harms_no_token(random_pair, monkeypatch, change, temperature):
    async with cluster(*random_pair) as (fleet, _):
        expected = await plain(fleet, temperature)
        with spoiled(monkeypatch, change):
            one = begin(fleet, temperature)
            for _ in range(6):
                await one.cycle()
            assert one.session.features.count < 20 + 6 * 5
        cycles = await one.finish()
        assert one.tokens == expected
        assert len(cycles) < COUNT


async def test_draft_worker_with_another_head_is_refused(random_pair, bigrams):
    target, head = random_pair
    other = bigrams[1]
    async with (
        running("target", target, features=str(head)) as verifier,
        running("draft", DATA / "qwen3", target_model=str(target)) as drafter,
        fleet_of([verifier], [drafter]) as fleet,
    ):
        assert other != head
        assert await until_so(lambda: _refused(fleet))
        (refusal,) = fleet.drafts.refusals()
        assert "no target worker makes features for the head" in str(refusal)
        one = begin(fleet)
        await one.finish()
        assert one.tokens == await plain(fleet)


async def _refused(fleet):
    return fleet.drafts.refusals()


async def test_targets_without_features_leave_the_head_out(random_pair):
    target, head = random_pair
    async with (
        running("target", target) as verifier,
        running("draft", head, target_model=str(target)) as drafter,
        fleet_of([verifier], [drafter]) as fleet,
    ):
        one = begin(fleet)
        cycles = await one.finish()
        assert one.tokens == await plain(fleet)
        assert len(cycles) == COUNT


async def test_draft_models_get_no_features(random_pair):
    target, head = random_pair
    async with (
        running("target", target, features=str(head)) as verifier,
        running("draft", target) as drafter,
        fleet_of([verifier], [drafter]) as fleet,
    ):
        one = begin(fleet)
        cycles = await one.finish()
        assert sum(cycle.features_received + cycle.features_sent for cycle in cycles) == 0
        assert cycles[0].num_drafted == 4


async def test_target_that_was_not_asked_is_not_listened_to():
    async with scripted("target", "draft") as (target, draft):

        def answer(block):
            result = target.work(block)
            result.features.start, result.features.count = block.base_position - 1, 1
            return result

        target.on_block = answer
        fleet = Fleet(ListRegistry(), 50, target_addresses=target.address, draft_addresses=draft.address)
        await fleet.start(30.0)
        session = make_session()
        spec = session_spec(session, frozenset(), shares_caches=True)
        drafter = RemoteDrafter(fleet.drafts, spec, timeout_s=30.0, prefill_timeout_s=30.0, vocab_size=50)
        verifier = RemoteVerifier(fleet.targets, spec, timeout_s=30.0, wait_s=30.0)
        while session.finish_reason is None:
            await run_cycle(session, drafter, verifier, Steady(3))
        assert session.features.num_received == 0
        assert not any(block.HasField("features_from") for block in target.blocks)
        await fleet.close()
