"""gammaray's SDK with asyncio: several completions at once, one of them cancelled half-way.

pip install gammaray
python examples/sdk_async.py [ADDRESS]           # localhost:9000 by default
"""

import asyncio
import sys
from contextlib import aclosing

import gammaray

PROMPTS = ("def read_lines(path):", "import os\n", "class Stack:")


async def main(address: str) -> None:
    async with gammaray.AsyncClient(address) as client:
        completions = (
            client.complete(prompt, max_tokens=48, temperature=0, timeout_s=60) for prompt in PROMPTS
        )
        answers = await asyncio.gather(*completions, return_exceptions=True)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            # Errors are typed: InvalidArgumentError names the field, for instance.
            if isinstance(answer, gammaray.GammarayError):
                print(f"{prompt!r} failed: {answer}", file=sys.stderr)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                print(prompt + answer.text, end="\n\n")

        # Closing the stream ends the session on the cluster.
        async with aclosing(client.generate("def main():", max_tokens=1024, seed=1)) as chunks:
            received = 0
            async for chunk in chunks:
                received += len(chunk.tokens)
                if received >= 16:
                    break
        print("cancelled")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["localhost:9000"]))
