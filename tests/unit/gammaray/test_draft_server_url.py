"""`openai:URL`: what names a server that drafts, and what settings make of it."""

from __future__ import annotations

import pytest

from gammaray.config import ClusterSettings, OrchestratorSettings
from gammaray.deploy.effective import effective_settings
from gammaray.deploy.serve_config import role_settings
from gammaray.draft_server import DraftServerUrl, check_draft, is_draft_server
from gammaray.errors import InvalidArgumentError

URL = "openai:http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("text", "root", "model"),
    [
        (URL, "http://127.0.0.1:8080", ""),
        (f"{URL}/v1", "http://127.0.0.1:8080", ""),
        (f"{URL}/v1/", "http://127.0.0.1:8080", ""),
        (f"{URL}/#smollm2:135m", "http://127.0.0.1:8080", "smollm2:135m"),
        (f"{URL}/v1#HuggingFaceTB/SmolLM2", "http://127.0.0.1:8080", "HuggingFaceTB/SmolLM2"),
        ("openai:https://models.example/llama/v1", "https://models.example/llama", ""),
        ("openai:http://[::1]:8080", "http://[::1]:8080", ""),
    ],
)
def test_url_has_a_root_and_a_model(text, root, model):
    assert DraftServerUrl.parse(text) == DraftServerUrl(root, model)
    assert is_draft_server(text)


def test_address_is_what_status_shows():
    assert DraftServerUrl.parse(f"{URL}/v1#m").address == "127.0.0.1:8080"


def test_url_of_another_form_is_refused(subtests):
    for text in [
        "openai:",
        "openai:127.0.0.1:8080",
        "openai:ftp://host",
        "openai:http://",
        "openai:http://host:99999",
        "openai:http://host:0",
        "openai:http://host/v1?key=1",
        "openai:http://host name",
        "openai:http://host\n",
        "openai:unix:/tmp/socket",
        "http://127.0.0.1:8080",
    ]:
        with subtests.test(str(text)[:80]):
            with pytest.raises(InvalidArgumentError, match="allowed: openai:http://HOST:PORT"):
                DraftServerUrl.parse(text)
            with pytest.raises(InvalidArgumentError, match="draft_server: "):
                OrchestratorSettings(draft_server=text)


@pytest.mark.parametrize("login", ["user:hunter2", "hunter2"])
@pytest.mark.parametrize("scheme", [URL[:14], "http://", "openai:ftp://"])
def test_password_in_a_url_is_refused_and_not_repeated(login, scheme):
    text = f"{scheme}{login}@host:8080"
    for make in (lambda: ClusterSettings(draft=text), lambda: OrchestratorSettings(draft_server=text)):
        with pytest.raises(InvalidArgumentError) as caught:
            make()
        assert "hunter2" not in str(caught.value)


def test_model_names_are_no_urls():
    for name in ("demo", "org/model", "./openai", "model.gguf"):
        assert check_draft(name) == name
        assert not is_draft_server(name)


def test_cluster_with_a_server_has_no_draft_workers():
    settings = ClusterSettings(draft=URL, draft_key_file="key")
    assert settings.draft_workers.maximum == 0
    roles = role_settings(settings)
    assert roles["orchestrator"]["draft_server"] == URL
    assert roles["orchestrator"]["draft_key_file"].endswith("/key")
    assert roles["orchestrator"]["draft_key_file"].startswith("/")
    assert "model" not in roles["draft"]
    assert effective_settings(settings)["orchestrator"]["draft_server"] == URL


def test_draft_workers_beside_a_server_are_refused():
    with pytest.raises(InvalidArgumentError, match="draft_workers: got 2, allowed: 0 with draft openai:"):
        ClusterSettings(draft=URL, draft_workers="2")


def test_cluster_with_a_model_has_no_server():
    assert "draft_server" not in role_settings(ClusterSettings())["orchestrator"]
    assert OrchestratorSettings().draft_server == ""
