"""Corpus and tokenizer of the demo pair: the running Python's own standard library and its pydoc topics.

    python -m benchmarks.demo_pair.corpus --out build/demo_pair

writes `tokenizer.json` (byte-level BPE), `train.npy` and `held.npy` (uint16 token ids), and `prompts.json`:
pieces of the training split, which `gammaray train` lets the target continue. A document is held out when a
hash of its name says so: the split is the same on every machine and in every Python that has it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.workloads import documents

END_TOKEN = "<|end|>"
"""Stands before every document; begin, end and padding token at once."""
END_ID = 0


def train_tokenizer(texts: Sequence[str], vocab_size: int = 2048) -> Tokenizer:
    """Return a byte-level BPE of `vocab_size` tokens whose id 0 is `END_TOKEN`; it prepends nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> NDArray[np.uint16]:
    """Return the texts one after the other as token ids `[num_tokens]`, `END_ID` before each."""
    ids = [i for encoding in tokenizer.encode_batch(list(texts)) for i in (END_ID, *encoding.ids)]
    return np.array(ids, dtype=np.uint16)


def read_split(directory: Path, split: str) -> NDArray[np.int64]:
    """Return the token ids of `train` or `held`, as written by this script.

    Raises:
        FileNotFoundError: The corpus was not written there.
    """
    path = directory / f"{split}.npy"
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: run `python -m benchmarks.demo_pair.corpus --out {directory}` first"
        )
    return np.load(path).astype(np.int64)


def pieces(texts: Sequence[str], every: int = 1000, length: int = 100) -> list[str]:
    """Return `length` characters of each `every` characters, shuffled."""
    found = [text[start : start + length] for text in texts for start in range(0, len(text), every)]
    random.Random(0).shuffle(found)
    return found


def write(directory: Path, vocab_size: int = 2048, limit: int | None = None) -> dict[str, tuple[int, int]]:
    """Write tokenizer and token ids into `directory`; return documents and tokens per split."""
    directory.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {"train": [], "held": []}
    for document in documents(limit):
        texts["held" if document.is_held_out else "train"].append(document.text)
    tokenizer = train_tokenizer(texts["train"], vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "prompts.json").write_text(json.dumps(pieces(texts["train"])), encoding="utf-8")
    sizes = {}
    for split, members in texts.items():
        ids = encode(tokenizer, members)
        np.save(directory / f"{split}.npy", ids)
        sizes[split] = (len(members), len(ids))
    return sizes


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Corpus and tokenizer of the demo pair.")
    parser.add_argument("--out", type=Path, default=Path("build/demo_pair"), help="where to write")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens of the tokenizer")
    parser.add_argument("--limit", type=int, help="take only this many documents (for a quick try)")
    options = parser.parse_args()
    for split, (files, tokens) in write(options.out, options.vocab_size, options.limit).items():
        print(f"{split}: {files} documents, {tokens} tokens")


if __name__ == "__main__":
    main()
