"""Time of a pass by arithmetic: devices, models and weight types.

A pass reads all weights and the KV caches of its sessions once, at `BANDWIDTH_SHARE` of the nominal memory
bandwidth, or computes 2 operations per parameter and token at `COMPUTE_SHARE` of the nominal dense 16-bit
rate, whichever takes longer. Kernel launches, sampling and the links between devices are left out; so are
faster tensor cores for 8-bit types. A measured time is better wherever there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from gammaray.checks import check_int
from gammaray.errors import InvalidArgumentError

__all__ = ["BITS", "DEVICES", "MODELS", "Device", "Model", "Placement", "find_device", "find_model"]

BANDWIDTH_SHARE = 0.8
COMPUTE_SHARE = 0.6
MEMORY_SHARE = 0.9
"""Share of the memory that weights and KV caches may fill; the rest is for activations and CUDA itself."""

BITS = {"bf16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.85}
"""Bits per parameter by weight type; int4 with its scales, and some tensors wider, as llama.cpp's Q4_K_M."""


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        name: Its name.
        gb_per_s: Nominal memory bandwidth (data sheet).
        memory_gb: Memory (data sheet).
        tflops: Nominal dense 16-bit rate with float32 accumulation (data sheet, without sparsity).
        price_per_h: US dollars per hour; an assumption, see `DEVICES`.
    """

    name: str
    gb_per_s: float
    memory_gb: float
    tflops: float
    price_per_h: float


DEVICES = {
    device.name: device
    for device in (
        Device("T4", 320, 16, 65, 0.35),
        Device("L4", 300, 24, 121, 0.44),
        Device("A10", 600, 24, 125, 0.75),
        Device("L40S", 864, 48, 362, 0.79),
        Device("RTX-4090", 1008, 24, 165, 0.34),
        Device("A100", 2039, 80, 312, 1.39),
        Device("H100", 3350, 80, 989, 2.69),
        Device("H200", 4800, 141, 989, 3.59),
        Device("B200", 8000, 180, 2250, 5.98),
    )
}
"""Data sheets of NVIDIA; A100, H100, H200 and B200 in their SXM variants.

