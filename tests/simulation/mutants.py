"""Faults to plant into the product, of the kinds that reviews found: the simulation must find them.

A mutant is an edit of one function's syntax tree, in a process of its own.
"""

import ast
import importlib
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
LIBRARIES = ("grpc.aio", "llguidance", "redis.asyncio", "torch", "transformers.models.auto.tokenization_auto")
_SEED_LIMIT_S = 30.0
"""Of a process per seed; a seed takes a tenth of a second on an idle core."""


class _Edit(ast.NodeTransformer):
    """Replaces the nodes that `matches` names by the code `new`, and counts them."""

    def __init__(self, matches: Callable[[ast.AST], bool], new: str) -> None:
        self.matches, self.new, self.count = matches, new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if not self.matches(node):
            return self.generic_visit(node)
        self.count += 1
        if isinstance(node, ast.Constant):
            return ast.Constant(self.new)
        statement = ast.parse(self.new).body[0] if self.new != "return" else ast.Return()
        return statement if isinstance(node, ast.stmt) else statement.value


def statement(text: str, new: str = "pass") -> Callable[[ast.AST], _Edit]:
    """Replace the simple statement that contains a text."""
    simple = (ast.Assign, ast.AugAssign, ast.Expr, ast.Break, ast.Return)
    return lambda place: _Edit(lambda node: isinstance(node, simple) and text in ast.unparse(node), new)


def expression(text: str, new: str, call: str = "") -> Callable[[ast.AST], _Edit]:
    """Replace the expression that is a text; with `call`, among the arguments of calls of that function."""

    def edit(place: ast.AST) -> _Edit:
        calls = [node for node in ast.walk(place) if isinstance(node, ast.Call)]
        named = [node for node in calls if ast.unparse(node.func).rpartition(".")[2] == call]
        inside = {inner for node in named for inner in ast.walk(node)}
        return _Edit(
            lambda node: (
                isinstance(node, ast.expr) and ast.unparse(node) == text and (not call or node in inside)
            ),
            new,
        )

    return edit


def script(text: str, new: str = "") -> Callable[[ast.AST], _Edit]:
    """Replace a part of a script, which is a string."""

    def edit(place: ast.AST) -> _Edit:
        strings = [node.value for node in ast.walk(place) if isinstance(node, ast.Constant)]
        (found,) = (value for value in strings if text in value)
        changed = found.replace(text, new, 1)
        return _Edit(lambda node: isinstance(node, ast.Constant) and node.value == found, changed)

    return edit


_SCRIPTS, _LIFECYCLE = "orchestrator/storage/session_scripts.py", "orchestrator/sessions/lifecycle.py"
_WORKERS, _SCHEDULING = "orchestrator/workers", "services/scheduling"
_LATE = "asyncio.get_running_loop().call_later(0.02, write.close)"
_LEAVE, _PENDING = "self._leave(caller.tenant)", "self.pending.get(result.request_id)"
_BEFORE, _REPLAYED = _PENDING.replace("_id)", "_id - 1)"), "range(self.offset, len(tokens), REPLAY_TOKENS)"
_EMITTED = "emitted = [*proposal.token_ids, verdict.next_token_id]"

