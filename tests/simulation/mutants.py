"""Faults to plant into the product, of the kinds that reviews found: the simulation must find them.

A mutant is an edit of one module's source, in a process of its own.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
LIBRARIES = ("grpc.aio", "llguidance", "redis.asyncio", "torch", "transformers.models.auto.tokenization_auto")


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Args:
        path: The module.
        old: Text of it that occurs once.
        new: What stands there instead.
    """

    path: str
    old: str
    new: str


_PIPELINE, _SCRIPTS = "orchestrator/cycle/pipeline.py", "orchestrator/storage/session_scripts.py"
_LIFECYCLE, _CONNECTION = "orchestrator/sessions/lifecycle.py", "orchestrator/workers/connection.py"
_CLIENT, _SESSIONS = "orchestrator/workers/session_client.py", "services/scheduling/sessions.py"
_STREAMS, _STORE = "services/streaming/streams.py", "orchestrator/storage/session_store.py"
_VERIFIER, _TARGET = "orchestrator/workers/verifier.py", "services/own/target_scheduler.py"

MUTANTS = {
    "delivered before it is stored": Mutant(
        _PIPELINE,
        "        await write\n",
        "        asyncio.get_running_loop().call_later(0.02, write.close)\n",
    ),
    "stored after delivery": Mutant(
        _PIPELINE, "        await write\n", "        asyncio.create_task(write)\n"
    ),
    "the store does not compare epochs": Mutant(
        _SCRIPTS, "if tonumber(head[1]) ~= tonumber(epoch) then return -2 end\n", ""
    ),
    "a takeover keeps the epoch": Mutant(
        _SCRIPTS,
        "local epoch = next_epoch()\nredis.call('HSET', KEYS[1], 'lease'",
        "local epoch = tonumber(head[1])\nredis.call('HSET', KEYS[1], 'lease'",
    ),
    "a commit is not recognised when it is sent again": Mutant(
        _SCRIPTS, "local replayed = length == offset + #data and", "local replayed = false and"
    ),
    "the last commit does not end the turn": Mutant(
        _SCRIPTS, "fields[#fields + 1], fields[#fields + 2] = 'finish_reason', reason\n", ""
    ),
    "an ended session stays among the running ones": Mutant(
        _SCRIPTS,
        "redis.call('HDEL', KEYS[1], 'lease')\nredis.call('SREM', KEYS[4], name)\nrenew()\nreturn length",
        "redis.call('HDEL', KEYS[1], 'lease')\nrenew()\nreturn length",
    ),
    "a cancelled turn accepts commits": Mutant(
        _SCRIPTS, "if head[2] == 'cancelled' then return -4 end\n", ""
    ),
    "answers of one batch are swapped": Mutant(
        "orchestrator/storage/client.py",
        "zip(calls, await self._run(calls), strict=True)",
        "zip(calls, (await self._run(calls))[::-1], strict=True)",
    ),
    "a resumed session has the first epoch": Mutant(
        _LIFECYCLE, "session.epoch, session.model_identity = stored.epoch, stored.model_identity", "pass"
    ),
    "a resumed session has another seed": Mutant(
        _LIFECYCLE, "seed=stored.seed, sample_index=stored.sample_index", "seed=stored.seed + 1"
    ),
    "the replay begins a token late": Mutant(
        _LIFECYCLE,
        "for start in range(self.offset, len(tokens), REPLAY_TOKENS):",
        "for start in range(self.offset + 1, len(tokens), REPLAY_TOKENS):",
    ),
    "the replay begins a token early": Mutant(
        _LIFECYCLE,
        "            began,\n            stored.tokens,\n            request.resume_from,",
        "            began,\n            stored.tokens,\n            max(0, request.resume_from - 1),",
    ),
    "the client resumes where it began": Mutant(
        "gammaray/client/resume.py",
        "request = replace(request, resume_from=offset)",
        "request = replace(request, resume_from=0)",
    ),
    "a place is not given back": Mutant(
        "orchestrator/access/admission.py",
        "            self._leave(caller.tenant)\n\n    async def _enter",
        "            __import__('sys').exc_info()[0] or self._leave(caller.tenant)\n\n    async def _enter",
    ),
    "calls stay unanswered when a link breaks": Mutant(
        _CONNECTION,
        "                future.set_exception(UnavailableError(message))\n",
        "                pass\n",
    ),
    "a link is not opened again": Mutant(
        _CONNECTION,
        "                self._lose(error)\n            except",
        "                self._lose(error)\n                return\n            except",
    ),
    "answers go to the call before": Mutant(
        _CONNECTION,
        "future = self.pending.get(result.request_id)\n                if future is None:",
        "future = self.pending.get(result.request_id - 1) or self.pending.get(result.request_id)\n"
        "                if future is None:",
    ),
    "a release is lost": Mutant(
        _CONNECTION, "            self._releases.append(pb.ReleaseSession(", "            (pb.ReleaseSession("
    ),
    "a session stays attached to its link": Mutant(
        _CONNECTION, "        self.sessions.discard(session_id)\n", ""
    ),
    "a listener stays after a release": Mutant(
        "orchestrator/workers/drafter.py",
        "            self._link.listeners.pop(session.session_id, None)\n        super().release(session)",
        "            pass\n        super().release(session)",
    ),
    "a dropped session counts as cancelled": Mutant(
        _VERIFIER, "                dropped = error\n", "                raise\n"
    ),
    "a worker keeps tokens that differ from the committed ones": Mutant(
        _SESSIONS,
        "            if ours != theirs:\n                break\n",
        "",
    ),
    "a rejected token stays in the session": Mutant(
        _TARGET,
        "emitted = [*(proposal.token_ids[node] for node in path), verdict.next_token_id]",
        "emitted = [*proposal.token_ids, verdict.next_token_id]",
    ),
    "the cache is not compared with the session": Mutant(
        "services/scheduling/scheduler.py",
        "        if same < num_cached:\n",
        "        if False:\n",
    ),
    "a copied prefix is one token too long": Mutant(
        "services/scheduling/scheduler.py",
        "self.engine.fork(source, session.session_id, shared, ",
        "self.engine.fork(source, session.session_id, shared + 1, ",
    ),
    "noise of the next position": Mutant(
        _TARGET,
        "judge(session.spec, proposal, logits, base, session.noise, edits)",
        "judge(session.spec, proposal, logits, base + 1, session.noise, edits)",
    ),
    "an answered block counts as pending": Mutant(
        _STREAMS, "        self._streams.num_ids -= task.num_ids\n", ""
    ),
    "a worker does not compare epochs": Mutant(
        _SESSIONS,
        "if session is not None and task.epoch < session.epoch:",
        "if False:",
    ),
    "a reset of an idle connection to Redis is not retried": Mutant(
        "gammaray/deploy/redis_connection.py", "except RuntimeError as error:", "except ImportError as error:"
    ),
}


