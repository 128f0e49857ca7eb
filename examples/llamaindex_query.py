"""`blend serve` as the LLM of LlamaIndex. The server searches its own corpus: the model's name ends in `+corpus`.

blend corpus docs-to-ask --module=csv && blend precompute docs-to-ask --store my-store
blend serve --store my-store
python examples/llamaindex_query.py "How do I get a csv writer that takes dictionaries?"
"""

import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    """Ask one question."""
    url = os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1")
    model = os.environ.get("KVBLEND_MODEL", "qwen2.5-coder-0.5b")
    server = {"model": f"{model}+corpus", "api_base": url, "api_key": "none", "is_chat_model": True, "timeout": 300}
    llm = OpenAILike(**server, max_tokens=128, temperature=0)
    messages = [("system", "Answer in one sentence."), ("user", sys.argv[1])]
    print(llm.chat([ChatMessage(role=role, content=text) for role, text in messages]).message.content)


if __name__ == "__main__":
    main()
