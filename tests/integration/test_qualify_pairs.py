"""`gammaray qualify` with real models: the demo pair, pairs that cannot be served, and planted losses."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gammaray
from gammaray.config import DraftSettings, TargetSettings
from gammaray.errors import InvalidArgumentError
from gammaray.qualify.judgement import Fitness, judge
from gammaray.qualify.measured import PairFacts, QualifyTask
from services.demo_pair import TARGET_DIR
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine
from services.qualify.loop import Ask, Pair, draft_scheduler, target_scheduler
from services.qualify.measure import is_tie, make_asks, measure
from services.qualify.models import encode, find, load, load_local
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import bigram_head, bigram_target
from tests.support.vocabulary_helpers import byte_fallback

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(gammaray.__file__).parents[1]
TIMEOUT_S = 250
SMALL = ("--num-prompts", "2", "--tokens", "24", "--gammas", "1,3")


def qualify(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gammaray", "qualify", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=TIMEOUT_S,
    )


def with_demo_tokenizer(directory):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, directory / name)
    return directory


def test_demo_pair_is_served_lossless_and_measured(tmp_path):
    # What it gains on this machine at this moment is not what is tested: any gain will do.
    done = qualify(
        *("--target", "demo", "--draft", "demo", "--min-speedup", "0.01"),
        *(*SMALL, "--json", tmp_path / "r.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "4 of 4 completions have the tokens of plain decoding" in done.stdout
    assert "\nFIT\n" in done.stdout
    for step in ("inspecting the models", "loading the draft demo", "measuring demo: temperature 0: "):
        assert f"\n{step}" in f"\n{done.stderr}"
    (candidate,) = json.loads((tmp_path / "r.json").read_text())["candidates"]
    measured = candidate["measured"]
    assert (measured["target"]["vocab_size"], measured["draft"]["vocab_size"]) == (2048, 2048)
    assert [(one["temperature"], one["equal"]) for one in measured["equality"]] == [(0.0, 4), (1.0, 4)]
    for payoff in candidate["payoffs"]:
        assert 0 < payoff["alpha"] < 1
        assert 0 < payoff["draft_step_ms"] < payoff["plain_ms"]
        assert [depth["gamma"] for depth in payoff["depths"]] == [1, 3]


def test_candidates_that_cannot_be_served_are_unfit_with_the_reason(tmp_path):
    wrong = tiny_model("llama", tmp_path)
    odd = tiny_model("mamba", tmp_path, vocab_size=2048)
    tokenizer = byte_fallback(["αβγ"], num_bytes=0)
    strange = tiny_model("gemma2", tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(strange)
    done = qualify("--target", "demo", "--draft", wrong, "--draft", odd, "--draft", strange, *SMALL)
    assert done.returncode == 5, done.stderr
    assert "2048 token ids of the target, 97 of the draft" in done.stdout
    assert "the draft cannot be served" in done.stdout
    assert "linear_attention" in done.stdout
    assert "shares no token with the draft's" in done.stdout
    assert done.stdout.count("UNFIT") == 6  # one each, and all in the ranking


def test_target_that_cannot_be_served_is_unfit(tmp_path):
    bloom = with_demo_tokenizer(tiny_model("bloom", tmp_path, vocab_size=2048))
    bare = tiny_model("llama", tmp_path, vocab_size=2048)
    targets = (load(found("target", bloom)).facts, found("target", bare).facts)
    for target, reason in zip(targets, ("the target cannot be served", "it has no tokenizer"), strict=True):
        judgement = judge(PairFacts(target=target, draft=found("draft", "demo").facts))
        assert judgement.fitness is Fitness.UNFIT
        assert reason in judgement.reasons[0]


def test_random_drafts_are_slower_with_the_same_and_with_a_mapped_vocabulary(tmp_path):
    draft = with_demo_tokenizer(tiny_model("llama", tmp_path, vocab_size=2048))
    mapped = tmp_path / "mapped"
    shutil.copytree(draft, mapped)
    text = json.loads((mapped / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (mapped / "tokenizer.json").write_text(json.dumps(text))
    done = qualify("--target", "demo", "--draft", draft, "--draft", mapped, *SMALL, "--rtt-ms", "20")
    assert done.returncode == 4, done.stderr
    assert "does not pay" in done.stdout
    assert done.stdout.count("FIT BUT SLOWER") == 4  # one each, and both in the ranking
    assert done.stdout.count("the draft's context is 128 tokens, the target's 2048") == 2
    equal = "4 of 4 completions have the tokens of plain decoding"
    assert done.stdout.count(equal) == 4  # each at two temperatures
    assert "the draft has 2048 of the target's tokens, 100% of those of the prompts" in done.stdout


def test_missing_model_or_head_is_an_argument_error(tmp_path, models):
    absent = tmp_path / "nothing"
    for role in ("target", "draft"):
        with pytest.raises(InvalidArgumentError, match=f"{role}: got .*which does not exist"):
            found(role, absent)
    with pytest.raises(InvalidArgumentError, match=r"head: got .*which does not exist"):
        load_local(str(absent), find("target", "demo", task()), models[0])


def found(role, model):
    """The model as the measuring process finds it, before any weight is read."""
    return find(role, str(model), task())


def task(**changed):
    known = {"target": "t", "drafts": ("d",), "prompts": ("p",), "max_tokens": 16, "gammas": (2,)}
    return QualifyTask(**known | {"temperatures": (0.0, 1.0)} | changed)


def test_settings_of_the_environment_are_those_of_workers(monkeypatch):
    monkeypatch.setenv("GAMMARAY_THREADS", "2")
    assert find("target", "demo", task()).settings.threads == 2
    assert find("draft", "demo", task(draft_weights="int8")).settings.draft_weights == "int8"
    monkeypatch.setenv("GAMMARAY_THREADS", "0")
    with pytest.raises(InvalidArgumentError, match="threads: got 0"):
        find("target", "demo", task())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("qualify")
    target = load_engine(str(tiny_model("llama", path, seed=0)))
    return target, load_engine(str(tiny_model("llama", path, seed=1)))


@pytest.fixture
def schedulers(models):
    target, draft = models
    return target_scheduler(target, TargetSettings()), draft_scheduler(draft, DraftSettings())


BLOCK_BYTES = 64 * 3 * 4 * 8 * 4
"""Of a tiny model: slots x layers x key and value heads x head size x bytes of a float32."""
PROMPTS = [random_tokens(9, seed=1), random_tokens(30, seed=2)]


def measured(pair, **changed):
    return measure(pair, make_asks(task(**changed), PROMPTS, (), 128), task(**changed), lambda told: None)


def test_any_draft_is_lossless(schedulers):
    asks = make_asks(task(), PROMPTS, (), 128)
    told = []
    runs, equality, decisions = measure(Pair(*schedulers), asks, task(gammas=(1, 4)), told.append)
    assert decisions == ()
    assert told[0] == "temperature 0: 8 of up to 32 tokens per gamma"
    assert [(one.compared, one.equal, one.tokens) for one in equality] == [(4, 4, 64), (4, 4, 64)]
    assert [(run.temperature, run.gamma) for run in runs] == [
        (temperature, gamma) for temperature in (0.0, 1.0) for gamma in (0, 1, 4)
    ]
    for run in runs:
        assert run.emitted >= 2 * 16
        assert len(run.tested) == len(run.accepted) == run.gamma
        assert all(a <= t for a, t in zip(run.accepted, run.tested, strict=True))
        # Everything but the target's own token of each cycle was accepted.
        assert run.emitted == run.cycles + sum(run.accepted)
    assert schedulers[0].engine.stats().num_sessions == 0  # and nothing is left


class Lossy(Pair):
    """Commits a wrong sixth token when it speculates."""

    def __init__(self, *schedulers):
        super().__init__(*schedulers)
        self.asks = {}

    def start(self, ask):
        completion = super().start(ask)
        self.asks[completion.name] = ask
        return completion

    def advance(self, completion, gamma, num_tokens):
        if gamma == 0 or len(completion.output) > 5:
            return super().advance(completion, gamma, num_tokens)
        cycles = super().advance(completion, 0, min(5, num_tokens))
        if num_tokens > 5:
            probe = super().start(self.asks[completion.name])
            super().advance(probe, 0, 6)
            completion.commit([(probe.output[5] + 1) % 97])
            self.end(probe)
            cycles += super().advance(completion, gamma, num_tokens)
        return cycles


def test_planted_loss_is_found(schedulers):
    _, equality, _ = measured(Lossy(*schedulers))
    for one in equality:
        assert (one.compared, one.equal, one.ties) == (2, 0, 0)
        assert one.first == "with gamma 2 prompt 1 diverges from plain decoding at token 6"
        assert not one.is_lossless


def test_head_that_knows_the_target_is_always_accepted_and_recording_ends(tmp_path):
    directory = bigram_target(tmp_path / "target")
    source = find("target", str(directory), task())
    target = load(dataclasses.replace(source, facts=source.facts.model_copy(update={"refusal": ""}))).engine
    facts, drafter = load_local(str(bigram_head(tmp_path / "head", directory)), source, target)
    assert (facts.architecture, facts.refusal, facts.vocab_size) == ("EAGLE-3 head", "", 97)
    pair = Pair(target_scheduler(target, source.settings, drafter), None)
    runs, equality, _ = measured(pair, gammas=(3,))
    assert [(one.compared, one.equal) for one in equality] == [(2, 2), (2, 2)]
    for run in runs:
        assert run.accepted == run.tested
        if run.gamma:
            assert sum(run.tested) > 10
            assert run.draft_ms > 0
            assert run.draft_step_ms < run.draft_ms


def test_chat_prompts_are_in_the_targets_template(tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(TARGET_DIR, folder)
    source = find("target", str(folder), task())
    template = folder / "chat_template.jinja"
    template.write_text("{% for message in messages %}def {{ message.content }}{% endfor %}:")
    assert encode(source, ("Hi",), chat=True) == encode(source, ("def Hi:",))
    template.unlink()
    with pytest.raises(InvalidArgumentError, match=r"chat: got True, allowed: false: .* no chat template"):
        encode(source, ("Hi",), chat=True)


@pytest.mark.parametrize(("min_speedup", "pays"), [(50.0, False), (0.01, True)])
def test_measuring_stops_when_the_verdict_is_certain(schedulers, min_speedup, pays):
    stopping = {"min_speedup": min_speedup, "error": 0.01, "gammas": (1, 4), "max_tokens": 64}
    runs, equality, decisions = measured(Pair(*schedulers), **stopping)
    assert [(one.temperature, one.pays, one.error) for one in decisions] == [
        (0.0, pays, 0.01),
        (1.0, pays, 0.01),
    ]
    for run in runs:
        # Twelve cycles without a prefill are the least; two prompts of 64 tokens are all.
        assert 12 <= run.emitted <= 40
    assert all(one.is_lossless and one.compared == 4 for one in equality)
    assert schedulers[0].engine.stats().num_sessions == 0


def test_verdict_that_never_becomes_certain_is_that_of_all_tokens(schedulers):
    # Bounds of a test with such an error are out of reach of 32 tokens.
    runs, _, decisions = measured(Pair(*schedulers), min_speedup=0.6, error=1e-300)
    assert [one.pays for one in decisions] == [None, None]
    assert all(run.emitted >= 2 * 16 for run in runs)


def test_completions_that_take_turns_in_a_small_cache_have_the_same_tokens(models):
    target, draft = (load_engine(model.model_name, cache_budget_bytes=4 * BLOCK_BYTES) for model in models)
    pair = Pair(target_scheduler(target, TargetSettings()), draft_scheduler(draft, DraftSettings()))
    asks = [Ask(tuple(random_tokens(60, seed=seed)), 24, 1.0, seed, ()) for seed in range(8)]
    expected = [pair.complete(ask, 3).token_ids for ask in asks]
    completions = [pair.start(ask) for ask in asks]
    for tokens in (12, 24):
        for completion in completions:
            pair.advance(completion, 3, tokens)
        assert target.stats().num_sessions < len(asks)  # the others' caches were evicted
    for completion in completions:
        pair.end(completion)
    assert [tuple(one.output) for one in completions] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tie_is_distinguished_from_a_loss(models, temperature):
    target, _ = models
    ask = Ask(tuple(PROMPTS[1]), 16, temperature, 3, ())
    (logits,) = target.step([SequenceInput("x", 0, list(ask.prompt), 1)])
    target.release("x")
    best, second = logits[0].topk(2).indices.tolist()
    assert is_tie(target, ask, (), (best, best))
    assert not is_tie(target, ask, (), (best, second))
    assert target.length("tie") == 0


def test_tie_sees_equal_scores_as_equal(tmp_path):
    directory = tiny_model("llama", tmp_path, tie_word_embeddings=False)
    engine = load_engine(str(directory), engine="transformers")
    ask = Ask(tuple(PROMPTS[0]), 16, 0.0, 0, ())

    class Nudged:
        """The engine, with two scores that differ by rounding."""

        vocab_size, device, dtype, release = engine.vocab_size, engine.device, torch.float32, engine.release

        def step(self, feeds):
            (logits,) = engine.step(feeds)
            logits[0, 7] = logits[0, 8] + 1e-6
            return [logits]

    assert is_tie(Nudged(), ask, (), (7, 8))


def test_end_of_sequence_ends_a_completion_at_every_gamma(schedulers):
    pair = Pair(*schedulers)
    whole = pair.complete(Ask(tuple(PROMPTS[0]), 16, 1.0, 0, ()), 0)
    end = whole.token_ids[6]
    expected = whole.token_ids[: whole.token_ids.index(end) + 1]
    ask = Ask(tuple(PROMPTS[0]), 16, 1.0, 0, (end,))
    assert [pair.complete(ask, gamma).token_ids for gamma in (0, 1, 4)] == [expected] * 3


def test_prompts_are_cut_at_their_beginning_and_bounds_are_checked():
    (ask, _) = make_asks(task(max_tokens=8), [list(range(20))], (), 18)
    assert ask.prompt == tuple(range(10, 20))
    with pytest.raises(InvalidArgumentError, match="tokens"):
        make_asks(task(max_tokens=18), [[1]], (), 18)
    with pytest.raises(InvalidArgumentError, match="prompts"):
        make_asks(task(), [[]], (), 128)