Prices are assumptions: those that RunPod listed in March 2026; it has no T4 and A10, those two are guesses.
Providers differ by a factor of three.
"""


HEAD_VOCABULARY = 32_000
"""Rows of the output of an EAGLE-3 head, as most published ones have."""


@dataclass(frozen=True)
class Model:
    """A language model.

    Args:
        name: Its name.
        parameters: Parameters, in billions; a pass reads all of them.
        layers: Transformer layers; 0: unknown.
        head: Parameters of the output head, in billions; 0: unknown.
        is_tied: Whether the head is the input embedding, too.
        kv_bytes: Bytes of the 16-bit KV cache per token; 0: unknown, then caches cost nothing.
        hidden: Length of a hidden state; 0: unknown.
    """

    name: str
    parameters: float
    layers: int = 0
    head: float = 0.0
    is_tied: bool = False
    kv_bytes: int = 0
    hidden: int = 0

    def first_layers(self, layers: int) -> Model:
        """Return the model of the first layers and the head, as an early exit reads them.

        Raises:
            InvalidArgumentError: The model has no such layers, or they are unknown.
        """
        if not self.layers:
            raise InvalidArgumentError("target", self.name, f"for an early exit one of {', '.join(MODELS)}")
        check_int("early exit", layers, 1, self.layers - 1)
        share = layers / self.layers
        parameters, kv_bytes = self._body * share + self.head, round(self.kv_bytes * share)
        return Model(f"{self.name}, {layers} layers", parameters, layers, self.head, True, kv_bytes)

    @property
    def _body(self) -> float:
        """Parameters of the layers, in billions."""
        return self.parameters - self.head * (1 if self.is_tied else 2)

    def eagle_head(self) -> Model | None:
        """Return an EAGLE-3 head for the model (arXiv 2503.01840); None if its layers are unknown.

        One layer as the model's, whose attention reads twice the width, a map of three hidden states to one,
        and an output of `HEAD_VOCABULARY` tokens.
        """
        if not self.layers or not self.hidden:
            return None
        kv_width = self.kv_bytes / (2 * 2 * self.layers)
        maps = self.hidden * (self.hidden + 2 * kv_width) + 3 * self.hidden**2
        output = HEAD_VOCABULARY * self.hidden * 1e-9
        parameters = self._body / self.layers + maps * 1e-9 + output
        return Model(f"EAGLE-3 of {self.name}", parameters, 1, output, False, self.kv_bytes // self.layers)


MODELS = {
    model.name: model
    for model in (
        Model("qwen3-0.6b", 0.596, 28, 0.156, True, 114_688, 1024),
        Model("llama-3.2-1b", 1.235, 16, 0.263, True, 32_768, 2048),
        Model("llama-3.1-8b", 8.03, 32, 0.525, False, 131_072, 4096),
        Model("qwen3-14b", 14.77, 40, 0.778, False, 163_840, 5120),
        Model("qwen3-32b", 32.76, 64, 0.778, False, 262_144, 5120),
        Model("llama-3.3-70b", 70.55, 80, 1.051, False, 327_680, 8192),
        Model("llama-3.1-405b", 405.9, 126, 2.101, False, 516_096, 16384),
    )
}
"""By the configurations of the published models: KV cache = 2 x layers x KV heads x head size x 2 bytes."""


@dataclass(frozen=True)
class Placement:
    """A model on one device or spread evenly over several, whose links are not counted.

    Args:
        model: The model.
        weights: Weight type, a key of `BITS`.
        device: Kind of device.
        devices: Number of devices.

    Raises:
        InvalidArgumentError: An unknown weight type, or a number out of bounds.
    """

    model: Model
    weights: str
    device: Device
    devices: int = 1

    def __post_init__(self) -> None:
        if self.weights not in BITS:
            raise InvalidArgumentError("weights", self.weights, f"one of {', '.join(BITS)}")
        check_int("devices", self.devices, 1, 1024)

    @property
    def weights_gb(self) -> float:
        """Size of the weights."""
        return self.model.parameters * BITS[self.weights] / 8.0

    @property
    def price_per_h(self) -> float:
        """Price of the devices, in US dollars per hour."""
        return self.devices * self.device.price_per_h

    def pass_ms(self, sessions: int = 0, context: int = 0) -> float:
        """Return the time of a pass over few tokens, with caches of `sessions` times `context` tokens."""
        read_gb = self.weights_gb + sessions * context * self.model.kv_bytes * 1e-9
        return 1e3 * read_gb / (self.devices * self.device.gb_per_s * BANDWIDTH_SHARE)

    def free_tokens(self, sessions: int = 0, context: int = 0) -> int:
        """Return the tokens per pass, at least 1, up to which `pass_ms` is longer than the arithmetic."""
        token_ms = 2.0 * self.model.parameters / (self.devices * self.device.tflops * COMPUTE_SHARE)
        return max(1, int(self.pass_ms(sessions, context) / token_ms))

    def max_sessions(self, context: int) -> int:
        """Return how many sessions of `context` tokens the memory holds; 0 if not even the weights fit."""
        free_gb = self.devices * self.device.memory_gb * MEMORY_SHARE - self.weights_gb
        if free_gb <= 0:
            return 0
        needed = context * self.model.kv_bytes * 1e-9
        return int(min(2**20, free_gb / needed)) if needed else 2**20


def find_device(text: str) -> tuple[Device, int]:
    """Return the device and the number that a text such as `H100` or `4xH100` names.

    Raises:
        InvalidArgumentError: There is no such device.
    """
    match = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", text)
    known = {name.lower(): device for name, device in DEVICES.items()}
    device = known.get(match[2].lower().replace(" ", "-")) if match else None
    if match is None or device is None:
        raise InvalidArgumentError("device", repr(text), f"one of {', '.join(DEVICES)}, or 4xH100 for four")
    return device, int(match[1] or 1)


def find_model(text: str) -> Model:
    """Return a model by its name, or one of the given size, such as `0.4B`, of which nothing else is known.

    Raises:
        InvalidArgumentError: Neither a known name nor a size.
    """
    if model := MODELS.get(text.lower()):
        return model
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([MB])", text, re.IGNORECASE)
    billions = float(Fraction(match[1]) / (1000 if match[2] in "mM" else 1)) if match else 0.0
    if not 0.0 < billions <= 1e5:
        raise InvalidArgumentError(
            "model", repr(text), f"one of {', '.join(MODELS)}, or a number of parameters such as 1.2B"
        )
    return Model(text, billions)
