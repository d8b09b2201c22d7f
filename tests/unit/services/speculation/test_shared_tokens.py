"""Drafts with other tokens than the target, and heads with fewer: which noise, which distribution."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from gammaray.blocks import Shape
from gammaray.types import SamplingParams, VerificationMethod
from gammaray.vocabulary import Vocabulary
from services.engine.core.drafter import DraftFormat
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.speculation.drafting import PendingProposal
from services.speculation.predictions import draw_temperature
from services.speculation.predictor import DraftModel, Predictor
from services.speculation.session import Speculation
from services.verification.rules import verify
from services.vocabulary.intersection import SharedTokens
from services.vocabulary.translation import Translation
from tests.support.maths_loop_helpers import g_test
from tests.support.vocabulary_helpers import byte_fallback

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
TARGET = Vocabulary(byte_fallback(["abcd"], num_bytes=0x65))
"""Has the characters a to d, and <0x61> to <0x64> for them; the draft has x and no d."""
DRAFT = Vocabulary(byte_fallback(["abcx"], num_bytes=0x62))
TRANSLATION = Translation(DRAFT, TARGET, len(DRAFT), len(TARGET))
COMMON = TRANSLATION.common
PROMPT = TARGET.encode(b"ab")
BASE = len(PROMPT)
FAIR, BIASED = 1e-3, 1e-6
ENGINE = SimpleNamespace(max_context=100, device=torch.device("cpu"), mask_token=None, target_taps=())
"""A draft model whose logits the tests give."""


def session_of(method=COUPLED, noise=None, eos=(), **params):
    spec = SessionSpec(SamplingParams(seed=1, **params), method, BASE, eos)
    session = SessionCopy("s", 1, spec)
    session.merge(0, list(PROMPT))
    session.noise = noise
    return session


def logits_of(vocabulary, probs):
    """Logits of a vocabulary in which each text has a probability, and every other token almost none."""
    row = torch.full((1, len(vocabulary)), -40.0)
    for text, prob in probs.items():
        row[0, vocabulary.id_of(text.encode())] = torch.tensor(prob).log()
    return row


def proposal_of(session, *rows, bits=12):
    """Return the proposal of as many tokens as there are rows of logits, and the draft tokens fed for it."""
    model = DraftModel(ENGINE, bits=bits, translation=TRANSLATION)
    speculation = Speculation(model, session)
    speculation.translate()
    speculation.begin()
    reading = speculation.read(speculation.tree.root, Shape(len(rows), 8))
    pending, fed = PendingProposal(speculation, reading, 64), []
    assert pending.advance()
    for row in rows:
        if pending.nodes:
            fed += pending.feed(0, pending.num_tokens).token_ids
            pending.take(row)
            pending.advance()
    return pending.reading.proposal(), fed[len(speculation.committed) :]


# Restricted to the shared tokens, q is (.5, 1/3, 1/6).
P = {"a": 0.5, "b": 0.2, "c": 0.1, "d": 0.2}
Q = {"a": 0.3, "b": 0.2, "c": 0.1, "x": 0.4}


def first_tokens(method, samples, bias=0.0):
    """Return how often each token was emitted first, over seeds."""
    moved = P | {"a": P["a"] + bias, "d": P["d"] - bias}
    log_p = logits_of(TARGET, moved).log_softmax(-1).repeat(2, 1)
    counts = Counter()
    for seed in range(samples):
        noise = Noise(seed, 0, len(TARGET))
        session = session_of(method, noise)
        proposal, _ = proposal_of(session, logits_of(DRAFT, Q), bits=16)
        verdict = verify(method, log_p, proposal, session.spec.params, noise, BASE)
        emitted = [*(proposal.token_ids[node] for node in verdict.accepted_path), verdict.next_token_id]
        counts[TARGET.spellings[emitted[0]].decode()] += 1
    assert set(counts) <= set(P)
    return [counts[text] for text in P]


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("method", list(VerificationMethod))
def test_emitted_tokens_follow_the_target_distribution(method):
    assert g_test(first_tokens(method, 1200), list(P.values())) > FAIR
    assert g_test(first_tokens(method, 500, bias=0.2), list(P.values())) < BIASED  # a bias would be seen


def test_probabilities_of_draft_tokens_with_the_same_bytes_are_added():
    byte_a = DRAFT.spellings.index(b"a")
    assert DRAFT.id_of(b"a") != byte_a
    row = logits_of(DRAFT, {"a": 0.2, "b": 0.3, "c": 0.5})
    row[0, byte_a] = torch.tensor(0.4).log()
    shared = SharedTokens(COMMON, "cpu").of(row).exp()
    found = {
        TARGET.spellings[token_id].decode(): round(float(prob), 6)
        for token_id, prob in zip(COMMON.target_ids, shared[0], strict=True)
        if prob > 1e-6
    }
    assert found == {"a": 0.6, "b": 0.3, "c": 0.5}


def test_shipped_distribution_has_the_targets_ids_and_is_that_of_the_draw():
    noise = Noise(3, 0, len(TARGET))
    session = session_of(REJECTION, noise)
    row = logits_of(DRAFT, Q)
    proposal, fed = proposal_of(session, row, row)
    assert len(proposal) == 2
    assert len(fed) == 1
    assert DRAFT.spellings[fed[0]] == TARGET.spellings[proposal.token_ids[0]]
    ids = [TARGET.id_of(text.encode()) for text in "abc"]
    for law, token_id in zip(proposal.draft_distributions, proposal.token_ids, strict=True):
        assert law.token_ids == tuple(sorted(ids))
        shares = dict(zip(law.token_ids, law.weights, strict=True))
        assert [round(shares[one] / 2**12, 2) for one in ids] == [0.5, 0.33, 0.17]
        assert token_id in ids


def test_masks_bias_and_penalties_are_those_of_the_targets_ids():
    a, b, d = (TARGET.id_of(text.encode()) for text in "abd")
    row = logits_of(DRAFT, Q)

    def greedy(**params):
        return proposal_of(session_of(temperature=0.0, **params), row)[0].token_ids

    assert greedy() == (a,)
    assert greedy(banned_token_ids=(a,)) == (b,)
    assert greedy(logit_bias={b: 5.0}) == (b,)
    assert greedy(repetition_penalty=1.0, presence_penalty=2.0) != ()
    assert greedy(allowed_token_ids=(d,)) == ()  # the draft has no such token


def test_penalties_count_the_tokens_of_the_proposal():
    row = logits_of(DRAFT, {"a": 0.5, "b": 0.4, "c": 0.1})
    session = session_of(temperature=0.0, frequency_penalty=1.5)
    proposal, _ = proposal_of(session, row, row, row)
    # The prompt does not count; each proposed token lowers its own score.
    assert [TARGET.spellings[one].decode() for one in proposal.token_ids] == ["a", "b", "a"]


def test_chain_ends_after_the_end_of_sequence():
    end = TARGET.eos_token_id
    row = torch.full((1, len(DRAFT)), -9.0)
    row[0, DRAFT.eos_token_id] = 9.0
    proposal, fed = proposal_of(session_of(temperature=0.0, eos=(end,)), *[row] * 4)
    assert (proposal.token_ids, fed) == ((end,), [])


VOCAB, OUTPUTS, FIRST, ROWS = 2000, 300, 7, 40
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:OUTPUTS].sort().values
REDUCED = DraftFormat(VOCAB, None, IDS)
HEAD = SimpleNamespace(keep_reduced=lambda: REDUCED)
"""A head whose logits the tests give."""


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.7, "logit_bias": {int(IDS[3]): 4.0, int(IDS[5]): -3.0}},
    ],
    ids=lambda given: " ".join(given),
)
def test_choices_and_confidences_are_those_over_all_tokens(params):
    params = SamplingParams(seed=5, **params)
    session = SessionCopy("s", 1, SessionSpec(params, VerificationMethod.COUPLED, FIRST, ()))
    session.noise = Noise(5, 0, VOCAB)
    logits = 3 * torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(2))
    positions = range(FIRST, FIRST + ROWS)
    made = Predictor(DraftModel(HEAD), session).predict(logits, positions, lambda: [[]] * ROWS)
    every = REDUCED.with_all_tokens(logits)
    for token_id, bias in params.logit_bias.items():
        every[:, token_id] += bias
    scores = processed_log_probs(every, params) + session.noise.gumbel(FIRST, ROWS)
    shares = (scores / draw_temperature(params.temperature)).softmax(-1)
    assert [one.choose(FIRST) for one in made] == scores.argmax(-1).tolist()
    for prediction, row in zip(made, shares, strict=True):
        best = row.topk(3)
        found = prediction.guesses(FIRST)[:3]
        known = [(i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if p > 0]
        assert [token_id for token_id, _ in found[: len(known)]] == [token_id for token_id, _ in known]
        for (_, share), (_, expected) in zip(found, known, strict=False):
            assert share == pytest.approx(expected, abs=1e-4)
