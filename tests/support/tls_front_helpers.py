"""HTTPS servers of the HTTP API for tests, and the options of a client certificate."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from orchestrator.api.http.server.app import create_app
from orchestrator.launcher.preflight import free_ports
from tests.support.surface_helpers import ScriptedBackend
from tests.support.workers.redis_helpers import wait_until


@contextmanager
def http_front(pki=None, files=None, *, mutual: bool = False, backend=None) -> Iterator[str]:
    (port,) = free_ports("127.0.0.1", 1)
    tls = {} if files is None else {"ssl_keyfile": files.key_file, "ssl_certfile": files.cert_file}
    if mutual:
        tls |= {"ssl_ca_certs": str(pki.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    app = create_app(backend or ScriptedBackend())
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical", lifespan="off", **tls)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"localhost:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def certificate(files):
    return "--cert-file", files.cert_file, "--key-file", files.key_file
