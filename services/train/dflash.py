"""A DFlash head in training (arXiv 2602.06036), and the directory that it becomes.

A block begins at a known token, the anchor, whose states are not known yet; masks follow it. Its rows see the
states of all positions before the anchor, and each other in both directions. Row k predicts the token k + 1
places after the anchor: no row is spent on the anchor alone, which speculators calls `sample_from_anchor`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gammaray.errors import InvalidArgumentError
from services.heads.dflash import DFlashConfig, DFlashHead
from services.heads.dflash_formats import load_dflash
from services.train.answers.states import StateStore
from services.train.answers.store import Sequence
from services.train.drafter import write_drafter
from services.train.features import FeatureDrafter, FixedRows, HeadBatch, head_card
from services.train.head import HeadDrafter

__all__ = ["DFlashDrafter"]

_NUM_LAYERS = 2

_ANCHORS = 0.5
"""Share of the places of an answer from which a block is trained in a step."""

_LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


class DFlashDrafter(FeatureDrafter):
    """A head whose layers begin as the target's last ones; the target's input embedding is not trained.

    Args:
        target: A causal model with layers as Llama's.
        taps: The layers whose entering states it reads.
        target_ids: Ascending ids of the output's rows.
        depth: Tokens of a block.
        states: Where states are read.

    Raises:
        FailedPreconditionError: The target has other layers.
    """

    def __init__(
        self, target: PreTrainedModel, taps: Items[int], target_ids: Tensor, depth: int, states: StateStore
    ) -> None:
        HeadDrafter.check_target(target.config)
        config: Any = target.config
        super().__init__(taps, config.hidden_size, config.vocab_size, target_ids, depth, states)
        self.num_steps = depth
        self.config = DFlashConfig(
            taps=tuple(taps),
            block_size=depth,
            mask_token=_mask_token(config),
            first_row=0,
            num_layers=min(_NUM_LAYERS, config.num_hidden_layers),
            num_outputs=len(target_ids),
            layer=_layer_config(config),
        )
        self.module = DFlashHead(self.config)
        self._begin(target, target_ids)

    @torch.no_grad()
    def _begin(self, target: PreTrainedModel, target_ids: Tensor) -> None:
        """Copy the target's last layers, which read the last of the states at first."""
        model: Any = target
        decoder, module = model.get_decoder(), self.module
        size = self.config.layer.hidden_size
        module.fc.weight.normal_(std=0.02 / len(self.config.taps))
        module.fc.weight[:, -size:] += torch.eye(size)
        last = decoder.layers[-self.config.num_layers :]
        module.hidden_norm.weight.copy_(last[-1].input_layernorm.weight.float())
        for own, theirs in zip(module.layers, last, strict=True):
            named = dict(theirs.named_parameters())
            for key, parameter in own.named_parameters():
                # The norms of queries and keys, which begin as 1, and missing biases are not there.
                if key in named:
                    parameter.copy_(named[key].float())
        module.norm.weight.copy_(decoder.norm.weight.float())
        self.head.copy_(model.get_output_embeddings().weight.float()[target_ids])
        del module.embed_tokens
        module.embed_tokens = FixedRows(decoder.embed_tokens.weight.detach().float())  # type: ignore[assignment]

    @property
    def head(self) -> Tensor:
        """The output matrix, [rows, hidden_size]."""
        return self.module.lm_head.weight

    @property
    def num_weights(self) -> int:
        """Number of weights that a drafted block reads; states are fused once per committed token."""
        fused = self.module.fc.weight.numel()
        return sum(parameter.numel() for parameter in self.parameters()) - fused

    def batch(
        self, sequences: Items[Sequence], *, keep: float = 0.0, generator: torch.Generator | None = None
    ) -> HeadBatch:
        """Return a batch of all depths, of blocks that `generator` chooses; None: of all blocks."""
        batch = super().batch(sequences, keep=keep, generator=generator)
        if generator is None:
            return batch
        number, anchor, _ = batch.place.unbind(1)
        chance = torch.rand(batch.token_ids.shape, generator=generator)
        kept = chance[number, anchor - batch.starts[number]] < _ANCHORS
        kept[0] |= not kept.any()  # a step of one short answer may have no block
        rows = {name: getattr(batch, name)[kept] for name in ("place", "labels", "top_ids", "top_logs")}
        return replace(batch, **rows)

    def forward(self, batch: HeadBatch) -> Tensor:
        """Return log-probabilities of each prediction, float32 [predictions, rows of the output]."""
        module, size = self.module, self.config.block_size
        blocks, block = torch.unique(batch.place[:, :2], dim=0, return_inverse=True)
        number, anchor = blocks.unbind(1)
        first = anchor - batch.starts[number]
        token_ids = torch.full((len(blocks), size), self.config.mask_token, device=blocks.device)
        token_ids[:, 0] = batch.token_ids[number, first]
        positions = anchor[:, None] + torch.arange(size, device=blocks.device)
        features = module.fuse(batch.states.float())
        width = features.shape[1]
        places = batch.starts[:, None] + torch.arange(width, device=blocks.device)
        x = module.embed_tokens(token_ids).flatten(0, 1)
        own, seen = module.rotary(x, positions.view(1, -1)), module.rotary(x, places.view(1, -1))
        counts = torch.bincount(number, minlength=len(features)).tolist()
        for layer in module.layers:
            part: Any = layer
            attention = part.self_attn
            context = attention.entries(features.flatten(0, 1), *seen).unflatten(1, (-1, width))
            normed = part.input_layernorm(x)
            query = attention.queries(normed)
            query, _ = apply_rotary_pos_emb(query, query, *own)
            query = query[0].unflatten(1, (-1, size))
            entries = attention.entries(normed, *own).unflatten(1, (-1, size))
            mixed = [
                _attend(*parts)
                for parts in zip(
                    query.split(counts, 1),
                    context.unbind(1),
                    entries.split(counts, 1),
                    first.split(counts),
                    strict=True,
                )
            ]
            x = x + attention.o_proj(torch.cat(mixed, 1).flatten(1, 2).transpose(0, 1).flatten(1))
            x = x + part.mlp(part.post_attention_layernorm(x))
        rows = module.norm(x)[block * size + batch.place[:, 2] - 1]
        return module.logits(rows).float().log_softmax(-1)

    def start_from(self, init: str, target: str) -> None:
        """Take the weights and the output's ids of another head, see `FeatureDrafter.start_from`."""
        head, ids = load_dflash(init, target)
        own = self.config
        if replace(head.config, layer=own.layer) != own:
            allowed = (
                f"a block of {own.block_size} tokens that begins with a prediction, {own.num_layers} layers"
            )
            raise InvalidArgumentError(
                "init",
                init,
                f"{allowed}, {own.num_outputs} output tokens, and the states of {list(own.taps)}",
            )
        keys = self.module.state_dict().keys()
        self.module.load_state_dict({key: value for key, value in head.state_dict().items() if key in keys})
        if ids is not None:
            self.take_ids(ids)

    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        """Write a directory in the `speculators` format, see `FeatureDrafter.save`."""
        config = self.config
        weights = {
            key: value.detach().to("cpu", torch.bfloat16).contiguous()
            for key, value in self.module.state_dict().items()
        }
        ids = self.target_ids.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        layer = {key: getattr(config.layer, key) for key in _LAYER_KEYS}
        layer |= {"model_type": "qwen3", "num_hidden_layers": config.num_layers, "hidden_act": "silu"}
        layer |= {"head_dim": config.layer.head_dim, "attention_bias": False, "tie_word_embeddings": False}
        stored = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "speculators_version": "0.9.0",
            "aux_hidden_state_layer_ids": list(config.taps),
            "block_size": config.block_size,
            "draft_vocab_size": config.num_outputs,
            "mask_token_id": config.mask_token,
            "sample_from_anchor": True,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.depth}],
                "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
            },
        }
        about = (
            f"It reads the states that enter the target's layers {', '.join(map(str, config.taps))}, drafts "
            f"{config.depth} tokens in a pass of {config.num_layers} layers, and has {config.num_outputs} "
            "output tokens. It shares the target's input embedding and tokenizer."
        )
        text = head_card("DFlash head", name, about, card)
        return write_drafter(folder, weights, stored, identity, name, card, text)


