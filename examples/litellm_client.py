"""LiteLLM in front of `blend serve`: a question with its documents, whole and streamed.

blend serve --store my-store
python examples/litellm_client.py
"""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or LiteLLM fetches prices when it is imported

import litellm

DOCUMENTS = [
    {"title": "Harbour", "text": "The harbour of Port Rowan has seven gates. The oldest was built in 1672. " * 4},
    {"title": "Bell", "text": "The bell of Port Rowan weighs two tonnes and rings at noon. " * 4},
]


def main() -> None:
    """Ask twice."""
    asked = {
        "model": f"openai/{os.environ.get('KVBLEND_MODEL', 'qwen2.5-coder-0.5b')}",
        "api_base": os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1"),
        "api_key": "none",
        "messages": [{"role": "user", "content": "How heavy is the bell?"}],
        "max_tokens": 64,
        "extra_body": {"documents": DOCUMENTS},
    }
    answer = litellm.completion(**asked)
    print(answer.choices[0].message.content)
    print(f"{answer.usage.prompt_tokens} tokens of prompt")
    for part in litellm.completion(**asked, stream=True):
        print(part.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