def edited(mutant: Mutant) -> str:
    """Return the mutant's source.

    Raises:
        ValueError: The text to change does not occur exactly once.
    """
    source = (ROOT / mutant.path).read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.path}: {mutant.old!r} occurs {source.count(mutant.old)} times, allowed: once"
        )
    return source.replace(mutant.old, mutant.new)


_SEED_LIMIT_S = 30.0
"""Of a process per seed; a seed takes a tenth of a second on an idle core."""


def plant(name: str) -> None:
    """Import a module of the product with a fault; call it before anything imports that module."""
    mutant = MUTANTS[name]
    module = ModuleType(mutant.path.removesuffix(".py").replace("/", "."))
    sys.modules[module.__name__] = module
    exec(compile(edited(mutant), mutant.path, "exec"), module.__dict__)


def hunt(names: Sequence[str], limit: int) -> int:
    """Print after how many seeds each mutant is found; return how many were missed.

    Args:
        names: The mutants; none: all.
        limit: Seeds after which a mutant counts as missed.
    """
    for library in LIBRARIES:  # each process would take seconds for them
        importlib.import_module(library)
    context, num_missed = multiprocessing.get_context("fork"), 0
    for name in names or MUTANTS:
        results = context.SimpleQueue()
        process = context.Process(target=_find, args=(name, limit, results.put))
        process.start()
        process.join(_SEED_LIMIT_S * limit)
        found = "" if process.is_alive() or process.exitcode or results.empty() else results.get()
        process.kill()
        print(f"{name}: {found or 'missed'}", flush=True)
        num_missed += not found
    print(f"{num_missed} of {len(names or MUTANTS)} missed")
    return num_missed


def _find(name: str, limit: int, put: Callable[[str], None]) -> None:
    plant(name)
    from tests.simulation.campaign import laboratory, run_seeds

    with laboratory() as real:
        report = run_seeds(range(limit), real, ends_at_failure=True)
    for seed, failure in report.failures.items():
        put(f"seed {seed}: {failure[:200]}")
