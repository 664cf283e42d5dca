"""Find plugins by name, build them, hold each in a pluggy manager of its own, and list them.

One manager for each plugin: a failure has one owner, an answer has one name, and no plugin is loaded because another
one is.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, cast

import pluggy

from trainyard.errors import PluginBroken, PluginConfigError, PluginNotFound, unknown
from trainyard.hookspecs import PROJECT, Hooks

__all__ = ["HOOK_NAMES", "Installed", "Plugin", "build", "hold", "installed", "load_class"]

HOOK_NAMES = tuple(name for name, member in vars(Hooks).items() if hasattr(member, f"{PROJECT}_spec"))
"""The names of all hooks, in the order in which things happen."""

_KINDS = {
    "log_results": "tracker",
    "open_store": "store",
    "request_resources": "policy",
    "on_result": "callback",
    "should_stop": "callback",
}


class Installed(NamedTuple):
    """One entry point in the group ``trainyard``."""

    name: str
    module: str
    package: str
    version: str
    entry_point: EntryPoint

    @property
    def place(self) -> str:
        """The package and version, for messages."""
        return f"{self.package} {self.version}"


class Plugin:
    """A built plugin: its name, the object, and typed calls to the hooks it implements.

    Args:
        name: its entry-point name or instance name.
        instance: the object.

    Raises:
        PluginBroken: the object implements a hook that does not exist, or with arguments that do not exist.
    """

    def __init__(self, name: str, instance: object) -> None:
        self.name = name
        self.instance = instance
        wrong = wrong_hook(type(instance))
        if wrong is not None:
            raise PluginBroken(f"plugin {name!r} ({type(instance).__qualname__}): {wrong}")
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        try:
            manager.register(instance, name=name)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginBroken(f"plugin {name!r} ({type(instance).__qualname__}): {error}") from error
        self._hook = manager.hook
        self.hooks = frozenset(hook for hook in HOOK_NAMES if getattr(manager.hook, hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call one hook; a plugin that does not implement it is left in peace.

        Args:
            hook: one of :data:`HOOK_NAMES`.
            arguments: all arguments of that hook.

        Returns:
            A question's answer; None for an event.
        """
        if hook not in self.hooks:
            return None
        return getattr(self._hook, hook)(**arguments)


@functools.cache
def installed() -> tuple[Installed, ...]:
    """All entry points in the group, sorted by name. Scanned once a process; nothing is imported."""
    found = []
    for point in entry_points(group=PROJECT):
        distribution = point.dist
        name, version = (distribution.name, distribution.version) if distribution else ("unknown", "?")
        found.append(Installed(point.name, point.value, name, version, point))
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.package)))


def find(name: str, what: str = "plugin", where: str = "") -> Installed:
    """The installed plugin of that name.

    Args:
        name: the entry point's name.
        what: the kind of thing, for the message.
        where: the place in the config, for the message.

    Raises:
        PluginNotFound: there is none; the message gives the nearest names and how to install one.
        PluginBroken: two packages offer it.
    """
    found = [plugin for plugin in installed() if plugin.name == name]
    if not found:
        raise PluginNotFound(_at(where) + unknown(what, name, _names_of_kind(what), label="installed"))
    if len(found) > 1:
        both = " and ".join(f"{plugin.place} ({plugin.module})" for plugin in found)
        raise PluginBroken(f"{_at(where)}the {what} {name!r} is offered by {both}: uninstall one of them")
    return found[0]


def _names_of_kind(what: str) -> list[str]:
    """The installed plugins of a kind, for a message; those that cannot be imported are left out."""
    names = []
    for plugin in installed():
        with contextlib.suppress(Exception, SystemExit):
            if what == "plugin" or what in kind_of(hooks_of(plugin.entry_point.load())):
                names.append(plugin.name)
    return names


