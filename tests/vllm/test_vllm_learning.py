"""A head on vLLM that learns: what is kept of streams, versions that take over, and no token that changes."""

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from gammaray.learning.folder import LearningFolder
from gammaray.types import Proposal, SamplingParams
from services.engine.core.errors import EngineLostError
from services.vllm.loading import load_target
from tests.support import vllm_head_helpers as heads
from tests.support.head_helpers import bigram_head
from tests.support.learning_helpers import (
    begin,
    end,
    learning,
    new_head,
    publish,
    records,
    right_head,
    run_for,
    useless,
)
from tests.support.target_helpers import Run
from tests.support.vllm_helpers import prompt
from tests.support.workers.redis_helpers import wait_until
from tests.vllm.conftest import LIMITS

NUM_OUTPUTS = 96
"""Tokens that a head knows, of 97."""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return heads.wide_bigram(tmp_path_factory.mktemp("target") / "bigram")


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr("services.learning.versions.PERIOD_S", 0.02)
    monkeypatch.setattr("services.learning.versions.trainer_command", lambda *_: None)
    monkeypatch.setattr("services.learning.swapped_head.SPAN_S", 0.1)


def settings(target: Path, head: Path, folder: Path, **changes: Any) -> TargetSettings:
    given = {"engine": "vllm", "cache_budget_mb": 8, **changes}
    return TargetSettings(model=str(target), head=str(head), learn=str(folder), **given)


def on_vllm(target: Path, head: Path, folder: Path, **changes: Any) -> closing[Any]:
    """A scheduler of vLLM whose head learns in a folder."""
    _, scheduler = load_target(str(target), settings(target, head, folder, **changes), LIMITS)
    return closing(scheduler)


def serve(scheduler: Any, first: int, lengths: Sequence[int]) -> list[dict[int, tuple[int, ...]]]:
    """Serve blocks of the head, of gamma 0 and of others; return the head's proposals by position."""
    found = []
    for seed, length in enumerate(lengths, start=first):
        params = SamplingParams(temperature=1.0, seed=seed)
        run, drafts = Run(scheduler, prompt(length, seed), params, name=f"session {seed}"), {}
        while len(run.output) < 60:
            position, kind = len(run.tokens), len(run.tokens) % 5
            run.cycle(Shape(3 if kind < 3 else 0), Proposal((5, 6)) if kind == 3 else Proposal())
            if kind < 3:
                drafts[position] = run.proposals[-1]
        end(run)
        found.append(drafts)
    return found


