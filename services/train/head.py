"""An EAGLE-3 head in training, and the directory that it becomes.

Row t of a sequence reads the target's states at t and the token at t + 1, and predicts the token at t + 2. In
further steps (training-time test, arXiv 2503.01840) it reads the tokens after that and its own states in
place of the target's, as when it drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.heads.eagle import Attend, EagleConfig, EagleHead
from services.heads.loading import load_head
from services.train.drafter import Drafter, write_drafter
from services.train.states import StateStore
from services.train.store import Sequence

__all__ = ["AnyDrafter", "HeadBatch", "HeadDrafter", "save_head"]

STEP_WEIGHT = 0.8
"""Weight of a step's loss relative to the step before, as a step counts only if those before were right."""

_SMALL = 0.1
"""Factor on what the layer adds at first: the head then begins near the target's own last state."""

_SPREAD = 0.02
_WINDOWS = 0.5
"""Share of the answers of which a head sees no states before a random place, as after a lost cache."""

_LAYER_TYPES = ("llama", "mistral", "qwen2", "smollm3")
_CONFIG_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
)


@dataclass(frozen=True)
class HeadBatch:
    """Inputs and what the target expects.

    Attributes:
        token_ids: int64 [sequences, tokens], padded behind.
        starts: Position of each sequence's first token here, int64 [sequences]; 0 but for windows.
        states: bfloat16 [sequences, tokens, taps, hidden_size].
        place: Sequence, anchor and depth (from 1) of each prediction, by depth, int64 [predictions, 3]: row
            of the token at anchor - 1 in step `depth` predicts the token at anchor + depth.
        labels: Token of the answer at the predicted place, int64 [predictions].
        top_ids: The target's most likely ids there, int64 [predictions, top_k].
        top_logs: Their log-probabilities at temperature 1, float32 [predictions, top_k].
    """

    token_ids: Tensor
    starts: Tensor
    states: Tensor
    place: Tensor
    labels: Tensor
    top_ids: Tensor
    top_logs: Tensor


