"""Controlled pairs: models of real size with random weights, whose acceptance is dialled.

The target is the draft's layers with more random layers on top, whose output matrices are scaled by eps:
at 0 the two models agree, at 1 they have nothing in common. Shapes and operations, and so the cost, are
those of the deep model. Both share embedding, last norm and head, so a draft is as wide as its target, and
it is its depth that makes it small: of the 8B shape, 2 layers and the head read 0.57 billion weights per
step, 4 layers 1.0 billion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from services.engine.core.batch import GumbelDraw, SequenceInput
from services.engine.core.model import LoadedModel
from services.engine.cuda.torch_kernels import TorchKernels
from services.engine.cuda.weights import GraphModel, build_graph_model
from services.engine.graph_engine import GraphEngine

__all__ = ["EIGHT_B", "TINY", "Agreement", "Pair", "Sizes"]

ENTROPY_NATS = 2.5
_NUM_NOISES = 8


@dataclass(frozen=True)
class Sizes:
    """Shape of the target."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int


EIGHT_B = Sizes(4096, 14336, 32, 32, 8, 128, 32000, 33_024)
TINY = Sizes(64, 96, 6, 4, 2, 16, 512, 512)


@dataclass(frozen=True)
class Agreement:
    """How well a draft foresees its target on the target's own samples at temperature 1.

    Attributes:
        coupled: Probability that both Gumbel-max draws give the same token: alpha of coupled verification.
        overlap: Mean of 1 - total variation: alpha of rejection sampling.
        greedy: Share of positions with the same argmax.
    """

    coupled: float
    overlap: float
    greedy: float


@dataclass
class Pair:
    """A target and what is made of its leading layers.

    Attributes:
        module: The transformers model, for its peers; shares the weights.
        model: The same weights as the engine reads them.
        kernels: Operations; None for those of the device.
    """

    module: PreTrainedModel
    model: GraphModel
    kernels: TorchKernels | None = None
    _scales: list[float] = field(default_factory=list)

    @classmethod
    @torch.no_grad()
    def build(cls, sizes: Sizes, device: str, dtype: torch.dtype, seed: int = 0) -> Pair:
        """Make random weights; the head gives distributions of about 2.5 nats."""
        config = _config(sizes, sizes.layers)
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
        generator = torch.Generator(device=device).manual_seed(seed)
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        loaded = LoadedModel("controlled pair", module, config, sizes.max_context)
        pair = cls(module, build_graph_model(loaded, sizes.vocab), None, [1.0] * sizes.layers)
        pair._set_entropy()
        return pair

    @property
    def _budget(self) -> int:
        """Bytes of an engine's caches: the pool is allocated whole, so a CPU gets a small one."""
        return _BUDGET if self.model.device.type == "cuda" else _CPU_BUDGET

    def target(self) -> GraphEngine:
        """Return an engine of the whole model."""
        return GraphEngine.of(
            self.model, name="target", kernels=self.kernels, cache_budget_bytes=self._budget
        )

    def draft(self, num_layers: int) -> GraphEngine:
        """Return an engine of the leading layers."""
        model = self.model.first_layers(num_layers)
        return GraphEngine.of(model, name="draft", kernels=self.kernels, cache_budget_bytes=self._budget)

    def draft_module(self, num_layers: int) -> PreTrainedModel:
        """Return the transformers model of the leading layers; shares all weights."""
        config = LlamaConfig(**{**self.module.config.to_dict(), "num_hidden_layers": num_layers})
        with torch.device("meta"):
            draft = AutoModelForCausalLM.from_config(config, dtype=self.model.dtype).eval()
        body = self.module.model
        draft.model.embed_tokens, draft.model.norm = body.embed_tokens, body.norm
        draft.model.rotary_emb, draft.lm_head = body.rotary_emb, self.module.lm_head
        draft.model.layers = nn.ModuleList(list(body.layers)[:num_layers])
        return draft

    @torch.no_grad()
    def set_eps(self, num_layers: int, eps: float) -> None:
        """Scale what the layers from `num_layers` on add; in place, so captured graphs stay valid."""
        for index, layer in enumerate(self.model.layers):
            scale = 1.0 if index < num_layers else eps
            if scale != self._scales[index]:
                layer.out.mul_(scale / self._scales[index])
                layer.down.mul_(scale / self._scales[index])
                self._scales[index] = scale

    def calibrate(
        self,
        target: GraphEngine,
        draft: GraphEngine,
        num_layers: int,
        alpha: float,
        *,
        num_sessions: int,
        num_tokens: int,
        expired: Callable[[], bool],
        tolerance: float = 0.01,
    ) -> tuple[float, Agreement]:
        """Find by bisection the eps whose coupled alpha is `alpha`; return it and what was measured there."""
        low, high = math.log(0.002), math.log(1.0)
        for turn in range(12):
            eps = math.exp((low + high) / 2)
            self.set_eps(num_layers, eps)
            found = agreement(target, draft, num_sessions, num_tokens, seed=turn)
            if abs(found.coupled - alpha) <= tolerance or expired():
                break
            if found.coupled > alpha:
                low = math.log(eps)
            else:
                high = math.log(eps)
        return eps, found

    def describe(self, num_layers: int) -> dict[str, Any]:
        """Weights that a step of the leading layers reads."""
        model = self.model.first_layers(num_layers)
        return {
            "layers": num_layers,
            "read_weights": model.step_bytes // model.head.element_size(),
            "read_bytes": model.step_bytes,
        }

    def _set_entropy(self) -> None:
        engine = self.draft(2)
        tokens = [(17 * i * i + 5 * i) % self.model.shape.vocab_size for i in range(64)]
        logits = engine.step([SequenceInput("entropy", 0, tokens, len(tokens))])[0].double()
        low, high = 1e-3, 1e3
        for _ in range(40):
            scale = math.sqrt(low * high)
            log_probs = (logits * scale).log_softmax(-1)
            if -(log_probs.exp() * log_probs).sum(-1).mean() > ENTROPY_NATS:
                low = scale
            else:
                high = scale
        self.model.head.mul_(scale)


