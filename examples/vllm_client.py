"""Ask vLLM with kvblend inside (docs/vllm.md). The request is vLLM's own, with documents; the reply shows what was blended.

python examples/vllm_client.py
"""

import os

import httpx

DOCUMENTS = [
    {"title": "Harbour", "text": "The harbour of Port Rowan has seven gates. The oldest was built in 1672. " * 4},
    {"title": "Bell", "text": "The bell of Port Rowan weighs two tonnes and rings at noon. " * 4},
]


def main() -> None:
    """Ask the same thing twice: the first request finds nothing in the store."""
    with httpx.Client(base_url=os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1"), timeout=300) as client:
        model = client.get("/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "How many gates does the harbour have?"}],
            "documents": DOCUMENTS,
            "max_tokens": 16,
        }
        for _ in range(2):
            reply = client.post("/chat/completions", json=body).raise_for_status().json()
            print(reply["choices"][0]["message"]["content"])
            print(f"  {reply.get('kvblend', {}).get('figures')}")


if __name__ == "__main__":
    main()
