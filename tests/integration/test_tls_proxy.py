"""Commands and clients through a proxy that terminates TLS for both APIs, as an Ingress does.

HAProxy, which comes with Ray, holds a certificate like that of the chart's ingress; the servers that it
forwards to speak plain text.
"""

import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from gammaray import Client, TlsError
from gammaray.cli import main
from orchestrator.launcher.preflight import free_ports
from tests.support.haproxy_helpers import haproxy
from tests.support.sdk_helpers import PROCESSES, ScriptedService, answer, last, serve_in_thread
from tests.support.tls_front_helpers import certificate, http_front
from tests.support.tls_helpers import Authority

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CONFIG = """
frontend tls
    bind 127.0.0.1:{port} ssl crt {pem} alpn h2,http/1.1 {verify}
    use_backend grpc if {{ path_beg /gammaray.v1.GenerationService/ }}
    default_backend http
backend grpc
    server one {grpc} proto h2
backend http
    server one {http}
"""
VERIFY = {"off": "", "required": "ca-file {ca} verify required"}


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority(folder, "authority")
    server = authority.issue("server", "localhost")
    pem = folder / "server.pem"
    pem.write_bytes(server.cert_file.read_bytes() + server.key_file.read_bytes())
    return SimpleNamespace(
        folder=folder, ca=authority.file, pem=pem, client=authority.issue("client", "client.example.com")
    )


@contextmanager
def proxy(pki, verify="off"):
    (port,) = free_ports("127.0.0.1", 1)
    with serve_in_thread(ScriptedService(answer(last("done")))) as grpc, http_front(pki, None) as http:
        config = CONFIG.format(
            port=port,
            pem=pki.pem,
            verify=VERIFY[verify].format(ca=pki.ca),
            grpc=grpc,
            http=http.replace("localhost", "127.0.0.1"),
        )
        with haproxy(pki.folder, config, port):
            yield f"localhost:{port}"


def invoke(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)], input="hi\n", prog_name="gammaray")


def both(address, *options):
    return [
        invoke("status", "-a", address, *options),
        invoke("chat", "--url", address, *options),
    ]


@pytest.mark.parametrize("verify", VERIFY)
def test_both_apis_are_reached_through_a_proxy(pki, verify):
    with proxy(pki, verify) as address:
        for result in both(address, "--ca-file", pki.ca, *certificate(pki.client)):
            assert result.exit_code == 0, result.output
        streamed = invoke("generate", "Hi", "-a", f"https://{address}", "--ca-file", pki.ca, "--no-color")
        assert streamed.exit_code == (0 if verify == "off" else 3), streamed.output
        files = {"cert_file": pki.client.cert_file, "key_file": pki.client.key_file}
        with Client(address, ca_file=pki.ca, **files) as client:
            assert client.status() == PROCESSES


def test_a_missing_client_certificate_is_reported(pki):
    with proxy(pki, "required") as address:
        for result in both(address, "--ca-file", pki.ca):
            assert result.exit_code == 3, result.output
            assert f"{address}: the server requires a client certificate" in result.stderr
            assert "--cert-file" in result.stderr
        with Client(address, ca_file=pki.ca) as client, pytest.raises(TlsError):
            client.status()


def test_lines_of_grpc_do_not_reach_the_terminal(pki):
    with proxy(pki) as address:
        invoke("status", "-a", address)
        command = [sys.executable, "-m", "gammaray", "status", "-a", address, "--tls"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    assert done.stderr.startswith(f"gammaray: {address}: the server's certificate is not signed")
    assert done.stderr.count("\n") == 1
