"""Servers of models with tools, one a family of chat templates."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
def families(folder: Path) -> Iterator[Callable[[str], Served]]:
    """Starts the server of a family when it is needed first."""
    with ExitStack() as stack:

        @cache
        def start(family: str) -> Served:
            model = save_tiny_model(folder / family, TEXT, template=TEMPLATES[family], special=SPECIAL[family])
            service = stack.enter_context(serving(folder / f"store of {family}", model, learn_budget=0))
            return stack.enter_context(listening(service))

        yield start
