"""Faults to plant into the product, of the kinds that reviews found: the simulation must find them.

A mutant is an edit of one place in the text of a module, in a process of its own.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
_SEED_LIMIT_S = 30.0
"""Of a process per seed; a seed takes a tenth of a second on an idle core."""

_PENDING, _LEAVE = "self.pending.get(result.request_id)", "self._leave(caller.tenant)"

PLACES = {
    "orchestrator/cycle/pipeline.py": {
        "delivered before it is stored": (
            "await write",
            "asyncio.get_running_loop().call_later(0.02, write.close)",
        ),
        "stored after delivery": ("await write", "asyncio.create_task(write)"),
    },
    "orchestrator/storage/session_scripts.py": {
        "the store does not compare epochs": ("tonumber(head[1]) ~= tonumber(epoch)", "false"),
        "a cancelled turn accepts commits": ("head[2] == 'cancelled'", "false"),
        "a takeover keeps the epoch": (
            "next_epoch()\nredis.call('HSET', KEYS[1], 'lease'",
            "tonumber(head[1])\nredis.call('HSET', KEYS[1], 'lease'",
        ),
        "a commit is not recognised when it is sent again": ("length == offset + #data", "false"),
        "the last commit does not end the turn": ("'finish_reason', reason\n", "'reason', reason\n"),
        "an ended session stays among the running ones": (
            "redis.call('SREM', KEYS[4], name)\nrenew()\nreturn length",
            "renew()\nreturn length",
        ),
    },
    "orchestrator/storage/client.py": {
        "answers of one batch are swapped": ("await self._run(calls)", "(await self._run(calls))[::-1]")
    },
    "orchestrator/sessions/lifecycle.py": {
        "a resumed session has the first epoch": (
            "session.epoch, session.model_identity = stored.epoch, stored.model_identity",
            "pass",
        ),
        "the replay begins a token early": (
            "request.resume_from,\n            stored.finish",
            "max(0, request.resume_from - 1),\n            stored.finish",
        ),
        "a resumed session has another seed": ("seed=stored.seed, sample", "seed=stored.seed + 1, sample"),
        "the replay begins a token late": ("range(self.offset, len", "range(self.offset + 1, len"),
    },
    "gammaray/client/resume.py": {
        "the client resumes where it began": ("resume_from=offset", "resume_from=0")
    },
    "orchestrator/access/admission.py": {
        "a place is not given back": (
            f"{_LEAVE}\n\n    async def _enter",
            f"__import__('sys').exc_info()[0] or {_LEAVE}\n\n    async def _enter",
        )
    },
    "orchestrator/workers/connection.py": {
        "calls stay unanswered when a link breaks": (
            "future.set_exception(UnavailableError(message))",
            "pass",
        ),
        "a link is not opened again": ("self._failures += 1", "return"),
        "answers go to the call before": (_PENDING, f"{_PENDING.replace('_id)', '_id - 1)')} or {_PENDING}"),
        "a release is lost": ("self._releases.append", "str"),
        "a session stays attached to its link": ("self.sessions.discard(session_id)", "pass"),
    },
    "orchestrator/workers/drafter.py": {
        "a listener stays after a release": (
            "self._link.listeners.pop(session.session_id, None)\n        super().release",
            "pass\n        super().release",
        )
    },
    "orchestrator/workers/verifier.py": {
        "a dropped session counts as cancelled": ("dropped = error", "raise")
    },
    "services/scheduling/sessions.py": {
        "a worker keeps tokens that differ from the committed ones": ("break\n", "pass\n"),
        "a worker does not compare epochs": ("task.epoch < session.epoch", "False"),
    },
    "services/scheduling/scheduler.py": {
        "the cache is not compared with the session": ("if same < num_cached", "if False"),
        "a copied prefix is one token too long": ("session_id, shared,", "session_id, shared + 1,"),
    },
    "services/own/target_scheduler.py": {
        "a rejected token stays in the session": (
            "*(proposal.token_ids[node] for node in path), verdict",
            "*proposal.token_ids, verdict",
        ),
        "noise of the next position": ("logits, base, session.noise", "logits, base + 1, session.noise"),
    },
    "services/streaming/streams.py": {
        "an answered block counts as pending": ("num_ids -= task.num_ids", "num_ids -= 0"),
    },
    "gammaray/deploy/redis_connection.py": {
        "a reset of an idle connection to Redis is not retried": ("except RuntimeError", "except ImportError")
    },
}
"""Modules and the faults in them, each the text that is replaced, which occurs once, and the one instead."""

MUTANTS = {name: (path, *edit) for path, edits in PLACES.items() for name, edit in edits.items()}


def edited(name: str) -> str:
    """Return the text of a mutant's module.

    Raises:
        ValueError: There is not exactly one place to edit.
    """
    path, old, new = MUTANTS[name]
    text = (ROOT / path).read_text()
    if (count := text.count(old)) != 1:
        raise ValueError(f"{path}: {count} places for {name!r}, allowed: one")
    return text.replace(old, new)


def plant(name: str) -> None:
    """Import a module of the product with a fault; call it before anything imports that module."""
    path = MUTANTS[name][0]
    module = ModuleType(path.removesuffix(".py").replace("/", "."))
    sys.modules[module.__name__] = module
    exec(compile(edited(name), path, "exec"), module.__dict__)


def hunt(names: Sequence[str], limit: int) -> int:
    """Print at which seed each mutant is found; return how many were missed.

    Args:
        names: The mutants; none: all.
        limit: Seeds after which a mutant counts as missed.
    """
    missed = []
    for name in names or MUTANTS:
        command = [sys.executable, "-m", "tests.simulation", "--plant", name, "--seeds", f"0:{limit}"]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SEED_LIMIT_S * limit)
        found = re.search("^seed .*", run.stdout, re.MULTILINE)
        print(f"{name}: {found[0][:200] if found else 'missed'}", flush=True)
        missed += [] if found else [name]
    print(f"{len(missed)} of {len(names or MUTANTS)} missed")
    return len(missed)
