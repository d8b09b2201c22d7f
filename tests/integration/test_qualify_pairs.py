"""`gammaray qualify` with real models: the demo pair, pairs that cannot be served, and planted losses."""

import json
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gammaray
from gammaray.errors import InvalidArgumentError
from gammaray.qualify.judgement import Fitness, judge
from gammaray.qualify.measured import PairFacts
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine
from services.qualify.loop import Ask, Pair
from services.qualify.measure import is_tie, make_asks, measure
from services.qualify.models import Target, load_draft, load_head
from tests.support.engine_helpers import draft_scheduler, random_tokens, target_scheduler, tiny_model
from tests.support.head_helpers import bigram_head, bigram_target
from tests.support.qualify_helpers import task
from tests.support.vocabulary_helpers import byte_fallback

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(gammaray.__file__).parents[1]
TIMEOUT_S = 250
SMALL = ("--num-prompts", "2", "--tokens", "24", "--gammas", "1,3")


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run the program in this process, which has loaded torch; return its exit status and output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["qualify", *map(str, arguments)])
        # Imported by another test of this process, which runpy warns of.
        monkeypatch.delitem(sys.modules, "services.qualify.__main__", raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("services.qualify", run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


def with_demo_tokenizer(directory):
    """Give a random model the tokenizer of the demo pair."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, directory / name)
    return directory


def test_demo_pair_is_served_lossless_and_measured(tmp_path):
    # What it gains on this machine at this moment is not what is tested: any gain will do.
    command = [sys.executable, "-m", "gammaray", "qualify", "--target", "demo", "--draft", "demo", *SMALL]
    command += ["--min-speedup", "0.01", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 completions have the tokens of plain decoding" in done.stdout
    assert "\nFIT\n" in done.stdout
    for step in ("loading the target demo", "loading the draft demo", "measuring demo: temperature 0: "):
        assert f"\n{step}" in f"\n{done.stderr}"
    (candidate,) = json.loads((tmp_path / "r.json").read_text())["candidates"]
    measured = candidate["measured"]
    assert (measured["target"]["vocab_size"], measured["draft"]["vocab_size"]) == (2048, 2048)
    assert [(one["temperature"], one["equal"]) for one in measured["trials"]] == [(0.0, 4), (1.0, 4)]
    for trial in measured["trials"]:
        assert 0 < sum(trial["accepted"]) < sum(trial["tested"])
        assert 0 < trial["draft_step_ms"] < trial["plain_ms"]
        assert [depth["gamma"] for depth in trial["depths"]] == [1, 3]


def test_draft_model_in_the_target_worker_is_measured_without_network_time(run_here, tmp_path):
    status, output, _ = run_here(
        *("--target", "demo", "--head", "demo", "--head", tiny_model("llama", tmp_path)),
        *("--rtt-ms", "1000", "--min-speedup", "0.01", *SMALL, "--json", tmp_path / "r.json"),
    )
    assert status == 0
    assert "it drafts in the target worker: --rtt-ms does not apply" in output
    fit, unfit = json.loads((tmp_path / "r.json").read_text())["candidates"]
    assert [one["fitness"] for one in (fit, unfit)] == ["FIT", "UNFIT"]
    assert "the vocabulary of" in unfit["reasons"][0]
    for trial in fit["measured"]["trials"]:
        assert 0 < sum(trial["accepted"]) < sum(trial["tested"])
        for depth in trial["depths"]:
            assert 0 < depth["draft_ms"] < depth["cycle_ms"] < 1000


def test_candidates_that_cannot_be_served_are_unfit_with_the_reason(run_here, tmp_path):
    wrong = tiny_model("llama", tmp_path)
    odd = tiny_model("mamba", tmp_path, vocab_size=2048)
    tokenizer = byte_fallback(["αβγ"], num_bytes=0)
    strange = tiny_model("gemma2", tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(strange)
    drafts = ("--draft", wrong, "--draft", odd, "--draft", strange)
    status, output, _ = run_here("--target", "demo", *drafts, *SMALL)
    assert status == 5
    assert "with a byte-level or SentencePiece tokenizer" in output
    assert output.count("the draft cannot be served") == 3
    assert "linear_attention" in output
    assert "shares no token with the draft's" in output
    assert output.count("UNFIT") == 6  # one each, and all in the ranking


def test_target_that_cannot_be_served_is_unfit(tmp_path):
    target = loaded(with_demo_tokenizer(tiny_model("bloom", tmp_path, vocab_size=2048)))
    judgement = judge(PairFacts(target=target.facts, draft=load_head("demo", target).facts), 1.0)
    assert judgement.fitness is Fitness.UNFIT
    assert "the target cannot be served" in judgement.reasons[0]


def test_random_drafts_are_slower_with_the_same_and_with_a_mapped_vocabulary(run_here, tmp_path):
    draft = with_demo_tokenizer(tiny_model("llama", tmp_path, vocab_size=2048))
    mapped = tmp_path / "mapped"
    shutil.copytree(draft, mapped)
    text = json.loads((mapped / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (mapped / "tokenizer.json").write_text(json.dumps(text))
    drafts = ("--draft", draft, "--draft", mapped)
    status, output, _ = run_here("--target", "demo", *drafts, *SMALL, "--rtt-ms", "20")
    assert status == 4
    assert "does not pay" in output
    assert output.count("FIT BUT SLOWER") == 4  # one each, and both in the ranking
    assert output.count("the draft's context is 128 tokens, the target's 2048") == 2
    equal = "4 of 4 completions have the tokens of plain decoding"
    assert output.count(equal) == 4  # each at two temperatures
    assert "the draft has 100% of the prompts' tokens" in output


def loaded(model):
    target = Target(str(model))
    target.load()
    return target


def test_target_without_a_tokenizer_is_unfit(tmp_path):
    target = loaded(tiny_model("llama", tmp_path, vocab_size=2048)).facts
    assert "it has no tokenizer" in target.refusal


def test_missing_model_is_an_argument_error(tmp_path):
    nothing, target = str(tmp_path / "nothing"), Target("demo")
    for role, load in (
        ("target", lambda: Target(nothing)),
        ("draft", lambda: load_draft(nothing, target)),
        ("head", lambda: load_head(nothing, target)),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{role}: got .*which does not exist"):
            load()


def test_directory_without_weights_is_a_wrong_argument(run_here, tmp_path):
    shutil.copy(DRAFT_DIR / "config.json", tmp_path)
    status, _, errors = run_here("--target", "demo", "--draft", tmp_path, *SMALL)
    assert status == 2
    assert "gammaray: draft: got" in errors
    assert "Traceback" not in errors


def test_settings_of_the_environment_are_those_of_workers(monkeypatch):
    monkeypatch.setenv("GAMMARAY_THREADS", "2")
    assert Target("demo").settings.threads == 2
    monkeypatch.setenv("GAMMARAY_THREADS", "0")
    with pytest.raises(InvalidArgumentError, match="threads: got 0"):
        Target("demo")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("qualify")
    target = load_engine(str(tiny_model("llama", path, seed=0)))
    return target, load_engine(str(tiny_model("llama", path, seed=1)))


@pytest.fixture
def schedulers(models):
    target, draft = models
    return target_scheduler(target), draft_scheduler(draft)


PROMPTS = [random_tokens(9, seed=1), random_tokens(30, seed=2)]


def measured(pair, **changed):
    """Measure the prompts above."""
    return measure(pair, make_asks(task(**changed), PROMPTS, (), 128), task(**changed), lambda told: None)


def test_any_draft_is_lossless(schedulers):
    asks = make_asks(task(), PROMPTS, (), 128)
    told = []
    trials = measure(Pair(*schedulers), asks, task(gammas=(1, 4)), told.append)
    assert told[0] == "temperature 0: 1 of 2 prompts"
    assert [(one.temperature, one.compared, one.equal, one.tokens) for one in trials] == [
        (0.0, 4, 4, 64),
        (1.0, 4, 4, 64),
    ]
    for one in trials:
        assert 1 <= len(one.tested) == len(one.accepted) <= 4
        assert all(a <= t for a, t in zip(one.accepted, one.tested, strict=True))
    assert schedulers[0].engine.stats().num_sessions == 0  # and nothing is left


def test_draft_like_the_target_is_always_accepted(models):
    target, _ = models
    pair = Pair(target_scheduler(target), draft_scheduler(load_engine(target.model_name)))
    for trial in measured(pair, gammas=(3,)):
        assert trial.accepted == trial.tested
        (depth,) = trial.depths
        assert depth.tokens_per_cycle == 4


class Lossy(Pair):
    """Returns a wrong sixth token when it speculates."""

    def complete(self, ask, gamma):
        text = super().complete(ask, gamma)
        if gamma == 0 or len(text.token_ids) <= 5:
            return text
        wrong = (text.token_ids[5] + 1) % 97
        return replace(text, token_ids=(*text.token_ids[:5], wrong, *text.token_ids[6:]))


def test_planted_loss_is_found(schedulers):
    for one in measured(Lossy(*schedulers)):
        assert (one.compared, one.equal, one.ties) == (2, 0, 0)
        assert one.divergence == "with gamma 2 prompt 1 diverges from plain decoding at token 6"
        assert not one.is_lossless


def test_head_that_knows_the_target_is_always_accepted_and_recording_ends(tmp_path):
    directory = bigram_target(tmp_path / "target")
    target = loaded(directory)
    assert target.facts.refusal == "it has no tokenizer, which orchestrators need"
    target.facts = replace(target.facts, refusal="")
    candidate = load_head(str(bigram_head(tmp_path / "head", directory)), target)
    assert (candidate.facts.refusal, candidate.facts.vocab_size) == ("", 97)
    pair = Pair(target.scheduler(candidate.head), None)
    for trial in measured(pair, gammas=(3,)):
        assert (trial.compared, trial.equal) == (2, 2)
        assert trial.accepted == trial.tested
        assert sum(trial.tested) > 10
        assert 0 < trial.draft_step_ms < trial.best.draft_ms


def test_chat_prompts_are_in_the_targets_template(tmp_path):
    folder = tmp_path / "chat"
    shutil.copytree(TARGET_DIR, folder)
    source = Target(str(folder))
    template = folder / "chat_template.jinja"
    template.write_text("{% for message in messages %}def {{ message.content }}{% endfor %}:")
    assert source.encode(("Hi",), chat=True) == source.encode(("def Hi:",))
    template.unlink()
    with pytest.raises(InvalidArgumentError, match=r"chat: got True, allowed: false: .* no chat template"):
        source.encode(("Hi",), chat=True)


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
    (ask, _) = make_asks(task(tokens=8), [list(range(20))], (), 18)
    assert ask.prompt == tuple(range(10, 20))
    with pytest.raises(InvalidArgumentError, match="tokens"):
        make_asks(task(tokens=18), [[1]], (), 18)
    with pytest.raises(InvalidArgumentError, match="prompts"):
        make_asks(task(), [[]], (), 128)
