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
from tests.support.late_masks import EOS, LateMasks, masked, steps_until
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


def served(scheduler, cycles, *, is_late):
    """Return the verdicts on cycles of a session with a grammar, and the tokens of its cache."""
    gate, found = threading.Event(), []
    run = Run(scheduler, PROMPT, SamplingParams(seed=1, grammar=GRAMMAR), eos_token_ids=EOS)
    grammar = masked(scheduler, gate)[1]
    for shape, proposal in cycles:
        gate.clear() if is_late else gate.set()
        opened = threading.Timer(3 * MAX_WAIT_S, gate.set)  # a head waits for the masks of its draft
        opened.start()
        block = run.block(shape, proposal)
        block.grammar, block.num_prompt_logprobs = grammar, None if found else 3
        scheduler.submit([block])
        (reply,) = steps_until(scheduler, len)
        opened.join()
        found.append(run.take(block, reply))
    return found, scheduler.engine.tokens(run.name)[:]


TREE = Proposal((1, 2, 4, 2), parents=(-1, -1, 0, 2))
CYCLES = {
    "tree": [(Shape(0), TREE), (Shape(0), Proposal()), (Shape(0), TREE)],
    "head": [(shape, Proposal()) for shape in (Shape(0), Shape(3), Shape(2, 5), Shape(3))],
}


@pytest.mark.parametrize("kind", CYCLES)
def test_late_masks_change_no_verdict_of_a_tree_and_no_draft_of_a_head(scheduler_of, kind):
    late, soon = (
        served(scheduler_of(has_head=kind == "head"), CYCLES[kind], is_late=is_late)
        for is_late in (True, False)
    )
    assert late == soon
