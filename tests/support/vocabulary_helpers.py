"""Small tokenizers of both kinds whose tokens have known bytes, and models that have them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CODE = """def fib(n):
    if n < 2:
        return n
    return fib(n - 1) + fib(n - 2)


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
"""
PROSE = "The quick brown fox jumps over the lazy dog, and the dog returns the call of the fox. " * 3


def byte_level(
    text: str, size: int, *, specials: Sequence[str] = ("<|end|>",), specials_last: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on a text, with at most `size` tokens and the specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[] if specials_last else list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[0])


def byte_fallback(words: Sequence[str], *, bos: bool = True, num_bytes: int = 256) -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like BPE tokenizer: "▁" for spaces, <0xNN> for bytes without a piece."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(num_bytes))]
    merges: list[tuple[str, str]] = []
    for word in words:
        piece = word[0]
        names += [c for c in word if c not in names]
        for character in word[1:]:
            if (piece, character) not in merges:
                merges.append((piece, character))
            piece += character
            if piece not in names:
                names.append(piece)
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in ("<unk>", "<s>", "</s>")])
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def word_pieces() -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer, whose tokens have no known bytes."""
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def single_bytes(order: Sequence[int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte and one special token, the last; `order` is the id of each."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
    vocabulary = {alphabet[byte]: token_id for byte, token_id in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def renumbered(source: Path, copy: Path, order: Sequence[int]) -> Path:
    """Save a copy of a model in which token i has the id order[i]; no token's score changes."""
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    with torch.no_grad():
        for weight in weights[: 1 if model.config.tie_word_embeddings else 2]:
            moved = torch.empty_like(weight)
            moved[list(order)] = weight
            weight.copy_(moved)
    model.save_pretrained(copy)
    return copy
