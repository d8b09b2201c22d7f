"""One interface for the two worker services, so that one connection class serves both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc

from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.v1.draft_service_pb2_grpc import DraftServiceStub
from gammaray.v1.target_service_pb2_grpc import TargetServiceStub

# The type stubs of grpc.aio streams lack read and write, so streams are untyped here and in connections.
BlockT = TypeVar("BlockT", bound=draft_pb.ProposeBlock | target_pb.VerifyBlock)
ResultT = TypeVar("ResultT", bound=draft_pb.ProposeResult | target_pb.VerifyResult)

WorkerInfo = draft_pb.GetDraftInfoResponse | target_pb.GetTargetInfoResponse
"""Info of a worker: two messages with the same fields."""


@dataclass(frozen=True)
class WorkerProtocol(Generic[BlockT, ResultT]):
    role: str
    open_stream: Callable[[grpc.aio.Channel], Any]  # bidirectional; carries the frames
    get_info: Callable[[grpc.aio.Channel, float], Awaitable[WorkerInfo]]  # with a timeout in seconds
    make_frame: Callable[[list[BlockT], list[pb.ReleaseSession]], Any]


DRAFT: WorkerProtocol[draft_pb.ProposeBlock, draft_pb.ProposeResult] = WorkerProtocol(
    role="draft",
    open_stream=lambda channel: cast(Any, DraftServiceStub(channel)).Propose(),
    get_info=lambda channel, timeout_s: DraftServiceStub(channel).GetDraftInfo(
        draft_pb.GetDraftInfoRequest(), timeout=timeout_s
    ),
    make_frame=lambda blocks, releases: draft_pb.ProposeRequest(blocks=blocks, releases=releases),
)

TARGET: WorkerProtocol[target_pb.VerifyBlock, target_pb.VerifyResult] = WorkerProtocol(
    role="target",
    open_stream=lambda channel: cast(Any, TargetServiceStub(channel)).Verify(),
    get_info=lambda channel, timeout_s: TargetServiceStub(channel).GetTargetInfo(
        target_pb.GetTargetInfoRequest(), timeout=timeout_s
    ),
    make_frame=lambda blocks, releases: target_pb.VerifyRequest(blocks=blocks, releases=releases),
)
