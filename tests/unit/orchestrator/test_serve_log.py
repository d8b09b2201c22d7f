"""The log of a replica: Serve's lines that do not tell what happened are left out."""

import logging

import pytest

from orchestrator.app import is_true


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("CALL gammaray OK 30008.1ms", False),
        ("10.0.0.7 CALL gammaray CANCELLED 12.0ms", False),
        ("CALL failed: UNAVAILABLE", True),
        ("COMPLETION unavailable 30008.1ms", True),
        ("POST /v1/completions 503 30008.1ms", True),
    ],
)
def test_calls_without_an_outcome_are_left_out(message, kept):
    assert is_true(logging.LogRecord("ray.serve", logging.INFO, "", 0, message, (), None)) is kept


@pytest.mark.parametrize(("end", "kept"), [(GeneratorExit, False), (RuntimeError, True), (None, True)])
def test_client_that_leaves_is_no_error(end, kept):
    error = (end, end(), None) if end else None
    record = logging.LogRecord("ray.serve", logging.ERROR, "", 0, "Request failed.", (), error)
    assert is_true(record) is kept
