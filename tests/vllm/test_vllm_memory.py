"""Sessions leave no memory behind in a worker on vLLM.

They have the same shapes: vLLM's CPU build keeps oneDNN's primitives for each number of rows that a step had.
"""

import ctypes
import gc
import random

import pytest

from gammaray.types import SamplingParams, VerificationMethod
from tests.support.vllm_helpers import Session, drafted, end, generate, prompt

NUM_SESSIONS = 40
ALLOWED_BYTES = 64 << 10
"""The token lists of the sessions would be more than that."""

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def allocated_bytes() -> int:
    """Return what malloc has handed out and not got back, mapped blocks included."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = MallocInfo
    gc.collect()
    found = mallinfo2()
    return found.uordblks + found.hblkhd


@pytest.mark.nightly
@pytest.mark.parametrize("method", [VerificationMethod.COUPLED, VerificationMethod.BLOCK])
def test_ended_sessions_hold_no_memory(scheduler, method):
    rng = random.Random(1)

    def run(seed: int) -> None:
        params = SamplingParams(temperature=1, seed=seed, frequency_penalty=0.5, top_p=0.9)
        session = Session(prompt(300, seed), params, method)
        generate(scheduler, [session], 40, lambda session: drafted(prompt(3, seed), rng))
        end(scheduler, session, forgets=True)

    for seed in range(10):
        run(seed)
    before = allocated_bytes()
    for seed in range(10, 10 + NUM_SESSIONS):
        run(seed)
    assert allocated_bytes() - before < ALLOWED_BYTES
