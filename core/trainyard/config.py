"""YAML or a dict in, a validated :class:`RunConfig` out; and from its words the plugins, stores and trainables they mean."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from trainyard import plugins
from trainyard.delivery import OnError, TrackerSpec
from trainyard.errors import ConfigError, PluginConfigError, unknown
from trainyard.records import Result
from trainyard.redaction import hide, resolve_environment, secret_values
from trainyard.resources import Resources
from trainyard.rundir import check_name, safe_name
from trainyard.storage import CheckpointPolicy, LocalStore
from trainyard.values import flatten

__all__ = [
    "FailurePolicy",
    "RunConfig",
    "StopRule",
    "load_trainable",
    "open_storage",
    "parse_config",
    "read_yaml",
    "split_trackers",
    "tracker_specs",
]

DEFAULT_STORAGE = "./runs"
DEFAULT_EXPERIMENT = "default"
DEFAULT_TRACKERS = ("json", "csv")

_OURS = ("run.json", "error.txt", "journal", "delivery", "checkpoints", "artifacts")  # names in a run directory

_COMMON_OPTIONS = ("type", "include", "exclude", "on_error")


DeliveryMode = Literal["process", "thread"]


class FailurePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config key ``failures``.

    Attributes:
        max_failures: how often a failed run goes on from its newest checkpoint; -1: for ever.
    """

    max_failures: int = 0


class RunConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One run, as YAML or :func:`trainyard.run` describe it. The words are the same in both.

    Attributes:
        trainable: ``module:name`` or ``path.py:name``; in Python also the class or function itself.
        config: handed to the trainable; ``${env:NAME}`` is resolved at use and never written resolved.
        experiment: the named set of runs that this one belongs to.
        name: its directory's name; default ``<trainable>_<id>``.
        stop: metric to threshold (stops at or above; nested names joined with ``/``), or in Python a callable.
        trackers: instance name to options, a list of names, or in Python plugin objects.
        storage: where run directories live.
        checkpoint: when to save, what to keep.
        resources: what the run needs.
        executor: where it runs: ``inline``, this process.
        failures: what happens after an exception.
        resume: ``never``; ``allow``: go on with the named, or the newest unfinished run, if there is one; ``must``.
        log_to_file: copy stdout and stderr into the run directory: true, one file's name, or two.
        delivery: who delivers to the trackers: ``process``, one beside the training process; ``thread``, threads in it.
        tags: free words, kept with the run.
        chdir: make the run directory the working directory while it runs.
    """

    trainable: Any
    config: dict[str, Any] = {}
    experiment: str = DEFAULT_EXPERIMENT
    name: str | None = None
    stop: Any = None
    trackers: Any = DEFAULT_TRACKERS
    storage: str = DEFAULT_STORAGE
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    resources: dict[str, Any] | None = None
    executor: str = "inline"
    failures: FailurePolicy = FailurePolicy()
    resume: Literal["never", "allow", "must"] = "never"
    log_to_file: bool | str | list[str] = False
    delivery: DeliveryMode = "process"
    tags: dict[str, str] = {}
    chdir: bool = False


class Source(msgspec.Struct):
    """A mapping that was read from YAML, and where its keys stand; relative trainables may lie in `directory`."""

    file: str
    directory: str
    data: dict[str, Any]
    lines: dict[str, int]
    overridden: set[str] = set()
    environment: dict[str, str] = {}

    def place(self, path: str) -> str:
        """``file:line: path`` for a key path, or for the nearest one above it; ``--set path`` for an override."""
        if variable := self.environment.get(path.partition(".")[0]):
            return f"{variable}: {path}"
        if not self.file:
            return path
        for key in self.overridden:
            if f"{path}.".startswith(f"{key}.") or (path and path not in self.lines and key.startswith(f"{path}.")):
                return f"--set {path}"
        at = path
        while at and at not in self.lines:
            at = at.rpartition(".")[0]
        line = f":{self.lines[at]}" if at in self.lines else ""
        return f"{self.file}{line}: {path}" if path else f"{self.file}{line}"


def read_yaml(path: str | os.PathLike[str]) -> Source:
    """Read a YAML file, by ``safe_load``.

    Raises:
        ConfigError: no such file, no YAML, or not a mapping; with file and line.
    """
    import yaml

    file = os.fspath(path)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        data = load_yaml(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping with the key 'trainable', found {_what(data)}")
    lines: dict[str, int] = {}
    _note_lines(node, "", lines, file)
    return Source(file, os.path.dirname(os.path.abspath(file)), data, lines)


def load_yaml(text: str) -> Any:
    """One YAML document, by the safe loader; ``1e-3`` is a number, as in YAML 1.2, where PyYAML sees a string."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader=Loader)


