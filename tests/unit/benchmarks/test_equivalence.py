"""Comparison of completions: equal, tied within transformers' own noise, different; and chat prompts."""

import pytest

from benchmarks.baselines import Gaps
from benchmarks.equivalence import Made, chat_prompts, count
from benchmarks.prompts import CATEGORIES, load_tasks
from orchestrator.text.tokenizer import Tokenizer
from services.demo_pair import TARGET_DIR

EXPECTED = Made((5, 6, 7, 8))
GAPS = Gaps((2.0, 1.0, 1e-6, 3.0), (1, 2, 9, 4), noise=1e-5)


def test_runner_up_within_the_noise_is_a_tie_and_the_rest_is_not_compared():
    found = count("c", [Made((5, 6, 9, 1))], [EXPECTED], [GAPS], GAPS.noise)
    assert found["tied"] == [{"prompt": 0, "token": 2, "ours": 9, "theirs": 7, "gap": 1e-6, "runner_up": 9}]
    assert (found["equal"], found["different"], found["tokens"]) == (0, [], 2)


@pytest.mark.parametrize(
    ("tokens", "place"),
    [
        pytest.param((5, 6, 3, 8), 2, id="neither of the two largest"),
        pytest.param((5, 2, 7, 8), 1, id="the second one, clearly below the first"),
        pytest.param((5, 6), 2, id="too short, though the next token would be a tie"),
        pytest.param((5, 6, 7, 8, 9), 4, id="too long"),
    ],
)
def test_other_differences_are_no_ties(tokens, place):
    found = count("c", [Made(tokens)], [EXPECTED], [GAPS], GAPS.noise)
    assert (found["equal"], found["tied"]) == (0, [])
    assert [(one["prompt"], one["token"]) for one in found["different"]] == [(0, place)]


def test_within_gammaray_nothing_is_a_tie():
    found = count("c", [Made((5, 6, 9, 8))], [EXPECTED])
    assert found["different"] == [{"prompt": 0, "token": 2}]


def test_chat_prompts_are_the_templates_as_transformers_renders_it():
    made, compared = chat_prompts(str(TARGET_DIR), CATEGORIES[:2], 2)
    assert (compared["completions"], compared["equal"]) == (4, 4)
    tokenizer = Tokenizer(str(TARGET_DIR))
    assert tokenizer.decode(made[0]) == tokenizer.render_chat(load_tasks(CATEGORIES[:1], 1)[0].messages)
