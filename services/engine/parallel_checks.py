"""Whether a model can be spread over a number of devices, told before anything is started."""

from __future__ import annotations

import torch

from gammaray.errors import InvalidArgumentError
from services.engine.errors import UnsupportedModelError
from services.engine.model import load_config

__all__ = ["check_parallel"]


def check_parallel(model: str, num_ranks: int, device: str) -> None:
    """Check a model's heads and plan, and this machine's devices.

    Args:
        model: Directory or hub name.
        num_ranks: Devices to spread it over.
        device: "auto", "cpu" or "cuda".

    Raises:
        InvalidArgumentError: Heads do not divide, or there are too few devices.
        UnsupportedModelError: transformers does not say how to share this architecture.
        NotFoundError: There is no such model.
    """
    config = load_config(model).get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % num_ranks:
            raise InvalidArgumentError(
                "tensor_parallel", num_ranks, f"a divisor of {heads}, the {name} of {model}"
            )
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            model, f"transformers has no tensor-parallel plan for {config.model_type}"
        )
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices and device == "cpu":
        # transformers takes the accelerator where there is one.
        raise InvalidArgumentError("device", device, "auto or cuda with tensor_parallel on this machine")
    if num_devices and num_ranks > num_devices:
        raise InvalidArgumentError(
            "tensor_parallel", num_ranks, f"at most {num_devices}, the devices of this worker"
        )
