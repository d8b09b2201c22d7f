"""The documentation refers to existing files, headings, commands and their options, and fields."""

import re
import shlex
from pathlib import Path

import click

import gammaray
from gammaray.cli import main
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.api.http.models import CompletionRequest, GammarayOptions

ROOT = Path(gammaray.__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
OTHERS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*(ROOT / name for name in (*OTHERS, "helm/gammaray/README.md")), *DOCS]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^\$ (?:[A-Z_]+=\S+ )*(gammaray(?: .*)?)$", re.MULTILINE)
INLINE = re.compile(r"`(gammaray [a-z][^`]*)`")


def anchors(page):
    """Return what the headings of a page can be linked as."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_links_resolve():
    for page in PAGES:
        for link in (first or second for first, second in LINK.findall(page.read_text())):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, link)
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), (page.name, link)


def test_commands_exist_and_know_their_options():
    for page in PAGES:
        text = page.read_text()
        for line in [*COMMAND.findall(text), *INLINE.findall(text)]:
            check_command(line)


def check_command(line):
    words = shlex.split(line.split(" | ")[0].rstrip("\\"), comments=True)
    command = main
    while isinstance(command, click.Group) and len(words) > 1 and not words[1].startswith("-"):
        command = command.get_command(click.Context(command), words.pop(1))
        assert command is not None, line
    names = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for word in words[1:]:
        if word.startswith("--") and command is not main:
            assert word.partition("=")[0] in names | {"--help"}, line


def test_index_has_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    for page in DOCS:
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_api_page_has_every_field():
    text = (ROOT / "docs" / "api.md").read_text()
    own = set(CompletionRequest.model_fields) - {"model", "prompt", "stream", "stream_options", "echo"}
    fields = {*GammarayOptions.model_fields, *own - {"gammaray", "max_completion_tokens"}}
    fields |= {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    fields |= {method.name for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods}
    assert {field for field in fields if f"`{field}`" not in text} == set()


def path_of_a_token():
    """Return the numbered sentences of the architecture page."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = re.split(r"^## ", page.split("## The path of one token")[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


def files_of(sentence):
    return set(re.findall(r"\]\(\.\./([\w/.]+)\)", sentence))


def test_path_of_a_token_is_short():
    sentences = path_of_a_token()
    assert 0 < len(sentences) <= 25
    assert len(set().union(*map(files_of, sentences))) <= 50
    assert all(len(re.findall(r"[.;!?](?=\s|$)", sentence)) == 1 for sentence in sentences)


def test_path_of_a_token_names_functions_where_they_are():
    for sentence in path_of_a_token():
        texts = [(ROOT / path).read_text() for path in files_of(sentence)]
        names = re.findall(r"`([A-Za-z_][\w.]*)`", sentence)
        assert names, sentence
        for name in names:
            places = [text for text in texts if all(is_defined(part, text) for part in name.split("."))]
            assert places, (name, sentence)


def is_defined(name, source):
    """Whether a class, function or constant is defined in a source."""
    return re.search(rf"^\s*(?:(?:async )?def|class) {name}\b|^{name} = ", source, re.MULTILINE) is not None