def _note_lines(node: Any, path: str, lines: dict[str, int], file: str) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            where = f"{path}.{key.value}" if path else str(key.value)
            line = key.start_mark.line + 1
            if where in lines and key.value != "<<":
                raise ConfigError(
                    f"{file}:{line}: the key {where!r} stands here twice, first in line {lines[where]}: keep one"
                )
            lines[where] = line
            _note_lines(value, where, lines, file)


def apply_overrides(source: Source, overrides: Iterable[str]) -> None:
    """Apply ``--set a.b=value`` to what was read; the value is YAML.

    Raises:
        ConfigError: no ``=``, not YAML, or a path through something that is no mapping.
    """
    import yaml

    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            raise ConfigError(f"--set {text}: expected KEY=VALUE, as in --set config.lr=0.01")
        into = source.data
        for i, key in enumerate(keys[:-1]):
            if into.get(key) is None:
                into[key] = {}
            if not isinstance(into[key], dict):
                raise ConfigError(f"--set {text}: {'.'.join(keys[: i + 1])} is {_what(into[key])}, which has no keys")
            into = into[key]
        try:
            into[keys[-1]] = load_yaml(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {text}: the value is not valid YAML; quote it") from None
        source.overridden.add(path)


def parse_config(data: Mapping[str, Any], source: Source | None = None) -> RunConfig:
    """Validate a mapping. What it leaves out comes from the environment, then from the defaults.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value that cannot be; with file, line and key path.
    """

    source = source or Source("", "", dict(data), {})
    place = source.place
    check_keys(data, RunConfig, "", place)
    for key, kind in (("checkpoint", CheckpointPolicy), ("failures", FailurePolicy)):
        if isinstance(data.get(key), Mapping):
            check_keys(data[key], kind, key, place)
    if "trainable" not in data:
        raise ConfigError(
            f"{place('')}: the key 'trainable' is missing: name one as module:name or path.py:name".lstrip(": ")
        )
    values = {key: value for key, value in data.items() if value is not None}
    for key, (variable, value) in _from_environment().items():
        if key not in values:
            values[key] = value
            source.environment[key] = variable
    for key in ("storage",):
        if isinstance(values.get(key), os.PathLike):
            values[key] = os.fspath(values[key])
    try:
        config = msgspec.convert(values, RunConfig)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `")
        path = re.sub(r"\[(\.\.\.|\d+)\]", "", at.rstrip("`").removeprefix("$")).lstrip(".")
        raise ConfigError(f"{place(path)}: {what[0].lower()}{what[1:].replace('`', '')}") from None
    if "config" in values and isinstance(values["config"], dict):
        config.config = values["config"]  # the user's own object, which a conversion would have copied
    _check_values(config, place)
    return config


def check_keys(data: Mapping[str, Any], kind: type, path: str, place: Callable[[str], str]) -> None:
    """Refuse keys that a struct does not have.

    Raises:
        ConfigError: naming the place and the nearest key.
    """
    known = msgspec.structs.fields(kind)
    names = [field.name for field in known]
    for key in data:
        if key not in names:
            where = f"{path}.{key}" if path else str(key)
            raise ConfigError(f"{place(where)}: {unknown('key', str(key), names, label='keys')}")


def _check_values(config: RunConfig, place: Callable[[str], str]) -> None:
    policy = config.checkpoint
    if policy.keep is not None and policy.keep < 1:
        raise ConfigError(
            f"{place('checkpoint.keep')}: keep at least 1 checkpoint, not {policy.keep}; leave it out to keep all"
        )
    if policy.every < 0:
        raise ConfigError(f"{place('checkpoint.every')}: a number of iterations, 0 or more, not {policy.every}")
    if config.executor != "inline":
        raise ConfigError(f"{place('executor')}: {unknown('executor', config.executor, ['inline'])}")
    check_name(config.experiment, place("experiment"))
    if config.name is not None:
        check_name(config.name, place("name"))
    StopRule.check(config.stop, place)
    names = [config.log_to_file] if isinstance(config.log_to_file, str) else config.log_to_file or []
    for name in names if isinstance(names, list) else []:
        if name in _OURS or name != safe_name(name):
            raise ConfigError(f"{place('log_to_file')}: {name!r} cannot be a file for output in the run directory")
    if isinstance(config.log_to_file, list) and len(config.log_to_file) != 2:
        raise ConfigError(f"{place('log_to_file')}: true, one file's name, or two of them for stdout and stderr")
    Resources.parse(config.resources, place("resources"))


def _from_environment() -> dict[str, tuple[str, Any]]:
    """What the environment says: key to variable and value."""
    found: dict[str, tuple[str, Any]] = {}
    for key in ("storage", "experiment", "trackers"):
        variable = f"TRAINYARD_{key.upper()}"
        text = os.environ.get(variable)
        if text:
            names = [name.strip() for name in text.split(",") if name.strip()]
            found[key] = (variable, names if key == "trackers" else text)
    return found


class StopRule:
    """The config key ``stop``: thresholds on metrics, or a callable.

    Args:
        rule: a mapping of metric to threshold, a callable ``(result) -> bool``, or None.
    """

    def __init__(self, rule: Mapping[str, float] | Callable[[Result], bool] | None) -> None:
        self._call = rule if callable(rule) else None
        self._thresholds = dict(rule) if isinstance(rule, Mapping) else {}

    @staticmethod
    def check(rule: Any, place: Callable[[str], str] = str) -> None:
        """Raise ConfigError for something that is no rule."""
        if rule is None or callable(rule):
            return
        if not isinstance(rule, Mapping):
            raise ConfigError(f"{place('stop')}: expected a mapping of metric to threshold, not {_what(rule)}")
        for metric, threshold in rule.items():
            if isinstance(threshold, bool) or not isinstance(threshold, int | float):
                raise ConfigError(f"{place(f'stop.{metric}')}: the threshold is a number, not {threshold!r}")

    def __call__(self, result: Result) -> bool:
        if self._call is not None:
            return bool(self._call(result))
        for metric, threshold in self._thresholds.items():
            value = _look_up(result.metrics, metric)
            if isinstance(value, int | float) and value >= threshold:
                return True
        return False

    def unseen(self, metrics: Mapping[str, Any]) -> list[str]:
        """A warning for each metric that these do not have."""
        missing = [metric for metric in self._thresholds if _look_up(metrics, metric) is None]
        if not missing:
            return []
        names = [name for name, _ in flatten({k: v for k, v in metrics.items() if k != "config"})]
        return [f"stop: {unknown('metric', metric, names, label='the results have')}" for metric in missing]

    @property
    def iterations(self) -> int | None:
        """The number of iterations that it stops at, if it says one."""
        limit = self._thresholds.get("training_iteration")
        return None if limit is None else int(limit)


def _look_up(metrics: Mapping[str, Any], name: str) -> Any:
    value = metrics.get(name)
    return dict(flatten(metrics)).get(name) if value is None and "/" in name else value


def tracker_specs(trackers: Any, place: Callable[[str], str] = str, *, check: bool = True) -> list[TrackerSpec]:
    """The trackers that a config names, each built once to be sure that it can be.

    Args:
        trackers: a mapping of instance name to options, or a list of names, one-entry mappings and plugin objects.
        place: words the place of a key path.

    Raises:
        ConfigError, PluginNotFound, PluginBroken, PluginConfigError: with the place.
    """
    specs: list[TrackerSpec] = []
    alone: dict[type, str] = {}  # those of which a run has one, by their class
    for name, given in split_trackers(trackers, place):
        if any(spec.name == name for spec in specs):
            raise ConfigError(
                f"{place('trackers')}: two trackers are named {name!r}: name one of them otherwise and give its 'type'"
            )
        where = place(f"trackers.{name}")
        if isinstance(given, Mapping):
            specs.append(_named_spec(name, given, where))
            if not check:
                plugins.find(specs[-1].type, what="tracker", where=where)
                continue
            plugin = specs[-1].build()
        else:
            plugin = plugins.hold(name, given)
            specs.append(TrackerSpec(name, type(given).__name__, functools.partial(_same, plugin)))
        _check_is_tracker(plugin, where)
        kind = type(plugin.instance)
        if getattr(kind, "one_per_run", False) and alone.setdefault(kind, name) != name:
            raise ConfigError(
                f"{where}: it would write the same files as the tracker {alone[kind]!r}: keep one of them"
            )
    return specs


def _same(plugin: plugins.Plugin) -> plugins.Plugin:
    return plugin


def named_trackers(trackers: Any) -> dict[str, Any]:
    """The trackers that can be built anew in another process: not the plugin objects, nor those with objects as options."""
    named = split_trackers(trackers, str)
    return {name: dict(given) for name, given in named if isinstance(given, Mapping) and is_plain(given)}


def check_tracker_name(name: Any, where: str) -> None:
    """Refuse what cannot be the name of a tracker and of its files."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{where}: {name!r} is no name for a tracker: use letters, digits, '.', '_' and '-'")


def is_plain(value: Any) -> bool:
    """Whether a value is the same after it was written as JSON and read again; a path becomes its text."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(key) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if isinstance(value, str | os.PathLike):
        return not re.search("[\ud800-\udfff]", str(os.fspath(value)))
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) is bool


