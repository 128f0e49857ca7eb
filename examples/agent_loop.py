"""An agent loop with the openai SDK: the model calls a function until it answers.

blend serve --model MODEL   # one whose chat template has a place for tools, such as qwen2.5-coder-0.5b
python examples/agent_loop.py
"""

import json
import os
from typing import Any

from openai import OpenAI

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
STEPS = 4  # the most


def weather(city: str) -> str:
    """What the function says."""
    return {"Paris": "rain, 12 degrees", "Rome": "sun, 24 degrees"}[city]


def main() -> None:
    """Ask, call, and ask again with the results."""
    client = OpenAI(base_url=os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "Do I need an umbrella in Paris?"}]
    for step in range(STEPS):
        choice = "required" if step == 0 else "none" if step == STEPS - 1 else "auto"
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[WEATHER],  # type: ignore[list-item]  # a TypedDict to the SDK
            tool_choice=choice,  # type: ignore[arg-type]
            max_tokens=64,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            result = weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)


if __name__ == "__main__":
    main()
