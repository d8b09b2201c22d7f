"""Admission: bounded, fair between tenants, and without leftover state however a wait ends."""

import asyncio
import math
import random
import time

import pytest

from gammaray.errors import DeadlineExceededError, ResourceExhaustedError
from orchestrator.access.admission import Admission
from orchestrator.access.caller import Caller


async def ticks():
    for _ in range(10):
        await asyncio.sleep(0)


class Requests:
    """Requests that hold their slot until they are ended; `served` lists those that got one, in order."""

    def __init__(self, capacity=1, max_waiting=100, max_wait_s=30.0, tenant_capacity=None):
        self.admission = Admission(capacity, max_waiting, max_wait_s, tenant_capacity)
        self.served, self.refused, self.ends = [], [], []

    async def ask(self, name, tenant="", **fields):
        task = asyncio.create_task(self.run(name, Caller(tenant, **fields)))
        await ticks()
        return task

    async def run(self, name, caller):
        try:
            async with self.admission.place(caller):
                self.served.append(name)
                end = asyncio.Event()
                self.ends.append(end)
                await end.wait()
        except (ResourceExhaustedError, DeadlineExceededError) as error:
            self.refused.append((name, error))

    async def end_all(self):
        while self.ends:
            self.ends.pop(0).set()
            await ticks()
        assert (self.admission.num_running, self.admission.num_waiting) == (0, 0)
        assert self.admission.num_tenants == 0


@pytest.mark.parametrize(
    ("limits", "asked", "at_once", "in_the_end"),
    [
        pytest.param({"capacity": 2}, "a0 a1 a2", "a0 a1", "a0 a1 a2", id="free slots"),
        pytest.param(
            {}, "a0 a1 a2 a3 b0 b1 c0", "a0", "a0 b0 c0 a1 b1 a2 a3", id="in turn between tenants"
        ),
        pytest.param(
            {"capacity": 4}, "a0 a1 a2 a3 a4 b0 b1 b2", "a0 a1 a2 a3", "a0 a1 a2 a3 b0 b1 a4 b2",
            id="to the tenant with the fewest running requests",
        ),
        pytest.param(
            {"capacity": 4, "tenant_capacity": 3}, "a0 a1 a2 a3 b0 b1", "a0 a1 a2 b0", "a0 a1 a2 b0 b1 a3",
            id="bound of a tenant",
        ),
        pytest.param({"capacity": 3, "tenant_capacity": 1}, "-0 -1 -2", "-0 -1 -2", "-0 -1 -2", id="none"),
        pytest.param({}, "a0 a1:-1 a2:5 b0:-10", "a0", "a0 b0:-10 a2:5 a1:-1", id="priority within a tenant"),
    ],
)  # fmt: skip
async def test_slots_are_given(limits, asked, at_once, in_the_end):
    """A request is named by its tenant, a number and its priority."""
    requests = Requests(**limits)
    for name in asked.split():
        await requests.ask(name, name[0].strip("-"), priority=int(name.partition(":")[2] or 0))
    assert requests.served == at_once.split()
    assert requests.admission.num_running == len(requests.served)
    assert requests.admission.num_waiting == len(asked.split()) - len(requests.served)
    await requests.end_all()
    assert requests.served == in_the_end.split()


async def test_full_queue_rejects_a_request_of_the_longest_queue():
    requests = Requests(max_waiting=3)
    for index in range(4):
        await requests.ask(f"a{index}", "a")
    await requests.ask("b0", "b")
    assert [name for name, _ in requests.refused] == ["a3"]
    await requests.ask("a4", "a")
    assert [name for name, _ in requests.refused] == ["a3", "a4"]
    await requests.end_all()
    assert requests.served == ["a0", "b0", "a1", "a2"]


@pytest.mark.parametrize(
    ("max_wait_s", "left_s", "error"),
    [
        (0.05, math.inf, ResourceExhaustedError),
        (30.0, 0.05, DeadlineExceededError),
        (30.0, -1.0, DeadlineExceededError),
    ],
)
async def test_wait_is_bounded_and_ends_at_the_deadline_of_the_caller(max_wait_s, left_s, error):
    requests = Requests(max_wait_s=max_wait_s)
    await requests.ask("1")
    await asyncio.wait_for(await requests.ask("2", deadline=time.monotonic() + left_s), 5)
    assert [(name, type(refusal)) for name, refusal in requests.refused] == [("2", error)]
    await requests.end_all()


async def test_request_cancelled_when_granted_passes_its_slot_on():
    requests = Requests()
    await requests.ask("1", "a")
    second = await requests.ask("2", "b")
    await requests.ask("3", "c")
    requests.ends.pop(0).set()
    await asyncio.sleep(0)  # the place is handed over, its new holder has not run yet
    second.cancel()
    await ticks()
    assert requests.served[-1] == "3"
    await requests.end_all()


async def test_full_queue_with_a_just_cancelled_request():
    requests = Requests(max_waiting=2)
    await requests.ask("a0", "a")
    await requests.ask("a1", "a")
    newest = await requests.ask("a2", "a")
    other = asyncio.create_task(requests.run("b0", Caller("b")))  # runs before the cancelled one wakes up
    newest.cancel()
    await ticks()
    assert newest.cancelled()
    await requests.end_all()
    assert requests.served == ["a0", "b0", "a1"]
    assert other.exception() is None


@pytest.mark.parametrize("seed", range(5))
async def test_any_sequence_of_events_keeps_the_bounds_and_ends_empty(seed):
    rng = random.Random(seed)
    admission, running, most, tasks = Admission(3, 5, 0.02), 0, 0, []

    async def request(tenant):
        nonlocal running, most
        try:
            async with admission.place(Caller(tenant, priority=rng.randrange(3))):
                running += 1
                most = max(most, running)
                try:
                    await asyncio.sleep(rng.uniform(0, 0.01))
                finally:
                    running -= 1
        except ResourceExhaustedError:
            pass

    for _ in range(200):
        tasks.append(asyncio.create_task(request(rng.choice("abc"))))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0.001)
        assert admission.num_running <= 3
        assert admission.num_waiting <= 5
    await asyncio.wait(tasks, timeout=20)
    assert all(task.done() for task in tasks)
    assert [task.exception() for task in tasks if not task.cancelled() and task.exception()] == []
    assert most == 3
    assert (admission.num_running, admission.num_waiting, admission.num_tenants) == (0, 0, 0)
