"""The table of drafters: what is asked, and a draft measured in it."""

import io

import pytest
from rich.console import Console

from benchmarks.drafters.compare import compare, split_draft, texts_for
from gammaray.errors import InvalidArgumentError
from gammaray.qualify.measured import QualifyTask
from services.demo_pair import TARGET_DIR


def test_weights_stand_behind_the_draft():
    assert split_draft("a/b@int8") == ("a/b", "int8")
    assert split_draft("early-exit:4") == ("early-exit:4", "auto")
    with pytest.raises(InvalidArgumentError, match="int4"):
        split_draft("demo@int3")


def test_demo_target_continues_code_and_others_chat():
    assert len(texts_for("demo", 3)) == 3
    chats = texts_for(str(TARGET_DIR), 1)
    assert len(chats) == 7
    assert len(set(chats)) == 7


@pytest.mark.slow
def test_drafts_of_other_weights_are_smaller_and_lossless():
    task = QualifyTask(
        target="demo",
        drafts=(),
        prompts=("def read(",),
        max_tokens=12,
        gammas=(2,),
        temperatures=(0.0,),
        threads=1,
    )
    console = Console(file=io.StringIO())
    whole, quantised = compare(["demo", "demo@int8"], task, console)
    assert quantised["weight_mb"] < 0.7 * whole["weight_mb"]
    for line in (whole, quantised):
        assert line["equal"][0]["compared"] == line["equal"][0]["equal"] + line["equal"][0]["ties"] == 1
        (payoff,) = line["payoffs"]
        assert payoff["gamma"] == 2
        assert 1 <= payoff["tokens_per_cycle"] <= 3
        assert len(payoff["alpha_by_position"]) <= 2
