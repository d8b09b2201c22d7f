"""An EAGLE-3 head in training, and the directory that it becomes.

Row t of a sequence reads the target's states at t and the token at t + 1, and predicts the token at t + 2. In
further steps (training-time test, arXiv 2503.01840) it reads the tokens after that and its own states in
place of the target's, as when it drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.heads.eagle import EagleConfig, EagleHead
from services.heads.loading import load_head
from services.train.answers.store import Sequence
from services.train.batches import Batch, build_batch
from services.train.trainable import DEPTH, UNROLL, Trainable, write_drafter

_SMALL = 0.1
"""Factor on what the layer adds at first: the head then begins near the target's own last state."""

_SPREAD = 0.02

States: TypeAlias = Callable[[Items[Sequence]], list[Tensor]]
"""Returns the target's states of sequences, each bfloat16 [tokens, taps, hidden_size]."""

_LAYER_TYPES = ("llama", "mistral", "qwen2", "smollm3")
_SHAPE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps"),
)
_CONFIG_KEYS = (*_SHAPE_KEYS, "max_position_embeddings", "rope_parameters", "hidden_act")
_shape_of = attrgetter(*_SHAPE_KEYS, "attention_bias", "mlp_bias")


class TrainableHead(Trainable):
    """A head that begins near the target's last state; the target's input embedding is not trained.

    The target's layers are as Llama's, else it is refused. The head reads the states `taps`, the last one
    after all layers, see `StateStore`.
    """

    depth, num_depths = DEPTH, UNROLL

    def __init__(self, target: PreTrainedModel, taps: Items[int], target_ids: Tensor, states: States) -> None:
        config: Any = target.config
        if config.model_type not in _LAYER_TYPES:
            allowed = f"a head is trained for targets of types {', '.join(_LAYER_TYPES)}"
            raise FailedPreconditionError(f"model_type {config.model_type}: {allowed}")
        super().__init__(config.vocab_size, target_ids)
        self._states = states
        stored = {key: getattr(config, key) for key in _CONFIG_KEYS if getattr(config, key, None) is not None}
        layer = LlamaConfig(**stored, num_hidden_layers=1, tie_word_embeddings=False)
        self.config = EagleConfig(
            taps=tuple(taps),
            target_hidden_size=layer.hidden_size,
            num_outputs=len(target_ids),
            layer=layer,
            fc_norm=True,
        )
        self.module = EagleHead(self.config)
        self._begin(target, target_ids)

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel, target_ids: Tensor) -> None:
        """Copy the target's last layer; what it adds, and reads of the embedding, is small at first."""
        model: Any = target
        decoder = model.get_decoder()
        last, module, size = decoder.layers[-1], self.module, self.config.layer.hidden_size
        layer: Any = module.layers[0]
        module.fc.weight.normal_(std=_SPREAD / len(self.config.taps))
        module.fc.weight[:, -size:] += torch.eye(size)  # of the last state
        for name in ("q_proj", "k_proj", "v_proj"):
            own, theirs = getattr(layer.self_attn, name).weight, getattr(last.self_attn, name).weight
            own[:, :-size].normal_(std=_SPREAD)
            own[:, -size:] = theirs.float()
        layer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight.float() * _SMALL)
        layer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight.float())
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.copy_(getattr(last.mlp, name).weight.float())
        layer.mlp.down_proj.weight.copy_(last.mlp.down_proj.weight.float() * _SMALL)
        del module.embed_tokens
        module.embed_tokens = _FixedRows(decoder.embed_tokens.weight.detach().float())  # type: ignore[assignment]
        layer.hidden_norm.weight.copy_(last.input_layernorm.weight.float())
        layer.input_layernorm.weight.fill_(1.0)
        module.norm.weight.copy_(decoder.norm.weight.float())
        module.lm_head.weight.copy_(model.get_output_embeddings().weight.float()[target_ids])

    def batch(
        self, sequences: Items[Sequence], num_depths: int, generator: torch.Generator | None = None
    ) -> Batch:
        return build_batch(sequences, num_depths, self._states(sequences), generator)

    def start_from(self, init: str, target: str) -> None:
        head, ids = load_head(init, target)
        layer, own = head.config.layer, self.config.layer
        is_alike = replace(head.config, layer=own) == self.config and _shape_of(layer) == _shape_of(own)
        if ids is None or not is_alike:
            shape = f"on layers {list(self.config.taps)} with {len(self.target_ids)} tokens"
            raise InvalidArgumentError("init", init, f"a head of its kind {shape}")
        self.take_ids(ids)
        names = self.module.state_dict().keys()
        self.module.load_state_dict({key: value for key, value in head.state_dict().items() if key in names})

    @property
    def head(self) -> Tensor:
        return self.module.lm_head.weight

    @property
    def num_weights(self) -> int:
        """Number of weights that one drafted token reads; features are fused once per committed token."""
        fused = sum(parameter.numel() for parameter in self.module.fc.parameters())
        return sum(parameter.numel() for parameter in self.parameters()) - fused

    def forward(self, batch: Batch) -> Tensor:
        module, rows = self.module, batch.token_ids.shape[1] - 1
        feature = module.fuse(batch.states[:, :-1].float())
        positions = torch.arange(rows, device=feature.device) + batch.starts[:, None]
        deepest = int(batch.place[:, 2].max())
        tokens = F.pad(batch.token_ids, (0, deepest))
        attention = _Unrolled()
        states = []
        for depth in range(1, deepest + 1):
            inputs = tokens[:, depth : depth + rows]
            hidden, feature = module(inputs, feature, positions + depth, attention.step)
            chosen = batch.place[batch.place[:, 2] == depth]
            states.append(hidden[chosen[:, 0], chosen[:, 1] - 1 - batch.starts[chosen[:, 0]]])
        return module.logits(torch.cat(states)).float().log_softmax(-1)

    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        config, ids = self.config, self.target_ids.cpu()
        weights = {**self.module.state_dict(), "d2t": ids - torch.arange(len(ids))}
        layer = config.layer.to_diff_dict() | {"model_type": "llama", "num_hidden_layers": 1}
        layer["num_aux_hidden_states"] = len(config.taps)  # vLLM assumes three, and reads only this part
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
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.depth}],
                "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
            },
        }
        about = (
            f"An EAGLE-3 head with {config.num_outputs} output tokens, which reads the target's states at "
            f"layers {', '.join(map(str, config.taps))}."
        )
        return write_drafter(folder, weights, stored, identity, name, card, about)


class _FixedRows(nn.Module):
    """An embedding that is not trained and not saved."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


class _Unrolled:
    """Attention of a row in each step: to the first step's rows up to itself, and to its later states."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend in the next step."""
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2)
        group = query.shape[1] // key.shape[1]
        keys = [step.repeat_interleave(group, 1) for step in self._keys]
        values = [step.repeat_interleave(group, 1) for step in self._values]
        query = query * query.shape[-1] ** -0.5
        rows = query.shape[2]
        later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        true = (query @ keys[0].transpose(-1, -2)).masked_fill(later, -torch.inf)
        drafted = torch.stack([(query * step).sum(-1) for step in keys[1:]], -1)
        share = torch.cat([true, drafted], -1).float().softmax(-1).to(value.dtype)
        mixed = share[..., :rows] @ values[0]
        for at, step in enumerate(values[1:]):
            mixed = mixed + share[..., rows + at, None] * step
        return mixed.transpose(1, 2)