def noisy(folder: Path, head: Path) -> Path:
    """Write a head with noise in all weights of another one."""
    shutil.copytree(head, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for key, one in weights.items():
        if key != "d2t":
            weights[key] = one + 0.2 * torch.randn(one.shape, generator=generator).to(one.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_kept_states_and_drafts_of_a_version_are_those_of_the_cpu_engine(ranks, tmp_path, monkeypatch):
    """States of prompts in one and in several chunks, and of text beside rejected proposals, to the end."""
    target = heads.random_target(tmp_path / "target")
    head = new_head(tmp_path / "head", target, NUM_OUTPUTS)
    version = noisy(tmp_path / "version", head)
    found, drafts = [], []
    for folder in (tmp_path / "vllm", tmp_path / "own"):
        with (
            on_vllm(target, head, folder, tensor_parallel=ranks)
            if folder.name == "vllm"
            else learning(folder, target, head, monkeypatch)
        ) as scheduler:
            serve(scheduler, 0, (150, 20, 3))
            wait_until(lambda folder=folder: len(records(folder)) == 3)
            found.append([np.load(path) for path in records(folder)])
            store = LearningFolder(folder).store("open")
            publish(store, version)
            store.promote(1)
            wait_until(lambda scheduler=scheduler: last_version(scheduler) == 1)
            drafts.append(serve(scheduler, 3, (50, 20, 3)))  # within the window of the CPU engine
    for one, other in zip(*found, strict=True):
        count = min(len(one["token_ids"]), len(other["token_ids"]))
        assert count > one["num_prompt"] + 50
        assert one["num_prompt"] == other["num_prompt"]
        assert (one["token_ids"][:count] == other["token_ids"][:count]).all()
        states, others = (torch.from_numpy(each["states"]).view(torch.bfloat16) for each in (one, other))
        assert len(states) == len(one["token_ids"]) - 1
        # Rounding in float32 may lead to the next number of bfloat16.
        torch.testing.assert_close(states[: count - 1], others[: count - 1], rtol=2**-7, atol=1e-4)
    for ours, theirs in zip(*drafts, strict=True):
        shared = [at for at in ours.keys() & theirs.keys() if ours[at] and theirs[at]]
        assert len(shared) > 10
        assert [ours[at] for at in shared] == [theirs[at] for at in shared]


def last_version(scheduler: Any) -> int:
    """Return which version drafts in a new session."""
    run = begin(scheduler, 500)
    run.cycle(Shape(2))
    task = run.block(Shape(2))
    run.ask(task)
    end(run, forgets=True)
    return task.proposal.version


@pytest.mark.nightly
def test_poisoned_and_damaged_versions_are_rolled_back_without_a_hand(tmp_path, target):
    right = right_head(tmp_path / "right", target, NUM_OUTPUTS)
    wrong = useless(tmp_path / "wrong", right, target)
    folder = LearningFolder(tmp_path / "learn")
    store = folder.store("open")
    with on_vllm(target, right, folder.path) as scheduler:
        plain = begin(scheduler, 1)
        expected = run_for(plain, 300, gamma=0)
        end(plain)
        run = begin(scheduler, 1)
        run_for(run, 60)
        assert len(run.proposals) < 20, "the head proposes, and is accepted"
        publish(store, wrong)
        wait_until(lambda: last_version(scheduler) == 1)
        while store.read().candidate is not None:
            assert len(run.output) < 290
            run.cycle(Shape(3))
            other = begin(scheduler, 700)
            run_for(other, 24)
            end(other, forgets=True)
        assert store.read().stable == 0
        assert "first tokens accepted" in store.read().versions[0].reason
        publish(store)  # an empty directory
        wait_until(lambda: store.read().candidate is None)
        publish(store, new_head(tmp_path / "narrow", target, 90))
        wait_until(lambda: store.read().candidate is None)
        assert [one.status for one in store.read().versions] == ["rolled back"] * 3
        wait_until(lambda: last_version(scheduler) == 0)
        num_cycles, num_tokens = len(run.proposals), len(run.output)
        run_for(run, 300)
        assert run.output[:300] == expected
        assert len(run.output) - num_tokens > 3 * (len(run.proposals) - num_cycles)
        with pytest.raises(EngineLostError, match="vLLM cannot load the head"):
            scheduler.engine.load_head(str(target))  # no head: what is published is checked before


@pytest.mark.nightly
def test_tenants_are_not_learnt_from(tmp_path, target):
    """Their sessions would draft with what was trained on another tenant's."""
    folder = LearningFolder(tmp_path / "learn")
    folder.consent("acme", "own")
    head = right_head(tmp_path / "right", target, NUM_OUTPUTS)
    with on_vllm(target, head, folder.path) as scheduler:
        for tenant in ("acme", "other", ""):
            run = begin(scheduler, 3, tenant)
            run_for(run, 30)
            end(run)
        wait_until(lambda: len(records(folder.path)) == 1)
    assert not list(folder.path.glob("tenant-*"))


def test_heads_that_cannot_learn_are_refused(tmp_path, target):
    foreign = bigram_head(tmp_path / "foreign", target)
    whole = right_head(tmp_path / "whole", target)
    for head, words in ((foreign, "no head of gammaray train"), (whole, "no reduced vocabulary")):
        with pytest.raises(InvalidArgumentError, match=rf"learn: .* {words}"):
            load_target(str(target), settings(target, head, tmp_path / "learn"), LIMITS)
