"""`gammaray chat` against the HTTP API over a scripted orchestrator."""

import json
import os
import socket
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from gammaray import errors
from gammaray.cli import render
from gammaray.client.chat import Chat
from gammaray.grammar.texts import choice_grammar, json_schema_grammar, regex_grammar
from tests.support.cli_helpers import invoke
from tests.support.surface_helpers import ScriptedBackend
from tests.support.tls_front_helpers import http_front


@pytest.fixture
def serve():
    with ExitStack() as started:
        yield lambda backend: f"http://{started.enter_context(http_front(backend=backend))}"


def chat(url, said, *options):
    return invoke("chat", "--url", url, *options, input=said)


@pytest.mark.parametrize("path", ["", "/v1", "/v1/"])
def test_chat_takes_the_url_that_up_prints_and_asks_no_proxy_for_loopback(serve, monkeypatch, path):
    monkeypatch.setattr(os, "environ", {**os.environ, "http_proxy": "http://127.0.0.1:9", "NO_PROXY": ""})
    result = chat(serve(ScriptedBackend()) + path, "hi\n")
    assert (result.exit_code, result.stdout) == (0, "café\n")


def test_chat_keeps_the_conversation_until_it_is_reset(serve):
    backend = ScriptedBackend()
    result = chat(
        serve(backend), "hi\n\nand?\n/reset\nagain\n/exit\nnever\n", "--system", "be", "--seed", "7"
    )
    assert result.exit_code == 0
    assert result.stdout == "café\n" * 3
    assert [request.prompt for request in backend.requests] == [
        "system: be\nuser: hi\n",
        "system: be\nuser: hi\nassistant: café\nuser: and?\n",
        "system: be\nuser: again\n",
    ]
    assert {request.sampling.seed for request in backend.requests} == {7}
    assert result.stderr.count("1.50 per cycle, alpha 0.50, seed 7") == 3


def test_control_characters_never_reach_a_terminal(serve, monkeypatch):
    monkeypatch.setattr(render, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    result = chat(serve(ScriptedBackend(pieces=[b"a\x1b[2J", b"b"])), "hi\n")
    assert "a\u241b[2Jb" in result.stdout
    assert "\x1b[2J" not in result.stdout


ADA = (b'{"name":', b' "Ada', b'"}')
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def test_chat_answers_have_the_form_that_an_option_asks_for(serve, tmp_path):
    backend, file = ScriptedBackend(), tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    url = serve(backend)
    for options in (["--json-schema", str(file)], ["--regex", "a+"], ["--choice", "a", "--choice", "b"], []):
        assert chat(url, "hi\nand?\n", *options).exit_code == 0
    grammars = [request.sampling.grammar for request in backend.requests]
    forms = (json_schema_grammar(PERSON), regex_grammar("a+"), choice_grammar(["a", "b"]), "")
    assert grammars == [grammar for grammar in forms for _ in range(2)]


class Person(BaseModel):
    name: str


def test_chat_object_parses_an_answer(serve):
    backend = ScriptedBackend(pieces=ADA)
    conversation = Chat(serve(backend))
    assert conversation.parsed is None
    said = "".join(piece.text for piece in conversation.ask("hi", json_schema=Person))
    assert conversation.parsed == Person(name="Ada")
    assert backend.requests[0].sampling.grammar == json_schema_grammar(Person.model_json_schema())
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    list(conversation.ask("and?", json_schema=PERSON))
    assert conversation.parsed == {"name": "Ada"}
    list(conversation.ask("and?"))
    assert conversation.parsed is None
    conversation.reset()
    assert conversation.parsed is None


def test_chat_object_of_a_cut_answer_is_an_error(serve):
    conversation = Chat(serve(ScriptedBackend(pieces=ADA)), options={"max_tokens": 2})
    list(conversation.ask("hi", json_schema=Person))
    with pytest.raises(errors.IncompleteOutputError) as caught:
        conversation.parsed  # noqa: B018  # a property
    assert (caught.value.text, caught.value.finish_reason) == ('{"name": "Ada', "length")


def test_chat_options_reach_the_request(serve):
    backend = ScriptedBackend()
    options = ("--verification", "naive", "--gamma", "3", "--temperature", "0.5", "--max-tokens", "2")
    chat(serve(backend), "hi\n", *options)
    (request,) = backend.requests
    assert (request.verification.value, request.gamma.fixed, request.max_tokens) == ("naive", 3, 2)
    assert request.sampling.temperature == 0.5


def test_chat_continues_after_an_error(serve):
    def before(request, number):
        if "fail" in request.prompt:
            raise errors.GammarayError("no luck")

    backend = ScriptedBackend(before)
    result = chat(serve(backend), "fail\nhi\n/what\n")
    assert result.exit_code == 0
    assert result.stdout == "café\n"
    assert "gammaray: no luck" in result.stderr
    assert "/reset starts a new chat" in result.stderr
    assert backend.requests[-1].prompt == "user: hi\n"


def test_chat_without_a_server_ends_with_3():
    result = chat("http://127.0.0.1:1", "hi\n")
    assert result.exit_code == 3
    assert "is a cluster running there?" in result.stderr


REFUSALS = [(503, errors.UnavailableError), (401, errors.UnauthenticatedError), (502, errors.InternalError)]
BODIES = {
    "cut": ("json", 100, b'{"error"'),
    "silent": ("json", 100, None),
    "empty": ("json", 0, b""),
    "nested too deeply": ("json", 100_000, b"[" * 100_000),
    "page": ("html", 4, b"Busy"),
}


@contextmanager
def answering(data, hangs=False):
    """Yield the URL of a server that answers one connection with these bytes, and may keep it open."""
    asked = threading.Event()

    def run():
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(data)
            if hangs:
                asked.wait(30)
        server.close()  # the client may ask again, whether TLS is the cause

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=run)
        thread.start()
        yield url
        asked.set()
        thread.join()


