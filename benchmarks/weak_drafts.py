"""Makes drafts that foresee their target badly, to see what a controller does with them.

    python -m benchmarks.weak_drafts cut build/models/smollm2 build/models/smollm2-cut
    python -m benchmarks.weak_drafts noise demo build/models/demo-draft-noised

A draft of the target's first six layers is almost useless, and expensive. Noise on the demo draft's weights
brings its acceptance from 0.94 to about 0.5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gammaray.demo_pair import resolve_model

__all__ = ["cut", "main", "noise"]


def cut(source: str, out: Path, num_layers: int) -> None:
    """Write a model that has the first layers of another, with its embeddings, last norm and head.

    Raises:
        ValueError: The other has fewer layers.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    if not 0 < num_layers < len(model.model.layers):
        raise ValueError(f"layers: {num_layers}; allowed are 1 to {len(model.model.layers) - 1}")
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    _save(model, source, out)


def noise(source: str, out: Path, strength: float, seed: int = 0) -> None:
    """Write a model with Gaussian noise on its matrices, of `strength` times the deviation of each matrix."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                drawn = torch.randn(parameter.shape, generator=generator) * parameter.float().std()
                parameter.add_((strength * drawn).to(parameter.dtype))
    _save(model, source, out)


def _save(model: torch.nn.Module, source: str, out: Path) -> None:
    model.save_pretrained(out)  # type: ignore[operator]
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def main() -> int:
    """Make one draft; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=("cut", "noise"))
    parser.add_argument("source", help='directory or hub name, or "demo": the demo pair\'s draft')
    parser.add_argument("out", type=Path, help="the directory to create")
    parser.add_argument("--layers", type=int, default=6, help="of a cut model")
    parser.add_argument("--strength", type=float, default=0.35, help="noise over a matrix's deviation")
    options = parser.parse_args()
    if options.out.exists():
        print(f"weak_drafts: {options.out} exists", file=sys.stderr)
        return 1
    source = resolve_model(options.source, "draft")
    if options.kind == "cut":
        cut(source, options.out, options.layers)
    else:
        noise(source, options.out, options.strength)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
