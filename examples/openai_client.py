"""OpenAI's own client: a completion with gammaray's options, then a streamed chat.

pip install openai
python examples/openai_client.py [BASE_URL]      # http://localhost:8000/v1 by default
"""

import sys

from openai import OpenAI


def main(base_url: str) -> None:
    # The key is only checked on servers that have API keys.
    with OpenAI(base_url=base_url, api_key="none") as client:
        model = client.models.list().data[0].id
        completion = client.completions.create(
            model=model,
            prompt="def read_lines(path):",
            max_tokens=48,
            temperature=0,
            extra_body={"gammaray": {"gamma": "adaptive"}},
        )
        print(completion.choices[0].text)
        # Fields that OpenAI's types do not have are in `model_extra`, and are attributes.
        summary = (completion.model_extra or {})["gammaray"]
        print(f"{summary['tokens_per_cycle']:.2f} tokens per cycle", file=sys.stderr)

        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Write a function that reads a file."}],
            max_tokens=48,
            seed=1,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                print(chunk.choices[0].delta.content, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://localhost:8000/v1"])
