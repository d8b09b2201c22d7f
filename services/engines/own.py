"""Our own engine: the compiled kernel for CPUs, the layers of transformers for other models and devices."""

from __future__ import annotations

from dataclasses import replace

from gammaray.config import DraftSettings, TargetSettings
from gammaray.demo_pair import early_exit_layers
from gammaray.engines import EngineFacts
from gammaray.errors import InvalidArgumentError
from services.engine.engine import Engine
from services.engine.loader import load_worker_engine
from services.engines.interface import Served, target_model
from services.own.draft_scheduler import DraftScheduler
from services.own.forward_times import forward_times
from services.own.head_loading import check_local_drafter, load_learning_drafter, load_local_drafter
from services.own.lookahead import measure_ahead
from services.own.target_scheduler import TargetScheduler
from services.process.fingerprints import vocab_sha256
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from services.speculation.local_drafter import TargetHead
from services.streaming.messages import Model
from services.vocabulary.translation import Translation, load_translation, target_size


class OwnEngine:
    """Implements `services.engines.interface.Engine`."""

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts

    def refuse_draft(self, path: str, target: str, settings: DraftSettings) -> InvalidArgumentError | None:
        """Return None: what this engine does not serve it finds when it loads the drafter."""
        return None

    def load_target(self, path: str, settings: TargetSettings, limits: Limits) -> Served:
        if settings.head:
            check_local_drafter(settings)
        engine = load_worker_engine(path, settings)
        head: TargetHead = TargetHead()
        if settings.head:
            load = load_learning_drafter if settings.learn else load_local_drafter
            head = load(settings, engine)
        grammars, ahead = Grammars(path, engine.vocab_size), settings.draft_ahead
        scheduler = TargetScheduler(engine, limits, grammars, head, draft_ahead=ahead)
        model = replace(target_model(path, settings, self.facts, engine), forward_s=forward_times(engine))
        return Served(model, scheduler)

    def load_draft(self, path: str, target: str, settings: DraftSettings, limits: Limits) -> Served:
        engine = load_worker_engine(path, settings, draft_for=target)
        vocab_size, digest, translation = _vocabulary(path, target, engine)
        model = Model(settings.model, vocab_size, engine.max_context, digest, kernel=engine.kernel)
        rows, cost, levels = measure_ahead(engine) if settings.draft_ahead else (0, 0.0, 1)
        scheduler = DraftScheduler(
            engine,
            limits,
            ahead_rows=rows,
            rows_cost=cost,
            ahead_levels=levels,
            translation=translation,
            grammars=Grammars(target or path, vocab_size),
        )
        return Served(model, scheduler)


def _vocabulary(path: str, target: str, engine: Engine) -> tuple[int, str, Translation | None]:
    """Return size and fingerprint of the target's vocabulary, else the draft's, and the translation to it."""
    size = engine.vocab_size
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
