"""The CPU engine's scheduler and masks that take long: as with any engine, and for trees and heads."""

import threading

import pytest

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.types import Proposal, SamplingParams
from services.engine.loader import load_engine
from services.own.head_loading import load_local_drafter
from services.own.target_scheduler import TargetScheduler
from services.scheduling.grammars import Grammars
from services.scheduling.masks import MAX_WAIT_S
from services.scheduling.planning import Limits
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA
from tests.support.late_masks import EOS, LateMasks, blocked, masked, steps_until
from tests.support.processing_helpers import GRAMMAR, save_small_tokenizer
from tests.support.target_helpers import Run

PROMPT = random_tokens(40, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3)
    return str(save_small_tokenizer(directory))


@pytest.fixture
def scheduler_of(model):
    """Make schedulers, and end their threads."""
    made = []

    def make(*, has_head=False):
        engine = load_engine(model)
        settings = TargetSettings(model=model, head=str(DATA / "llama"))
        head = load_local_drafter(settings, engine) if has_head else None
        grammars = Grammars(model, engine.vocab_size)
        made.append(TargetScheduler(engine, Limits(1024, 16), grammars, head=head, draft_ahead=False))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def scheduler(scheduler_of):
    return scheduler_of()


class TestCpuEngine(LateMasks):
    pass


def masked_run(scheduler, gate):
    """Return a session with a grammar, and the grammar."""
    params = SamplingParams(seed=1, grammar=GRAMMAR)
    return Run(scheduler, PROMPT, params, eos_token_ids=EOS), masked(scheduler, gate)[1]


def masked_block(run, state, shape=Shape(0), proposal=Proposal(), num_top=None):  # noqa: B008
    block = run.block(shape, proposal)
    block.grammar, block.num_prompt_logprobs = state, num_top
    return block


@pytest.mark.parametrize("num_top", [None, 3])
@pytest.mark.parametrize(
    "proposal", [Proposal((1, 2, 1)), Proposal((1, 2, 4, 2), parents=(-1, -1, 0, 2))], ids=["chain", "tree"]
)
def test_late_masks_change_no_verdict(scheduler_of, proposal, num_top):
    def verdicts(*, is_late):
        scheduler, gate = scheduler_of(), threading.Event()
        run, state = masked_run(scheduler, gate)
        found = []
        for shown in (proposal, Proposal(), proposal):
            gate.clear() if is_late else gate.set()
            scheduler.submit([masked_block(run, state, proposal=shown, num_top=None if found else num_top)])
            replies = blocked(scheduler)
            assert not (is_late and replies)
            gate.set()
            (reply,) = replies or steps_until(scheduler, len)
            found.append(reply.outcome)
            run.held = len(run.tokens)
            run.tokens += [shown.token_ids[node] for node in reply.outcome.accepted_path]
            run.tokens.append(reply.outcome.next_token_id)
        return found, scheduler.engine.tokens(run.name)[:]

    assert verdicts(is_late=True) == verdicts(is_late=False)


def test_late_masks_change_no_draft_of_a_head(scheduler_of):
    def proposals(*, is_late):
        scheduler, gate = scheduler_of(has_head=True), threading.Event()
        run, state = masked_run(scheduler, gate)
        for shape in (Shape(0), Shape(3), Shape(2, 5), Shape(3)):
            gate.clear() if is_late else gate.set()
            opened = threading.Timer(3 * MAX_WAIT_S, gate.set)
            opened.start()
            block = masked_block(run, state, shape)
            verdict = run.ask(block)
            opened.join()
            run.held = len(run.tokens)
            drafted = verdict.drafted or Proposal()
            run.proposals.append(drafted.token_ids)
            run.tokens += [drafted.token_ids[node] for node in verdict.accepted_path]
            run.tokens.append(verdict.next_token_id)
        return run.proposals, run.tokens

    assert proposals(is_late=True) == proposals(is_late=False)
