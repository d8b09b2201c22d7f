"""Measures of a drafter on held-out answers, where they are known in closed form."""

import pytest
import torch

from services.train.answers.store import Sequence
from services.train.batches import build_batch
from services.train.evaluate import evaluate

PROMPT, ANSWER = [5, 6, 7, 8, 9, 5, 6], [7, 8, 3, 4]


class Scripted:
    """A draft model that is right after given positions of the text only."""

    depth = 1
    target_ids = torch.arange(16)
    head = torch.empty(0)

    def __init__(self, *right):
        self.right = right

    def __call__(self, batch):
        logs = torch.full((len(batch.labels), 16), -30.0)
        for row, (place, label) in enumerate(zip(batch.place.tolist(), batch.labels.tolist(), strict=True)):
            logs[row, label if place[1] in self.right else 15] = 0.0
        return logs

    def batch(self, sequences, num_depths):
        return build_batch(sequences, num_depths)

    def common(self, batch, logs):
        wanted = torch.zeros(len(logs), 16)
        wanted[torch.arange(len(logs)), batch.labels] = 0.8
        return wanted, logs

    def eval(self):
        pass

    def train(self):
        pass


def sequence(temperature=0.0):
    ids = torch.tensor(PROMPT + ANSWER).numpy()
    top = ids[len(PROMPT) :, None]
    return Sequence(ids, len(PROMPT), temperature, top, top.astype("float16"))


@pytest.mark.parametrize(
    ("right", "expected"), [((), 4 / 4), ((8, 9), 4 / 3), ((6, 7, 8), 4 / 1), ((6, 8), 4 / 2)]
)
def test_tokens_per_cycle(right, expected):
    found = evaluate(Scripted(*right), [sequence()])
    assert found["tokens_per_cycle"] == round(expected, 3)
    assert found["positions"] == 4


def test_acceptance_by_depth_counts_what_was_tested():
    # Anchors 6 to 9, depth 1: three of four. Depth 2 after 6, 7, 8: two of three. Depth 3 after 6, 7: one.
    # Depth 4 after 6: the text ends there.
    found = evaluate(Scripted(6, 7, 8), [sequence()])
    assert found["greedy"] == [0.75, 0.667, 0.5, 0.0, 0.0]
    assert found["overlap"] == found["coupled"] == [0.6]
