"""Idle priority is used only if it can be reverted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from services.draft_worker.lookahead import IdlePriority, can_use_idle_priority

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="idle priority is Linux's")

UNPRIVILEGED = """
import os, resource
from services.draft_worker.lookahead import can_use_idle_priority
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
print(can_use_idle_priority(), os.sched_getscheduler(0) == os.SCHED_OTHER)
"""


@pytest.mark.slow
def test_idle_priority_is_not_used_if_it_cannot_be_reverted():
    """An ordinary user: the thread would keep idle priority for good."""
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["False", "True"]


needs_way_back = pytest.mark.skipif(
    hasattr(os, "SCHED_IDLE") and not can_use_idle_priority(),
    reason="this user may not come back from idle priority",
)


@needs_way_back
def test_idle_priority_applies_to_one_thread_within_the_block():
    priority = IdlePriority()
    seen: list[int] = []
    usual = os.sched_getscheduler(0)
    with priority:
        assert os.sched_getscheduler(0) == os.SCHED_IDLE
        other = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
    other.start()
    other.join()
    assert os.sched_getscheduler(0) == usual
    assert seen == [usual]
    with pytest.raises(ValueError, match="through"), priority:
        raise ValueError("through")
    assert os.sched_getscheduler(0) == usual


@needs_way_back
def test_preempt_ends_idle_priority_from_another_thread():
    priority = IdlePriority()
    usual = os.sched_getscheduler(0)
    priority.preempt()  # before it ever began: nothing to end
    with priority:
        other = threading.Thread(target=priority.preempt)
        other.start()
        other.join()
        assert os.sched_getscheduler(0) == usual
    with priority:
        assert os.sched_getscheduler(0) == os.SCHED_IDLE
