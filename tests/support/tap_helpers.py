"""Hidden states that an engine recorded, against transformers' own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import PreTrainedModel

from services.engine.core.batch import Batch, Runner, SequenceInput, Taps
from services.engine.engine import Engine


@torch.no_grad()
def plain_states(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return what enters each layer and the final norm in a plain forward, [tokens, layers + 1, hidden_size].

    `output_hidden_states` has the last state after the norm only, so a hook takes what leaves the last layer.
    """
    depth, last = model.config.num_hidden_layers, []
    stack = next(m for m in model.modules() if isinstance(m, ModuleList) and len(m) == depth)
    hook = stack[-1].register_forward_hook(
        lambda _module, _given, made: last.append(made[0] if isinstance(made, tuple) else made)
    )
    output = model(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
    hook.remove()
    states = [state[0] for state in output.hidden_states[:-1]]
    return torch.stack([*states, last[0].view(states[0].shape)], dim=1)


class CheckedTaps:
    """An engine whose every step's taps are compared with plain forwards of the same tokens.

    Attributes:
        worst: Largest difference so far, of 1 + the expected number's size.
    """

    def __init__(self, engine: Engine, plain: PreTrainedModel, layers: Sequence[int]) -> None:
        self.engine = engine
        self.worst = 0.0
        self._plain, self._layers = plain, list(layers)
        self._nodes: dict[str, tuple[list[int], list[int]]] = {}
        engine.tap(layers)

    def step(self, *feeds: SequenceInput) -> list[Tensor]:
        """Step, compare the taps of each row with those of its own path, and return them."""
        before = {feed.session_id: list(self.engine.tokens(feed.session_id)) for feed in feeds}
        self.engine.step(feeds)
        taps = self.engine.taps
        assert len(taps) == len(feeds)
        for feed, got in zip(feeds, taps, strict=True):
            assert got.shape == (len(feed.token_ids), len(self._layers), self._plain.config.hidden_size)
            assert (got.dtype, got.device) == (self.engine.dtype, self.engine.device)
            expected = self._expected(before[feed.session_id][: feed.start], feed)
            difference = ((got - expected).abs() / (1 + expected.abs())).max().item()
            self.worst = max(self.worst, difference)
        return taps

    def _expected(self, context: list[int], feed: SequenceInput) -> Tensor:
        count = len(feed.token_ids) - len(feed.parents or ())
        chain = context + list(feed.token_ids[:count])
        rows = [plain_states(self._plain, chain)[len(context) :]] if count else []
        kept = self._nodes.get(feed.session_id, ([], []))
        nodes = [*kept[0][: feed.num_kept], *feed.token_ids[count:]]
        parents = [*kept[1][: feed.num_kept], *(feed.parents or ())]
        self._nodes[feed.session_id] = (nodes, parents)
        for node in range(feed.num_kept, len(nodes)):
            rows.append(plain_states(self._plain, node_text(chain, nodes, parents, node))[-1:])
        return torch.cat(rows)[:, self._layers]


def node_text(chain: Sequence[int], nodes: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Return the tokens up to a node of a tree, which may start from an earlier token of the chain."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, nodes[node])
        node = parents[node]
    return [*chain[: len(chain) + 1 + node], *path]


class FaultyRunner:
    """A runner that records wrong states.

    Args:
        runner: The right one.
        layers_late: How many layers too late it records.
        rows_late: How many rows too late it writes the states.
        last: What it writes as the last of the tapped states; None: what belongs there.
    """

    def __init__(
        self, runner: Runner, *, layers_late: int = 0, rows_late: int = 0, last: Tensor | None = None
    ) -> None:
        assert not runner.tap_obstacle()
        self.hidden_size = runner.hidden_size
        self.tap_obstacle = runner.tap_obstacle
        self._runner, self._layers_late, self._rows_late, self._last = runner, layers_late, rows_late, last

    def forward(self, batch: Batch) -> Tensor:
        """Return the right logits."""
        assert batch.taps is not None
        layers, states = batch.taps.layers, batch.taps.states
        batch.taps = Taps(tuple(layer + self._layers_late for layer in layers), states)
        logits = self._runner.forward(batch)
        states.copy_(states.roll(self._rows_late, 0))
        if self._last is not None:
            states[:, -1] = self._last
        return logits
