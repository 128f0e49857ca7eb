"""Servers of models with tools, one a family of chat templates."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rooms import serving
from served import Served, listening
from tool_templates import SPECIAL, TEMPLATES

from tests.tiny_model import save_tiny_model

FAMILIES = tuple(TEMPLATES)
TEXT = "What is the weather in Paris? Sunny and mild, the function says. name arguments parameters city"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The weather in Paris?"}]


@contextmanager
def servers(folder: Path, save: Callable[[Path, str], Path]) -> Iterator[Callable[[str], Served]]:
    """Starts the server of a model when it is needed first. save: makes the model of this name in a folder."""
    with ExitStack() as stack:

        @cache
        def start(name: str) -> Served:
            model = save(folder / name, name)
            service = stack.enter_context(serving(folder / f"store of {name}", model, learn_budget=0))
            return stack.enter_context(listening(service))

        yield start


def families(folder: Path) -> AbstractContextManager[Callable[[str], Served]]:
    """The servers of all families."""
    return servers(
        folder, lambda place, name: save_tiny_model(place, TEXT, template=TEMPLATES[name], special=SPECIAL[name])
    )


def chat_text(served: Served, messages: list[Any], **more: Any) -> str:
    """What chat completions answer in twelve tokens."""
    with served.openai() as client:
        answer = client.chat.completions.create(model=served.model, messages=messages, max_tokens=12, **more)
    return str(answer.choices[0].message.content)
