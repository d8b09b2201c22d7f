"""The cluster emits the tokens of the target alone."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray import AsyncClient
from services.demo_pair import TARGET_DIR

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPTS = [
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n",
    "    for key, value in ",
    '"""Parse ',
    "é = 'ünïcödé'\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_DIR)


@pytest.fixture(scope="module")
def greedy(tokenizer):
    """Return the target's own greedy continuations, 48 tokens each."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=48)
        expected.append(out[0, ids.shape[1] :].tolist())
    return expected


@pytest.mark.parametrize("gamma", [0, 4, "adaptive"])
async def test_greedy_equals_transformers_generate(cluster, greedy, gamma):
    async with AsyncClient(cluster.grpc) as client:
        runs = [client.complete(prompt, temperature=0, max_tokens=48, gamma=gamma) for prompt in PROMPTS]
        made = await asyncio.gather(*runs)
    assert [[token.token_id for token in one.tokens] for one in made] == greedy
