"""Ask `blend serve` with the openai SDK: documents in the request, the same documents in another order, and a stream.

blend serve --store my-store
python examples/openai_client.py
"""

import os
from typing import Any

from openai import OpenAI

DOCUMENTS = [
    {"title": "Harbour", "text": "The harbour of Port Rowan has seven gates. The oldest was built in 1672. " * 4},
    {"title": "Bell", "text": "The bell of Port Rowan weighs two tonnes and rings at noon. " * 4},
    {"title": "Market", "text": "The market of Port Rowan opens on Saturdays, from six to eleven. " * 4},
]


def main() -> None:
    """Ask twice, then stream."""
    client = OpenAI(base_url=os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    model = client.models.list().data[0].id

    def ask(question: str, documents: list[dict[str, str]], *, stream: bool = False) -> Any:
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            stream=stream,
            extra_body={"documents": documents},
        )

    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        answer = ask("How many gates does the harbour have?", documents)
        figures = answer.kvblend["figures"]  # kvblend's own part of the reply
        print(answer.choices[0].message.content)
        print(f"  {figures['method']}: {figures['rows_computed']} of {figures['rows']} rows computed")

    for part in ask("When does the market open?", DOCUMENTS, stream=True):
        if part.choices:
            print(part.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
