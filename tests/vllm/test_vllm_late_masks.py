"""vLLM's scheduler and masks that take long."""

from gammaray.errors import CancelledError
from services.scheduling.tasks import Release
from tests.support.late_masks import LateMasks, blocked, masked, outcome_of, steps_until


class TestVllm(LateMasks):
    def test_a_released_session_is_answered_while_its_masks_are_late(self, scheduler, gate):
        session, grammar = masked(scheduler, gate)
        scheduler.submit([session.block((1, 2), grammar=grammar)])
        assert blocked(scheduler) == []
        scheduler.release([Release(session.name, 0, False)])
        assert isinstance(outcome_of(steps_until(scheduler, len), session), CancelledError)
        assert not scheduler.requests
