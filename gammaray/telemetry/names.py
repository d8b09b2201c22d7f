"""Names of the spans and attributes of gammaray's traces.

Names of OpenTelemetry's semantic conventions for generative AI are used where they exist; all others start
with `gammaray.`. `docs/make_telemetry.py` has their types, units and meanings, and makes `docs/telemetry.md`;
metrics: `gammaray.telemetry.catalog`.
"""

from __future__ import annotations

from typing import Final

# Attributes of the semantic conventions, on the span of a generation.

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"

# Attributes of a session.

SESSION_ID: Final = "gammaray.session.id"
EPOCH: Final = "gammaray.session.epoch"
TURN: Final = "gammaray.session.turn"
RESUMED_FROM: Final = "gammaray.session.resumed_from"
VERIFICATION: Final = "gammaray.verification"
COMPILE_MS: Final = "gammaray.grammar.compile_ms"

# Attributes of a cycle.

CYCLE_INDEX: Final = "gammaray.cycle.index"
CYCLES: Final = "gammaray.cycles"
BASE_POSITION: Final = "gammaray.base_position"
GAMMA: Final = "gammaray.gamma"
GAMMA_REASON: Final = "gammaray.gamma.reason"
DRAFTER: Final = "gammaray.drafter"
DRAFTER_VERSION: Final = "gammaray.drafter.version"
DRAFT_FAILED: Final = "gammaray.drafter.failed"
DRAFT_AHEAD_HIT: Final = "gammaray.draft_ahead.hit"
AHEAD_STOPPED: Final = "gammaray.draft_ahead.stopped"
DRAFTED: Final = "gammaray.drafted_tokens"
TESTED: Final = "gammaray.tested_tokens"
ACCEPTED: Final = "gammaray.accepted_tokens"
EMITTED: Final = "gammaray.emitted_tokens"
NEXT_ORIGIN: Final = "gammaray.next_token.origin"

# Attributes of a worker.

WORKER_ADDRESS: Final = "gammaray.worker.address"
EARLY: Final = "gammaray.worker.early"
BLOCKS: Final = "gammaray.worker.blocks"
REFED_TOKENS: Final = "gammaray.worker.refed_tokens"
REQUEST_BYTES: Final = "gammaray.worker.request_bytes"
RESPONSE_BYTES: Final = "gammaray.worker.response_bytes"
QUEUE_MS: Final = "gammaray.worker.queue_ms"
COMPUTE_MS: Final = "gammaray.worker.compute_ms"
FORWARD_MS: Final = "gammaray.worker.forward_ms"
MASK_MS: Final = "gammaray.worker.mask_ms"
HEAD_MS: Final = "gammaray.worker.head_ms"
STEPS: Final = "gammaray.worker.steps"
BATCH_SIZE: Final = "gammaray.worker.batch_size"
BATCH_TOKENS: Final = "gammaray.worker.batch_tokens"
NEEDS_FROM: Final = "gammaray.worker.needs_from"

SPAN_GENERATE: Final = "gammaray.generate"
SPAN_OPEN: Final = "gammaray.session.open"
SPAN_CYCLE: Final = "gammaray.cycle"
SPAN_PROPOSE: Final = "gammaray.draft.propose"
SPAN_AHEAD: Final = "gammaray.draft.ahead"
SPAN_VERIFY: Final = "gammaray.target.verify"
SPAN_COMMIT: Final = "gammaray.session.commit"
