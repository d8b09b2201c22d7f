"""An HTTP server on loopback whose answers a function gives."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, JSON value or bytes, and headers."""


@contextmanager
def scripted(
    reply: Callable[[str, dict[str, Any] | None], Reply], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Serve what `reply` makes of path and body, in threads; yield the URL and the list of headers."""
    headers: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            self._answer(reply(self.path, json.loads(self.rfile.read(length))))

        def do_GET(self) -> None:
            self._answer(reply(self.path, None))

        do_HEAD = do_GET

        def _answer(self, found: Reply) -> None:
            headers.append({name.lower(): value for name, value in self.headers.items()})
            status, value, more = found if len(found) == 3 else (*found, {})
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {**more, "content-length": str(len(data))}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}", headers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