@pytest.mark.parametrize(("code", "kind"), REFUSALS, ids=["503", "401", "502"])
@pytest.mark.parametrize(("form", "length", "body"), BODIES.values(), ids=BODIES)
def test_refusal_whose_body_cannot_be_read_has_the_class_of_its_status(code, kind, form, length, body):
    head = f"HTTP/1.1 {code} Oops\r\nContent-Type: text/{form}\r\nContent-Length: {length}\r\n\r\n"
    with answering(head.encode() + (body or b""), hangs=body is None) as url:
        with pytest.raises(errors.GammarayError, match=f"responds with {code} Oops") as caught:
            list(Chat(url, timeout_s=0.5 if body is None else 30).ask("hi"))
    assert type(caught.value) is kind


def test_response_that_fails_or_is_closed_midway_keeps_its_text_in_the_conversation(serve):
    def before(request, number):
        if number == 1 and "fail" in request.prompt:
            raise errors.UnavailableError("gone")

    conversation = Chat(serve(ScriptedBackend(before)))
    pieces = conversation.ask("hi")
    while not next(pieces).text:
        pass
    pieces.close()
    cut = {"role": "assistant", "content": "caf"}
    assert conversation.messages == [{"role": "user", "content": "hi"}, cut]
    with pytest.raises(errors.GammarayError, match="gone"):
        list(conversation.ask("fail"))
    assert conversation.messages[-1] == cut


def test_chat_says_what_is_wrong_with_a_port(serve):
    http2 = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00"  # the first frame of gRPC
    for greeting in (http2, b"\x15\x03\x01\x00\x02\x02\x16", b""):  # and a TLS server's alert; and none
        with answering(greeting) as url:
            result = chat(url, "hi\n")
        assert result.exit_code == 3
        assert "is it the HTTP API, on port 8000 by default?" in result.stderr
    result = chat(serve(ScriptedBackend()).replace("http:", "https:"), "hi\n")
    assert "it does not use TLS: http:// instead of https://" in result.stderr


def test_generate_says_that_a_port_is_not_grpcs(serve):
    address = serve(ScriptedBackend()).removeprefix("http://").replace("localhost", "127.0.0.1")
    result = invoke("generate", "x", "--address", address, "--timeout", "5")
    assert result.exit_code != 0
    assert "is it the gRPC API, on port 9000 by default?" in result.stderr
