"""Records of a cycle's calls: what the trace says about the bytes of features."""

from gammaray.telemetry import names as t
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.cycle.types import Call
from orchestrator.telemetry.records import worker_call

FEATURES = pb.Features(start=3, count=2, width=5, data=b"\1" * 10, scales=b"\2" * 8)


def called(blocks, results):
    call = Call()
    for block, result in zip(blocks, results, strict=True):
        call.sent(block)
        call.answered(result)
    return worker_call(call)


def test_features_are_part_of_the_blocks_of_a_proposal():
    block = draft_pb.ProposeBlock(features=FEATURES)
    record = called([block, block], [draft_pb.ProposeResult(), draft_pb.ProposeResult()])
    assert record.feature_bytes == 36
    assert record.request_bytes > 36


def test_features_are_part_of_the_answer_to_a_verification():
    record = called([target_pb.VerifyBlock(features_from=3)], [target_pb.VerifyResult(features=FEATURES)])
    assert record.feature_bytes == 18
    assert record.response_bytes > 18


def test_calls_without_features_have_none():
    record = called([target_pb.VerifyBlock()], [None])
    assert record.feature_bytes == 0


def test_spans_of_both_calls_may_name_their_bytes():
    spans = {t.SPAN_PROPOSE, t.SPAN_VERIFY}
    named = {span.name for span in t.SPANS if t.FEATURE_BYTES in span.sometimes and span.kind == "client"}
    assert named == spans
