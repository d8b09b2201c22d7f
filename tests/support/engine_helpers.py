"""Tiny random models of many architectures, saved as Hugging Face directories."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.engine.core.batch import SequenceInput
from services.engine.core.kv_cache import CacheShape
from services.engine.core.model import load_model
from services.engine.engine import Engine
from services.engine.hf.probe import probe_model
from services.engine.hf.runner import TransformersRunner
from services.own.draft_scheduler import DraftScheduler
from services.own.target_scheduler import TargetScheduler
from services.scheduling.planning import Limits

VOCAB_SIZE = 97
LIMITS = Limits(max_batch_tokens=1024, prefill_chunk=256)
MAX_CONTEXT = 128

_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_CONTEXT},
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_MLA: dict[str, Any] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

# Architecture -> (model type, settings in addition to the common ones). A name with a dash is a variant.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma2": (
        "gemma2",
        {
            **{"sliding_window": 8, "layer_types": _LAYER_TYPES, "query_pre_attn_scalar": 8},
            **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "layer_types": _LAYER_TYPES, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", {"sliding_window": 8}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "gpt_oss": (
        "gpt_oss",
        {
            **{"sliding_window": 8, "layer_types": _LAYER_TYPES},
            **{"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "falcon": ("falcon", {"alibi": False, "head_dim": None}),
    "falcon-alibi": ("falcon", {"alibi": True, "head_dim": None}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"max_seq_len": MAX_CONTEXT}),
    "mamba": ("mamba", {"state_size": 8}),
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 16}),
    "qwen3_next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            **{"num_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **{"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16},
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
}

UNSUPPORTED = {
    **dict.fromkeys(("gptj", "falcon", "falcon-alibi", "bloom", "mpt"), "0 of 3 layers attend through"),
    **dict.fromkeys(("mamba", "recurrent_gemma", "qwen3_next"), "linear_attention"),
    "llama4": "chunked_attention",
}
"""With the reason why it is refused."""
SUPPORTED = tuple(arch for arch in CONFIGS if arch not in UNSUPPORTED)
# Those that have a path with fast kernels as well.
LEAN = ("llama", "llama-bias", "llama-yarn", "mistral", "mistral-full", "qwen2", "qwen2-sliding", "qwen3")


def tiny_model(
    arch: str, path: Path, *, seed: int = 0, gain: float = 1.0, bfloat16: bool = False, **overrides: Any
) -> Path:
    """Save a random model of an architecture of CONFIGS and return its directory.

    Args:
        arch: Key of CONFIGS.
        path: Directory to make a subdirectory in, such as pytest's tmp_path.
        seed: Of the weights.
        gain: Scales all matrices; above 1 makes attention and logits more extreme.
        bfloat16: Round the weights to bfloat16 and save them so, as published models are.
        overrides: Settings of the configuration, such as `vocab_size` or `num_hidden_layers`.
    """
    directory = path / f"{arch}-{seed}"
    model_type, settings = CONFIGS[arch]
    config = AutoConfig.for_model(model_type, **_merged(settings, overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, gain)
    if bfloat16:
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def plain_model(directory: Path) -> PreTrainedModel:
    """Load the directory as transformers does it, float32 with eager attention: the reference."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the model's own logits [len(token_ids), vocab_size] of one plain forward."""
    return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def flash_engine(directory: Path, *, dtype: str = "float32") -> Engine:
    """Load transformers' layers with a causal kernel for chunks of prompts, as on GPUs."""
    loaded = load_model(str(directory), device="cpu", dtype=dtype)
    layout = probe_model(loaded)
    shape = CacheShape(layout.num_layers, layout.kv_heads, layout.kv_dim, loaded.dtype, loaded.device)
    runner = TransformersRunner(loaded, layout, flash=True)
    sizes = {"vocab_size": layout.vocab_size, "max_context": loaded.max_context}
    return Engine(runner, shape, 1 << 26, model_name=str(directory), **sizes)


