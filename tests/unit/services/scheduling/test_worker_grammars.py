"""Grammars of a worker's sessions: one compiler for all of them, whatever ends a completion."""

from unittest.mock import Mock

import pytest

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler
from services.scheduling import grammars
from services.scheduling.grammars import Grammars

VOCAB_SIZE = 2048


def test_stop_tokens_of_requests_do_not_make_further_compilers(monkeypatch):
    making = Mock(wraps=GrammarCompiler)
    monkeypatch.setattr(grammars, "GrammarCompiler", making)
    worker = Grammars(resolve_model("demo"), VOCAB_SIZE)
    for stop in range(40, 60):
        state = worker.begin("start: /[a-z]+/", (0, stop))
        assert not state.is_ended
        state.extend([stop])
        assert state.is_ended
    making.assert_called_once()


def test_worker_refuses_what_compiles_without_limits():
    worker = Grammars(resolve_model("demo"), VOCAB_SIZE)
    with pytest.raises(InvalidArgumentError, match="the operator &"):
        worker.begin("start: A\nB: </s>\nA: /([ab]{10007})*c/ & /([ab]{10009})*c/", (0,))
    with pytest.raises(InvalidArgumentError, match="ignore_eos"):
        worker.begin("start: /a/", ())
