"""Each sampling parameter against a slow, obvious oracle, and row independence to the bit."""

import dataclasses
import math
import random

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from gammaray.sampling import SAMPLING_RULES
from gammaray.types import Proposal, SamplingParams
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import filter_key
from tests.support.processing_helpers import GRAMMAR, follows_grammar, path_of, processed

PROMPT, OUTPUT, EOS = (1, 1, 4), (4, 2, 2, 7), (0, 3)
CHAIN = Proposal((2, 9, 2, 0, 5))
TREE = Proposal((2, 9, 2, 0, 5, 2), (-1, 0, 0, -1, 2, 4))
SETTINGS = {
    "off": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-9},
    "top_k": {"top_k": 3},
    "top_k_1": {"top_k": 1},
    "top_k_beyond_vocabulary": {"top_k": 10**6},
    "min_p": {"min_p": 0.2},
    "min_p_1": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.4},
    "repetition_reward": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.6},
    "frequency_reward": {"frequency_penalty": -0.6},
    "bias": {"logit_bias": {1: 2.5, 8: -100.0, 11: 100.0}},
    "allowed": {"allowed_token_ids": (0, 2, 5, 8, 11)},
    "banned": {"banned_token_ids": (2, 7, 2)},
    "min_tokens": {"min_tokens": 6},
    "grammar": {"grammar": GRAMMAR},
    "grammar_and_min_tokens": {"grammar": GRAMMAR, "min_tokens": 8},
    "greedy_penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "nucleus_chain": {"temperature": 0.8, "min_p": 0.02, "top_k": 6, "top_p": 0.7},
    "everything": {
        "temperature": 1.3,
        "top_p": 0.9,
        "top_k": 8,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {6: 1.0},
        "banned_token_ids": (9,),
        "min_tokens": 7,
        "grammar": GRAMMAR,
    },
}


def oracle_row(logits, params, prompt, output, eos):
    """Return one row's probabilities in plain Python; `output` ends with the row's own path."""
    scores = list(logits)
    for v in range(len(scores)):
        not_allowed = params.allowed_token_ids and v not in params.allowed_token_ids
        is_impossible = params.grammar and not follows_grammar(output, v, eos)
        is_early = v in eos and len(output) < params.min_tokens
        if not_allowed or v in params.banned_token_ids or is_early or is_impossible:
            scores[v] = -math.inf
        scores[v] += params.logit_bias.get(v, 0.0)
        if v in (*prompt, *output):
            r = params.repetition_penalty
            scores[v] = scores[v] / r if scores[v] > 0 else scores[v] * r
        scores[v] -= params.frequency_penalty * output.count(v)
        scores[v] -= params.presence_penalty * (v in output)
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    if params.temperature == 0:
        return [float(v == order[0]) for v in range(len(scores))]
    weights = [math.exp((s - scores[order[0]]) / params.temperature) for s in scores]
    kept = [v for v in order if weights[v] >= params.min_p]
    kept = kept[: params.top_k or len(kept)]
    total, before, nucleus = math.fsum(weights[v] for v in kept), 0.0, []
    for v in kept:
        if params.top_p == 1 or before < params.top_p * total:
            nucleus.append(v)
        before += weights[v]
    total = math.fsum(weights[v] for v in nucleus)
    return [weights[v] / total if v in nucleus else 0.0 for v in range(len(scores))]


def process(logits, params, proposal, prompt=PROMPT, output=OUTPUT, eos=EOS):
    return processed(logits, params, prompt=prompt, output=output, proposal=proposal, eos_token_ids=eos)


def assert_equals_oracle(logits, params, proposal):
    rows = process(logits, params, proposal)
    assert rows.dtype == torch.float32
    assert rows.shape == logits.shape
    for row in range(len(proposal) + 1):
        expected = oracle_row(logits[row].tolist(), params, PROMPT, (*OUTPUT, *path_of(proposal, row)), EOS)
        got = rows[row].double().exp().tolist()
        assert got == pytest.approx(expected, rel=2e-5, abs=1e-30), f"row {row}"
        assert [p > 0 for p in got] == [p > 0 for p in expected], f"support of row {row}"


@pytest.mark.parametrize("vocab_size", [12, 900], ids=["wide", "narrow"])
@pytest.mark.parametrize("proposal", [Proposal(), CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_processing_each_parameter_equals_oracle(proposal, vocab_size, subtests):
    """With edits of a large part of the vocabulary, and of a small one."""
    for name, setting in SETTINGS.items():
        with subtests.test(name):
            torch.manual_seed(len(proposal))
            logits = 2 * torch.randn(len(proposal) + 1, vocab_size)
            assert_equals_oracle(logits, SamplingParams(**setting), proposal)


def test_processing_random_parameters_equal_oracle(subtests):
    for seed in range(25):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            chosen = [setting for setting in SETTINGS.values() if rng.random() < 0.25]
            params = SamplingParams(**{key: value for setting in chosen for key, value in setting.items()})
            torch.manual_seed(seed)
            assert_equals_oracle(3 * torch.randn(7, 12), params, TREE)


@pytest.mark.parametrize(
    "kept", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 7, "top_p": 0.6}, {"temperature": 0.0}], ids=str
)
def test_processing_equal_logits_keep_lowest_ids(kept):
    logits = torch.tensor([[0.0] * 8 + [-1.0] * 4, [1.0, 0.0] * 6])
    assert_equals_oracle(logits, SamplingParams(**kept), Proposal((2,)))


