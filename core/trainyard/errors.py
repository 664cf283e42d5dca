"""Every exception that trainyard raises, and the wording they share.

::

    Exception
    └── TrainyardError
        ├── ConfigError              a mistake in code, YAML or a command line (also a ValueError)
        ├── MetricError              a value that cannot be recorded (also a TypeError)
        ├── PluginNotFound           nothing installed has that name
        ├── PluginBroken             it is installed, and cannot be imported or registered
        ├── PluginConfigError        its options are wrong
        ├── DeliveryError            a tracker with ``on_error: raise`` failed
        ├── Rejected                 raised *by* a tracker: set these results aside
        ├── StoreError
        │   ├── NotFound             no such key
        │   ├── Exists               ``put(create=True)`` lost
        │   ├── Denied               the store refuses us
        │   ├── Transient            worth another try: the only one that core retries
        │   └── Full                 no room
        ├── CheckpointError
        │   ├── CheckpointCorrupt    a file is missing, cut or changed
        │   └── PickleRefused        it holds pickled leaves and nobody allowed them
        ├── ResourcesUnavailable
        ├── RunLocked                another live process writes to that run
        └── JournalError             the journal cannot be written or read
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "ConfigError",
    "DeliveryError",
    "Denied",
    "Exists",
    "Full",
    "JournalError",
    "MetricError",
    "NotFound",
    "PickleRefused",
    "PluginBroken",
    "PluginConfigError",
    "PluginNotFound",
    "Rejected",
    "ResourcesUnavailable",
    "RunLocked",
    "StoreError",
    "TrainyardError",
    "Transient",
]


class TrainyardError(Exception):
    """The root of all of them."""


class ConfigError(TrainyardError, ValueError):
    """Something that the user wrote is wrong; the message names the place and the mend."""


class MetricError(TrainyardError, TypeError):
    """A value that cannot be recorded; nothing of its result was written."""


class PluginNotFound(TrainyardError):
    """No installed package offers a plugin of that name."""


class PluginBroken(TrainyardError):
    """A plugin is installed, but importing, building or registering it failed."""


class PluginConfigError(TrainyardError):
    """A plugin was given options that it does not have or cannot use."""


class DeliveryError(TrainyardError):
    """A tracker whose ``on_error`` is ``raise`` could not take a result."""


class Rejected(TrainyardError):
    """Raised by a tracker: it will never take these results, however often it is asked.

    Args:
        seqs: the ``seq`` of each result that is refused. The rest of the batch is handed over again without them.
        why: one sentence, kept beside the results that were set aside.
    """

    def __init__(self, seqs: Sequence[int], why: str) -> None:
        super().__init__(f"rejected results {list(seqs)}: {why}")
        self.seqs = list(seqs)
        self.why = why

    def __reduce__(self) -> tuple[type[Rejected], tuple[list[int], str]]:
        return Rejected, (self.seqs, self.why)


class StoreError(TrainyardError):
    """A checkpoint store could not do what it was asked."""


class NotFound(StoreError):
    """There is no object of that key."""


class Exists(StoreError):
    """The key is taken, and ``put(create=True)`` may not replace it."""


class Denied(StoreError):
    """The store does not let us: credentials or permissions."""


class Transient(StoreError):
    """It may work the next time; core tries again."""


class Full(StoreError):
    """The store has no room left."""


class CheckpointError(TrainyardError):
    """A checkpoint could not be saved or restored."""


class CheckpointCorrupt(CheckpointError):
    """A file of the checkpoint is missing, cut short or changed."""


class PickleRefused(CheckpointError):
    """The checkpoint holds pickled leaves from another run, and ``allow_pickle`` is off."""


class ResourcesUnavailable(TrainyardError):
    """The request cannot be met by what there is."""


class RunLocked(TrainyardError):
    """A live process is writing to this run."""


class JournalError(TrainyardError):
    """The journal cannot be written or read."""


def unknown(what: str, name: str, known: Iterable[str], *, label: str = "known") -> str:
    """Word the message for a name that does not exist: what it is, the nearest one, and all that there are.

    >>> unknown("tracker", "mlfow", ["mlflow", "json"], label="installed")
    "unknown tracker 'mlfow': did you mean 'mlflow'? installed: json, mlflow"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {name!r}: {hint}{label}: {', '.join(names) or 'none'}"
