"""What is heavy is loaded when it is first asked for, once, whichever threads ask."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar, overload

_Value = TypeVar("_Value")


class Loading(Protocol):
    """Has properties that are loaded once. loading: held by whoever loads one of them."""

    loading: RLock


class loaded_once(Generic[_Value]):  # noqa: N801
    """A property whose value is computed at first use and kept, as `functools.cached_property` does.

    That one keeps threads apart no more since Python 3.12: each of several that ask at once would load a model of its own. One
    lock for all of an object's, because loading one asks for others.
    """

    def __init__(self, load: Callable[[Any], _Value]) -> None:
        self._load, self.__doc__ = load, load.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> loaded_once[_Value]: ...
    @overload
    def __get__(self, instance: Loading, owner: type) -> _Value: ...
    def __get__(self, instance: Loading | None, owner: type) -> _Value | loaded_once[_Value]:
        """Found by Python only until the value stands in the object itself."""
        if instance is None:
            return self
        with instance.loading:
            if self._name not in vars(instance):
                vars(instance)[self._name] = self._load(instance)
            value: _Value = vars(instance)[self._name]
        return value
