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


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the arguments and results of the kernel's functions, and return it."""
    library.gr_panel.restype = c_int32
    library.gr_panel.argtypes = ()
    library.gr_lanes.restype = c_int32
    library.gr_lanes.argtypes = ()
    library.gr_scratch_size.restype = c_int64
    library.gr_scratch_size.argtypes = (POINTER(ModelWeights), c_int32, c_int32, c_int32)
    for guesses in (library.gr_guesses_float32, library.gr_guesses_float64):
        guesses.restype = c_int32
        guesses.argtypes = (c_void_p, c_int64, c_int32, c_float, c_void_p, c_void_p)
    library.gr_forward.restype = None
    library.gr_forward.argtypes = (POINTER(ModelWeights), POINTER(BatchArguments))
    library.gr_map.restype = None
    library.gr_map.argtypes = (POINTER(MatrixWeights), c_int32, c_void_p, c_void_p, c_int32)
    library.gr_chain.restype = c_int32
    library.gr_chain.argtypes = (
        POINTER(ModelWeights),
        POINTER(BatchArguments),
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_double,
        POINTER(c_int32),
    )
    library.gr_philox.restype = None
    library.gr_philox.argtypes = (
        c_uint64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_uint32,
        c_uint32,
        c_void_p,
    )
    return library