SPREADS = {"wide": [0.1] * 3, "medium": [1.0] * 3, "narrow": [6.0] * 3, "one wide": [6.0, 0.1, 3.0]}


@pytest.mark.parametrize("spreads", SPREADS.values(), ids=SPREADS)
def test_processing_large_vocabulary_nucleus_equals_oracle(spreads):
    torch.manual_seed(3)
    logits = torch.tensor(spreads)[:, None] * torch.randn(3, 1500)
    assert_equals_oracle(logits, SamplingParams(top_p=0.9), Proposal((5, 6)))


@pytest.mark.parametrize("vocab_size", [12, 37, 2048, 5003])
def test_processing_row_alone_is_bit_identical(vocab_size, subtests):
    for name, setting in SETTINGS.items():
        with subtests.test(name):
            torch.manual_seed(1)
            logits, params = 3 * torch.randn(6, vocab_size), SamplingParams(**setting)
            together = process(logits, params, CHAIN)
            for row in range(6):
                output = (*OUTPUT, *CHAIN.token_ids[:row])
                alone = process(logits[row : row + 1].clone(), params, Proposal(), output=output)
                assert torch.equal(together[row], alone[0]), f"row {row}"
                shorter = process(logits[: row + 1], params, Proposal(CHAIN.token_ids[:row]))
                assert torch.equal(together[: row + 1], shorter)


def test_processing_without_parameters_is_log_softmax_and_keeps_logits():
    logits = torch.randn(6, 64)
    before = logits.clone()
    assert torch.equal(process(logits, SamplingParams(), CHAIN), logits.log_softmax(-1))
    process(logits, SamplingParams(**SETTINGS["everything"]), CHAIN)
    assert torch.equal(logits, before)


def test_processing_half_precision_logits_are_widened():
    logits = torch.randn(1, 64).bfloat16()
    got = process(logits, SamplingParams(), Proposal())
    assert torch.equal(got, logits.float().log_softmax(-1))


EXTREMES = [
    {"temperature": 5e-324},
    {"temperature": 1e-12},
    {"temperature": 100.0},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e-300, "temperature": 1e-300},
    {"repetition_penalty": 100.0, "temperature": 1e-300},
    {"logit_bias": {2: 100.0}, "temperature": 1e-300, "top_p": 5e-324},
    {"min_p": 1.0, "top_k": 1, "top_p": 5e-324},
]


@pytest.mark.parametrize("setting", EXTREMES, ids=str)
def test_processing_extreme_parameters_give_a_distribution(setting):
    params = SamplingParams(**setting)
    params.validate()
    torch.manual_seed(0)
    rows = process(100 * torch.randn(6, 50), params, CHAIN)
    assert not bool(rows.isnan().any())
    assert rows.double().exp().sum(-1).tolist() == pytest.approx([1.0] * 6, abs=1e-5)


NO_TOKEN_LEFT = [
    {"allowed_token_ids": (2, 3), "banned_token_ids": (2, 3)},
    {"banned_token_ids": tuple(range(12))},
    {"allowed_token_ids": EOS, "min_tokens": 1},
    {"banned_token_ids": (1, 2, *range(4, 12)), "min_tokens": 10},
]


@pytest.mark.parametrize("setting", NO_TOKEN_LEFT, ids=str)
@pytest.mark.parametrize("output", [(), (5,) * 50], ids=["start", "later"])
def test_processing_masks_of_everything_are_refused(setting, output):
    with pytest.raises(InvalidArgumentError, match="min_tokens"):
        process(torch.zeros(1, 12), SamplingParams(**setting), Proposal(), output=output)


@pytest.mark.parametrize("kept", [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_processing_one_nan_is_detected(kept):
    torch.manual_seed(1)
    logits = torch.randn(2, 400)
    logits[0, 17] = math.nan
    rows = process(logits, SamplingParams(**kept), Proposal((5,)), output=())
    assert [math.isfinite(row.max()) for row in rows] == [False, True]


@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=["nan", "nothing"])
def test_processing_nan_row_is_detected_and_does_not_affect_others(bad, subtests):
    for name, setting in SETTINGS.items():
        with subtests.test(name):
            torch.manual_seed(1)
            logits, params = torch.randn(6, 400), SamplingParams(**setting)
            sound = process(logits, params, CHAIN)
            logits[3] = bad
            rows = process(logits, params, CHAIN)
            assert not math.isfinite(rows[3].max())
            assert torch.equal(rows[[0, 1, 2, 4, 5]], sound[[0, 1, 2, 4, 5]])


def test_every_parameter_is_an_edit_or_in_the_key_by_which_sessions_share_a_call():
    others = {name: value for setting in SETTINGS.values() for name, value in setting.items()}
    others |= {"seed": 1, "sample_index": 1}
    assert others.keys() == SAMPLING_RULES.keys()
    plain = SamplingParams(temperature=0.5)
    for name, value in others.items():
        params = dataclasses.replace(plain, **{name: value})
        is_distinct = LogitEdits.needed(params) or filter_key(params) != filter_key(plain)
        assert is_distinct is (name not in ("seed", "sample_index")), name
