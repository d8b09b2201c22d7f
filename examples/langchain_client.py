"""LangChain: a chain of prompt, model and parser, invoked and streamed.

pip install langchain-openai
python examples/langchain_client.py [BASE_URL]   # http://localhost:8000/v1 by default
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI


def main(base_url: str) -> None:
    with OpenAI(base_url=base_url, api_key="none") as client:
        name = client.models.list().data[0].id
    model = ChatOpenAI(
        model=name,
        base_url=base_url,
        api_key="none",
        temperature=0,
        max_tokens=48,
        extra_body={"gammaray": {"gamma": "adaptive"}},
    )
    prompt = ChatPromptTemplate.from_messages([("user", "Write a function that {task}.")])
    chain = prompt | model | StrOutputParser()
    whole = chain.invoke({"task": "reads a file"})
    print(whole)
    streamed = "".join(chain.stream({"task": "reads a file"}))
    print("the same text when streamed:", streamed == whole)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["http://localhost:8000/v1"])