_BUDGET, _CPU_BUDGET = 24 * 2**30, 64 * 2**20


def agreement(
    target: GraphEngine, draft: GraphEngine, num_sessions: int, num_tokens: int, *, seed: int
) -> Agreement:
    """Measure a pair on text that the target samples after random prompts."""
    vocab, names = target.vocab_size, [f"agreement-{index}" for index in range(num_sessions)]
    texts = [random_tokens(8, seed * num_sessions + index, vocab) for index in range(num_sessions)]
    gumbel_draws = [GumbelDraw(seed * num_sessions + index) for index in range(num_sessions)]
    chosen = target.choose(
        [SequenceInput(n, 0, text, 1) for n, text in zip(names, texts, strict=True)], gumbel_draws
    )
    for _ in range(num_tokens):
        feeds = [SequenceInput(n, len(t), c, 1) for n, t, c in zip(names, texts, chosen, strict=True)]
        for text, tokens in zip(texts, chosen, strict=True):
            text.extend(tokens)
        chosen = target.choose(feeds, gumbel_draws)
    distributions = []
    for engine in (target, draft):
        feeds = [SequenceInput(n, 0, text, num_tokens) for n, text in zip(names, texts, strict=True)]
        distributions.append(torch.cat(engine.step(feeds)).log_softmax(-1))
        for name in names:
            engine.release(name)
    return _agreement_of(distributions[0], distributions[1], seed)


def _agreement_of(target: Tensor, draft: Tensor, seed: int) -> Agreement:
    """From log-probabilities [positions, vocab_size]."""
    generator = torch.Generator(device=target.device).manual_seed(seed)
    same = 0.0
    for _ in range(_NUM_NOISES):
        noise = torch.empty_like(target).exponential_(generator=generator).log_()
        same += (((target - noise).argmax(-1)) == (draft - noise).argmax(-1)).double().mean().item()
    overlap = torch.minimum(target.exp(), draft.exp()).sum(-1).mean().item()
    greedy = (target.argmax(-1) == draft.argmax(-1)).double().mean().item()
    return Agreement(same / _NUM_NOISES, overlap, greedy)


def random_tokens(count: int, seed: int, vocab_size: int) -> list[int]:
    """Return token ids that do not depend on torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def _config(sizes: Sizes, layers: int) -> LlamaConfig:
    values = asdict(sizes)
    return LlamaConfig(
        hidden_size=values["hidden"],
        intermediate_size=values["intermediate"],
        num_hidden_layers=layers,
        num_attention_heads=values["heads"],
        num_key_value_heads=values["kv_heads"],
        head_dim=values["head_dim"],
        vocab_size=values["vocab"],
        max_position_embeddings=values["max_context"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
