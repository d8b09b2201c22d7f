"""Idle priority is used only if it can be reverted, and ends when a request arrives."""

import os
import threading
import time
from contextlib import suppress
from ctypes import c_int32

import pytest

from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine
from services.own.lookahead import can_use_idle_priority
from tests.support.engine_helpers import tiny_model
from tests.support.own_process import run_code

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="idle priority is Linux's")

UNPRIVILEGED = """
import os, resource
from services.own.lookahead import can_use_idle_priority
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
print(can_use_idle_priority(), os.sched_getscheduler(0) == os.SCHED_OTHER)
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_idle_priority_is_not_used_if_it_cannot_be_reverted():
    """An ordinary user: the thread would keep idle priority for good."""
    assert run_code(UNPRIVILEGED).stdout.split() == ["False", "True"]


def preempted(work, stop: c_int32) -> list[int]:
    """Run `work` in a thread, preempt it; return the scheduling policies meanwhile, and the last one."""
    seen: list[int] = []
    thread_ids: list[int] = []

    def run() -> None:
        thread_ids.append(threading.get_native_id())
        work()
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=run)
    thread.start()
    during: set[int] = set()
    while thread.is_alive():
        with suppress(ProcessLookupError, IndexError):
            during.add(os.sched_getscheduler(thread_ids[0]))
            if os.SCHED_IDLE in during:
                stop.value = 1
                os.sched_setscheduler(thread_ids[0], os.SCHED_OTHER, os.sched_param(0))
        time.sleep(0.0002)
    thread.join()
    return [*sorted(during), *seen]


@pytest.mark.skipif(
    hasattr(os, "SCHED_IDLE") and not can_use_idle_priority(),
    reason="this user may not come back from idle priority",
)
@pytest.mark.parametrize("call", ["chain", "step"])
@pytest.mark.parametrize("is_waited_for", [False, True])
def test_forwards_run_at_idle_priority_until_a_request_waits(tmp_path, call, is_waited_for):
    engine = load_engine(str(tiny_model("llama", tmp_path, max_position_embeddings=4096)))
    assert engine.can_chain
    stop = c_int32(int(is_waited_for))

    def work() -> None:
        for number in range(200):
            if call == "chain":
                engine.chain(SequenceInput(f"{number}", 0, [1] * 400, 400), stop=stop, is_idle=True)
            else:
                engine.step([SequenceInput(f"{number}", 0, [1] * 500, 1)], stop)
            engine.release(f"{number}")
            if stop.value and (number > 20 or not is_waited_for):
                return

    policies = preempted(work, stop)
    assert policies[-1] == os.SCHED_OTHER
    assert (os.SCHED_IDLE in policies) is not is_waited_for
