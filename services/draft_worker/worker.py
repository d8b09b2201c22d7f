"""The draft worker: a model, its scheduler, and gammaray.v1.DraftService."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import grpc

from gammaray.config import DraftSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal
from gammaray.v1 import draft_service_pb2, draft_service_pb2_grpc
from gammaray.v1 import draft_service_pb2 as pb
from gammaray.wire.blocks import proposal_to_proto, shape_from_proto
from services.engines.choice import choose_for_draft
from services.engines.interface import Served
from services.heads.loading import names_head
from services.process.fingerprints import check_drafter
from services.process.server import guarded
from services.process.worker import Worker
from services.scheduling.tasks import Prepared, ProposeTask, Reply
from services.streaming.messages import Model, describe, fill_result, task_fields
from services.streaming.streams import Deliver, Streams

DEFAULT_TIMEOUT_MS = 10_000


class DraftServicer(draft_service_pb2_grpc.DraftServiceServicer):
    def __init__(self, streams: Streams, model: Model) -> None:
        self._streams, self._model = streams, model

    async def Propose(
        self, request_iterator: AsyncIterator[pb.ProposeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeResponse]:
        frames = self._streams.serve(request_iterator, self._parse)
        async with guarded(context), aclosing(frames):
            async for replies in frames:
                yield _response(replies, is_draining=self._streams.is_leaving)

    async def GetDraftInfo(
        self, request: pb.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDraftInfoResponse:
        async with guarded(context):
            info = await describe(self._model, self._streams.engine)
        return pb.GetDraftInfoResponse(**info, is_draining=self._streams.is_leaving)

    def _parse(self, block: pb.ProposeBlock, deliver: Deliver) -> ProposeTask:
        task = ProposeTask(
            **task_fields(block, DEFAULT_TIMEOUT_MS, deliver),
            shape=shape_from_proto(block),
            wants_ahead=block.wants_ahead,
            is_notice=block.is_notice,
        )
        task.validate(self._model.vocab_size, self._model.max_context)
        return task


def _response(replies: Sequence[Reply], *, is_draining: bool) -> pb.ProposeResponse:
    response = pb.ProposeResponse(is_draining=is_draining)
    for reply in replies:
        if isinstance(reply.outcome, Prepared):
            response.ahead.append(_ahead(reply.outcome))
        else:
            response.results.append(_result(reply))
    return response


def _ahead(prepared: Prepared) -> pb.AheadProposal:
    task = prepared.task
    return pb.AheadProposal(
        session_id=task.session_id,
        epoch=task.epoch,
        base_position=task.base_position,
        token_ids=prepared.token_ids,
        gamma=task.shape.depth,
        proposal=proposal_to_proto(prepared.proposal),
    )


def _result(reply: Reply) -> pb.ProposeResult:
    result = pb.ProposeResult(num_forwards=reply.timing.num_forwards)
    fill_result(result, reply)
    outcome: Any = reply.outcome
    if isinstance(outcome, Proposal):
        result.proposal.CopyFrom(proposal_to_proto(outcome))
    return result


class DraftWorker(Worker[DraftSettings]):
    role: ClassVar[str] = "draft"
    service_name: ClassVar[str] = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name

    def load_model(self, path: str) -> Served:
        settings = self.settings
        target = resolve_model(settings.target, "target", "target") if settings.target else ""
        if names_head(path):
            allowed = "a draft model; a head drafts in target workers: name it with --head (setting head)"
            raise InvalidArgumentError("model", f"{path}, a head", allowed)
        check_drafter(path, target)
        return choose_for_draft(path, target, settings).load_draft(path, target, settings, self._limits)

    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        servicer = DraftServicer(streams, model)
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