PLACES = {
    "orchestrator/cycle/pipeline.py:_CycleQueue.take": {
        "delivered before it is stored": statement("await write", _LATE),
        "stored after delivery": statement("await write", "asyncio.create_task(write)"),
    },
    f"{_SCRIPTS}:_FENCE": {
        "the store does not compare epochs": script("tonumber(head[1]) ~= tonumber(epoch)", "false"),
        "a cancelled turn accepts commits": script("head[2] == 'cancelled'", "false"),
    },
    f"{_SCRIPTS}:TAKE_OVER": {"a takeover keeps the epoch": script("next_epoch()", "tonumber(head[1])")},
    f"{_SCRIPTS}:_APPEND": {
        "a commit is not recognised when it is sent again": script("length == offset + #data", "false")
    },
    f"{_SCRIPTS}:END": {
        "the last commit does not end the turn": script("'finish_reason', reason", "'reason', reason"),
        "an ended session stays among the running ones": script("redis.call('SREM', KEYS[4], name)"),
    },
    "orchestrator/storage/client.py:BatchedScript._send": {
        "answers of one batch are swapped": expression(
            "await self._run(calls)", "(await self._run(calls))[::-1]"
        )
    },
    f"{_LIFECYCLE}:SessionManager._resume": {
        "a resumed session has the first epoch": statement("session.epoch"),
        "the replay begins a token early": expression(
            "request.resume_from", "max(0, request.resume_from - 1)", call="OpenSession"
        ),
    },
    f"{_LIFECYCLE}:_began": {
        "a resumed session has another seed": expression("stored.seed", "stored.seed + 1")
    },
    f"{_LIFECYCLE}:OpenSession.replay": {
        "the replay begins a token late": expression(_REPLAYED, _REPLAYED.replace("offset", "offset + 1"))
    },
    "gammaray/client/resume.py:stream_completion": {
        "the client resumes where it began": expression("offset", "0", call="replace")
    },
    "orchestrator/access/admission.py:Admission.place": {
        "a place is not given back": statement(_LEAVE, f"__import__('sys').exc_info()[0] or {_LEAVE}")
    },
    f"{_WORKERS}/connection.py:WorkerConnection._lose": {
        "calls stay unanswered when a link breaks": statement("set_exception")
    },
    f"{_WORKERS}/connection.py:WorkerConnection._stay_connected": {
        "a link is not opened again": statement("self._failures += 1", "return")
    },
    f"{_WORKERS}/connection.py:WorkerConnection._read_frames": {
        "answers go to the call before": expression(_PENDING, f"{_BEFORE} or {_PENDING}")
    },
    f"{_WORKERS}/connection.py:WorkerConnection.release": {
        "a release is lost": statement("self._releases.append"),
        "a session stays attached to its link": statement("self.sessions.discard"),
    },
    f"{_WORKERS}/drafter.py:RemoteDrafter.release": {
        "a listener stays after a release": statement("listeners.pop")
    },
    f"{_WORKERS}/verifier.py:FencedVerifier.verify": {
        "a dropped session counts as cancelled": statement("dropped = error", "raise")
    },
    f"{_SCHEDULING}/sessions.py:SessionCopy.merge": {
        "a worker keeps tokens that differ from the committed ones": statement("break")
    },
    f"{_SCHEDULING}/sessions.py:SessionTable.admit": {
        "a worker does not compare epochs": expression("task.epoch < session.epoch", "False")
    },
    f"{_SCHEDULING}/scheduler.py:Scheduler._match_tokens": {
        "the cache is not compared with the session": expression("same < num_cached", "False"),
        "a copied prefix is one token too long": expression("shared", "shared + 1", call="fork"),
    },
    "services/own/target_scheduler.py:TargetScheduler._judge": {
        "a rejected token stays in the session": statement("emitted =", _EMITTED),
        "noise of the next position": expression("base", "base + 1", call="judge"),
    },
    "services/streaming/streams.py:BlockStream._deliver": {
        "an answered block counts as pending": statement("num_ids -=")
    },
    "gammaray/deploy/redis_connection.py:RetryingRedis.repeated.attempt": {
        "a reset of an idle connection to Redis is not retried": expression("RuntimeError", "ImportError")
    },
}
"""Module and function or constant in it -> the faults there, each with its edit."""

MUTANTS = {name: (place, edit) for place, edits in PLACES.items() for name, edit in edits.items()}


def edited(name: str) -> ast.Module:
    """Return the module of a mutant.

    Raises:
        ValueError: There is not exactly one place to edit.
    """
    found, edit = MUTANTS[name]
    path, _, place = found.partition(":")
    module = ast.parse((ROOT / path).read_text())
    node: ast.AST = module
    for part in place.split("."):
        (node,) = (inner for inner in ast.walk(node) if _name(inner) == part)
    change = edit(node)
    change.visit(node)
    if change.count != 1:
        raise ValueError(f"{path}, {place}: {change.count} places for {name!r}, allowed: one")
    return ast.fix_missing_locations(module)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""


def plant(name: str) -> None:
    """Import a module of the product with a fault; call it before anything imports that module."""
    path = MUTANTS[name][0].partition(":")[0]
    module = ModuleType(path.removesuffix(".py").replace("/", "."))
    sys.modules[module.__name__] = module
    exec(compile(edited(name), path, "exec"), module.__dict__)


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
