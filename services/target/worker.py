"""The target worker: a model, its scheduler and its service."""

from __future__ import annotations

from typing import Any, ClassVar

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from gammaray.v1 import target_service_pb2, target_service_pb2_grpc
from services.engine.engine import Engine
from services.engine.loader import limit_cache
from services.engine.tensor_parallel.engine import ParallelEngine
from services.process.fingerprints import model_identity
from services.process.worker import Worker
from services.streaming.messages import Model
from services.streaming.streams import Streams
from services.target.scheduler import TargetScheduler
from services.target.servicer import TargetServicer

__all__ = ["TargetWorker"]


class TargetWorker(Worker[TargetSettings]):
    """Serves gammaray.v1.TargetService."""

    role: ClassVar[str] = "target"
    service_name: ClassVar[str] = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

    def _load_engine(self, path: str) -> Engine:
        settings = self.settings
        if settings.tensor_parallel == 1:
            return super()._load_engine(path)
        if settings.deterministic:
            raise InvalidArgumentError("deterministic", True, "false with tensor_parallel")
        engine = ParallelEngine.load_parallel(
            path,
            num_ranks=settings.tensor_parallel,
            device=settings.device,
            dtype=settings.dtype,
            threads=settings.threads,
            timeout_s=settings.rank_timeout_s,
        )
        limit_cache(engine, settings)
        return engine

    def _identity(self, path: str, engine: Engine) -> str:
        return model_identity(
            path,
            dtype=str(engine.dtype).removeprefix("torch."),
            device=engine.device.type,
            deterministic=self.settings.deterministic,
        )

    def _scheduler(self, engine: Engine) -> TargetScheduler:
        return TargetScheduler(engine, self._limits)

    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        target_service_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(streams, model), server)
