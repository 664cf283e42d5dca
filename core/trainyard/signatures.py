"""Training functions: which arguments they take, and functions with some of them given."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.errors import ConfigError, unknown

__all__ = ["check_signature", "parameters_bound", "takes_reporter"]


def takes_reporter(function: Callable[..., Any]) -> bool:
    """Whether it is of the form of 2019, ``train(config, reporter)``."""
    parameter = inspect.signature(function).parameters.get("reporter")
    return parameter is not None and parameter.default is parameter.empty


def check_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training function that can be called as one.

    Raises:
        ConfigError: it does not take ``(config)`` or ``(config, reporter)``.
    """
    name = getattr(function, "__name__", repr(function))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is no training function: it has no signature") from None
    try:
        signature.bind(*[{}, None] if takes_reporter(function) else [{}])
    except TypeError as error:
        raise ConfigError(
            f"{name}{signature} is no training function, {error}: it takes (config) or (config, reporter); "
            "give it further arguments by with_parameters()"
        ) from None
    return function


def parameters_bound(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with keyword arguments given, its name kept, as a new object.

    Raises:
        ConfigError: it has no argument of such a name.
    """
    known: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):
        known = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for name in parameters:
            if name not in known:
                raise ConfigError(f"with_parameters(): {unknown('argument', name, known, label='arguments')}")
    bound = functools.partial(function, **parameters)
    functools.update_wrapper(bound, function)
    del bound.__wrapped__  # type: ignore[attr-defined]  # or its signature would still ask for them
    return bound
