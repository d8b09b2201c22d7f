"""The kernel's structures and functions, as `kernel.c` declares them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p


class MatrixWeights(Structure):
    """`gr_matrix`."""

    _fields_ = (
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
    )


class LayerWeights(Structure):
    """`gr_layer`."""

    _fields_ = (
        ("qkv", MatrixWeights),
        ("out", MatrixWeights),
        ("gate_up", MatrixWeights),
        ("down", MatrixWeights),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int32),
    )


class ModelWeights(Structure):
    """`gr_model`."""

    _fields_ = (
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("layers", c_int32),
        ("scaling", c_float),
        ("norm_eps", c_float),
        ("embedding", c_void_p),
        ("embedding_scale", c_void_p),
        ("last_norm", c_void_p),
        ("head", MatrixWeights),
        ("layer", POINTER(LayerWeights)),
        ("is_head", c_int32),
        ("residual_is_normed", c_int32),
        ("state_is_normed", c_int32),
        ("feature_norm", c_void_p),
    )


class SegmentArguments(Structure):
    """`gr_segment`."""

    _fields_ = (
        ("cache", c_void_p),
        ("capacity", c_int64),
        ("slot", c_int64),
        ("count", c_int32),
        ("first", c_int32),
    )


class BatchArguments(Structure):
    """`gr_batch`."""

    _fields_ = (
        ("rows", c_int32),
        ("segments", c_int32),
        ("wanted", c_int32),
        ("segment", c_void_p),
        ("token", c_void_p),
        ("position", c_void_p),
        ("num_chain", c_void_p),
        ("path_offset", c_void_p),
        ("path", c_void_p),
        ("logit_row", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("scratch", c_void_p),
        ("logits", c_void_p),
        ("taps", c_int32),
        ("tap", c_void_p),
        ("tapped", c_void_p),
        ("feature", c_void_p),
        ("threads", c_int32),
        ("idle_until", c_void_p),
    )


_MODEL, _BATCH = POINTER(ModelWeights), POINTER(BatchArguments)
_GUESSES = (c_int32, c_void_p, c_int64, c_int32, c_float, c_void_p, c_void_p)
_FUNCTIONS = {
    "gr_panel": (c_int32,),
    "gr_lanes": (c_int32,),
    "gr_tile_inputs": (c_int32,),
    "gr_scratch_size": (c_int64, _MODEL, c_int32, c_int32, c_int32),
    "gr_guesses_float32": _GUESSES,
    "gr_guesses_float64": _GUESSES,
    "gr_forward": (None, _MODEL, _BATCH),
    "gr_map": (None, POINTER(MatrixWeights), c_int32, c_void_p, c_void_p, c_void_p, c_int32),
    "gr_map_scratch_size": (c_int64, POINTER(MatrixWeights), c_int32),
    "gr_chain": (
        c_int32,
        _MODEL,
        _BATCH,
        *(c_void_p, c_void_p, c_int64, c_void_p),
        c_double,
        POINTER(c_int32),
    ),
    "gr_philox": (None, c_uint64, c_void_p, c_int64, c_int64, c_int64, c_uint32, c_uint32, c_void_p),
}
"""Types of the results, then of the arguments."""


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments and results of the kernel's functions, and return it."""
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
