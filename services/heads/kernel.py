"""Runs heads with the compiled CPU kernel."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref, c_int32
from typing import Any, cast

import torch
from torch import Tensor, nn

from services.engine.core.batch import Batch, Taps
from services.engine.core.kv_cache import CacheShape
from services.engine.core.quantised import QuantisedMatrix, quantised_matrices
from services.engine.native.bindings import LayerWeights, ModelWeights
from services.engine.native.library import kernel_threads, load_kernel
from services.engine.native.runner import NativeRunner
from services.engine.native.weights import MAX_HEAD_DIM, NativeModel, Packer, check_layout
from services.heads.eagle import EagleHead, EagleLayer
from services.heads.states import HeadStates


def kernel_obstacle(head: EagleHead) -> str:
    """Return why the compiled kernel cannot run a head; empty if it can."""
    config, weight = head.config, head.fc.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"the head is on {weight.device.type} in {str(weight.dtype).removeprefix('torch.')}"
    if config.head_dim % 2 or config.head_dim > MAX_HEAD_DIM:
        return f"a head of {config.head_dim} is not covered"
    return load_kernel().reason


class KernelMap:
    """A linear map of float32 rows, by the compiled kernel; `quantised` as of `quantised_matrices`."""

    def __init__(self, linear: nn.Linear, library: Any, quantised: Mapping[int, QuantisedMatrix]) -> None:
        self._library, self._size = library, linear.out_features
        self._kept: list[Any] = []
        self._matrix = Packer(library, self._kept, quantised).maps(linear)

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        images = torch.empty(len(rows), self._size)
        matrix = byref(self._matrix)
        scratch = torch.empty(self._library.gr_map_scratch_size(matrix, len(rows)))
        places = rows.data_ptr(), images.data_ptr(), scratch.data_ptr()
        self._library.gr_map(matrix, len(rows), *places, kernel_threads())
        return images


class HeadKernelRunner(NativeRunner):
    """Runs steps of a head without a `kernel_obstacle`; `weights` are "auto" (as stored) or "int8"."""

    def __init__(self, name: str, head: EagleHead, max_context: int, weights: str = "auto") -> None:
        quantised = {} if weights == "auto" else quantised_matrices(head)
        super().__init__(_packed(name, head, max_context, quantised))
        config = head.config
        self.head, self.target_taps = head, config.taps
        self._fc = KernelMap(head.fc, self.model.kernel, quantised)
        self._states = HeadStates(2 * config.num_kv_heads, config.head_dim, config.layer.hidden_size)

    @property
    def cache_shape(self) -> CacheShape:
        """The entry of a token: its keys, its values, then its state."""
        return self._states.cache_shape(torch.float32, torch.device("cpu"))

    def fuse(self, states: Tensor) -> Tensor:
        return self.head.fuse(states.float(), self._fc)

    def forward(self, batch: Batch) -> Tensor:
        self._features = self._states.features(batch)
        states = self._tap_state(batch)
        logits = super().forward(batch)
        self._states.keep(batch, states)
        return logits

    def chain(
        self, batch: Batch, noise: Tensor | None, scale: float, stop: c_int32, target_ids: Tensor | None
    ) -> tuple[list[int], Tensor]:
        self._features = self._states.of_first(batch.segments[0], batch.num_first).contiguous()
        states = self._tap_state(batch)
        result = super().chain(batch, noise, scale, stop, target_ids)
        self._states.keep(batch, states)
        return result

    def _tap_state(self, batch: Batch) -> Tensor:
        """Let the next forward record the last state of each row; return them, [rows, hidden_size]."""
        states = torch.empty(len(batch.token_ids), 1, self.head.config.layer.hidden_size)
        batch.taps = Taps((1,), states)
        return states[:, 0]


def _packed(
    name: str, head: EagleHead, max_context: int, quantised: Mapping[int, QuantisedMatrix]
) -> NativeModel:
    library = load_kernel().library
    assert library is not None
    config, shape = head.config, head.config.layer
    num_outputs, head_dim = config.num_outputs, config.head_dim
    model = NativeModel(library, ModelWeights(), num_outputs, head_dim, head.rotary, max_context)
    packer = Packer(library, model.kept, quantised)
    layer = cast(EagleLayer, head.layers[0])
    attention = layer.self_attn
    norms = (attention.q_norm.weight, attention.k_norm.weight) if config.has_head_norms else None
    layers = (LayerWeights * 1)(packer.layer(layer, norms, None))
    model.kept.append(layers)
    weights = model.weights
    weights.hidden, weights.intermediate = shape.hidden_size, shape.intermediate_size
    weights.heads, weights.kv_heads = shape.num_attention_heads, config.num_kv_heads
    weights.head_dim, weights.layers = head_dim, 1
    weights.scaling, weights.norm_eps = head_dim**-0.5, shape.rms_norm_eps
    weights.embedding, weights.embedding_scale = packer.embedding(head.embed_tokens.weight)
    weights.head, weights.layer, weights.is_head = packer.maps(head.lm_head), layers, True
    weights.last_norm = packer.vector(head.norm.weight)
    weights.feature_norm = packer.vector(layer.hidden_norm.weight)
    weights.residual_is_normed, weights.state_is_normed = config.norm_before_residual, config.norm_output
    check_layout(name, model)
    return model
