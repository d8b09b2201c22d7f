"""gammaray's SDK: stream a completion, see what speculation did, and repeat it by its seed.

pip install gammaray
python examples/sdk_sync.py [ADDRESS]            # localhost:9000 by default
"""

import sys

import gammaray

PROMPT = "def read_lines(path):"


def main(address: str) -> None:
    with gammaray.Client(address) as client:
        text = ""
        for chunk in client.generate(PROMPT, max_tokens=64, temperature=0.7):
            print(chunk.text, end="", flush=True)
            text += chunk.text
        print()
        # The last chunk has the summary; every chunk has the seed that was drawn.
        if summary := chunk.summary:
            print(
                f"{summary.tokens_per_cycle:.2f} tokens per cycle, alpha {summary.alpha:.2f}", file=sys.stderr
            )

        # The text depends on prompt, seed and parameters alone: without drafting it is the same.
        plain = client.complete(PROMPT, max_tokens=64, temperature=0.7, seed=chunk.seed, gamma=0)
        print("the same text without drafting:", plain.text == text)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["localhost:9000"])