def _attend(query: Tensor, context: Tensor, own: Tensor, first: Tensor) -> Tensor:
    """Return the attention of one sequence's blocks, [heads, blocks, block_size, dim].

    Args:
        query: [heads, blocks, block_size, dim].
        context: Keys beside values of the committed positions, [kv heads, positions, 2 dim].
        own: Of the blocks' rows, [kv heads, blocks, block_size, 2 dim].
        first: Number of positions that a block sees, [blocks].
    """
    group = query.shape[0] // own.shape[0]
    dim = query.shape[-1]
    context, own = context.repeat_interleave(group, 0), own.repeat_interleave(group, 0)
    scores = query.flatten(1, 2) @ context[..., :dim].transpose(1, 2) * dim**-0.5
    scores = scores.unflatten(1, query.shape[1:3])
    hidden = torch.arange(context.shape[1], device=first.device) >= first[:, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    inner = query @ own[..., :dim].transpose(2, 3) * dim**-0.5
    share = F.softmax(torch.cat([scores, inner], -1).float(), -1).to(own.dtype)
    of_context, of_block = share[..., : context.shape[1]], share[..., context.shape[1] :]
    mixed: Tensor = (of_context.flatten(1, 2) @ context[..., dim:]).view(query.shape)
    return mixed + of_block @ own[..., dim:]


def _layer_config(config: PretrainedConfig) -> LlamaConfig:
    target: Any = config
    stored = {key: getattr(target, key) for key in _LAYER_KEYS}
    dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    return LlamaConfig(**stored, head_dim=dim, attention_bias=False, tie_word_embeddings=False)


def _mask_token(config: PretrainedConfig) -> int:
    """Return the id that stands for unknown tokens: one after which nothing is drafted."""
    for found in (getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)):
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, int) and 0 <= first < config.vocab_size:
            return first
    return int(config.vocab_size) - 1
