"""A head is recognised by its files, and refused as a draft, and by engines that do not serve its kind."""

import asyncio

import pytest

from gammaray.config import DraftSettings, TargetSettings
from gammaray.errors import InvalidArgumentError
from services.draft_worker.worker import DraftWorker
from services.engine.core.errors import UnsupportedModelError
from services.heads.loading import names_head
from services.own.head_loading import check_local_drafter
from tests.support.engine_helpers import tiny_model
from tests.support.head_helpers import DATA, VARIANTS, as_official, bigram_head, bigram_target, changed
from tests.support.medusa_helpers import random_heads, write_own


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
    for name in ("demo", "early-exit:3", "absent/model", "a/b/c", "./absent", "/absent"):
        assert not names_head(name)


EAGLE, MEDUSA, DFLASH = "an EAGLE-1 or EAGLE-2 head", "a Medusa head", "a DFlash head"


@pytest.mark.parametrize(
    ("config", "served_by_vllm"),
    [
        ({"speculators_model_type": "eagle3"}, ""),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, ""),
        ({"speculators_model_type": "eagle"}, EAGLE),
        ({"model_type": "eagle"}, EAGLE),
        ({"model_type": "llama", "num_hidden_layers": 1}, EAGLE),
        ({"speculators_model_type": "dflash"}, DFLASH),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {}}, DFLASH),
        ({"model_type": "medusa"}, MEDUSA),
        ({"medusa_num_heads": 3}, MEDUSA),
    ],
)
def test_a_head_is_refused_as_a_draft_and_by_an_engine_that_does_not_serve_it(
    config, served_by_vllm, folders, tmp_path
):
    target = str(folders[0])
    head = str(changed("llama", tmp_path, config=lambda _: config))
    draft = DraftWorker(DraftSettings(model=head, target=target))
    with pytest.raises(
        InvalidArgumentError, match=r"model: got .*, a head, allowed: a draft model; .* --head"
    ):
        asyncio.run(draft.start())
    words = (
        f"it is {served_by_vllm}, served by the engine vllm only" if served_by_vllm else "cannot be served"
    )
    with pytest.raises(UnsupportedModelError, match=words):
        check_local_drafter(TargetSettings(model=target, head=head))


def test_medusa_heads_in_files_of_their_own_are_refused(folders, tmp_path):
    """In the format of FasterDecoding/Medusa, which has no model.safetensors."""
    target = folders[0]
    settings = TargetSettings(model=str(target), head=str(write_own(tmp_path / "m", random_heads(target))))
    with pytest.raises(UnsupportedModelError, match=f"it is {MEDUSA}, served by the engine vllm only"):
        check_local_drafter(settings)
