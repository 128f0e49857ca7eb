"""Chat with `blend serve` in a terminal: answers stream, and each comes with its time to first token.

blend serve --store my-store
python examples/chat.py

Answers come from the server's corpus, out of eight passages (KVBLEND_TOP_K). An empty line or Ctrl-D ends the chat.
"""

import os
from time import perf_counter
from typing import Any

from openai import OpenAI

PASSAGES = int(os.environ.get("KVBLEND_TOP_K", "8"))


def main() -> None:
    """Ask what is typed, until an empty line."""
    client = OpenAI(base_url=os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    model = client.models.list().data[0].id
    messages: list[dict[str, str]] = []
    while question := _question():
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(client, model, messages)})


def _question() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


def answer(client: Any, model: str, messages: list[dict[str, str]]) -> str:
    """Print the answer as it comes, with its time to first token; passages come from the server's corpus."""
    start = perf_counter()
    words: list[str] = []
    seconds = 0.0
    retrieve = {"kvblend": {"retrieve": {"top_k": PASSAGES}}}
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=64, stream=True, extra_body=retrieve
    )
    figures: dict[str, Any] = {}
    for part in stream:
        figures |= (part.model_extra.get("kvblend") or {}).get("figures", {})  # kvblend's own part of the stream
        text = part.choices[0].delta.content if part.choices else None
        if text:
            seconds = seconds or perf_counter() - start
            words.append(text)
            print(text, end="", flush=True)
    rows = f"{figures['rows_computed']:,} of {figures['rows']:,} rows computed"
    print(f"\n\033[2m[first token after {seconds:.1f} s, {rows}]\033[0m")
    return "".join(words)


if __name__ == "__main__":
    main()
