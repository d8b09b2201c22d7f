"""Which engine computes a worker's model."""

from __future__ import annotations

import logging

import torch

from gammaray import engines
from gammaray.config import DraftSettings, WorkerSettings
from services.engines.interface import Engine
from services.engines.own import OwnEngine
from services.engines.vllm import VllmEngine

_log = logging.getLogger(__name__)


def choose(settings: WorkerSettings) -> Engine:
    """Return a worker's engine, see `gammaray.engines.choose`; InvalidArgumentError if that refuses."""
    facts, obstacle = engines.choose(settings.asked, has_gpu=torch.cuda.is_available())
    if obstacle is not None:
        _log.warning("the engine is not vllm: %s", obstacle)
    return VllmEngine() if facts is engines.VLLM else OwnEngine(facts)


def choose_for_draft(path: str, target: str, settings: DraftSettings) -> Engine:
    """Return the engine of a draft worker; `auto` leaves a drafter that vLLM does not serve to our own."""
    engine = choose(settings)
    if settings.engine == engines.AUTO and (obstacle := engine.refuse_draft(path, target, settings)):
        _log.info("%s is not served by vLLM: %s", path, obstacle)
        return OwnEngine(engines.NATIVE)
    return engine
