"""The session store driven by concurrent owners that lag, repeat commits and lose replies: nothing stale
gets in.

A model holds what the store must say. Every step runs on a real Redis; its times are moved instead of its
clock: what a clock that jumped would have written, or let expire, is written and deleted.
"""

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gammaray.errors import CancelledError, FailedPreconditionError, InternalError, NotFoundError
from gammaray.types import FinishReason, TokenOrigin
from orchestrator.cycle.session import Session
from orchestrator.storage import session_scripts as scripts
from orchestrator.storage.client import connect
from orchestrator.storage.keys import Keys
from orchestrator.storage.session_store import RedisStore
from tests.support.workers.redis_helpers import running_redis
from tests.support.workers.scripted_workers import make_session

pytestmark = [pytest.mark.integration, pytest.mark.each_redis]

MAX_TOKENS = 24
OWNERS = st.integers(0, 2)
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4)
JUMPS = st.sampled_from([-86_400_000, -11_000, -1, 1, 11_000, 86_400_000])
REFUSALS = (FailedPreconditionError, CancelledError, NotFoundError, InternalError)


@dataclass
class Model:
    """The expected contents of the store; `epoch` is the last one issued, also without a session."""

    exists: bool = True
    epoch: int = 0
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_whole: bool = True


class StoreMachine(RuleBasedStateMachine):
    """Three owners, each with its own and possibly stale view of one session."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = connect(self.url)
        self.store = RedisStore(self.redis, ttl_s=60, lease_s=10.0)
        self.views: list[Session | None] = [None, None, None]
        self.model = Model()

    def teardown(self) -> None:
        self.run(self.redis.aclose())
        self.loop.close()

    def run(self, work):
        return self.loop.run_until_complete(work)

    @property
    def has_gone_far(self) -> bool:
        """Whether the session has enough tokens to test a loss."""
        return self.model.exists and (len(self.model.tokens) > 6 or self.model.turn > 0)

    def view(self, epoch: int, tokens: list[int], digest: str = "") -> Session:
        session = make_session("s", MAX_TOKENS, epoch)
        session.digest = digest
        session.commit(tokens)
        session.finish_reason = None
        return session

    @initialize()
    def create(self) -> None:
        self.run(self.redis.flushall())
        session = self.view(0, [])
        self.run(self.store.create(session, b"turn 0"))
        self.views[0], self.model.epoch = session, session.epoch

    def rises(self, epoch: int) -> None:
        """Check a new epoch: it must be higher than those of all former owners of any session."""
        assert self.model.epoch < epoch < 2**53
        assert epoch > max((view.epoch for view in self.views if view is not None), default=0)
        self.model.epoch = epoch

    @rule(owner=OWNERS)
    def take_over(self, owner: int) -> None:
        try:
            epoch = self.run(self.store.take_over("s"))
            stored = self.run(self.store.read("s"))
        except (NotFoundError, InternalError):
            assert not (self.model.exists and self.model.is_whole)
            if self.model.exists and self.model.finish_reason is None:
                self.rises(int(self.run(self.redis.hget(Keys().of("s")[0], "epoch"))))
            return
        if self.model.finish_reason is None:
            self.rises(epoch)
        assert epoch == self.model.epoch
        self.views[owner] = self.view(epoch, list(stored.token_ids), stored.digest)

    @rule(owner=OWNERS, token_ids=TOKENS, ends=st.booleans(), times=st.integers(1, 3), gap=st.integers(-2, 2))
    def commit(self, owner: int, token_ids: list[int], ends: bool, times: int, gap: int) -> None:
        """Commit, perhaps repeatedly as after lost replies, perhaps at an offset that is not the end."""
        session = self.views[owner]
        if session is None or session.remaining < len(token_ids) + 2:
            return
        session.token_ids += [7] * max(0, gap)
        if gap < 0:
            del session.token_ids[max(len(session.prompt), len(session.token_ids) + gap) :]
        session.token_ids += token_ids
        session.finish_reason = FinishReason.STOP if ends else None
        start, model = session.num_emitted - len(token_ids), self.model
        is_owner = model.exists and model.is_whole and session.epoch == model.epoch
        is_next = is_owner and model.finish_reason is None and start == len(model.tokens)
        is_replay = (
            is_owner
            and model.finish_reason is not FinishReason.CANCELLED
            and (start + len(token_ids) == len(model.tokens) and model.tokens[start:] == token_ids)
        )
        for _ in range(times):
            try:
                self.run(self.store.append(session, token_ids, [TokenOrigin.BONUS] * len(token_ids)))
                accepted = True
            except REFUSALS:
                accepted = False
            assert accepted == (is_next or is_replay), (session.epoch, model, start, token_ids)
        if is_next:
            model.tokens += token_ids
            model.finish_reason = session.finish_reason

    @rule(owner=OWNERS, token_ids=TOKENS, ends=st.booleans(), times=st.integers(1, 2))
    def commit_in_order(self, owner: int, token_ids: list[int], ends: bool, times: int) -> None:
        """The usual commit of an owner, current or stale."""
        self.commit(owner, token_ids, ends, times, 0)

    @rule(owner=OWNERS, token_ids=TOKENS, ends=st.booleans())
    def come_back_and_commit(self, owner: int, token_ids: list[int], ends: bool) -> None:
        """A client resumes at another owner."""
        self.take_over(owner)
        self.commit(owner, token_ids, ends, 1, 0)

    @rule(owner=OWNERS)
    def renew(self, owner: int) -> None:
        session = self.views[owner]
        if session is None:
            return
        try:
            self.run(self.store.renew(session))
            assert session.epoch == self.model.epoch
            assert self.model.finish_reason is not FinishReason.CANCELLED
        except REFUSALS:
            stale = session.epoch != self.model.epoch or not self.model.exists
            assert stale or self.model.finish_reason is FinishReason.CANCELLED

    @rule(owner=OWNERS)
    def detach(self, owner: int) -> None:
        session = self.views[owner]
        if session is None:
            return
        before = self.run(self.redis.hget(Keys().of("s")[0], "lease"))
        self.run(self.store.detach(session))
        if session.epoch != self.model.epoch:  # a former owner lets go of nothing
            assert self.run(self.redis.hget(Keys().of("s")[0], "lease")) == before

    @rule()
    def cancel(self) -> None:
        try:
            epoch = self.run(self.store.cancel("s"))
        except NotFoundError:
            assert not self.model.exists
            return
        if self.model.finish_reason is None:
            self.model.finish_reason = FinishReason.CANCELLED
            self.rises(epoch)
        assert epoch == self.model.epoch

    @precondition(lambda self: self.model.exists and self.model.is_whole)
    @rule(owner=OWNERS, is_stale=st.booleans())
    def next_turn(self, owner: int, is_stale: bool) -> None:
        before = self.run(self.store.read("s"))
        if is_stale and self.model.finish_reason is None:
            self.take_over(owner)
        session = self.view(0, [])
        try:
            self.run(self.store.next_turn(session, b"next", before))
        except FailedPreconditionError:
            assert self.model.finish_reason is None
            return
        assert self.model.finish_reason is not None
        self.rises(session.epoch)
        self.model = Model(epoch=session.epoch, turn=self.model.turn + 1)
        self.views[owner] = session

    @rule(jump_ms=JUMPS)
    def clock_jumps(self, jump_ms: int) -> None:
        """Redis's clock jumps by `jump_ms`, which ages the lease by as much."""
        head, *_ = Keys().of("s")
        lease = self.run(self.redis.hget(head, "lease"))
        if lease is not None:
            self.run(self.redis.hset(head, "lease", int(lease) - jump_ms))

    @rule()
    def reap(self) -> None:
        """The reaper must not change which commits are accepted."""
        lease = self.run(self.redis.hget(Keys().of("s")[0], "lease"))
        epoch = self.run(self.store.reap("s"))
        if not self.model.exists:
            assert epoch == -1
        elif lease is not None and int(lease) > time.time() * 1e3 + 1000:
            assert epoch is None
            left = int(self.run(self.redis.hget(Keys().of("s")[0], "lease"))) - time.time() * 1e3
            assert left < 11_000, "a lease from before the clock was set back would last for ever"
        elif lease is None or int(lease) < time.time() * 1e3 - 1000:
            assert epoch == self.model.epoch

    @precondition(lambda self: self.has_gone_far)
    @rule(how=st.sampled_from(["evicted", "torn"]))
    def tokens_are_lost(self, how: str) -> None:
        """A partial write: the hash exists, the tokens do not. Commits and reads must fail."""
        _, tokens, *_ = Keys().of("s")
        data = self.run(self.redis.get(tokens)) or b""
        if not data:
            return
        self.run(self.redis.delete(tokens) if how == "evicted" else self.redis.set(tokens, data[:-3]))
        self.model.is_whole = False

    @precondition(lambda self: self.has_gone_far)
    @rule()
    def delete(self) -> None:
        """Owners do not notice; their view stays stale, also when the name is used again."""
        assert self.run(self.store.delete("s")) == self.model.exists
        self.model = Model(exists=False, epoch=self.model.epoch)

    @precondition(lambda self: self.has_gone_far)
    @rule()
    def expires(self) -> None:
        """The session expires; suspended owners resume later without knowing it."""
        digest = self.run(self.redis.hget(Keys().of("s")[0], "digest")).decode()
        self.run(self.redis.delete(*Keys().of("s")[:3], *Keys().request("s", digest)))
        self.model = Model(exists=False, epoch=self.model.epoch)

    @precondition(lambda self: self.has_gone_far)
    @rule()
    def redis_loses_everything(self) -> None:
        self.run(self.redis.flushall())
        self.model = Model(exists=False, epoch=self.model.epoch)

    @precondition(lambda self: not self.model.exists)
    @rule(owner=OWNERS)
    def create_again(self, owner: int) -> None:
        session = self.view(0, [])
        self.run(self.store.create(session, b"turn 0"))
        self.rises(session.epoch)
        self.views[owner], self.model = session, Model(epoch=session.epoch)

    @invariant()
    def store_charges_what_is_there(self) -> None:
        """The charged bytes are exactly those of the session, its reservation and its request."""
        fields = self.run(self.redis.hgetall("gammaray:stored:bytes"))
        sums = {k: int(v) for k, v in self.run(self.redis.hgetall("gammaray:stored:used")).items()}
        charged = {k: int(v) for k, v in fields.items() if not k.endswith(b"+")}
        spare = sum(int(v) for k, v in fields.items() if k.endswith(b"+"))
        assert sums.get(b":", 0) == sums.get(b"", 0) == sum(charged.values())
        assert sums.get(b":+", 0) == sums.get(b"+", 0) == spare
        if not self.model.exists or not self.model.is_whole:
            return
        head_key, tokens_key, cycles_key, *_ = Keys().of("s")
        head = self.run(self.redis.hgetall(head_key))
        size, cycles = self.run(self.redis.strlen(tokens_key)), self.run(self.redis.strlen(cycles_key))
        room = max(int(head[b"room"]) - size, 0) if b"lease" in head else 0
        request = self.run(self.redis.strlen(Keys().request("s", head[b"digest"].decode())[0]))
        assert request > 0
        # A session that was reaped takes the commits of its owner, that was only slow, until this renews.
        assert charged[b"s"] == scripts.SESSION_OVERHEAD + size + cycles + room
        assert charged[b"/" + head[b"digest"]] == scripts.REQUEST_OVERHEAD + request

    @invariant()
    def store_says_what_the_model_says(self) -> None:
        model = self.model
        try:
            stored = self.run(self.store.read("s"))
        except NotFoundError:
            assert not model.exists
            return
        except InternalError:
            assert not model.is_whole
            return
        assert model.exists
        assert model.is_whole
        assert (stored.epoch, stored.turn) == (model.epoch, model.turn)
        assert (list(stored.token_ids), stored.finish_reason) == (model.tokens, model.finish_reason)


@pytest.fixture(scope="module", autouse=True)
def redis_server(request):
    with running_redis(request.param) as server:
        StoreMachine.url = server.url
        yield server


def test_store_accepts_no_stale_commit():
    limits = settings(
        max_examples=30, stateful_step_count=40, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(StoreMachine, settings=limits)
