"""`blend serve` as the LLM of LlamaIndex. The server searches its own corpus: the model's name ends in `+corpus`.

blend precompute docs/ --store my-store && blend serve --store my-store
python examples/llamaindex_query.py "How do I choose a ratio?"
"""

import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main() -> None:
    """Ask one question."""
    url = os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1")
    model = os.environ.get("KVBLEND_MODEL", "qwen2.5-coder-0.5b")
    llm = OpenAILike(model=f"{model}+corpus", api_base=url, api_key="none", is_chat_model=True, max_tokens=16)
    print(llm.chat([ChatMessage(role="user", content=sys.argv[1])]).message.content)


if __name__ == "__main__":
    main()
