"""A head is recognised by its files, and refused as the draft of draft workers."""

import asyncio
import json

import pytest

from gammaray.config import DraftSettings
from gammaray.errors import InvalidArgumentError
from services.draft_worker.worker import DraftWorker
from services.heads.formats import kind_of_config
from services.heads.loading import names_head
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA, VARIANTS, as_official, bigram_head, bigram_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    target = bigram_target(folder / "target")
    heads = [*(DATA / variant for variant in VARIANTS), as_official(folder / "official")]
    return target, [*heads, bigram_head(folder / "exact", target)]


def test_heads_are_told_from_models(folders, tmp_path):
    target, heads = folders
    for name in (*heads, target, tiny_model("llama", tmp_path)):
        assert names_head(str(name)) == (name in heads)


def test_names_are_no_heads():
    for name in ("demo", "early-exit:3", "absent/model", "a/b/c", "./absent", "/absent"):
        assert not names_head(name)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"model_type": "eagle"}, "eagle"),
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, "dflash"),
        ({"model_type": "medusa"}, "medusa"),
        ({"medusa_num_heads": 3}, "medusa"),
    ],
)
def test_a_head_as_the_draft_is_refused_and_told_where_it_belongs(config, kind, folders, tmp_path):
    target, _ = folders
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_of_config(config, ()) == kind
    worker = DraftWorker(DraftSettings(model=str(tmp_path), target=str(target)))
    with pytest.raises(
        InvalidArgumentError, match=r"model: got .*, a head, allowed: a draft model; .* --head"
    ):
        asyncio.run(worker.start())
