"""Values that a caller gives by name, checked against the annotation of the parameter they are for.

Python does not look at annotations, so a string for a number would fail deep inside, or worse, pass. Read next:
`presets.py`.
"""

from __future__ import annotations

import operator
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Literal, Union


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises ValueError that lists the names if `value` is none of them."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")


def checked(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` with every value in the type that `function`'s parameter of that name has.

    Raises ValueError that names the parameter and what is allowed.
    """
    hints = typing.get_type_hints(function)
    return {name: conform(name, value, hints[name]) for name, value in given.items()}


def conform(name: str, value: Any, hint: Any) -> Any:
    """`value` as `hint` says: integers of any library become int, numbers float, sequences tuples; nothing is rounded.

    Raises ValueError for anything else, a bool for a number included.
    """
    fits, result = _fit(value, hint)
    if not fits:
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); it must be {describe(hint)}")
    return result


def describe(hint: Any) -> str:
    """The annotation in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return ", ".join(repr(arg) for arg in args)
    if origin is not None and issubclass(origin, Sequence):
        return f"a sequence of {describe(args[0])}" if args else "a sequence"
    names = {int: "an integer", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return next((found for found in (_fit(value, arg) for arg in args) if found[0]), (False, None))
    if hint is Any:
        return True, value
    if origin is Literal:  # which of the names are known is told best by whoever knows them
        return any(type(value) is type(arg) for arg in args), value
    if hint is int:
        return _integer(value)
    if hint is float:
        fits = isinstance(value, Real) and not isinstance(value, bool)
        return fits, float(value) if fits else None
    if isinstance(origin, type) and issubclass(origin, Sequence):
        items = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
            return False, None
        found = [_fit(item, args[0]) for item in items]
        return all(fits for fits, _ in found), tuple(item for _, item in found)
    return (isinstance(value, hint) if isinstance(hint, type) else True), value


def _integer(value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool):
        return False, None
    try:
        return True, operator.index(value)
    except TypeError:
        return False, None
