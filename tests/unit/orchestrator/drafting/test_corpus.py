"""Past outputs: whose text is proposed to whom, when it is forgotten, and how much is held."""

import random

from gammaray.types import DrafterKind, SamplingParams, VerificationMethod
from orchestrator.cycle.session import Session
from orchestrator.drafting.corpus import BLOCK, CHECK_PAGE, MAX_ENTRY, MIN_ENTRY, Corpus
from orchestrator.drafting.suffix_decoding import SuffixDrafter
from tests.support.workers.scripted_workers import NoText

TTL_S = 100.0
PROMPT = (1, 2, 3, 4)


def session_of(name, emitted=(), salt="", prompt=PROMPT):
    params = SamplingParams(seed=1)
    method = VerificationMethod.COUPLED
    session = Session(name, tuple(prompt), params, method, 2**20, NoText(), cache_salt=salt)
    session.commit(list(emitted))
    return session


def corpus_of(max_tokens=64 * BLOCK, tenant_share=0.5, clock=lambda: 1000.0):
    return Corpus(max_tokens, tenant_share, TTL_S, clock)


def text_of(seed, size=64):
    """Return tokens that no other seed has."""
    return [10_000 * (seed + 1) + index for index in range(size)]


def proposed(corpus, name, text, salt=""):
    """Return what is proposed to a session that has emitted the first half of a text."""
    match = corpus.look_up(session_of(name, text[: len(text) // 2], salt), 4)
    return match and list(match.token_ids)


def test_corpus_proposes_past_outputs_with_their_counts():
    corpus = corpus_of()
    for name, last in (("t:1", 50), ("t:2", 51), ("t:3", 50)):
        corpus.add(session_of(name, [*range(10, 20), last, 60, 61]))
    match = corpus.look_up(session_of("t:new", [15, 16, 17, 18, 19]), 8)
    assert (match.kind, match.token_ids, match.length) == (DrafterKind.SUFFIX, (50, 60, 61), 5)
    assert match.probabilities == (2 / 3, 1.0, 1.0)
    corpus.add(session_of("t:4", text_of(0), prompt=range(100, 150)))
    match = corpus.look_up(session_of("t:5", prompt=(1, 147, 148, 149)), 3)
    assert list(match.token_ids) == text_of(0)[:3], "the start of an output, by the end of its prompt"


def test_short_outputs_are_not_kept_and_long_ones_from_their_end():
    corpus = corpus_of()
    corpus.add(session_of("t:1", text_of(0, MIN_ENTRY - 1)))
    assert (corpus.num_sessions, corpus.num_tokens) == (0, 0)
    text = [10 + index for index in range(MAX_ENTRY + 100)]
    corpus.add(session_of("t:2", text))
    assert proposed(corpus, "t:3", text[:100]) is None
    assert proposed(corpus, "t:3", text[-100:]) == text[-50:-46]


async def test_sessions_that_the_store_does_not_have_are_forgotten():
    corpus, pages = corpus_of(), []
    names = [f"t:{number}" for number in range(CHECK_PAGE + 50)]
    for number, name in enumerate(names):
        corpus.add(session_of(name, text_of(number, MIN_ENTRY)))

    async def exist(page):
        pages.append(len(page))
        return [int(name.removeprefix("t:")) % 2 == 0 for name in page]

    await corpus.forget_missing(exist)
    assert pages == [CHECK_PAGE, 50]
    for number in (0, 1, CHECK_PAGE, CHECK_PAGE + 49):
        text = text_of(number, MIN_ENTRY)
        assert proposed(corpus, "t:9", text) == (None if number % 2 else text[4:8])
    assert corpus.num_sessions == len(names) / 2


def test_the_oldest_text_goes_first_when_a_tenant_has_its_share():
    corpus = corpus_of(max_tokens=8 * BLOCK, tenant_share=0.5)
    texts = [text_of(seed, 4000) for seed in range(30)]
    for number, text in enumerate(texts):
        corpus.add(session_of(f"t:{number}", text, salt=str(number % 2)))
        assert corpus.num_tokens <= 4 * BLOCK
    kept = [proposed(corpus, "t:9", text[:100], str(n % 2)) is not None for n, text in enumerate(texts)]
    assert kept[::2] == sorted(kept[::2])
    assert kept[1::2] == sorted(kept[1::2])
    assert 6 <= sum(kept) <= 16
    assert corpus.num_sessions <= sum(kept) + 2  # of the oldest of each salt a part may be left


def test_the_oldest_text_of_all_tenants_goes_first():
    corpus = corpus_of(max_tokens=4 * BLOCK, tenant_share=0.5)
    for number in range(8):
        corpus.add(session_of(f"tenant{number}:s", text_of(number)))
        assert corpus.num_tokens <= 4 * BLOCK
    found = [proposed(corpus, f"tenant{number}:x", text_of(number)) is not None for number in range(8)]
    assert found == [False] * 4 + [True] * 4
    assert corpus.num_sessions == 4


def test_text_of_unnamed_callers_may_take_all_memory():
    corpus = corpus_of(max_tokens=4 * BLOCK, tenant_share=0.25)
    for number in range(30):
        corpus.add(session_of(str(number), text_of(number, 4000)))
    assert corpus.num_tokens == 4 * BLOCK


def test_random_use_stays_within_bounds_and_forgets_what_it_must():
    """Sessions come, go on, are forgotten and expire; the text of those that are gone is never proposed."""
    now_s, chance, texts = 1000.0, random.Random(11), {}
    corpus = corpus_of(max_tokens=6 * BLOCK, clock=lambda: now_s)
    for number in range(400):
        name = f"{chance.choice('ab')}:{chance.randrange(60)}"
        now_s += chance.random() * 5
        if chance.random() < 0.2:
            corpus.forget(name)
            texts[name] = []
        else:
            text = text_of(number, chance.randrange(MIN_ENTRY, 6000))
            corpus.add(session_of(name, text))
            texts.setdefault(name, []).append((now_s, text))
        assert corpus.num_tokens <= 6 * BLOCK
    own = [token for at in texts for _, text in texts[at] for token in text]
    assert len(own) == len(set(own))
    alive = 0
    for number in range(400):
        start = text_of(number, 8)
        for tenant in "ab":
            match = corpus.look_up(session_of(f"{tenant}:new", start[:4]), 4)
            holders = [
                name
                for name, kept in texts.items()
                if any(text[:8] == start for _, text in kept) and max(at for at, _ in kept) + TTL_S > now_s
            ]
            alive += match is not None
            assert match is None or [name[0] for name in holders] == [tenant]
    assert alive > 10


def test_suffix_drafter_prefers_the_more_promising_continuation():
    corpus = corpus_of()
    corpus.add(session_of("t:1", [10, 11, 12, 13, 20, 21, 22, 23]))
    drafter = SuffixDrafter(corpus)
    session = session_of("t:2", [12, 13, 30, 31, 10, 11, 12, 13])
    match = drafter.look_up(session, 4)
    assert (match.token_ids, match.length) == ((20, 21, 22, 23), 4)
    session.commit([30, 31])  # the session's own text goes on now
    assert drafter.look_up(session, 2).token_ids == (10, 11)
    assert SuffixDrafter().look_up(session, 2).token_ids == (10, 11)
    assert SuffixDrafter(corpus).look_up(session_of("t:3", [98, 99]), 4) is None
