"""Properties that are loaded at first use, once, whichever threads ask."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar, overload

_Value = TypeVar("_Value")


class Loading(Protocol):
    """Has properties that are loaded once. loading: held by whoever loads one of them."""

    loading: RLock


class loaded_once(Generic[_Value]):  # noqa: N801
    """A `functools.cached_property` that only one thread loads.

    Since Python 3.12 `cached_property` has no lock, so threads could load a model twice. The lock is one per object, because
    loading a property may ask for others.
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
