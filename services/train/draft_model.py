"""A draft model in training: some of the target's layers and rows of its output matrix."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.train.answers.store import Sequence
from services.train.batches import Batch, build_batch
from services.train.trainable import Trainable, write_drafter


class TrainableDraft(Trainable):
    """A draft model; the target's input embedding is not trained.

    It starts from some `layers` of a causal model with `model.embed_tokens`, `model.layers` and `lm_head`. It
    is evaluated by one depth: where all tokens before matched, it has read the true text.
    """

    def __init__(self, target: PreTrainedModel, layers: Items[int], target_ids: Tensor) -> None:
        parts: Any = target
        body = getattr(parts, "model", None)
        if not all(hasattr(body, part) for part in ("embed_tokens", "layers", "norm")):
            raise FailedPreconditionError(
                f"model_type {target.config.model_type}: a drafter needs a target with model.embed_tokens, "
                "model.layers and model.norm, as Llama and Qwen have them"
            )
        embedding = parts.model.embed_tokens.weight.detach().float()
        super().__init__(len(embedding), target_ids)
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[number] for number in layers]
        config.tie_word_embeddings = False
        make: Any = AutoModelForCausalLM.from_config
        self.config, self.model = config, make(config, attn_implementation="sdpa").model.float()
        for own, number in zip(self.model.layers, layers, strict=True):
            own.load_state_dict(parts.model.layers[number].state_dict())
        self.model.norm.load_state_dict(parts.model.norm.state_dict())
        self.model.embed_tokens = nn.Identity()  # rows are looked up below, in a matrix that is not saved
        self.output = nn.Parameter(parts.get_output_embeddings().weight.detach().float()[target_ids].clone())
        self.embedding: Tensor
        self.register_buffer("embedding", embedding, persistent=False)

    @property
    def head(self) -> Tensor:
        return self.output

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def batch(
        self, sequences: Items[Sequence], num_depths: int, generator: torch.Generator | None = None
    ) -> Batch:
        return build_batch(sequences, num_depths)

    def forward(self, batch: Batch) -> Tensor:
        rows = F.embedding(batch.token_ids, self.embedding)
        hidden = self.model(inputs_embeds=rows, use_cache=False).last_hidden_state
        chosen = hidden[batch.place[:, 0], batch.place[:, 1]]
        return F.linear(chosen, self.output.to(chosen.dtype)).float().log_softmax(-1)

    def start_from(self, init: str, target: str) -> None:
        try:
            stored = load_file(Path(init) / "model.safetensors")
            self.take_ids(stored["d2t"] + torch.arange(len(stored["d2t"])))
            self.output.data.copy_(stored["lm_head.weight"])
            layers = {key[6:]: value.float() for key, value in stored.items() if key.startswith("model.")}
            self.model.load_state_dict(layers)
        except (OSError, RuntimeError, KeyError, SafetensorError) as error:
            raise InvalidArgumentError("init", init, f"a drafter of the same shape ({error})") from error

    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        parts = self.model.state_dict().items()
        weights = {f"model.{key}": value for key, value in parts if "embed_tokens" not in key}
        ids = self.target_ids.cpu()
        weights |= {"lm_head.weight": self.output, "d2t": ids - torch.arange(len(ids))}
        config = self.config.to_dict() | {"dtype": "bfloat16", "architectures": self.config.architectures}
        config["draft_vocab_size"] = len(ids)
        about = f"A draft model of {self.config.num_hidden_layers} layers and {len(ids)} output tokens."
        return write_drafter(folder, weights, config, identity, name, card, about)


def choose_vocabulary(sequences: Iterable[Sequence], count: int, vocab_size: int) -> Tensor:
    """Return the ids that answers use most, int64 [count], ascending; unused ones follow by id."""
    seen: Counter[int] = Counter()
    for sequence in sequences:
        seen.update(sequence.token_ids[sequence.num_prompt :].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))
