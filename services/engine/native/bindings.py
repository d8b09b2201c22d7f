"""The kernel's structures and functions, as `kernel.c` declares them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Return the fields of a structure from groups of a type and its fields' names."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class MatrixWeights(Structure):
    """`gr_matrix`."""

    _fields_ = _fields((c_void_p, "panels scale bias"), (c_int32, "kind outputs inputs"))


class LayerWeights(Structure):
    """`gr_layer`."""

    _fields_ = _fields(
        (MatrixWeights, "qkv out gate_up down"),
        (c_void_p, "attention_norm mlp_norm query_norm key_norm"),
        (c_int32, "window"),
    )


class ModelWeights(Structure):
    """`gr_model`."""

    _fields_ = _fields(
        (c_int32, "hidden intermediate heads kv_heads head_dim layers"),
        (c_float, "scaling norm_eps"),
        (c_void_p, "embedding embedding_scale last_norm"),
        (MatrixWeights, "head"),
        (POINTER(LayerWeights), "layer"),
        (c_int32, "is_head residual_is_normed state_is_normed"),
        (c_void_p, "feature_norm"),
    )


class SegmentArguments(Structure):
    """`gr_segment`."""

    _fields_ = _fields((c_void_p, "cache"), (c_int64, "capacity slot"), (c_int32, "count first"))


class BatchArguments(Structure):
    """`gr_batch`."""

    _fields_ = _fields(
        (c_int32, "rows segments wanted"),
        (c_void_p, "segment token position num_chain path_offset path logit_row cos sin scratch logits"),
        (c_int32, "taps"),
        (c_void_p, "tap tapped feature"),
        (c_int32, "threads"),
        (c_void_p, "idle_until"),
        (c_void_p, "until"),
    )


_MODEL, _BATCH = POINTER(ModelWeights), POINTER(BatchArguments)
_CHAIN = (c_void_p, c_void_p, c_int64, c_void_p, c_double, POINTER(c_int32))
_GUESSES = (c_int32, c_void_p, c_int64, c_int32, c_float, c_void_p, c_void_p)
_FUNCTIONS = {
    "gr_panel": (c_int32,),
    "gr_lanes": (c_int32,),
    "gr_tile_inputs": (c_int32,),
    "gr_integer_inputs": (c_int32,),
    "gr_can_round": (c_int32,),
    "gr_scratch_size": (c_int64, _MODEL, c_int32, c_int32, c_int32),
    "gr_guesses_float32": _GUESSES,
    "gr_guesses_float64": _GUESSES,
    "gr_forward": (c_int32, _MODEL, _BATCH),
    "gr_map": (None, POINTER(MatrixWeights), c_int32, c_void_p, c_void_p, c_void_p, c_int32),
    "gr_map_scratch_size": (c_int64, POINTER(MatrixWeights), c_int32),
    "gr_chain": (c_int32, _MODEL, _BATCH, *_CHAIN),
    "gr_draw": (None, c_uint64, c_uint32, c_uint32, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p),
    "gr_philox": (None, c_uint64, c_void_p, c_int64, c_int64, c_int64, c_uint32, c_uint32, c_void_p),
}
"""Types of the results, then of the arguments."""


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments and results of the kernel's functions, and return it."""
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
