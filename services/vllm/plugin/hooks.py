"""The start of the plug-in in a process of vLLM, if that has what the plug-in needs."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.worker_base import WorkerWrapperBase

from . import RUNNER_VARIABLE, needs

logger = init_logger("vllm.plugins.gammaray_vllm")

_MARK = "_is_gammaray"
_GPU = "vllm.v1.worker.gpu"


def install() -> None:
    """Hook into this process of vLLM; what draws is replaced once the model runner exists."""
    if not hasattr(WorkerWrapperBase.init_device, _MARK):
        WorkerWrapperBase.init_device = _with_hooks(WorkerWrapperBase.init_device)
        SamplingParams._validate_spec_decode = _with_all_parameters(SamplingParams._validate_spec_decode)


def _with_hooks(init_device: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(init_device)
    def hooked(self: Any) -> None:
        init_device(self)
        runner, is_second = self.worker.model_runner, selects_second()
        if reason := next(iter(differences(is_second)), "") or _other_runner(runner, is_second):
            logger.error("gammaray-vllm is NOT active, and vLLM samples as without it: %s", reason)
            return
        if is_second:
            from .second_runner import install as install_second

            taken = install_second(runner)
        else:
            from .sampler import CoupledSampler

            taken = CoupledSampler(runner).install()
        promise = "a seed gives the same tokens with and without speculation"
        logger.warning("gammaray-vllm is ACTIVE: %s. Replaced: %s", promise, ", ".join(taken))

    setattr(hooked, _MARK, True)
    return hooked


def _with_all_parameters(validate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Let parameters pass with speculation that vLLM's own rejection sampler lacks."""

    @functools.wraps(validate)
    def checked(self: Any, speculative_config: Any) -> None:
        is_budgeted = getattr(self, "thinking_token_budget", None) is not None
        is_given = self.min_p or self.logit_bias or is_budgeted
        if speculative_config is None or not is_given or differences(selects_second()):
            return validate(self, speculative_config)
        if is_budgeted:
            raise VLLMValidationError(
                "thinking_token_budget is not supported with speculative decoding by gammaray-vllm.",
                parameter="thinking_token_budget",
            )
        others = copy.copy(self)
        others.min_p, others.logit_bias = 0.0, None
        return validate(others, speculative_config)

    return checked


def selects_second() -> bool:
    """Whether the V2 model runner is asked for."""
    return os.environ.get(RUNNER_VARIABLE, "0") not in ("", "0")


def _other_runner(runner: Any, is_second: bool) -> str:
    known = import_module(f"{_GPU}.model_runner" if is_second else f"{_GPU}_model_runner").GPUModelRunner
    if not isinstance(runner, known):
        kind, number = f"{type(runner).__module__}.{type(runner).__name__}", 1 + is_second
        return f"{kind} is not the V{number} model runner, which {RUNNER_VARIABLE}={number - 1} selects"
    is_marked = is_second and getattr(runner.vllm_config, "watermark_config", None) is not None
    return "it draws no watermarked tokens" if is_marked else ""


@functools.cache
def differences(is_second: bool) -> Sequence[str]:
    """Return where the installed vLLM differs from what the plug-in replaces and reads; () is nowhere."""
    try:
        import_module(".second_runner" if is_second else ".sampler", __package__)
    except ImportError as error:
        return (str(error),)
    return tuple(needs.differences(is_second, _look))


def _look(name: str) -> needs.Found:
    module, _, path = name.partition(":")
    value: Any = functools.reduce(getattr, path.split("."), import_module(module))
    parameters = inspect.signature(value).parameters
    required = [each for each, one in parameters.items() if one.default is one.empty]
    functions = filter(inspect.isfunction, vars(value).values()) if inspect.isclass(value) else (value,)
    codes: list[Any] = [inspect.unwrap(function) for function in functions]
    return needs.Found(list(parameters), required, {each for one in codes for each in one.__code__.co_names})
