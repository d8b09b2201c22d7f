"""The draft worker: a model, its scheduler, and gammaray.v1.DraftService."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import grpc

from gammaray.config import DraftSettings
from gammaray.demo_pair import early_exit_layers, resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal
from gammaray.v1 import draft_service_pb2, draft_service_pb2_grpc
from gammaray.v1 import draft_service_pb2 as pb
from gammaray.wire.blocks import proposal_to_proto, shape_from_proto
from services.draft_worker.loading import check_learning, load_learning
from services.draft_worker.scheduler import DraftScheduler
from services.engine.choice import uses_vllm
from services.engine.engine import Engine
from services.engine.loader import load_worker_engine
from services.heads.loading import names_head
from services.process.fingerprints import check_drafter, vocab_sha256
from services.process.server import guarded
from services.process.worker import Worker
from services.scheduling.block_queue import BlockQueue
from services.scheduling.grammars import Grammars
from services.scheduling.tasks import Prepared, ProposeTask, Reply
from services.speculation.outcomes import AHEAD_ROWS
from services.streaming.messages import Model, describe, fill_result, task_fields
from services.streaming.streams import Deliver, Streams
from services.vocabulary.translation import Translation, load_translation, target_size

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_MS = 10_000


class DraftServicer(draft_service_pb2_grpc.DraftServiceServicer):
    """Serves proposals."""

    def __init__(self, streams: Streams, model: Model) -> None:
        self._streams, self._model = streams, model

    async def Propose(
        self, request_iterator: AsyncIterator[pb.ProposeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeResponse]:
        """Serve proposals for many sessions over one stream."""
        if self._streams.is_leaving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")
        frames = self._streams.serve(request_iterator, self._parse)
        async with guarded(context), aclosing(frames):
            async for replies in frames:
                yield _response(replies, is_draining=self._streams.is_leaving)

    async def GetDraftInfo(
        self, request: pb.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDraftInfoResponse:
        """Return what the worker serves and its load."""
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


def drafts_on_vllm(path: str, target: str, settings: DraftSettings) -> bool:
    """Return whether vLLM serves a drafter: with the engine auto only one that it can."""
    if not uses_vllm(settings.engine, settings.device):
        return False
    if settings.engine == "auto":
        if settings.learn:
            return False
        from services.vllm.loading import check_draft  # vLLM is an extra

        try:
            check_draft(path, target, settings)
        except InvalidArgumentError as error:
            _log.info("%s is not served by vLLM: %s", path, error)
            return False
    return True


class DraftWorker(Worker[DraftSettings]):
    """Serves gammaray.v1.DraftService."""

    role: ClassVar[str] = "draft"
    service_name: ClassVar[str] = draft_service_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name

    def load_model(self, path: str) -> tuple[Model, BlockQueue[Any, Any]]:
        name, target, limits = self.settings.model, self._target, self._limits
        if names_head(path):
            allowed = "a draft model; a head drafts in target workers: name it with --head (setting head)"
            raise InvalidArgumentError("model", f"{path}, a head", allowed)
        check_drafter(path, target)
        if drafts_on_vllm(path, target, self.settings):
            from services.vllm.loading import load_draft  # vLLM is an extra

            return load_draft(path, target, self.settings, limits)
        if self.settings.learn:
            check_learning(path, target, self.settings)
        engine = load_worker_engine(path, self.settings, draft_for=target)
        learning = load_learning(path, target, self.settings, engine) if self.settings.learn else None
        vocab_size, digest, translation = self._vocabulary(path, engine)
        model = Model(name, vocab_size, engine.max_context, digest, kernel=engine.kernel)
        grammars = Grammars(target or path, vocab_size)
        ahead_rows = AHEAD_ROWS if self.settings.draft_ahead else 0
        return model, DraftScheduler(
            engine,
            limits,
            ahead_rows=ahead_rows,
            translation=translation,
            grammars=grammars,
            learning=learning,
        )

    @property
    def _target(self) -> str:
        """The target's directory or hub name; "" if the settings do not name it."""
        name = self.settings.target
        return resolve_model(name, "target") if name else ""

    def _vocabulary(self, path: str, engine: Engine) -> tuple[int, str, Translation | None]:
        """Return size and fingerprint of the sessions' vocabulary, and the draft model's translation to it.

        It is the target's, if the settings name the target.
        """
        target, size = self._target, engine.vocab_size
        if early_exit_layers(path) is not None:
            return size, vocab_sha256(target), None
        digest = vocab_sha256(path)
        if not target:
            return size, digest, None
        target_digest = vocab_sha256(target)
        if target_digest and digest in ("", target_digest) and target_size(target) in (0, size):
            return size, target_digest, None
        if engine.mask_token is not None:
            allowed = "one of the target's vocabulary, as a parallel draft model's tokens are not mapped"
            raise InvalidArgumentError("model", path, allowed)
        translation = load_translation(path, size, target)
        return translation.target_size, target_digest, translation

    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        servicer = DraftServicer(streams, model)
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