@torch.no_grad()
def plain_states(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return what enters each layer and the final norm in a plain forward, [tokens, layers + 1, hidden_size].

    `output_hidden_states` has the last state after the norm only, so a hook takes what leaves the last layer.
    """
    depth, last = model.config.num_hidden_layers, []
    stack = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth)
    hook = stack[-1].register_forward_hook(
        lambda _module, _given, made: last.append(made[0] if isinstance(made, tuple) else made)
    )
    output = model(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
    hook.remove()
    states = [state[0] for state in output.hidden_states[:-1]]
    return torch.stack([*states, last[0].view(states[0].shape)], dim=1)


class CheckedEngine:
    """An engine whose every step is compared with plain forwards of the same tokens.

    Args:
        taps: Layers whose recorded hidden states are compared, too.

    Attributes:
        worst: Largest absolute difference of a logit so far.
        worst_tap: Largest difference of a hidden state so far, of 1 + the expected number's size.
    """

    def __init__(self, engine: Engine, plain: PreTrainedModel, taps: Sequence[int] = ()) -> None:
        self.engine = engine
        self.worst = self.worst_tap = 0.0
        self._plain, self._layers = plain, list(taps)
        self._nodes: dict[str, tuple[list[int], list[int]]] = {}
        if taps:
            engine.tap(taps)

    def step(self, *feeds: SequenceInput) -> list[torch.Tensor]:
        """Step, and compare each wanted logit and each state with those of its row's own path."""
        before = {feed.session_id: list(self.engine.tokens(feed.session_id)) for feed in feeds}
        results, taps = self.engine.step(feeds), self.engine.taps
        assert len(taps) == (len(feeds) if self._layers else 0)
        for index, (feed, got) in enumerate(zip(feeds, results, strict=True)):
            assert got.shape == (feed.num_logits, self.engine.vocab_size)
            assert got.dtype == torch.float32
            texts = self._texts(before[feed.session_id][: feed.start], feed)
            if feed.num_logits:
                expected = self._rows(plain_logits, texts)[-feed.num_logits :]
                self.worst = max(self.worst, (got - expected).abs().max().item())
            if taps:
                self._compare_taps(taps[index], self._rows(plain_states, texts)[:, self._layers])
        return results

    def _compare_taps(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        assert got.shape == expected.shape
        assert (got.dtype, got.device) == (self.engine.dtype, self.engine.device)
        difference = ((got - expected).abs() / (1 + expected.abs())).max().item()
        self.worst_tap = max(self.worst_tap, difference)

    def _texts(self, context: list[int], feed: SequenceInput) -> list[tuple[list[int], int]]:
        """Return the texts whose last rows are those of a feed's tokens, with how many each."""
        count = len(feed.token_ids) - len(feed.parents or ())
        chain = context + list(feed.token_ids[:count])
        kept = self._nodes.get(feed.session_id, ([], []))
        nodes = [*kept[0][: feed.num_kept], *feed.token_ids[count:]]
        parents = [*kept[1][: feed.num_kept], *(feed.parents or ())]
        self._nodes[feed.session_id] = (nodes, parents)
        trees = [path_tokens(chain, nodes, parents, node) for node in range(feed.num_kept, len(nodes))]
        return [*([(chain, count)] if count else []), *((text, 1) for text in trees)]

    def _rows(
        self,
        forward: Callable[[PreTrainedModel, Sequence[int]], torch.Tensor],
        texts: list[tuple[list[int], int]],
    ) -> torch.Tensor:
        return torch.cat([forward(self._plain, text)[-count:] for text, count in texts])


def chained(
    ours: Engine, theirs: Engine, noise: torch.Tensor | None = None, first: Sequence[int] = (5,)
) -> list[int]:
    """Draft a chain in one call and token by token, on engines of the same model: the bits are equal."""
    scale = 1.25  # one over the temperature
    for engine in (ours, theirs):
        engine.step([SequenceInput("a", 0, random_tokens(20, 1), 1)])
    token_ids, logits = ours.chain(SequenceInput("a", 20, [*first, *[5] * 5], 6), noise, scale=scale)
    following, drawn = list(first), list[int]()
    for index in range(6):
        (row,) = theirs.step([SequenceInput("a", 20 + len(drawn), following, 1)])
        drawn += following
        assert torch.equal(logits[index], row[0])
        following = [int((row[0] if noise is None else row[0].double() * scale + noise[index]).argmax())]
    assert token_ids == drawn
    assert list(ours.tokens("a")) == list(theirs.tokens("a"))
    end = SequenceInput("a", 20 + len(drawn), [*following, 3], 2)
    (one,), (other,) = ours.step([end]), theirs.step([end])
    assert torch.equal(one, other)
    return drawn


def path_tokens(chain: Sequence[int], nodes: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Return the tokens up to a node of a tree, which may start from an earlier token of the chain."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, nodes[node])
        node = parents[node]
    return [*chain[: len(chain) + 1 + node], *path]


def random_tokens(count: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return token ids that do not depend on torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


def _merged(*settings: dict[str, Any]) -> dict[str, Any]:
    """The common settings with others on top; None for head_dim leaves it out."""
    merged = dict(_COMMON)
    for some in settings:
        merged.update(some)
    if merged["head_dim"] is None:
        del merged["head_dim"]
    return merged


def _randomise(model: PreTrainedModel, gain: float) -> None:
    """Weights so large that attention is far from uniform and every path matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(noise * 0.5)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)


def target_scheduler(engine: Engine) -> TargetScheduler:
    """Return the scheduler of a target worker, without draft-ahead."""
    return TargetScheduler(engine, LIMITS, draft_ahead=False)


def draft_scheduler(engine: Engine, translation: Any = None) -> DraftScheduler:
    """Return the scheduler of a draft worker, without draft-ahead."""
    return DraftScheduler(engine, LIMITS, ahead_rows=0, translation=translation)
