"""A receipt of no real completion, for tests of its form."""

from gammaray.receipts.receipt import Receipt
from gammaray.types import FinishReason, SamplingParams, VerificationMethod

RECEIPT = Receipt(
    **{"issued_at": 1_795_000_000, "model": "demo", "model_identity": "ab" * 32 + "/float32"},
    **{"tokenizer": "cd" * 32, "eos_token_ids": (0,), "verification": VerificationMethod.COUPLED},
    sampling=SamplingParams(temperature=0.7, seed=2**64 - 1, logit_bias={9: -1.5}, banned_token_ids=(3,)),
    **{"prompt_token_ids": (5, 6, 7), "max_tokens": 16, "stop": ("\n\n", "é")},
    **{"token_ids": (8, 9, 10), "finish_reason": FinishReason.STOP},
)
