"""TLS of the command line and the clients, against certificates like those of the chart's ingress."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import grpc
import pytest

from gammaray import AsyncClient, Client, InvalidArgumentError
from tests.support.cli_helpers import invoke
from tests.support.sdk_helpers import PROCESSES, ScriptedService, answer, last, serve_in_thread
from tests.support.tls_front_helpers import certificate, http_front
from tests.support.tls_helpers import Authority


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Certificates of a good and of another authority."""
    folder = tmp_path_factory.mktemp("pki")
    good, other = Authority(folder, "good"), Authority(folder, "other")
    return SimpleNamespace(
        ca=good.file,
        other_ca=other.file,
        server=good.issue("server", "localhost", "gammaray.example.com"),
        expired=good.issue("expired", "localhost", expires_in=timedelta(days=-1)),
        elsewhere=good.issue("elsewhere", "gammaray.example.com", "grpc.gammaray.example.com"),
        client=good.issue("client", "client.example.com"),
        stranger=other.issue("stranger", "client.example.com"),
    )


@contextmanager
def grpc_front(pki, files, *, mutual: bool = False) -> Iterator[str]:
    pair = (files.key_file.read_bytes(), files.cert_file.read_bytes())
    roots = pki.ca.read_bytes() if mutual else None
    credentials = grpc.ssl_server_credentials([pair], roots, mutual)
    with serve_in_thread(ScriptedService(answer(last("done"))), credentials) as address:
        yield f"localhost:{address.rpartition(':')[2]}"


def status(address, *options, **more):
    return invoke("status", "-a", address, *options, **more)


def chat(url, *options, **more):
    return invoke("chat", "--url", url, *options, **{"input": "hi\n", **more})


FRONTS = pytest.mark.parametrize(
    ("front", "command"), [(grpc_front, status), (http_front, chat)], ids=["gRPC", "HTTP"]
)


@FRONTS
def test_a_server_with_a_given_or_trusted_ca_is_accepted(pki, front, command):
    with front(pki, pki.server) as address:
        # OpenSSL's own variable stands for an authority that the system trusts.
        for result in (
            command(address, "--ca-file", pki.ca),
            command(f"https://{address}/", "--ca-file", pki.ca),
            command(address, env={"GAMMARAY_CA_FILE": str(pki.ca)}),
            command(address, "--tls", env={"SSL_CERT_FILE": str(pki.ca)}),
        ):
            assert result.exit_code == 0, result.output
            assert ("orchestrator" if command is status else "café") in result.stdout
        for result in (command(address, "--tls"), command(address)):
            assert (result.exit_code, result.stdout) == (3, "")


@FRONTS
def test_a_client_certificate_is_accepted_by_a_server_that_requires_one(pki, front, command):
    with front(pki, pki.server, mutual=True) as address:
        result = command(address, "--ca-file", pki.ca, *certificate(pki.client))
    assert result.exit_code == 0, result.output


@FRONTS
@pytest.mark.parametrize(
    ("server", "ca", "client"),
    [
        pytest.param("server", "other_ca", None, id="wrong authority"),
        pytest.param("expired", "ca", None, id="expired"),
        pytest.param("elsewhere", "ca", None, id="wrong host"),
        pytest.param("server", "ca", (), id="no certificate"),
        pytest.param("server", "ca", "stranger", id="strange certificate"),
    ],
)
def test_a_failed_handshake_is_one_line_with_the_address(pki, front, command, server, ca, client):
    own = certificate(getattr(pki, client)) if client else ()
    with front(pki, getattr(pki, server), mutual=client is not None) as address:
        result = command(address, "--ca-file", getattr(pki, ca), *own)
    assert result.exit_code == 3, result.output
    (line,) = result.stderr.splitlines()
    assert address.rpartition(":")[2] in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("front", "command"),
    [(lambda: serve_in_thread(ScriptedService()), status), (lambda: http_front(None), chat)],
    ids=["gRPC", "HTTP"],
)
def test_tls_to_a_plain_text_port_is_refused(pki, front, command):
    with front() as address:
        result = command(address, "--ca-file", pki.ca)
    assert result.exit_code == 3
    assert re.search("wrong.version.number", result.stderr, re.IGNORECASE)


def test_every_grpc_command_uses_the_options_of_tls(pki):
    with grpc_front(pki, pki.expired) as address:
        options = ("-a", address.replace("localhost", "127.0.0.1"), "--ca-file", pki.ca)
        sessions = ("sessions list", "sessions resume s", "sessions cancel s", "sessions delete s")
        for command in ("bench", "generate Hi", *sessions, "status", "top --once", "trace s"):
            result = invoke(*command.split(), *options)
            assert result.exit_code == 3, command
            assert "certificate has expired" in result.stderr, command


@pytest.mark.parametrize("command", [status, chat], ids=["gRPC", "HTTP"])
def test_files_that_cannot_be_used_are_refused_by_name(pki, tmp_path, command):
    text = tmp_path / "text"
    text.write_text("-----BEGIN nothing\n")
    for options, words in (
        (["--key-file", pki.server.key_file], "key_file: got"),
        (["--ca-file", text], "ca_file: got"),
        (["--ca-file", tmp_path], "ca_file: got"),
        (["--cert-file", pki.server.cert_file, "--key-file", pki.client.key_file], "cert_file: got"),
        (["--cert-file", pki.server.cert_file, "--key-file", text], "cert_file: got"),
    ):
        result = command("127.0.0.1:1", *options)
        assert result.exit_code == 2
        assert words in result.stderr


def test_options_that_contradict_the_url_are_refused(pki):
    for command, plain in ((status, "grpc://localhost:1"), (chat, "http://localhost:1")):
        result = command(plain, "--ca-file", pki.ca)
        assert result.exit_code == 2
        assert "with TLS options" in result.stderr


async def test_clients_take_the_same_arguments(pki):
    with grpc_front(pki, pki.server, mutual=True) as address:
        files = {"ca_file": pki.ca, "cert_file": pki.client.cert_file, "key_file": str(pki.client.key_file)}
        async with AsyncClient(address, **files) as client:
            assert await client.status() == PROCESSES
            assert (await client.complete("Hi")).text == "done"
        with Client(f"https://{address}", **files) as blocking:
            assert blocking.status() == PROCESSES


def test_contradicting_arguments_are_refused():
    for arguments in (
        {"tls": False, "ca_file": "ca.pem"},
        {"tls": False, "address": "https://localhost:1"},
        {"credentials": grpc.ssl_channel_credentials(), "tls": True},
    ):
        with pytest.raises(InvalidArgumentError):
            AsyncClient(**{"address": "localhost:1", **arguments})
