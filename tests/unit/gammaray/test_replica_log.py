"""A replica's loggers write to Serve's log of the replica."""

import logging

from gammaray.deploy.serve_config import log_with_serve
from orchestrator.launcher.cluster import serve_environment


def test_failure_of_a_forward_is_an_error_with_its_traceback(tmp_path, monkeypatch):
    handler = logging.FileHandler(tmp_path / "replica.log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_with_serve()
    log_with_serve()  # no record is written twice
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        logging.getLogger("services.vllm.request_steps").exception("a step over 2 sessions failed")
    logging.getLogger("vllm").warning("a library's")
    handler.close()
    first, second, *_, last, after = (tmp_path / "replica.log").read_text().splitlines()
    assert first == "ERROR a step over 2 sessions failed"
    assert (second, last) == ("Traceback (most recent call last):", "RuntimeError: planted")
    assert after == "WARNING a library's"


def test_serve_leaves_print_alone_with_which_python_formats_tracebacks(tmp_path):
    assert serve_environment(tmp_path, "127.0.0.1")["RAY_SERVE_LOG_TO_STDERR"] == "1"
