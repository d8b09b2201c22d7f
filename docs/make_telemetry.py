"""Make docs/telemetry.md: all spans and attributes of gammaray's traces.

python docs/make_telemetry.py            # write
python docs/make_telemetry.py --check    # exit with 1 when it is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gammaray.telemetry import names as t

PAGE = Path(__file__).with_name("telemetry.md")

_INTRODUCTION = """\
# Spans and attributes

Made by `python docs/make_telemetry.py`; do not edit.
[observability.md](observability.md) tells how to switch traces on and what one looks like;
[metrics.md](metrics.md) has the metrics.

Names that begin with `gen_ai.` are OpenTelemetry's semantic conventions for generative AI. A span of kind
*client* waits, the *server* span below it is the worker's own, from its own process.
"""


AttributeType = Literal["string", "boolean", "int", "double", "string[]"]


@dataclass(frozen=True)
class Attribute:
    """One attribute.

    Args:
        name: Its name.
        type: Type of its values.
        unit: Unit of its values in UCUM; empty without one.
        meaning: Description of its values.
    """

    name: str
    type: AttributeType
    unit: str
    meaning: str


@dataclass(frozen=True)
class Span:
    """One kind of span.

    Args:
        name: Its name; both sides of a call use the same.
        kind: The side of the call, or internal; a producer does not wait for its consumer.
        process: The process that creates it: orchestrator, draft or target.
        parent: Name of the parent span, empty if it is not one of gammaray's.
        meaning: What its duration covers.
        always: Attributes that every such span has.
        sometimes: Attributes that some have; their meaning states when.
    """

    name: str
    kind: Literal["server", "client", "producer", "consumer", "internal"]
    process: str
    parent: str
    meaning: str
    always: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()


ATTRIBUTES = (
    Attribute(t.OPERATION_NAME, "string", "", "Always `text_completion`."),
    Attribute(t.PROVIDER_NAME, "string", "", "Always `gammaray`."),
    Attribute(t.REQUEST_MODEL, "string", "", "The requested model, if named."),
    Attribute(t.RESPONSE_MODEL, "string", "", "The target model that served."),
    Attribute(t.CONVERSATION_ID, "string", "", "The session."),
    Attribute(t.REQUEST_MAX_TOKENS, "int", "{token}", "Upper bound of tokens."),
    Attribute(t.REQUEST_TEMPERATURE, "double", "", "Sampling temperature."),
    Attribute(t.REQUEST_TOP_P, "double", "", "Nucleus mass, where it is below 1."),
    Attribute(t.REQUEST_TOP_K, "int", "", "Most likely tokens kept, where limited."),
    Attribute(
        *(t.REQUEST_SEED, "string", ""),
        "Seed, if the client gave one; decimal, since it may exceed 63 bits.",
    ),
    Attribute(t.FINISH_REASONS, "string[]", "", "Finish reason, if it ended: stop, length or cancelled."),
    Attribute(t.INPUT_TOKENS, "int", "{token}", "Tokens of the prompt, at the end."),
    Attribute(t.OUTPUT_TOKENS, "int", "{token}", "Tokens emitted, at the end."),
    Attribute(t.ERROR_TYPE, "string", "", "Class of the error, if it failed."),
    Attribute(t.SESSION_ID, "string", "", "The session."),
    Attribute(t.EPOCH, "int", "", "Fencing number of the session's owner: increases with each takeover."),
    Attribute(t.TURN, "int", "", "Turn of the session, from 0."),
    Attribute(
        *(t.RESUMED_FROM, "int", "{token}"),
        "Emitted tokens that the client had if it resumed.",
    ),
    Attribute(t.VERIFICATION, "string", "", "Verification method: coupled, rejection, naive or block."),
    Attribute(
        *(t.COMPILE_MS, "double", "ms"),
        "Compiling the request's grammar, if it has one that was not kept.",
    ),
    Attribute(t.CYCLE_INDEX, "int", "", "Number of the cycle in its generation, from 0."),
    Attribute(t.CYCLES, "int", "{cycle}", "Cycles that were run."),
    Attribute(t.BASE_POSITION, "int", "{token}", "Committed tokens that the cycle builds on."),
    Attribute(t.GAMMA, "int", "{token}", "Requested draft tokens: depth of the proposal."),
    Attribute(t.GAMMA_REASON, "string", "", "Reason of the controller for this gamma."),
    Attribute(
        *(t.DRAFTER, "string", ""),
        "Drafter that proposed: model, head, suffix, prediction, grammar (forced tokens) or none.",
    ),
    Attribute(
        *(t.DRAFTER_VERSION, "int", ""),
        "Version of the head or draft model that proposed, 0 for the one of the start; absent if none did.",
    ),
    Attribute(t.DRAFT_FAILED, "boolean", "", "Whether the drafter was absent, late or wrong."),
    Attribute(
        *(t.DRAFT_AHEAD_HIT, "boolean", ""),
        "Whether the proposal was prepared ahead and needed no forward.",
    ),
    Attribute(
        *(t.AHEAD_STOPPED, "boolean", ""),
        "Whether the session's next block, or its end, came before all likely proposals were complete.",
    ),
    Attribute(t.DRAFTED, "int", "{token}", "Nodes of the proposal."),
    Attribute(
        *(t.TESTED, "int", "{token}"),
        "Tested proposed tokens: the accepted ones, plus one if a test failed.",
    ),
    Attribute(t.ACCEPTED, "int", "{token}", "Accepted proposed tokens."),
    Attribute(t.EMITTED, "int", "{token}", "Tokens that were emitted."),
    Attribute(
        *(t.NEXT_ORIGIN, "string", ""),
        "The target's own token: correction or bonus; absent if the completion ended before it.",
    ),
    Attribute(t.WORKER_ADDRESS, "string", "", "host:port of the last worker that responded."),
    Attribute(
        *(t.EARLY, "boolean", ""),
        "Whether the block was sent before the verdict that it follows; those in vain have no span.",
    ),
    Attribute(
        *(t.BLOCKS, "int", "{block}"),
        "Blocks sent: above 1 if the worker requested missing tokens or the session changed its worker; 0 if "
        "it had decoded the tokens ahead.",
    ),
    Attribute(t.REFED_TOKENS, "int", "{token}", "Tokens sent again because a worker lacked them."),
    Attribute(t.REQUEST_BYTES, "int", "By", "Bytes of the blocks on the wire, without their frame."),
    Attribute(t.RESPONSE_BYTES, "int", "By", "Bytes of the answers on the wire, without their frame."),
    Attribute(t.QUEUE_MS, "double", "ms", "From the block's arrival at the worker to its first step."),
    Attribute(t.COMPUTE_MS, "double", "ms", "Engine steps that served the block, shared with the batch."),
    Attribute(t.FORWARD_MS, "double", "ms", "Model forwards in these steps."),
    Attribute(
        *(t.MASK_MS, "double", "ms"),
        "Computing the masks of the block's rows, beside the forward; only with a grammar.",
    ),
    Attribute(
        *(t.HEAD_MS, "double", "ms"),
        "Drafting by the worker's head for the blocks of the batch, before it; only where a head drafts.",
    ),
    Attribute(t.STEPS, "int", "{step}", "Engine steps that served the block; of draft-ahead: forwards."),
    Attribute(t.BATCH_SIZE, "int", "{session}", "Sessions in the largest batch that served the block."),
    Attribute(t.BATCH_TOKENS, "int", "{token}", "Tokens fed in these steps, over the whole batch."),
    Attribute(
        *(t.NEEDS_FROM, "int", "{token}"),
        "First position of missing tokens, if the worker requested them instead of responding.",
    ),
)

_TIMING = (t.QUEUE_MS, t.COMPUTE_MS, t.FORWARD_MS, t.BATCH_SIZE, t.BATCH_TOKENS)
_CALL = (t.WORKER_ADDRESS, t.BLOCKS, t.REFED_TOKENS, t.REQUEST_BYTES, t.RESPONSE_BYTES)
_BLOCK = (t.SESSION_ID, t.EPOCH, t.BASE_POSITION, t.DRAFTED, t.STEPS, *_TIMING)

SPANS = (
    Span(
        *(t.SPAN_GENERATE, "server", "orchestrator", ""),
        "One completion, from the request's arrival to the last piece; child of the caller's `traceparent`.",
        (
            t.OPERATION_NAME,
            t.PROVIDER_NAME,
            t.RESPONSE_MODEL,
            t.REQUEST_MAX_TOKENS,
            t.REQUEST_TEMPERATURE,
            t.VERIFICATION,
        ),
        (
            *(
                t.REQUEST_MODEL,
                t.REQUEST_TOP_P,
                t.REQUEST_TOP_K,
                t.REQUEST_SEED,
                t.CONVERSATION_ID,
                t.SESSION_ID,
            ),
            *(
                t.TURN,
                t.RESUMED_FROM,
                t.COMPILE_MS,
                t.FINISH_REASONS,
                t.INPUT_TOKENS,
                t.OUTPUT_TOKENS,
                t.CYCLES,
                t.ERROR_TYPE,
            ),
        ),
    ),
    Span(
        *(t.SPAN_OPEN, "internal", "orchestrator", t.SPAN_GENERATE),
        "From the request's arrival to the first cycle: admission, tokenising, creating the session.",
        (t.SESSION_ID, t.EPOCH),
    ),
    Span(
        *(t.SPAN_CYCLE, "internal", "orchestrator", t.SPAN_GENERATE),
        "One propose and one verify; its tokens are committed while the next one runs.",
        (
            *(
                t.SESSION_ID,
                t.EPOCH,
                t.CYCLE_INDEX,
                t.BASE_POSITION,
                t.VERIFICATION,
                t.GAMMA,
                t.GAMMA_REASON,
                t.DRAFTER,
                t.DRAFT_FAILED,
            ),
            *(t.DRAFTED, t.TESTED, t.ACCEPTED, t.EMITTED),
        ),
        (t.DRAFTER_VERSION, t.NEXT_ORIGIN, t.ERROR_TYPE),
    ),
    Span(
        *(t.SPAN_PROPOSE, "client", "orchestrator", t.SPAN_CYCLE),
        "Waiting for the proposal, re-feeds included. Prefilling a long prompt concurrently with the first "
        "cycles is such a span too, under the generation.",
        _CALL,
        (t.DRAFT_AHEAD_HIT, *_TIMING, t.ERROR_TYPE),
    ),
    Span(
        *(t.SPAN_PROPOSE, "producer", "orchestrator", t.SPAN_CYCLE),
        "Using a proposal that the draft worker had sent ahead, and sending it a notice.",
        (*_CALL, t.DRAFT_AHEAD_HIT),
    ),
    Span(
        *(t.SPAN_PROPOSE, "internal", "orchestrator", t.SPAN_CYCLE),
        "Proposal without a draft worker: a look-up in known text, or no drafter was available.",
    ),
    Span(
        *(t.SPAN_PROPOSE, "server", "draft", t.SPAN_PROPOSE),
        "One block, from its arrival at the draft worker to its result.",
        (*_BLOCK, t.GAMMA, t.DRAFT_AHEAD_HIT),
        (t.NEEDS_FROM, t.ERROR_TYPE),
    ),
    Span(
        *(t.SPAN_PROPOSE, "consumer", "draft", t.SPAN_PROPOSE),
        "One such notice, from its arrival at the draft worker until it was processed; no call waits for it.",
        (*_BLOCK, t.GAMMA, t.DRAFT_AHEAD_HIT),
        (t.ERROR_TYPE,),
    ),
    Span(
        *(t.SPAN_AHEAD, "internal", "draft", t.SPAN_PROPOSE),
        "Drafting ahead after a proposal, at most until the session's next block: from the first forward to "
        "the end of the last one. Other sessions may share its forwards, or have some between them.",
        (t.SESSION_ID, t.EPOCH, t.BASE_POSITION, t.STEPS, t.AHEAD_STOPPED),
    ),
    Span(
        *(t.SPAN_VERIFY, "client", "orchestrator", t.SPAN_CYCLE),
        "Waiting for the verdict, re-feeds and other targets included.",
        _CALL,
        (*_TIMING, t.ERROR_TYPE),
    ),
    Span(
        *(t.SPAN_VERIFY, "server", "target", t.SPAN_VERIFY),
        "One block, from its arrival at the target worker to its result; of one sent early, from the "
        "verdict before it, which may be before its parent begins.",
        _BLOCK,
        (t.EARLY, t.TESTED, t.ACCEPTED, t.NEXT_ORIGIN, t.NEEDS_FROM, t.HEAD_MS, t.MASK_MS, t.ERROR_TYPE),
    ),
    Span(
        *(t.SPAN_COMMIT, "internal", "orchestrator", t.SPAN_GENERATE),
        "From a cycle's end until its tokens are stored.",
        (t.CYCLE_INDEX, t.EMITTED),
    ),
)
"""The spans of a trace, outermost first."""


def render() -> str:
    """Return the page."""
    return "\n".join([_INTRODUCTION, *_spans(), *_attributes()]) + "\n"


def _spans() -> Iterator[str]:
    yield "## Spans\n"
    yield "| span | kind | process | parent | what its time is | attributes (in brackets: some have it) |"
    yield "|---|---|---|---|---|---|"
    for span in SPANS:
        parent = f"`{span.parent}`" if span.parent else "the caller's"
        names = ", ".join(_names(span)) or "none"
        yield f"| `{span.name}` | {span.kind} | {span.process} | {parent} | {span.meaning} | {names} |"
    yield ""


def _names(span: Span) -> Iterator[str]:
    yield from (f"`{name}`" for name in span.always)
    yield from (f"(`{name}`)" for name in span.sometimes)


def _attributes() -> Iterator[str]:
    yield "## Attributes\n"
    yield "| attribute | type | unit | meaning |"
    yield "|---|---|---|---|"
    for attribute in ATTRIBUTES:
        unit = f"`{attribute.unit}`" if attribute.unit else ""
        yield f"| `{attribute.name}` | {attribute.type} | {unit} | {attribute.meaning} |"


def main() -> int:
    """Write the page, or compare it; return the exit status."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render())
        return 0
    if PAGE.exists() and PAGE.read_text() == render():
        return 0
    print(f"{PAGE.name} is stale: run `python docs/make_telemetry.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
