"""The target worker: a model, its scheduler and its service."""

from __future__ import annotations

from typing import Any, ClassVar

from gammaray.config import TargetSettings
from gammaray.v1 import target_service_pb2, target_service_pb2_grpc
from services.engine.engine import Engine
from services.messages import Model
from services.streams import Streams
from services.target.scheduler import TargetScheduler
from services.target.servicer import TargetServicer
from services.worker import Worker

__all__ = ["TargetWorker"]


class TargetWorker(Worker[TargetSettings]):
    """Serves gammaray.v1.TargetService."""

    role: ClassVar[str] = "target"
    service_name: ClassVar[str] = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

    def _scheduler(self, engine: Engine) -> TargetScheduler:
        return TargetScheduler(engine, self._limits)

    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        target_service_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(streams, model), server)
