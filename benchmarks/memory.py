"""What speculation costs in memory: the draft's weights and KV cache, and room for proposals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from gammaray.bench.tables import plain_table
from gammaray.demo_pair import resolve_model
from gammaray.types import ProcessStatus
from services.engine.native.library import load_kernel

__all__ = ["ModelMemory", "memory_overhead", "memory_table", "model_memory"]

_MIB = 2**20


@dataclass(frozen=True)
class ModelMemory:
    """What a model takes, by its configuration.

    Attributes:
        parameters: Number of weights; tied ones count once.
        weight_bytes: Their bytes as served: on a CPU the kernel keeps bfloat16 weights as they are, and the
            embedding in float32.
        kv_bytes_per_token: 2 x layers x key-value heads x head dimension x bytes per value.
        max_context: Longest sequence, in tokens.
    """

    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_context: int


def model_memory(name: str, bytes_per_value: int) -> ModelMemory:
    """Return what the model `name` (directory or hub name) takes; no weights are read."""
    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    weight_bytes = parameters * bytes_per_value
    if bytes_per_value == 4 and config.dtype == torch.bfloat16 and load_kernel().library is not None:
        weight_bytes = parameters * 2 + text.vocab_size * text.hidden_size * 4
    return ModelMemory(
        parameters=parameters,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=2 * text.num_hidden_layers * heads * head_dim * bytes_per_value,
        max_context=text.max_position_embeddings,
    )


def memory_overhead(
    target: str, draft: str, processes: Sequence[ProcessStatus], max_nodes: int
) -> dict[str, Any]:
    """Return the memory overhead of speculation, JSON-ready.

    `delta_m_bytes`, for one session of full length: the draft's weights and KV cache, and `max_nodes` more
    positions in the target's. `rss_bytes` are measured: the workers' resident memory, runtime included.

    Args:
        target: Target model: directory, hub name or "demo".
        draft: Draft model.
        processes: The cluster's, on this machine.
        max_nodes: Largest proposal.
    """
    bytes_per_value = 2 if torch.cuda.is_available() else 4
    models = {
        role: model_memory(resolve_model(name, role), bytes_per_value)
        for role, name in (("target", target), ("draft", draft))
    }
    context = min(model.max_context for model in models.values())
    delta = models["draft"].weight_bytes + models["draft"].kv_bytes_per_token * context
    delta += models["target"].kv_bytes_per_token * max_nodes
    plain = models["target"].weight_bytes + models["target"].kv_bytes_per_token * context
    return {
        "bytes_per_value": bytes_per_value,
        "context": context,
        "max_nodes": max_nodes,
        **{role: {**vars(model), "rss_bytes": _rss(processes, role)} for role, model in models.items()},
        "delta_m_bytes": delta,
        "delta_m_share": delta / plain,
    }


def memory_table(memory: dict[str, Any]) -> Table:
    """Return the two models side by side, and what the draft adds."""
    title = (
        f"Memory: speculation adds {memory['delta_m_bytes'] / _MIB:.1f} MiB, "
        f"{memory['delta_m_share']:.0%} of the target alone ({memory['context']} tokens of context)"
    )
    columns = ("role", "parameters", "weights MiB", "KV KiB/token", "worker's RSS MiB")
    table = plain_table(title, columns)
    for role in ("target", "draft"):
        model = memory[role]
        rss = [f"{rss / _MIB:.0f}" for rss in model["rss_bytes"]]
        figures = (f"{model['weight_bytes'] / _MIB:.1f}", f"{model['kv_bytes_per_token'] / 1024:.1f}")
        table.add_row(role, f"{model['parameters'] / 1e6:.1f} M", *figures, ", ".join(rss))
    return table


def _rss(processes: Sequence[ProcessStatus], role: str) -> list[int]:
    found = []
    for process in processes:
        if process.role == role and process.healthy:
            try:
                found.append(int(psutil.Process(process.pid).memory_info().rss))
            except psutil.NoSuchProcess:
                continue
    return found