def split_trackers(trackers: Any, place: Callable[[str], str]) -> list[tuple[str, Any]]:
    """The trackers of a config, whichever way they are written: name and options, or name and plugin object."""
    return list(_each_tracker(trackers, place))


def _each_tracker(trackers: Any, place: Callable[[str], str]) -> Iterable[tuple[str, Any]]:
    if isinstance(trackers, Mapping):
        items: list[tuple[Any, Any]] = list(trackers.items())
    elif isinstance(trackers, Sequence) and not isinstance(trackers, str):
        items = []
        for entry in trackers:
            if isinstance(entry, str):
                items.append((entry, {}))
            elif isinstance(entry, Mapping):
                items.extend(entry.items())
            else:
                taken = [name for name, _ in items]
                name = plain = type(entry).__name__
                while name in taken:
                    name = f"{plain}-{taken.count(plain) + 1}"
                    taken.append(plain)
                items.append((name, entry))
    else:
        raise ConfigError(
            f"{place('trackers')}: expected a mapping of names to options, or a list of names, not {_what(trackers)}"
        )
    for name, options in items:
        check_tracker_name(name, place("trackers"))
        if (
            options is not None
            and not isinstance(options, Mapping)
            and (isinstance(trackers, Mapping) or isinstance(options, str | int | float | list))
        ):
            raise ConfigError(f"{place(f'trackers.{name}')}: expected a mapping of options, not {_what(options)}")
        yield name, {} if options is None else options


