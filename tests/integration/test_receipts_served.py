"""Receipts of real workers of the demo pair, checked by one forward pass of its target."""

import asyncio
import dataclasses
import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.texts import json_schema_grammar
from gammaray.receipts.keys import published, read_receipt_keys, rotate
from gammaray.receipts.receipt import Receipt, SignedReceipt
from gammaray.types import FinishReason, GammaPolicy, SamplingParams, VerificationMethod
from orchestrator.access.caller import ANONYMOUS
from services.receipts.check import ReceiptChecker
from tests.support.http_helpers import http_client
from tests.support.workers.resume_helpers import first_chunks, request_of, resumed
from tests.support.workers.service_helpers import complete, running, tokens_of, worker_process

pytestmark = pytest.mark.integration

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TIMEOUT_S = 240
GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "receipts.json"
    rotate(path)
    return path


@pytest.fixture(scope="module")
def checker():
    return ReceiptChecker("demo")


@pytest.fixture
async def orchestrator(redis_server, workers, keys_file):
    async with running(redis_server, *workers, receipt_keys_file=str(keys_file)) as orchestrator:
        yield orchestrator


def receipt_of(chunks, keys_file) -> Receipt:
    """Return the receipt of a completion, after its signature was checked."""
    assert not any(chunk.receipt for chunk in chunks[:-1])
    signed = SignedReceipt.parse(chunks[-1].receipt)
    signed.check(read_receipt_keys(keys_file))
    return signed.receipt


def sampled(**fields):
    return {"sampling": SamplingParams(seed=7, **fields)}


CASES = {
    "gamma 8": {"gamma": GammaPolicy(8)},
    "greedy": {"sampling": GREEDY},
    "tree": {"gamma": GammaPolicy(4, max_nodes=16)},
    "filters": sampled(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01),
    "penalties": sampled(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4),
    "bias": sampled(logit_bias={11: 5.0, 12: -5.0}, banned_token_ids=(13, 14), sample_index=3),
    "min_tokens": {**sampled(min_tokens=20, logit_bias={0: 40.0}), "ignore_eos": False},
    "grammar": {**sampled(grammar=json_schema_grammar(SCHEMA)), "ignore_eos": False},
    "stop": {"stop": ("é", "\n"), "max_tokens": 80},
    "unstored": {"store": False, "session_id": ""},
}


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
async def test_receipt_of_a_completion_is_valid(orchestrator, checker, keys_file, fields):
    request = request_of(receipt=True, **fields)
    chunks = await complete(orchestrator, request)
    receipt = receipt_of(chunks, keys_file)
    assert receipt.token_ids == tuple(tokens_of(chunks))
    assert receipt.finish_reason is chunks[-1].finish_reason
    assert receipt.sampling == request.sampling
    assert receipt.finish_reason is FinishReason.STOP or not receipt.stop
    verdict = checker.verdict(receipt)
    assert (verdict.result, verdict.reason) == ("valid", "")
    assert verdict.num_tokens == len(receipt.token_ids)
    # The compiled kernel's rows do not depend on their batch.
    assert verdict.num_ties == 0


@pytest.mark.slow
async def test_receipt_of_a_head_is_valid(redis_server, checker, keys_file):
    with worker_process("target", "demo", "--head", "demo") as (_, target):
        async with running(redis_server, target, "", receipt_keys_file=str(keys_file)) as orchestrator:
            chunks = await complete(orchestrator, request_of(receipt=True))
    assert chunks[-1].summary.head_cycles > 0
    assert checker.verdict(receipt_of(chunks, keys_file)).result == "valid"


@pytest.mark.slow
async def test_receipt_covers_the_tokens_of_all_owners(
    redis_server, workers, orchestrator, checker, keys_file
):
    request = request_of(max_tokens=120, receipt=True)
    async with running(redis_server, *workers, receipt_keys_file=str(keys_file)) as other:
        chunks = await first_chunks(orchestrator, request, 3)
        await orchestrator.leases.settled()
        chunks += await complete(other, resumed(request, chunks))
        receipt = receipt_of(chunks, keys_file)
        again = await complete(other, dataclasses.replace(request, resume_from=0))
    assert receipt.token_ids == tuple(tokens_of(chunks))
    assert len(receipt.token_ids) == 120
    assert checker.verdict(receipt).result == "valid"
    later = receipt_of(again, keys_file)
    assert later.model_copy(update={"issued_at": receipt.issued_at}) == receipt