class HeadDrafter(nn.Module):
    """A head that begins near the target's last state; the target's input embedding is not trained.

    Args:
        target: A causal model with layers as Llama's.
        taps: The states that it reads, the last one after all layers, see `StateStore`.
        target_ids: Ascending ids of the output's rows.
        depth: Steps that are evaluated.
        states: Where states are read.

    Raises:
        FailedPreconditionError: The target has other layers.
    """

    def __init__(
        self, target: PreTrainedModel, taps: Items[int], target_ids: Tensor, depth: int, states: StateStore
    ) -> None:
        super().__init__()
        config: Any = target.config
        if config.model_type not in _LAYER_TYPES:
            allowed = ", ".join(_LAYER_TYPES)
            raise FailedPreconditionError(
                f"model_type {config.model_type}: a head is trained for targets of types {allowed}"
            )
        stored = {key: getattr(config, key) for key in _CONFIG_KEYS if getattr(config, key, None) is not None}
        self.layer_config = LlamaConfig(**stored, num_hidden_layers=1, tie_word_embeddings=False)
        rope = self.layer_config
        self.config = EagleConfig(
            taps=tuple(taps),
            hidden_size=rope.hidden_size,
            target_hidden_size=rope.hidden_size,
            intermediate_size=rope.intermediate_size,
            num_heads=rope.num_attention_heads,
            num_kv_heads=rope.num_key_value_heads or rope.num_attention_heads,
            head_dim=rope.head_dim or rope.hidden_size // rope.num_attention_heads,
            vocab_size=rope.vocab_size,
            num_outputs=len(target_ids),
            norm_eps=rope.rms_norm_eps,
            rope=rope,
            fc_norm=True,
        )
        self.module = EagleHead(self.config)
        self._begin(target, target_ids)
        self.depth, self._states = depth, states
        self.num_steps = 1
        self.target_ids: Tensor
        self.row_of: Tensor
        self.register_buffer("target_ids", target_ids)
        row_of = torch.full((rope.vocab_size,), -1)
        row_of[target_ids] = torch.arange(len(target_ids))
        self.register_buffer("row_of", row_of, persistent=False)

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel, target_ids: Tensor) -> None:
        """Copy the target's last layer; what it adds, and reads of the embedding, is small at first."""
        model: Any = target
        decoder = model.get_decoder()
        last, module, size = decoder.layers[-1], self.module, self.config.hidden_size
        layer: Any = module.layers[0]
        module.fc.weight.normal_(std=_SPREAD / len(self.config.taps))
        module.fc.weight[:, -size:] += torch.eye(size)  # of the last state
        for name in ("q_proj", "k_proj", "v_proj"):
            own, theirs = getattr(layer.self_attn, name).weight, getattr(last.self_attn, name).weight
            own[:, :size].normal_(std=_SPREAD)
            own[:, size:] = theirs.float()
        layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight.float() * _SMALL)
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight.float())
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight.float())
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight.float())
        layer.mlp.down_proj.weight.copy_(last.mlp.down_proj.weight.float() * _SMALL)
        module.norm.weight.copy_(decoder.norm.weight.float())
        module.lm_head.weight.copy_(model.get_output_embeddings().weight.float()[target_ids])
        embedding = decoder.embed_tokens.weight.detach().float()
        layer.input_layernorm.weight.fill_(1.0)
        del module.embed_tokens
        module.embed_tokens = _Rows(embedding)  # type: ignore[assignment]

    def start_from(self, init: str, target: str) -> None:
        """Take the weights and the output's ids of another head.

        Args:
            init: Its directory.
            target: The target's directory or hub name.

        Raises:
            InvalidArgumentError: It has another shape, or reads other states.
            UnsupportedModelError: It is no head of the target.
        """
        head, ids = load_head(init, target)
        own = self.config
        same = replace(head.config, rope=own.rope, feature_eps=own.feature_eps)
        if same != own or ids is None:
            raise InvalidArgumentError(
                "init", init, f"a head of {own.num_outputs} output tokens on layers {list(own.taps)}"
            )
        own_keys = self.module.state_dict().keys()
        self.module.load_state_dict(
            {key: value for key, value in head.state_dict().items() if key in own_keys}
        )
        self.target_ids.copy_(ids)
        self.row_of.fill_(-1)
        self.row_of[ids] = torch.arange(len(ids))

    @property
    def head(self) -> Tensor:
        """The output matrix, [rows, hidden_size]."""
        return self.module.lm_head.weight

    @property
    def num_weights(self) -> int:
        """Number of weights that one drafted token reads; features are fused once per committed token."""
        fused = sum(parameter.numel() for parameter in self.module.fc.parameters())
        return sum(parameter.numel() for parameter in self.parameters()) - fused

    def batch(
        self, sequences: Items[Sequence], *, keep: float = 0.0, generator: torch.Generator | None = None
    ) -> HeadBatch:
        """Return a batch for `num_steps` steps; `keep` 1 for all `depth` steps that are evaluated.

        Args:
            sequences: Answers with their prompts.
            keep: 1: all of each sequence.
            generator: Chooses windows; None: there are none.
        """
        count = self.depth if keep == 1.0 else self.num_steps
        starts = [0 if generator is None else _start(one, generator) for one in sequences]
        width = max(len(one.token_ids) - start for one, start in zip(sequences, starts, strict=True))
        token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
        size = (len(sequences), width, len(self.config.taps), self.config.hidden_size)
        states = torch.zeros(size, dtype=torch.bfloat16)
        for number, (one, found) in enumerate(zip(sequences, self._states.of(sequences), strict=True)):
            start, length = starts[number], len(found) - starts[number]
            token_ids[number, :length] = torch.from_numpy(one.token_ids[start:].astype("int64"))
            states[number, :length] = found[start:]
        place, labels, ids, logs = [], [], [], []
        for depth in range(1, count + 1):
            for number, one in enumerate(sequences):
                end = len(one.token_ids)
                label = torch.arange(min(end, max(one.num_prompt, starts[number] + depth + 1)), end)
                anchor = label - depth
                place.append(
                    torch.stack((torch.full_like(anchor, number), anchor, torch.full_like(anchor, depth)), 1)
                )
                answer = label.numpy() - one.num_prompt
                labels.append(torch.from_numpy(one.token_ids[label.numpy()].astype("int64")))
                ids.append(torch.from_numpy(one.top_ids[answer].astype("int64")))
                logs.append(torch.from_numpy(one.top_logs[answer].astype("float32")))
        joined = (torch.cat(part) for part in (place, labels, ids, logs))
        return HeadBatch(token_ids, torch.tensor(starts), states, *joined)

    def forward(self, batch: HeadBatch) -> Tensor:
        """Return log-probabilities of each prediction, float32 [predictions, rows of the output]."""
        module, rows = self.module, batch.token_ids.shape[1] - 1
        feature = module.fuse(batch.states[:, :-1].float())
        positions = torch.arange(rows, device=feature.device) + batch.starts[:, None]
        deepest = int(batch.place[:, 2].max())
        tokens = F.pad(batch.token_ids, (0, deepest))
        attention = _Unrolled()
        found = []
        for depth in range(1, deepest + 1):
            hidden, feature = module(
                tokens[:, depth : depth + rows], feature, positions + depth, attention.step()
            )
            chosen = batch.place[batch.place[:, 2] == depth]
            logits = module.logits(hidden[chosen[:, 0], chosen[:, 1] - 1 - batch.starts[chosen[:, 0]]])
            found.append(logits.float().log_softmax(-1))
        return torch.cat(found)

    def common(self, batch: HeadBatch, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's probabilities and the head's log-probabilities of the target's top ids.

        Both are [predictions, top_k]; an id without a row has the target's probability 0.
        """
        rows = self.row_of[batch.top_ids]
        return batch.top_logs.exp() * (rows >= 0), logs.gather(1, rows.clamp_min(0))

    def loss(self, batch: HeadBatch, kind: str) -> Tensor:
        """Return the mean loss, in which later steps count less: "kl" or "tv", as for other drafters."""
        wanted, found = self.common(batch, self(batch))
        if kind == "tv":
            each = 1 - torch.minimum(wanted, found.exp()).sum(-1)
        else:
            each = -(wanted * found).sum(-1)
        weight = STEP_WEIGHT ** (batch.place[:, 2] - 1).float()
        return (each * weight).sum() / weight.sum()


def _start(one: Sequence, generator: torch.Generator) -> int:
    """Return the first position of which the head sees the states; at least half of the answer follows."""
    most = one.num_prompt + (len(one.token_ids) - one.num_prompt) // 2
    is_window, place = torch.rand(2, generator=generator).tolist()
    return int(place * most) if is_window < _WINDOWS else 0


class _Rows(nn.Module):
    """An embedding that is not trained and not saved."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class _Unrolled:
    """Attention of the steps: to the first step's rows up to the own one, and to the own later steps."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self) -> Attend:
        """Return the attention of the next step."""
        return self._first if not self._keys else self._further

    def _first(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys.append(key)
        self._values.append(value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)

    def _further(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._keys.append(key)
        self._values.append(value)
        group = query.shape[1] // key.shape[1]
        keys = [one.repeat_interleave(group, 1) for one in self._keys]
        values = [one.repeat_interleave(group, 1) for one in self._values]
        query = query * query.shape[-1] ** -0.5
        rows = query.shape[2]
        later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        true = (query @ keys[0].transpose(-1, -2)).masked_fill(later, -torch.inf)
        own = torch.stack([(query * one).sum(-1) for one in keys[1:]], -1)
        share = torch.cat([true, own], -1).float().softmax(-1).to(value.dtype)
        mixed = share[..., :rows] @ values[0]
        for at, one in enumerate(values[1:]):
            mixed = mixed + share[..., rows + at, None] * one
        return mixed.transpose(1, 2)


AnyDrafter = Drafter | HeadDrafter


def save_head(
    drafter: HeadDrafter, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]
) -> int:
    """Write a directory in the `speculators` format, in bfloat16; files are replaced, the weights first.

    Returns:
        Size of the weights in bytes.

    Raises:
        ResourceExhaustedError: The disk is full; what the directory held is intact.
    """
    weights = {
        key: value.detach().to("cpu", torch.bfloat16).contiguous()
        for key, value in drafter.module.state_dict().items()
    }
    ids = drafter.target_ids.cpu()
    weights["d2t"] = ids - torch.arange(len(ids))
    config = drafter.config
    layer = drafter.layer_config.to_diff_dict() | {"model_type": "llama", "num_hidden_layers": 1}
    stored = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.num_outputs,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.depth}],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
    }
    return write_drafter(folder, weights, stored, identity, name, card, _card(name, drafter, card))


def _card(name: str, drafter: HeadDrafter, card: dict[str, Any]) -> str:
    taps = ", ".join(map(str, drafter.config.taps))
    return (
        f"# EAGLE-3 head for {name}\n\n"
        f"It reads the target's states at layers {taps} and has {drafter.config.num_outputs} output tokens, "
        "trained by `gammaray train` on text of the target. Its weights derive from the target's, whose "
        "licence applies. It shares the target's input embedding and tokenizer.\n\n"
        f"Measured on held-out answers:\n\n```json\n{json.dumps(card, indent=1)}\n```\n"
    )
