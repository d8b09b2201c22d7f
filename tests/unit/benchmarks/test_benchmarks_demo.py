"""The demo: which model it serves, what it asks, and what its table says."""

from dataclasses import replace

from rich.console import Console

from benchmarks.demo import (
    Comparison,
    Scene,
    compare,
    results_table,
)
from gammaray.bench.systems import Ask, Sample
from gammaray.types import Chunk, EmittedToken, FinishReason, TokenOrigin
from tests.support.sdk_helpers import SUMMARY, USAGE

PLAIN = replace(SUMMARY, alpha=None, plain_cycles=3)
SPECULATIVE = replace(SUMMARY, cycles=4, prediction_cycles=3, plain_cycles=1, tokens_per_cycle=2.5)


class ScriptedClient:
    """Answers with the token ids that `answer` returns for a prompt and gamma, and keeps what was asked."""

    def __init__(self, answer=lambda prompt, gamma: (1, 2, 3)):
        self.answer, self.asked = answer, []

    async def generate(self, prompt, **options):
        self.asked.append((prompt, options))
        gamma = options["gamma"].fixed
        tokens = tuple(EmittedToken(token, TokenOrigin.BONUS, b"x") for token in self.answer(prompt, gamma))
        summary = PLAIN if gamma == 0 else SPECULATIVE
        yield Chunk("s", "x" * len(tokens), tokens, 1, FinishReason.LENGTH, USAGE, summary)


def sample(seconds, *token_ids, summary=None):
    return Sample(token_ids, seconds, summary=summary)


async def test_compare_asks_plainly_and_adaptively_with_the_scenes_options():
    client = ScriptedClient()
    asks = [Ask("a", 3, 0.7, 1, "text"), Ask("b", 3, 0.7, 2)]
    advances = []
    comparison = await compare(client, asks, lambda: advances.append(1), options={"ignore_eos": False})
    assert comparison.num_different == 0
    assert len(advances) == 2 * 2 * 2
    gammas = [options["gamma"].fixed for prompt, options in client.asked]
    assert gammas.count(0) == gammas.count(None) == 1 + 2 * 2
    assert {options["ignore_eos"] for _, options in client.asked} == {False}
    assert {options.get("prediction") for prompt, options in client.asked if prompt == "a"} == {"text"}


async def test_changed_token_is_counted():
    client = ScriptedClient(lambda prompt, gamma: (1, 2, 3) if gamma == 0 or prompt == "a" else (1, 2, 4))
    comparison = await compare(client, [Ask("a", 3), Ask("b", 3)], lambda: None)
    assert comparison.num_different == 1
    assert comparison.part(0, 1).num_different == 0
    assert comparison.part(1, 2).num_different == 1


def test_table_has_a_row_per_task_and_temperature_with_its_drafters():
    slow, fast = sample(2.0, 1, 2, 3, 4), sample(0.5, 1, 2, 3, 4, summary=SPECULATIVE)
    scene = Scene(
        "", "", None, {"an edit": [Ask("a", 4)], "code": [Ask("b", 4), Ask("c", 4)]}, ("", Ask("a", 4))
    )
    even = sample(2.0, 1, 2, 3, 4, summary=replace(PLAIN, cycles=4, plain_cycles=4))
    comparisons = [Comparison(t, [[slow]] * 3, [[fast], [even], [even]]) for t in (0.0, 0.7)]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(results_table(scene, comparisons))
    rows = [line.split() for line in captured.get().splitlines() if line.strip().startswith("0")]
    assert [row[0] for row in rows] == ["0", "0", "0.7", "0.7"]
    assert rows[0][-3:] == ["2", "8", "4.00x"]
    assert " ".join(rows[0]).startswith("0 an edit 0.75 2.50 prediction 75%, none 25% ")
    assert rows[1][-3:] == ["2", "2", "1.00x"]
    assert "code, 2 prompts" in " ".join(rows[1])