@pytest.mark.slow
async def test_receipt_of_the_next_turn_has_the_whole_prompt(orchestrator, checker, keys_file):
    first = await complete(orchestrator, request := request_of(max_tokens=12))
    turn = dataclasses.replace(request, prompt="\n    return ", turn=1, receipt=True)
    receipt = receipt_of(await complete(orchestrator, turn), keys_file)
    num_prompt = first[-1].prompt_tokens
    assert receipt.prompt_token_ids[num_prompt : num_prompt + 12] == tuple(tokens_of(first))
    assert checker.verdict(receipt).result == "valid"


@pytest.mark.slow
async def test_receipt_of_a_cancelled_turn_has_the_tokens_that_were_sent(orchestrator, checker, keys_file):
    request = request_of(max_tokens=2000, receipt=True)
    chunks = []
    async for chunk in orchestrator.generate(request):
        chunks.append(chunk)
        if len(chunks) == 3:
            await orchestrator.sessions.cancel(request.session_id, ANONYMOUS)
    receipt = receipt_of(chunks, keys_file)
    assert receipt.finish_reason is FinishReason.CANCELLED
    assert receipt.token_ids == tuple(tokens_of(chunks))
    assert checker.verdict(receipt).result == "valid"


def with_fields(**fields):
    return lambda receipt: fields


def text_of(receipt, start, end):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo", "target"))
    return tokenizer.decode(receipt.token_ids[start:end])


CHANGES = {
    "later token": (
        lambda r: {"token_ids": (*r.token_ids[:30], (r.token_ids[30] + 1) % 100, *r.token_ids[31:])},
        *("invalid", "token 30 is"),
    ),
    "seed": (lambda r: {"sampling": dataclasses.replace(r.sampling, seed=8)}, "invalid", "expected"),
    "prompt": (lambda r: {"prompt_token_ids": r.prompt_token_ids[1:]}, "invalid", "expected"),
    "cut": (lambda r: {"token_ids": r.token_ids[:-1]}, "invalid", "do not end by length"),
    "longer": (with_fields(max_tokens=40), "invalid", "do not end by length"),
    "passed end": (lambda r: {"stop_token_ids": r.token_ids[3:4]}, "invalid", "went on after token"),
    "passed stop": (
        lambda r: {"stop": ("no such text", text_of(r, 9, 12))},
        "invalid",
        "went on after token",
    ),
    "no stop": (
        with_fields(stop=("no such text",), finish_reason=FinishReason.STOP),
        "invalid",
        "do not end by stop",
    ),
    "method": (with_fields(verification=VerificationMethod.BLOCK), "refused", "verification: got"),
    "checkpoint": (with_fields(model_identity="00/float32"), "refused", "model_identity: got"),
    "no checkpoint": (with_fields(model_identity=""), "refused", "model_identity: got none"),
    "adapter": (lambda r: {"model_identity": r.model_identity + "/lora/1"}, "refused", "LoRA"),
    "dtype": (lambda r: {"model_identity": r.model_identity[:64] + "/int3"}, "refused", "int3"),
    "tokenizer": (with_fields(tokenizer="00"), "refused", "tokenizer: got"),
    "eos": (with_fields(eos_token_ids=(5,)), "refused", "eos_token_ids: got"),
    "grammars": (with_fields(grammars="llguidance-0"), "refused", "grammars: got"),
    "token id": (with_fields(token_ids=(2**31,), max_tokens=1), "refused", "token_ids: got"),
    "no prompt": (with_fields(prompt_token_ids=()), "refused", "and a prompt"),
    "length": (lambda r: {"prompt_token_ids": r.prompt_token_ids * 9999}, "refused", "context"),
}


@pytest.fixture(scope="module")
def honest(redis_server, workers, keys_file):
    async def ask():
        async with running(redis_server, *workers, receipt_keys_file=str(keys_file)) as orchestrator:
            return await complete(orchestrator, request_of(receipt=True))

    return receipt_of(asyncio.run(ask()), keys_file)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_changed_receipt_is_found(honest, checker, name):
    change, result, reason = CHANGES[name]
    assert checker.verdict(honest).result == "valid"
    verdict = checker.verdict(honest.model_copy(update=change(honest)))
    assert verdict.result == result
    assert reason in verdict.reason
    if "expected" in verdict.reason:
        assert verdict.token != verdict.expected
        assert verdict.gap is None or verdict.gap > verdict.margin


