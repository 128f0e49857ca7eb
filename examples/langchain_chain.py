"""A LangChain chain that pastes passages into its prompt, in front of `blend serve`. Only the base URL differs from OpenAI's.

blend serve --store my-store
python examples/langchain_chain.py
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

PASSAGES = [
    "The harbour of Port Rowan has seven gates. The oldest was built in 1672. " * 4,
    "The bell of Port Rowan weighs two tonnes and rings at noon. " * 4,
]


def main() -> None:
    """Ask one question over two passages."""
    url = os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1")
    model = os.environ.get("KVBLEND_MODEL", "qwen2.5-coder-0.5b")
    llm = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=64)  # type: ignore[arg-type, call-arg]
    prompt = ChatPromptTemplate.from_messages([("user", "{passages}\n\n{question}")])
    chain = prompt | llm | StrOutputParser()
    print(chain.invoke({"passages": "\n\n".join(PASSAGES), "question": "How heavy is the bell?"}))


if __name__ == "__main__":
    main()
