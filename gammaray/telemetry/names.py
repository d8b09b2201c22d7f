"""All spans and attributes of gammaray's traces: name, type, unit and meaning.

Names of OpenTelemetry's semantic conventions for generative AI are used where they exist; all others start
with `gammaray.`. `docs/telemetry.md` is generated from this module; metrics: `gammaray.telemetry.catalog`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

AttributeType = Literal["string", "boolean", "int", "double", "string[]"]


class Attribute(str):
    """The name of an attribute, with its description.

    Args:
        name: The name.
        type: Type of its values.
        unit: Unit of its values in UCUM; empty without one.
        meaning: Description of its values.
    """

    type: AttributeType
    unit: str
    meaning: str

    def __new__(cls, name: str, type: AttributeType, unit: str, meaning: str) -> Attribute:
        attribute = str.__new__(cls, name)
        attribute.type, attribute.unit, attribute.meaning = type, unit, meaning
        return attribute


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
    always: tuple[Attribute, ...] = ()
    sometimes: tuple[Attribute, ...] = ()


# Attributes of the semantic conventions, on the span of a generation.

OPERATION_NAME: Final = Attribute("gen_ai.operation.name", "string", "", "Always `text_completion`.")
PROVIDER_NAME: Final = Attribute("gen_ai.provider.name", "string", "", "Always `gammaray`.")
REQUEST_MODEL: Final = Attribute("gen_ai.request.model", "string", "", "The requested model, if named.")
RESPONSE_MODEL: Final = Attribute("gen_ai.response.model", "string", "", "The target model that served.")
CONVERSATION_ID: Final = Attribute("gen_ai.conversation.id", "string", "", "The session.")
REQUEST_MAX_TOKENS: Final = Attribute("gen_ai.request.max_tokens", "int", "{token}", "Upper bound of tokens.")
REQUEST_TEMPERATURE: Final = Attribute("gen_ai.request.temperature", "double", "", "Sampling temperature.")
REQUEST_TOP_P: Final = Attribute("gen_ai.request.top_p", "double", "", "Nucleus mass, where it is below 1.")
REQUEST_TOP_K: Final = Attribute("gen_ai.request.top_k", "int", "", "Most likely tokens kept, where limited.")
REQUEST_SEED: Final = Attribute(
    "gen_ai.request.seed", "string", "", "Seed, if the client gave one; decimal, since it may exceed 63 bits."
)
FINISH_REASONS: Final = Attribute(
    "gen_ai.response.finish_reasons", "string[]", "", "Finish reason, if it ended: stop, length or cancelled."
)
INPUT_TOKENS: Final = Attribute(
    "gen_ai.usage.input_tokens", "int", "{token}", "Tokens of the prompt, at the end."
)
OUTPUT_TOKENS: Final = Attribute(
    "gen_ai.usage.output_tokens", "int", "{token}", "Tokens emitted, at the end."
)
ERROR_TYPE: Final = Attribute("error.type", "string", "", "Class of the error, if it failed.")

# Attributes of a session.

SESSION_ID: Final = Attribute("gammaray.session.id", "string", "", "The session.")
EPOCH: Final = Attribute(
    "gammaray.session.epoch",
    "int",
    "",
    "Fencing number of the session's owner: increases with each takeover.",
)
TURN: Final = Attribute("gammaray.session.turn", "int", "", "Turn of the session, from 0.")
RESUMED_FROM: Final = Attribute(
    "gammaray.session.resumed_from",
    "int",
    "{token}",
    "Emitted tokens that the client had if it resumed; the span links to the former owner's.",
)
VERIFICATION: Final = Attribute(
    "gammaray.verification", "string", "", "Verification method: coupled, rejection, naive or block."
)

COMPILE_MS: Final = Attribute(
    *("gammaray.grammar.compile_ms", "double", "ms"),
    "Compiling the request's grammar, if it has one that was not kept.",
)

# Attributes of a cycle.

CYCLE_INDEX: Final = Attribute(
    "gammaray.cycle.index", "int", "", "Number of the cycle in its generation, from 0."
)
CYCLES: Final = Attribute("gammaray.cycles", "int", "{cycle}", "Cycles that were run.")
BASE_POSITION: Final = Attribute(
    "gammaray.base_position", "int", "{token}", "Committed tokens that the cycle builds on."
)
GAMMA: Final = Attribute("gammaray.gamma", "int", "{token}", "Requested draft tokens: depth of the proposal.")
GAMMA_REASON: Final = Attribute(
    "gammaray.gamma.reason", "string", "", "Reason of the controller for this gamma."
)
DRAFTER: Final = Attribute(
    *("gammaray.drafter", "string", ""),
    "Drafter that proposed: model, head, suffix, prediction, grammar (forced tokens) or none.",
)
DRAFT_FAILED: Final = Attribute(
    "gammaray.drafter.failed", "boolean", "", "Whether the drafter was absent, late or wrong."
)
DRAFT_AHEAD_HIT: Final = Attribute(
    "gammaray.draft_ahead.hit",
    "boolean",
    "",
    "Whether the proposal was prepared ahead and needed no forward.",
)
DRAFTED: Final = Attribute("gammaray.drafted_tokens", "int", "{token}", "Nodes of the proposal.")
TESTED: Final = Attribute(
    "gammaray.tested_tokens",
    "int",
    "{token}",
    "Tested proposed tokens: the accepted ones, plus one if a test failed.",
)
ACCEPTED: Final = Attribute("gammaray.accepted_tokens", "int", "{token}", "Accepted proposed tokens.")
EMITTED: Final = Attribute("gammaray.emitted_tokens", "int", "{token}", "Tokens that were emitted.")
NEXT_ORIGIN: Final = Attribute(
    "gammaray.next_token.origin",
    "string",
    "",
    "The target's own token: correction or bonus; absent if the completion ended before it.",
)

# Attributes of a worker.

WORKER_ADDRESS: Final = Attribute(
    "gammaray.worker.address", "string", "", "host:port of the last worker that responded."
)
BLOCKS: Final = Attribute(
    "gammaray.worker.blocks",
    "int",
    "{block}",
    "Blocks sent: above 1 if the worker requested missing tokens or the session changed its worker.",
)
REFED_TOKENS: Final = Attribute(
    "gammaray.worker.refed_tokens", "int", "{token}", "Tokens sent again because a worker lacked them."
)
REQUEST_BYTES: Final = Attribute(
    "gammaray.worker.request_bytes", "int", "By", "Bytes of the blocks on the wire, without their frame."
)
RESPONSE_BYTES: Final = Attribute(
    "gammaray.worker.response_bytes", "int", "By", "Bytes of the answers on the wire, without their frame."
)
QUEUE_MS: Final = Attribute(
    "gammaray.worker.queue_ms", "double", "ms", "From the block's arrival at the worker to its first step."
)
COMPUTE_MS: Final = Attribute(
    "gammaray.worker.compute_ms",
    "double",
    "ms",
    "Engine steps that served the block, shared with the batch.",
)
FORWARD_MS: Final = Attribute("gammaray.worker.forward_ms", "double", "ms", "Model forwards in these steps.")
MASK_MS: Final = Attribute(
    "gammaray.worker.mask_ms",
    "double",
    "ms",
    "Computing the masks of the block's rows, beside the forward; only with a grammar.",
)
HEAD_MS: Final = Attribute(
    "gammaray.worker.head_ms",
    "double",
    "ms",
    "Drafting by the worker's head for the blocks of the batch, before it; only where a head drafts.",
)
STEPS: Final = Attribute("gammaray.worker.steps", "int", "{step}", "Engine steps that served the block.")
BATCH_SIZE: Final = Attribute(
    "gammaray.worker.batch_size", "int", "{session}", "Sessions in the largest batch that served the block."
)
BATCH_TOKENS: Final = Attribute(
    "gammaray.worker.batch_tokens", "int", "{token}", "Tokens fed in these steps, over the whole batch."
)
NEEDS_FROM: Final = Attribute(
    "gammaray.worker.needs_from",
    "int",
    "{token}",
    "First position of missing tokens, if the worker requested them instead of responding.",
)

_TIMING = (QUEUE_MS, COMPUTE_MS, FORWARD_MS, BATCH_SIZE, BATCH_TOKENS)
_CALL = (WORKER_ADDRESS, BLOCKS, REFED_TOKENS, REQUEST_BYTES, RESPONSE_BYTES)
_BLOCK = (SESSION_ID, EPOCH, BASE_POSITION, DRAFTED, STEPS, *_TIMING)

SPAN_GENERATE: Final = "gammaray.generate"
SPAN_OPEN: Final = "gammaray.session.open"
SPAN_CYCLE: Final = "gammaray.cycle"
SPAN_PROPOSE: Final = "gammaray.draft.propose"
SPAN_VERIFY: Final = "gammaray.target.verify"
SPAN_COMMIT: Final = "gammaray.session.commit"

SPANS: Final = (
    Span(
        *(SPAN_GENERATE, "server", "orchestrator", ""),
        "One completion, from the request's arrival to the last piece; child of the caller's `traceparent`.",
        (
            OPERATION_NAME,
            PROVIDER_NAME,
            RESPONSE_MODEL,
            REQUEST_MAX_TOKENS,
            REQUEST_TEMPERATURE,
            VERIFICATION,
        ),
        (
            *(
                REQUEST_MODEL,
                REQUEST_TOP_P,
                REQUEST_TOP_K,
                REQUEST_SEED,
                CONVERSATION_ID,
                SESSION_ID,
            ),
            *(
                TURN,
                RESUMED_FROM,
                COMPILE_MS,
                FINISH_REASONS,
                INPUT_TOKENS,
                OUTPUT_TOKENS,
                CYCLES,
                ERROR_TYPE,
            ),
        ),
    ),
    Span(
        *(SPAN_OPEN, "internal", "orchestrator", SPAN_GENERATE),
        "From the request's arrival to the first cycle: admission, tokenising, creating the session.",
        (SESSION_ID, EPOCH),
    ),
    Span(
        *(SPAN_CYCLE, "internal", "orchestrator", SPAN_GENERATE),
        "One propose and one verify; its tokens are committed while the next one runs.",
        (
            *(
                SESSION_ID,
                EPOCH,
                CYCLE_INDEX,
                BASE_POSITION,
                VERIFICATION,
                GAMMA,
                GAMMA_REASON,
                DRAFTER,
                DRAFT_FAILED,
            ),
            *(DRAFTED, TESTED, ACCEPTED, EMITTED),
        ),
        (NEXT_ORIGIN, ERROR_TYPE),
    ),
    Span(
        *(SPAN_PROPOSE, "client", "orchestrator", SPAN_CYCLE),
        "Waiting for the proposal, re-feeds included. Prefilling a long prompt concurrently with the first "
        "cycles is such a span too, under the generation.",
        _CALL,
        (DRAFT_AHEAD_HIT, *_TIMING, ERROR_TYPE),
    ),
    Span(
        *(SPAN_PROPOSE, "producer", "orchestrator", SPAN_CYCLE),
        "Using a proposal that the draft worker had sent ahead, and sending it a notice.",
        (*_CALL, DRAFT_AHEAD_HIT),
    ),
    Span(
        *(SPAN_PROPOSE, "internal", "orchestrator", SPAN_CYCLE),
        "Proposal without a draft worker: a look-up in known text, or no drafter was available.",
    ),
    Span(
        *(SPAN_PROPOSE, "server", "draft", SPAN_PROPOSE),
        "One block, from its arrival at the draft worker to its result.",
        (*_BLOCK, GAMMA, DRAFT_AHEAD_HIT),
        (NEEDS_FROM, ERROR_TYPE),
    ),
    Span(
        *(SPAN_PROPOSE, "consumer", "draft", SPAN_PROPOSE),
        "One such notice, from its arrival at the draft worker until it was processed; no call waits for it.",
        (*_BLOCK, GAMMA, DRAFT_AHEAD_HIT),
        (ERROR_TYPE,),
    ),
    Span(
        *(SPAN_VERIFY, "client", "orchestrator", SPAN_CYCLE),
        "Waiting for the verdict, re-feeds and other targets included.",
        _CALL,
        (*_TIMING, ERROR_TYPE),
    ),
    Span(
        *(SPAN_VERIFY, "server", "target", SPAN_VERIFY),
        "One block, from its arrival at the target worker to its result.",
        _BLOCK,
        (TESTED, ACCEPTED, NEXT_ORIGIN, NEEDS_FROM, HEAD_MS, MASK_MS, ERROR_TYPE),
    ),
    Span(
        *(SPAN_COMMIT, "internal", "orchestrator", SPAN_GENERATE),
        "From a cycle's end until its tokens are stored.",
        (CYCLE_INDEX, EMITTED),
    ),
)
"""The spans of a trace, outermost first."""

ATTRIBUTES: Final = tuple(value for value in list(vars().values()) if isinstance(value, Attribute))
"""All attributes."""
