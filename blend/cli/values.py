"""What options and arguments may be: numbers within their limits, text, paths."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from blend.errors import ConfigError
from blend.limits import NUMBERS, Limits, is_text, shown
from blend.select import make_selector
from blend.store.addresses import is_address

F = TypeVar("F", bound=Callable[..., Any])


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A number within limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.name = "integer" if limits.whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        """Parsed as Python does."""
        try:
            return self.limits.parsed(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class _Text(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """Text in UTF-8, whatever the locale: Python holds bytes that are not in the locale's encoding as surrogates."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is."""
        try:
            return str(value) if is_text(value) else os.fsencode(value).decode("utf-8")
        except UnicodeError:
            self.fail(f"{shown(value)} is not UTF-8 text", param, ctx)


class _Name(_Text):
    """Text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is."""
        if not value.strip():
            self.fail("the name is empty", param, ctx)
        return super().convert(value, param, ctx)


class _Selector(_Text):
    """A spec of a selector, checked as far as it can be without a model."""

    name = "spec"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The spec without what is at its default anyway."""
        try:
            return make_selector(super().convert(value, param, ctx)).spec
        except ConfigError as error:
            self.fail(f"{error}; `blend selectors` lists all", param, ctx)


class _Place(click.Path):
    """A path; any bytes will do, as the file system has it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`."""
        if not str(value):
            self.fail("the path is empty", param, ctx)
        if str(value) == "-" and not self.dir_okay and not self.allow_dash:
            self.fail("this goes to a file, not to standard output; name one", param, ctx)
        return super().convert(value, param, ctx)


class _HomePlace(_Place):
    """A path in which ~ is the home directory, as it may stand in an environment variable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`."""
        place = super().convert(value, param, ctx)
        try:
            return place.expanduser()
        except RuntimeError:
            self.fail(f"{shown(value)}: no such user", param, ctx)


class _StorePlace(_HomePlace):
    """The same, or an address."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`, or the text of an address."""
        try:
            elsewhere = is_address(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return value if elsewhere else super().convert(value, param, ctx)


SELECTOR = _Selector()
TEXT = _Text()
NAME = _Name()
PLACE = _Place(path_type=Path)
STORE = _StorePlace(path_type=Path)
STORE_DIRECTORY = _HomePlace(path_type=Path, file_okay=False)
FOLDER = _Place(path_type=Path, file_okay=False)
OUTPUT = _Place(path_type=Path, dir_okay=False)
OUTPUT_OR_STDOUT = _Place(path_type=Path, dir_okay=False, allow_dash=True)


def number(flag: str, name: str, words: str, **attributes: Any) -> Callable[[F], F]:
    """An option with the limits that `blend.limits` has for `name`, which its help shows."""
    limits = NUMBERS[name]
    return click.option(flag, name, type=Number(limits), help=f"{words}  [{limits.span}]", **attributes)
