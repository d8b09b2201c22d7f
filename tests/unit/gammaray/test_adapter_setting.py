"""The setting `lora`: its form, its option, and the engines that it goes with."""

import pytest

from gammaray.config import MAX_ADAPTERS, ClusterSettings, TargetSettings, parse_adapters
from gammaray.deploy.serve_config import role_settings
from gammaray.errors import InvalidArgumentError
from gammaray.program.settings import parse_settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sql", r"lora: got 'sql', allowed: NAME=DIR"),
        ("sql=", "NAME=DIR"),
        ("=dir", "NAME=DIR"),
        ("-sql=dir", "NAME=DIR"),
        (f"{'x' * 129}=dir", "NAME=DIR"),
        ("a=b,a=c", "got 'a' twice, allowed: each name once"),
        (",".join(f"a{at}=b" for at in range(MAX_ADAPTERS + 1)), f"at most {MAX_ADAPTERS}"),
    ],
)
def test_malformed_adapters_are_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_settings(TargetSettings, "target", ["--engine", "vllm", "--lora", text])


def test_the_option_is_repeated_or_lists_several(monkeypatch):
    argv = ["--engine", "vllm", "--lora", "sql=/models/sql", "--lora", "a/b:1.x=owner/legal, c=/z"]
    expected = {"sql": "/models/sql", "a/b:1.x": "owner/legal", "c": "/z"}
    assert parse_adapters(parse_settings(TargetSettings, "target", argv)[0].lora) == expected
    assert parse_adapters(parse_settings(TargetSettings, "target", [])[0].lora) == {}
    monkeypatch.setenv("GAMMARAY_LORA", "a=/x,b=/y")
    assert parse_adapters(TargetSettings().lora) == {"a": "/x", "b": "/y"}


def test_targets_alone_get_the_adapters_of_a_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()
    roles = role_settings(ClusterSettings(lora="sql=sql,legal=owner/legal", engine="vllm"))
    assert roles["target"]["lora"] == f"sql={tmp_path / 'sql'},legal=owner/legal"
    assert "lora" not in roles["draft"]
    assert "lora" not in roles["orchestrator"]
