"""trainyard: run a training loop, and never lose what it found out.

A training loop is a :class:`Trainable` or a function that calls :func:`report`; :func:`run` runs it. Everything here
is imported at its first use, so that ``import trainyard`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainyard.version import __version__ as __version__

if TYPE_CHECKING:
    from trainyard.active_run import Run as Run
    from trainyard.active_run import get_run as get_run
    from trainyard.checkpoint import Checkpoint as Checkpoint
    from trainyard.errors import CheckpointCorrupt as CheckpointCorrupt
    from trainyard.errors import CheckpointError as CheckpointError
    from trainyard.errors import ConfigError as ConfigError
    from trainyard.errors import DeliveryError as DeliveryError
    from trainyard.errors import Denied as Denied
    from trainyard.errors import Exists as Exists
    from trainyard.errors import Full as Full
    from trainyard.errors import JournalError as JournalError
    from trainyard.errors import MetricError as MetricError
    from trainyard.errors import NotFound as NotFound
    from trainyard.errors import PickleRefused as PickleRefused
    from trainyard.errors import PluginBroken as PluginBroken
    from trainyard.errors import PluginConfigError as PluginConfigError
    from trainyard.errors import PluginNotFound as PluginNotFound
    from trainyard.errors import Rejected as Rejected
    from trainyard.errors import ResourcesUnavailable as ResourcesUnavailable
    from trainyard.errors import RunLocked as RunLocked
    from trainyard.errors import StoreError as StoreError
    from trainyard.errors import TrainyardError as TrainyardError
    from trainyard.errors import Transient as Transient
    from trainyard.functional import get_checkpoint as get_checkpoint
    from trainyard.functional import report as report
    from trainyard.functional import wrap_function as wrap_function
    from trainyard.hookspecs import hookimpl as hookimpl
    from trainyard.launch import run as run
    from trainyard.launch import start_run as start_run
    from trainyard.media import Audio as Audio
    from trainyard.media import Figure as Figure
    from trainyard.media import Histogram as Histogram
    from trainyard.media import Image as Image
    from trainyard.media import Table as Table
    from trainyard.media import Text as Text
    from trainyard.media import Video as Video
    from trainyard.records import Artifact as Artifact
    from trainyard.records import CheckpointInfo as CheckpointInfo
    from trainyard.records import MediaFile as MediaFile
    from trainyard.records import Outcome as Outcome
    from trainyard.records import Result as Result
    from trainyard.records import RunInfo as RunInfo
    from trainyard.resources import Resources as Resources
    from trainyard.rundir import RunResult as RunResult
    from trainyard.rundir import open_run as open_run
    from trainyard.storage import Entry as Entry
    from trainyard.storage import LocalStore as LocalStore
    from trainyard.storage import Store as Store
    from trainyard.trainable import Trainable as Trainable
    from trainyard.trainable import validate_save_restore as validate_save_restore
    from trainyard.trainable import with_parameters as with_parameters
    from trainyard.trainable import with_resources as with_resources
    from trainyard.values import flatten as flatten
    from trainyard.values import strict_json as strict_json

_HOMES = {
    "checkpoint": ["Checkpoint"],
    "errors": [
        "CheckpointCorrupt", "CheckpointError", "ConfigError", "DeliveryError", "Denied", "Exists", "Full", "JournalError",
        "MetricError", "NotFound", "PickleRefused", "PluginBroken", "PluginConfigError", "PluginNotFound", "Rejected",
        "ResourcesUnavailable", "RunLocked", "StoreError", "TrainyardError", "Transient",
    ],
    "functional": ["get_checkpoint", "report", "wrap_function"],
    "hookspecs": ["hookimpl"],
    "launch": ["run", "start_run"],
    "media": ["Audio", "Figure", "Histogram", "Image", "Table", "Text", "Video"],
    "records": ["Artifact", "CheckpointInfo", "MediaFile", "Outcome", "Result", "RunInfo"],
    "resources": ["Resources"],
    "active_run": ["Run", "get_run"],
    "rundir": ["RunResult", "open_run"],
    "storage": ["Entry", "LocalStore", "Store"],
    "trainable": ["Trainable", "validate_save_restore", "with_parameters", "with_resources"],
    "values": ["flatten", "strict_json"],
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trainyard' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trainyard.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
