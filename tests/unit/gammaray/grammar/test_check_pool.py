"""Processes that check grammars: what ends them, whom that concerns, and that they end with their parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError, UnavailableError
from gammaray.grammar import check_pool
from gammaray.grammar.check_pool import CheckPool, GrammarCheck
from tests.support.own_process import run_code
from tests.support.small_files import no_descriptors
from tests.support.workers.redis_helpers import wait_until

pytestmark = pytest.mark.slow

FILE = str(Path(resolve_model("demo")) / "tokenizer.json")
TOKENIZER = Tokenizer.from_file(FILE)
ENDLESS = 'start: %json {"type": ["string", "integer"], "multipleOf": 2147483647}'


@pytest.fixture
def make_pool():
    made = []

    def make(num_processes=1):
        made.append(CheckPool(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [0], num_processes))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """Return a function that sets limits of a check; they are large unless a test sets them."""

    def limit(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(check_pool, name, value)

    limit(MAX_CPU_S=100.0, MAX_DURATION_S=100.0)
    return limit


def checked(pool: CheckPool, grammar: str) -> float:
    return pool.submit(GrammarCheck(grammar)).result()


def children() -> list[psutil.Process]:
    processes = psutil.Process().children()
    return [one for one in processes if "gammaray.grammar.check_process" in one.cmdline()]


def test_grammars_are_checked(make_pool):
    pool = make_pool()
    checked(pool, 'start: "a"')
    for grammar, match in (
        ("start: A\nA: /a/ & /b/", "the operator &"),
        ("start: /a", "lexer error"),
        ('start: "\ud800"', "surrogate"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^grammar: .*{match}"):
            checked(pool, grammar)
    assert len(children()) == 1


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": ["string", "integer"], "multipleOf": 2147483647}',
        '\n{"type": ["string", "integer"], "multiple\\u004ff": 2147483647}',
        '{"$ref": "#/x", "x": {"type": ["string", "integer"], "multipleOf": 2147483647}}',
    ],
)
def test_grammar_that_does_not_end_compiling_is_refused_and_others_go_on(make_pool, limits, schema):
    limits(MAX_CPU_S=0.4)
    pool = make_pool()
    checked(pool, 'start: "a"')
    checks = [GrammarCheck(text) for text in (f"start: %json {schema}", 'start: "b"', 'start: "c"')]
    results = [pool.submit(check) for check in checks]
    with pytest.raises(InvalidArgumentError, match=r"more than 0\.4 s of CPU time"):
        results[0].result()
    assert all(result.result() < 0.4 for result in results[1:])


def test_grammar_beyond_the_memory_is_refused_and_others_go_on(make_pool, limits):
    limits(MAX_MEMORY_BYTES=2**25)
    pool = make_pool()
    with pytest.raises(InvalidArgumentError, match="with 32 MiB of memory"):
        checked(pool, ENDLESS)
    checked(pool, 'start: "a"')


def test_duration_is_bounded_where_the_cpu_time_is_not(make_pool, limits):
    pool = make_pool()
    checked(pool, 'start: "a"')
    limits(MAX_DURATION_S=0.2)
    with pytest.raises(check_pool.ResourceExhaustedError, match=r"more than 0\.2 s"):
        checked(pool, ENDLESS)
    limits(MAX_DURATION_S=100.0)
    checked(pool, 'start: "b"')


@pytest.mark.parametrize("is_busy", [False, True])
def test_grammar_is_checked_again_after_its_process_was_killed(make_pool, limits, is_busy):
    limits(MAX_CPU_S=0.5)
    pool = make_pool()
    checked(pool, 'start: "a"')
    (first,) = children()
    if not is_busy:
        os.kill(first.pid, signal.SIGKILL)
        checked(pool, 'start: "b"')
    else:
        os.kill(first.pid, signal.SIGSTOP)  # so that it is killed during the check
        result = pool.submit(GrammarCheck('start: "b"'))
        os.kill(first.pid, signal.SIGKILL)
        assert result.result() < 0.5
    (second,) = children()
    assert second.pid != first.pid


def test_check_is_refused_while_no_process_can_start(make_pool):
    pool = make_pool()
    with pytest.raises(UnavailableError, match="does not start"), no_descriptors():
        checked(pool, 'start: "a"')
    checked(pool, 'start: "a"')
    with no_descriptors():
        checked(pool, 'start: "b"')  # by the process that there is


def test_cancelled_check_ends_its_process(make_pool):
    pool = make_pool()
    checked(pool, 'start: "a"')
    (first,) = children()
    check = GrammarCheck(ENDLESS)
    result = pool.submit(check)
    wait_until(result.running)
    check.cancel()
    with pytest.raises(check_pool.CancelledError):
        result.result(60)
    checked(pool, 'start: "b"')
    assert first not in children()


def test_process_ends_with_its_parent_also_within_a_check():
    script = f"""
import sys
from tokenizers import Tokenizer
from gammaray.grammar.check_pool import CheckPool, GrammarCheck
tokenizer = Tokenizer.from_file({FILE!r})
pool = CheckPool(tokenizer.to_str(), tokenizer.get_vocab_size(), [0], 2)
pool.submit(GrammarCheck({ENDLESS!r}))
pool.submit(GrammarCheck('start: "a"')).result()
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        made = psutil.Process(parent.pid).children()
        assert len(made) == 2
        parent.kill()
    wait_until(lambda: not any(one.is_running() and one.status() != "zombie" for one in made))


def test_process_imports_little_and_has_no_settings_of_its_parent(make_pool, monkeypatch):
    monkeypatch.setenv("GAMMARAY_REDIS_URL", "x")
    checked(make_pool(), 'start: "a"')
    (child,) = children()
    assert "GAMMARAY_REDIS_URL" not in child.environ()
    loaded = run_code("import sys, gammaray.grammar.check_process; print(*sys.modules)")
    assert {"torch", "ray", "transformers", "numpy"}.isdisjoint(loaded.stdout.split())
