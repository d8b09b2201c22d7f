"""The target worker: a model, its scheduler, and gammaray.v1.TargetService."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import grpc

from gammaray.blocks import MAX_AHEAD, Verdict
from gammaray.checks import check_int
from gammaray.config import TargetSettings
from gammaray.errors import GammarayError, InvalidArgumentError, ModelChangedError
from gammaray.grammar.matcher import grammar_identity
from gammaray.types import MAX_NODES, MAX_TOP_LOGPROBS, check_prompt_logprobs
from gammaray.v1 import target_service_pb2, target_service_pb2_grpc
from gammaray.v1 import target_service_pb2 as pb
from gammaray.wire.blocks import (
    add_logprobs,
    fill_verdict,
    proposal_from_proto,
    proposal_to_proto,
    shape_from_proto,
)
from services.engines.choice import choose
from services.engines.interface import Served
from services.process.server import guarded
from services.process.worker import Worker
from services.scheduling.tasks import AheadTokens, Reply, VerifyTask
from services.streaming.messages import Model, describe, fill_error, fill_result, fill_timing, task_fields
from services.streaming.streams import Deliver, Streams

DEFAULT_TIMEOUT_MS = 60_000


class TargetServicer(target_service_pb2_grpc.TargetServiceServicer):
    """Serves verifications; `head` names the head that drafts in it, if any."""

    def __init__(self, streams: Streams, model: Model, head: str = "") -> None:
        self._streams, self._model, self._head = streams, model, head

    async def Verify(
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.VerifyResponse]:
        frames = self._streams.serve(request_iterator, self._parse)
        async with guarded(context), aclosing(frames):
            async for replies in frames:
                yield _response(replies, is_draining=self._streams.is_leaving)

    async def GetTargetInfo(
        self, request: pb.GetTargetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTargetInfoResponse:
        async with guarded(context):
            info = await describe(self._model, self._streams.engine)
        return pb.GetTargetInfoResponse(
            **info,
            is_draining=self._streams.is_leaving,
            model_identity=self._model.identity,
            head=self._head,
            grammar_identity=grammar_identity(),
            takes_trees=self._model.takes_trees,
            forward_s=self._model.forward_s,
            adapters=self._model.adapters,
        )

    def _parse(self, block: pb.VerifyBlock, deliver: Deliver) -> VerifyTask:
        model = self._model
        check_identity(block, model)
        num_top = block.num_top_logprobs if block.HasField("num_top_logprobs") else None
        if num_top is not None and num_top > MAX_TOP_LOGPROBS:
            raise InvalidArgumentError("num_top_logprobs", num_top, f"0 to {MAX_TOP_LOGPROBS}")
        num_prompt = block.num_prompt_logprobs if block.HasField("num_prompt_logprobs") else None
        if num_prompt is not None:
            check_int("num_prompt_logprobs", num_prompt, 0, MAX_TOP_LOGPROBS)
            check_prompt_logprobs(num_prompt, block.base_position)
        if len(block.proposal.token_ids) > MAX_NODES:
            got = f"{len(block.proposal.token_ids)} nodes"
            raise InvalidArgumentError("proposal", got, f"at most {MAX_NODES}")
        proposal = proposal_from_proto(block.proposal, model.vocab_size)
        head = shape_from_proto(block.head, least=0) if block.HasField("head") else None
        if head is not None and head.depth and proposal:
            raise InvalidArgumentError("proposal", f"{len(proposal)} nodes", "none where the head drafts")
        task = VerifyTask(
            **task_fields(block, DEFAULT_TIMEOUT_MS, deliver),
            proposal=proposal,
            num_top_logprobs=num_top,
            num_prompt_logprobs=num_prompt,
            head=head,
            is_conditional=block.is_conditional,
            num_ahead=min(block.num_ahead, MAX_AHEAD, max(0, model.max_context - block.base_position)),
        )
        task.validate(model.vocab_size, model.max_context)
        end = task.base_position + proposal.depth
        if end > model.max_context:
            allowed = f"at most {model.max_context} (context)"
            raise InvalidArgumentError("proposal", f"an end at {end}", allowed)
        return task


def check_identity(block: pb.VerifyBlock, model: Model) -> None:
    """Refuse a session of another model; its owner may expect the process that had this address before."""
    wanted, adapter = block.spec.model_identity, block.spec.adapter
    identity = model.adapters.get(adapter, "") if adapter else model.identity
    if wanted and wanted != identity:
        raise ModelChangedError(block.session_id, wanted, [model.identity, *model.adapters.values()])
    if adapter and adapter not in model.adapters:
        allowed = ", ".join(sorted(model.adapters)) or "none: this worker serves no adapter"
        raise InvalidArgumentError("spec.adapter", adapter, allowed)


def _response(replies: Sequence[Reply], *, is_draining: bool) -> pb.VerifyResponse:
    response = pb.VerifyResponse(is_draining=is_draining)
    for reply in replies:
        if reply.is_ahead:
            response.ahead.append(_ahead(reply))
        else:
            response.results.append(_result(reply))
    return response


def _ahead(reply: Reply) -> pb.AheadTokens:
    """Return tokens that were decoded ahead, or the error that ended them."""
    message, tokens = pb.AheadTokens(request_id=reply.request_id, session_id=reply.session_id), reply.outcome
    fill_timing(message.timing, reply.timing)
    if isinstance(tokens, AheadTokens):
        message.base_position, message.is_last = tokens.base_position, tokens.is_last
        message.token_ids.extend(tokens.token_ids)
        add_logprobs(message.logprobs, tokens.logprobs)
    else:
        assert isinstance(tokens, GammarayError)
        message.is_last = True
        fill_error(message.error, tokens)
    return message


def _result(reply: Reply) -> pb.VerifyResult:
    result = pb.VerifyResult()
    fill_result(result, reply)
    if isinstance(reply.outcome, Verdict):
        fill_verdict(result.verdict, reply.outcome)
        result.is_followed = reply.outcome.is_followed
        if reply.outcome.drafted is not None:
            result.drafted.CopyFrom(proposal_to_proto(reply.outcome.drafted))
            result.is_prepared = reply.outcome.drafted.is_prepared
    return result


class TargetWorker(Worker[TargetSettings]):
    role: ClassVar[str] = "target"
    service_name: ClassVar[str] = target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name

    def load_model(self, path: str) -> Served:
        return choose(self.settings).load_target(path, self.settings, self._limits)

    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        servicer = TargetServicer(streams, model, self.settings.head)
        target_service_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