def load_class(name: str, what: str = "plugin", where: str = "") -> type:
    """Import a plugin's class.

    Raises:
        PluginNotFound, PluginBroken: as :func:`find`, or its module cannot be imported.
    """
    plugin = find(name, what, where)
    try:
        loaded = plugin.entry_point.load()
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{_at(where)}the {what} {name!r} of {plugin.place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(loaded, type):
        raise PluginBroken(
            f"{_at(where)}the {what} {name!r} of {plugin.place} is {plugin.module}, which is not a class"
        )
    return loaded


def build(
    name: str, options: Mapping[str, Any] | None = None, *, as_name: str = "", what: str = "plugin", where: str = ""
) -> Plugin:
    """Import a plugin, build it with its options, and hold it.

    Args:
        name: the entry point's name.
        options: the constructor's arguments.
        as_name: the instance's name, if it is another.
        what, where: for messages.

    Raises:
        PluginNotFound, PluginBroken: as :func:`load_class`, or its constructor raised.
        PluginConfigError: it has no such option, lacks one, or refused a value.
    """
    kind = load_class(name, what, where)
    options = dict(options or {})
    place = where or f"{what} {name!r}"
    parameters = options_of(kind)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [option for option, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    if not takes_any:
        for option in options:
            if option not in parameters:
                raise PluginConfigError(f"{_at(place)}{unknown('option', str(option), known, label='options')}")
    for option in known:
        if option not in options and parameters[option].default is inspect.Parameter.empty:
            raise PluginConfigError(f"{_at(place)}the option {option!r} is required")
    try:
        instance = kind(**options)
    except PluginConfigError as error:
        raise PluginConfigError(f"{_at(place)}{error}") from error
    except (TypeError, ValueError) as error:
        raise PluginConfigError(f"{_at(place)}{error}") from error
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{_at(place)}the {what} {name!r} cannot be built: {type(error).__name__}: {error}"
        ) from error
    return hold(as_name or name, instance)


def options_of(kind: type) -> Mapping[str, inspect.Parameter]:
    """A plugin's options: the parameters of its constructor."""
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return {}
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL}


def hold(name: str, instance: object) -> Plugin:
    """Hold a plugin object that somebody built.

    Raises:
        PluginBroken: a class was given instead of an object, or its hooks are wrong.
    """
    if isinstance(instance, type):
        raise PluginBroken(
            f"plugin {name!r} is the class {instance.__name__}: hand over an object, {instance.__name__}(...)"
        )
    return Plugin(name, instance)


def ask(plugins: Iterable[Plugin], question: str, **arguments: Any) -> tuple[Any, Plugin | None]:
    """Ask plugins in order until one answers.

    Returns:
        The answer and who gave it, or ``(None, None)``.
    """
    for plugin in plugins:
        answer = plugin.call(question, **arguments)
        if answer is not None:
            return answer, plugin
    return None, None


def kind_of(hooks: Iterable[str]) -> str:
    """What a plugin is, by the hooks that it implements."""
    return ", ".join(dict.fromkeys(_KINDS[hook] for hook in HOOK_NAMES if hook in hooks and hook in _KINDS)) or "none"


def wrong_hook(kind: type) -> str | None:
    """What is wrong with the hooks that a class marks: a name or an argument that does not exist. None: nothing."""
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if not hasattr(method, f"{PROJECT}_impl"):
            continue
        if name not in HOOK_NAMES:
            return unknown("hook", name, HOOK_NAMES, label="hooks")
        known = [argument for argument in inspect.signature(getattr(Hooks, name)).parameters if argument != "self"]
        for argument in list(inspect.signature(method).parameters)[1:]:
            if argument not in known:
                return f"{name}() has an {unknown('argument', argument, known, label='its arguments')}"
    return None


def hooks_of(kind: type) -> list[str]:
    """The hooks that a class implements, without building it."""
    return [hook for hook in HOOK_NAMES if hasattr(cast("Any", getattr(kind, hook, None)), f"{PROJECT}_impl")]


def _at(where: str) -> str:
    return f"{where}: " if where else ""