def _named_spec(name: str, given: Mapping[str, Any], where: str) -> TrackerSpec:
    kind = given.get("type", name)
    on_error: OnError = given.get("on_error", "spool")
    if on_error not in ("spool", "drop", "raise"):
        raise PluginConfigError(f"{where}.on_error: one of spool, drop, raise, not {on_error!r}")
    options = {option: value for option, value in given.items() if option not in _COMMON_OPTIONS}

    secrets = secret_values(options)

    def build() -> plugins.Plugin:
        try:
            resolved = resolve_environment(options, where)
            return plugins.build(kind, resolved, as_name=name, what="tracker", where=where)
        except PluginConfigError as error:
            raise PluginConfigError(hide(str(error), secrets)) from None if secrets else error.__cause__

    globs = {key: _globs(given.get(key), f"{where}.{key}") for key in ("include", "exclude")}
    return TrackerSpec(name, kind, build, on_error=on_error, secrets=secrets, options=dict(given), **globs)


def _globs(given: Any, where: str) -> tuple[str, ...]:
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise PluginConfigError(f"{where}: expected a list of globs on metric names, such as ['val/*'], not {given!r}")
    return tuple(names)


def _check_is_tracker(plugin: plugins.Plugin, where: str) -> None:
    if not any(hook.startswith("log_") for hook in plugin.hooks):
        raise ConfigError(f"{where}: the plugin {plugin.name!r} is a {plugins.kind_of(plugin.hooks)}, not a tracker")


def open_storage(url: str, place: str = "storage") -> LocalStore:
    """Open the store that a path or URL names. Only the plugin of its scheme is loaded.

    Raises:
        PluginNotFound: nothing installed opens that scheme.
        ConfigError: the store is not on this machine.
    """
    url = resolve_environment(url, place)
    scheme = urlsplit(url).scheme if "://" in url else "file"
    plugin = plugins.build(scheme, what="store", where=place)
    store, _ = plugins.ask([plugin], "open_store", url=url, options={})
    if store is None:
        raise ConfigError(f"{place}: {url!r}: the plugin {scheme!r} does not open it")
    if not isinstance(store, LocalStore):
        raise ConfigError(f"{place}: {url!r}: runs live on local disks only in this version: name a directory")
    return store


def load_trainable(spec: str, beside: str | None = None, place: str = "trainable") -> Any:
    """Import what ``module:name`` or ``path.py:name`` means.

    Args:
        spec: the words.
        beside: a directory where a relative path is looked for after the working directory.
        place: where the words stand, for messages.

    Raises:
        ConfigError: there is no such file, module or name, or importing it failed.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{place}: {spec!r} is no trainable: write module:name or path.py:name")
    if module_name.endswith(".py"):
        module = _load_file(module_name, beside, place)
    else:
        with _searching(os.getcwd()):
            try:
                module = importlib.import_module(module_name)
            except (Exception, SystemExit) as error:
                raise ConfigError(f"{place}: cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    found = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            candidates = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(
                f"{place}: {unknown('trainable', name, candidates, label=f'{module_name} has')}"
            ) from None
    return found


def _load_file(path: str, beside: str | None, place: str) -> Any:
    file = Path(path)
    if not file.is_file() and beside is not None and not file.is_absolute():
        file = Path(beside) / path
    if not file.is_file():
        raise ConfigError(f"{place}: there is no file {path} in {os.getcwd()}")
    file = file.resolve()
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    name = file.stem if loaded is None else f"{file.stem}_{abs(hash(str(file))):x}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # so that it finds its neighbours, as a script does
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{place}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


@contextlib.contextmanager
def _searching(directory: str) -> Any:
    if directory in sys.path:
        yield
        return
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def _what(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"{type(value).__name__} {str(value)[:40]!r}"
