"""Processing of logits to distributions for one cycle, and small grammars."""

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gammaray.grammar.matcher import GrammarCompiler
from gammaray.types import Proposal, SamplingParams
from services.engine.sampling.edits import LogitEdits, row_paths
from services.engine.sampling.logits import processed_log_probs
from tests.support.maths_helpers import paths_of

TOKENS = ("<eos>", "b", "a", "<eot>", "c", "ba", "bc", "ab", "cc", "ac", "1", "bb")
"""The first tokens of the vocabulary of `GRAMMAR`; no other ones are in its texts."""

GRAMMAR = "start: /(c?[ab])*c?a/"
"""Letters a, b and c without two c in a row, the last one an a."""

AB_OR_BA = "start: /(ab|ba){1,2}c?/"
AB_TEXTS = [
    "".join(parts) + end
    for count in (1, 2)
    for parts in itertools.product(("ab", "ba"), repeat=count)
    for end in ("", "c")
]
"""All texts of `AB_OR_BA`."""


def text_of(output: Sequence[int], tokens: Sequence[str]) -> str:
    return "".join(tokens[token_id] for token_id in output).replace("Ġ", " ")


def listed(texts: Sequence[str], output: Sequence[int], tokens: Sequence[str]) -> list[int]:
    """Return the possible tokens after an output of possible tokens, from all texts of the language."""
    text = text_of(output, tokens)
    return [
        token_id
        for token_id, token in enumerate(tokens)
        if (
            text in texts
            if token[:2] == "<e"
            else any(one.startswith(text + token.replace("Ġ", " ")) for one in texts)
        )
    ]


def ids_of(mask: bytes | None) -> list[int] | None:
    bits = np.unpackbits(np.frombuffer(mask or b"", np.uint8), bitorder="little")
    return None if mask is None else [int(token_id) for token_id in np.flatnonzero(bits)]


@cache
def small_compiler(
    tokens: tuple[str, ...], vocab_size: int, eos_token_ids: tuple[int, ...]
) -> GrammarCompiler:
    """Return the compiler for a vocabulary that begins with `tokens`."""
    return GrammarCompiler(small_tokenizer(tokens, eos_token_ids), vocab_size, eos_token_ids)


def small_tokenizer(tokens: tuple[str, ...], eos_token_ids: tuple[int, ...]) -> str:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [tuple(token) for token in tokens if len(token) == 2]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(tokens[token_id], special=True) for token_id in eos_token_ids])
    assert tokenizer.get_vocab_size() == len(tokens)
    return str(tokenizer.to_str())


def follows_grammar(output: Sequence[int], token_id: int, eos: Sequence[int]) -> bool:
    """Return whether `GRAMMAR` allows a token; anything after an end or an impossible token."""
    text = ""
    for one in output:
        if one in eos or not _is_possible(text, one):
            return True
        text += TOKENS[one]
    return text.endswith("a") if token_id in eos else _is_possible(text, token_id)


def _is_possible(text: str, token_id: int) -> bool:
    is_of_text = token_id < len(TOKENS) and set(TOKENS[token_id]) <= set("abc")
    return is_of_text and "cc" not in text + TOKENS[token_id]


def processed(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    proposal: Proposal,
    eos_token_ids: Sequence[int],
) -> Tensor:
    """Process the rows of a proposal as a session's first cycle does."""
    edits = None
    if LogitEdits.needed(params):
        vocab_size, eos = logits.shape[-1], tuple(eos_token_ids)
        grammar = small_compiler(TOKENS, vocab_size, eos).begin(params.grammar) if params.grammar else None
        edits = LogitEdits(params, eos, len(prompt), vocab_size, grammar=grammar)
        edits.follow([*prompt, *output])
    return processed_log_probs(logits, params, edits, row_paths(proposal))


def path_of(proposal: Proposal, row: int) -> list[int]:
    return list(paths_of((), proposal)[row])


def save_small_tokenizer(directory: Path) -> Path:
    """Give a model the tokenizer of `TOKENS`."""
    tokenizer = Tokenizer.from_str(small_tokenizer(TOKENS, (0, 3)))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TOKENS[0]).save_pretrained(directory)
    return directory
