"""An agent loop with the openai SDK: the model calls a function until it answers, in a form that is fixed beforehand.

blend serve --model MODEL   # one whose chat template has a place for tools, such as qwen2.5-coder-0.5b
python examples/agent_loop.py
"""

import json
import os
from typing import Any

from openai import OpenAI

QUESTION = "Do I need an umbrella in Paris?"


def form(**properties: object) -> dict[str, object]:
    """A schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CITY = form(city={"enum": ["Paris", "Rome"]})
WEATHER = {"name": "weather", "description": "The weather of a city now.", "parameters": CITY, "strict": True}
# Small models like to go on calling functions; with a form they answer or call, and nothing else.
ANSWER = {"name": "answer", "schema": form(answer={"type": "string"}), "strict": True}


def weather(city: str) -> str:
    """What the function says."""
    return {"Paris": "It is raining in Paris, at 12 degrees.", "Rome": "The sun shines in Rome, at 24 degrees."}[city]


def main() -> None:
    """Ask, call, and ask again with the results. A call that was made before is the last one."""
    client = OpenAI(base_url=os.environ.get("KVBLEND_URL", "http://127.0.0.1:8000/v1"), api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    results: dict[str, str] = {}
    choice = "required"
    while True:
        answer = client.chat.completions.create(  # type: ignore[call-overload]  # TypedDicts to the SDK
            model=model,
            messages=messages,
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice=choice,
            parallel_tool_calls=False,
            response_format={"type": "json_schema", "json_schema": ANSWER},
            max_tokens=64,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        [call] = message.tool_calls
        arguments = call.function.arguments
        choice = "none" if arguments in results else "auto"
        results[arguments] = weather(**json.loads(arguments))
        print(f"weather({arguments}): {results[arguments]}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": results[arguments]})
    print(json.loads(message.content)["answer"])


if __name__ == "__main__":
    main()
