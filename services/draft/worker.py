"""The draft worker: a model, its scheduler and its service."""

from __future__ import annotations

from typing import Any, ClassVar

from gammaray.config import DraftSettings
from gammaray.v1 import draft_service_pb2, draft_service_pb2_grpc
from services.draft.scheduler import DraftScheduler
from services.draft.servicer import DraftServicer
from services.engine.engine import Engine
from services.process.worker import Worker
from services.streaming.messages import Model
from services.streaming.streams import Streams

__all__ = ["DraftWorker"]


class DraftWorker(Worker[DraftSettings]):
    """Serves gammaray.v1.DraftService."""

    role: ClassVar[str] = "draft"
    service_name: ClassVar[str] = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name

    def _scheduler(self, engine: Engine) -> DraftScheduler:
        return DraftScheduler(
            engine,
            self._limits,
            draft_top_k=self.settings.draft_top_k,
            weight_bits=self.settings.weight_bits,
            ahead_rows=self.settings.ahead_rows if self.settings.draft_ahead else 0,
        )

    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(streams, model), server)
