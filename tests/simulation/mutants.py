"""Faults to plant into the product, of the kinds that reviews found: the simulation must find them.

A mutant is an edit of one function's syntax tree, in a process of its own.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
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


_TAKE = "orchestrator/cycle/pipeline.py:_CycleQueue.take"
_SEND = "orchestrator/storage/client.py:BatchedScript._send"
_SCRIPTS, _LIFECYCLE = "orchestrator/storage/session_scripts.py", "orchestrator/sessions/lifecycle.py"
_RESUME, _REPLAY = f"{_LIFECYCLE}:SessionManager._resume", f"{_LIFECYCLE}:OpenSession.replay"
_SDK = "gammaray/client/resume.py:stream_completion"
_PLACE = "orchestrator/access/admission.py:Admission.place"
_LINK = "orchestrator/workers/connection.py:WorkerConnection"
_RELEASE = "orchestrator/workers/session_client.py:WorkerSession.release"
_LISTEN = "orchestrator/workers/session_client.py:WorkerSession._start_listening"
_VERIFIER = "orchestrator/workers/verifier.py:FencedVerifier.verify"
_COPY, _TABLE = (f"services/scheduling/sessions.py:Session{rest}" for rest in ("Copy.merge", "Table.admit"))
_MATCH = "services/scheduling/batcher.py:Batcher.match"
_JUDGE = "services/own/target_scheduler.py:TargetScheduler._judge"
_STREAM = "services/streaming/streams.py:BlockStream._deliver"
_RETRY = "gammaray/deploy/redis_connection.py:RetryingRedis.repeated.attempt"

_LATE = "asyncio.get_running_loop().call_later(0.02, write.close)"
_RUN, _FROM = "await self._run(calls)", "request.resume_from"
_LEAVE, _PENDING = "self._leave(caller.tenant)", "self.pending.get(result.request_id)"
_BEFORE, _TOLD = _PENDING.replace("_id)", "_id - 1)"), "range(self.offset, len(tokens), REPLAY_TOKENS)"
_KEPT = "same = len(self.tokens[start : start + len(context)])"
_EMITTED = "emitted = [*proposal.token_ids, verdict.next_token_id]"

MUTANTS: dict[str, tuple[str, Callable[[ast.AST], _Edit]]] = {
    "delivered before it is stored": (_TAKE, statement("await write", _LATE)),
    "stored after delivery": (_TAKE, statement("await write", "asyncio.create_task(write)")),
    "the store does not compare epochs": (
        f"{_SCRIPTS}:_FENCE", script("tonumber(head[1]) ~= tonumber(epoch)", "false")
    ),
    "a cancelled turn accepts commits": (f"{_SCRIPTS}:_FENCE", script("head[2] == 'cancelled'", "false")),
    "a takeover keeps the epoch": (f"{_SCRIPTS}:TAKE_OVER", script("next_epoch()", "tonumber(head[1])")),
    "a commit is not known again": (f"{_SCRIPTS}:_APPEND", script("length == offset + #data", "false")),
    "a last commit ends no turn": (f"{_SCRIPTS}:END", script("'finish_reason', reason", "'reason', reason")),
    "an ended session stays running": (f"{_SCRIPTS}:END", script("redis.call('SREM', KEYS[4], name)")),
    "answers of one batch are swapped": (_SEND, expression(_RUN, f"({_RUN})[::-1]")),
    "a resumed session has the first epoch": (_RESUME, statement("session.epoch")),
    "the replay begins a token early": (
        _RESUME, expression(_FROM, f"max(0, {_FROM} - 1)", call="OpenSession")
    ),
    "a resumed session has another seed": (
        f"{_LIFECYCLE}:_began", expression("stored.seed", "stored.seed + 1")
    ),
    "the replay begins a token late": (_REPLAY, expression(_TOLD, _TOLD.replace("offset", "offset + 1"))),
    "the client resumes where it began": (_SDK, expression("offset", "0", call="replace")),
    "a place is not given back": (_PLACE, statement(_LEAVE, f"__import__('sys').exc_info()[0] or {_LEAVE}")),
    "calls stay unanswered when a link breaks": (f"{_LINK}._lose", statement("set_exception")),
    "a link is not opened again": (f"{_LINK}._stay_connected", statement("self._failures += 1", "return")),
    "answers go to the call before": (
        f"{_LINK}._read_frames", expression(_PENDING, f"{_BEFORE} or {_PENDING}")
    ),
    "a release is lost": (f"{_LINK}.release", statement("self._releases.append")),
    "a session stays attached to its link": (f"{_LINK}.release", statement("self.sessions.discard")),
    "a listener stays after a release": (_RELEASE, statement("self._stop_listening")),
    "another owner is not told that it hears no more": (_LISTEN, statement("before(None)")),
    "a dropped session counts as cancelled": (_VERIFIER, statement("dropped = error", "raise")),
    "a worker keeps tokens that differ from the committed ones": (_COPY, statement("common_prefix", _KEPT)),
    "a worker does not compare epochs": (_TABLE, expression("task.epoch < session.epoch", "False")),
    "the cache is not compared with the session": (_MATCH, expression("same < num_cached", "False")),
    "a copied prefix is one token too long": (_MATCH, expression("shared", "shared + 1", call="fork")),
    "a rejected token stays in the session": (_JUDGE, statement("emitted =", _EMITTED)),
    "noise of the next position": (_JUDGE, expression("base", "base + 1", call="judge")),
    "an answered block counts as pending": (_STREAM, statement("num_ids -=")),
    "a reset of an idle connection is not retried": (_RETRY, expression("RuntimeError", "ImportError")),
}  # fmt: skip
"""Module and function or constant in it, and the edit, by name."""


def edited(name: str) -> ast.Module:
    """Return the module of a mutant; ValueError unless there is exactly one place to edit."""
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
    """Print after how many seeds, at most `limit`, each mutant is found; return how many were missed."""
    num_missed = 0
    for name in names or MUTANTS:
        command = [sys.executable, "-m", "tests.simulation", "--plant", name, "--seeds", f"0:{limit}"]
        found = None
        with suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_SEED_LIMIT_S * limit)
            found = re.search("^seed .*", ended.stdout, re.MULTILINE)
        print(f"{name}: {found[0][:200] if found else 'missed'}", flush=True)
        num_missed += found is None
    print(f"{num_missed} of {len(names or MUTANTS)} missed")
    return num_missed