@pytest.mark.slow
def test_token_within_the_margin_is_a_tie(honest, checker):
    tokens = list(honest.token_ids)
    tokens[20] = (tokens[20] + 1) % 100
    changed = honest.model_copy(update={"token_ids": tuple(tokens)})
    gap = checker.verdict(changed).gap
    below, above = (
        ReceiptChecker("demo", gap * factor).verdict(changed.model_copy(update=fields))
        for factor in (0.99, 1.01)
        for fields in [{"token_ids": tuple(tokens[:21]), "max_tokens": 21}]
    )
    assert (below.result, below.position, below.gap) == ("invalid", 20, pytest.approx(gap, rel=1e-3))
    assert (above.result, above.num_ties) == ("valid", 1)
    assert above.largest_gap == pytest.approx(gap, rel=1e-3)


async def test_receipt_without_a_key_is_refused(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        with pytest.raises(
            InvalidArgumentError, match="receipt: got true, allowed: false: this server has no key"
        ):
            await complete(orchestrator, request_of(receipt=True))
        assert not (await complete(orchestrator, request_of()))[-1].receipt


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
async def test_http_answers_have_receipts(orchestrator, checker, keys_file, path):
    body = {"seed": 3, "gammaray": {"receipt": True}}
    asked = {
        "completions": {"prompt": "def f(", "max_tokens": 16, "n": 2},
        "chat/completions": {"messages": [{"role": "user", "content": "def f("}], "max_tokens": 16, "n": 2},
        "responses": {"input": "def f(", "max_output_tokens": 16},
    }[path]
    async with http_client(orchestrator) as client:
        listed = (await client.get("/v1/receipts/key")).json()
        whole = (await client.post(f"/v1/{path}", json={**body, **asked})).json()
        async with client.stream("POST", f"/v1/{path}", json={**body, **asked, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        refused = await client.post(
            f"/v1/{path}", json={**asked, "gammaray": {"receipt": True, "verification": "block"}}
        )
        stored = (await client.get(f"/v1/responses/{whole['id']}")).json() if path == "responses" else {}
    keys = read_receipt_keys(keys_file)
    assert listed == published(keys, ["float32"])
    assert "d" not in listed["keys"][0]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    streamed = [e.get("response", e).get("gammaray", {}).get("receipt") for e in events]
    holders = [whole] if path == "responses" else whole["choices"]
    texts = [one["gammaray"]["receipt"] for one in holders]
    receipts = [SignedReceipt.parse(text) for text in (*texts, *filter(None, streamed))]
    assert len(receipts) == 2 * len(texts)
    for one in receipts:
        one.check(keys)
        assert checker.verdict(one.receipt).result == "valid"
    assert {one.receipt.sampling.sample_index for one in receipts} == set(range(len(texts)))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "receipt"
    assert "receipt" not in stored.get("gammaray", {})


@pytest.mark.nightly
@pytest.mark.slow
def test_check_command_judges_a_file(honest, keys_file, tmp_path):
    key = read_receipt_keys(keys_file)[-1]
    public, file = tmp_path / "public.json", tmp_path / "receipts.txt"
    public.write_text(json.dumps(published([key])))
    wrong = honest.model_copy(update={"token_ids": (*honest.token_ids[:9], 1, *honest.token_ids[10:])})
    valid, invalid = honest.signed(key), wrong.signed(key)
    file.write_text(f"{valid}\n{invalid}\n{valid[:-8]}\n")
    command = [sys.executable, "-m", "gammaray", "check", str(file), "--target", "demo"]
    keyed = [*command, "--key", str(public), "--json"]
    result = subprocess.run(keyed, capture_output=True, text=True, timeout=TIMEOUT_S)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["result"] for one in found] == ["valid", "invalid", "refused"]
    assert [one["position"] for one in found] == [None, 9, None]
    assert found[1]["expected"] == honest.token_ids[9]
    assert (found[0]["signature"], result.returncode) == ("valid", 1)
    file.write_text(f"{valid}\n")
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.stdout.splitlines() == [
        "receipt 1: valid: 48 tokens follow, float32, margin 0.001, signature not checked",
        "valid in float32, margin 0.001: 1 receipts, 48 tokens, 0 of them within the margin only",
    ]
    assert result.returncode == 0
