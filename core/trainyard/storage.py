"""Where runs and their checkpoints live: the Store protocol, and the checkpoints of one run with their retention."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from trainyard.checkpoint import MANIFEST_NAME, STAGING_PREFIX, Checkpoint, Staging, score
from trainyard.errors import CheckpointCorrupt, CheckpointError
from trainyard.files import sync_directory
from trainyard.results import Counters

__all__ = ["CheckpointPolicy", "Entry", "LocalStore", "RunCheckpoints", "Store"]

logger = logging.getLogger("trainyard")

_NAME = re.compile(r"checkpoint_(\d{6,})")
_REMOVED_PREFIX = ".removed-"
_GRACE_S = 24 * 3600  # a checkpoint directory without a manifest may be somebody's copy in progress


class Entry(msgspec.Struct, frozen=True):
    """One object of a listing: its key, its size in bytes, when it was last written (seconds since the epoch)."""

    key: str
    size: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """Four verbs over keys and bytes; everything harder is in core.

    Keys are relative paths with forward slashes. A store is thread-safe, and safe after a fork or says so. Its errors
    are `NotFound`, `Exists`, `Denied`, `Transient` and `Full`; core retries only `Transient`. The protocol needs no
    rename, directories, locks or mtimes, and will never gain a required method.

    Attributes:
        atomic_create: True only if ``put(create=True)`` lets exactly one of many writers win.
    """

    atomic_create: bool

    def put(self, key: str, source: bytes | Path, *, create: bool = False) -> None:
        """Store an object. Once this returns it is durable, and every later get and list sees it.

        If it raises, there is the old object, the new one whole, or none; never a torn one.

        Args:
            key: where.
            source: its content, or the file that holds it.
            create: raise `Exists` rather than replace an object.
        """
        ...

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read an object or a range of it; beyond its end there is nothing. Raises `NotFound`."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[Entry]:
        """All objects whose key begins with `prefix` and comes behind `after`, complete, sorted by key."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a missing key is no error."""
        ...


@runtime_checkable
class LocalStore(Store, Protocol):
    """A store whose objects are files on this machine: run directories lie in it, and a commit is a rename."""

    def path(self, key: str) -> Path:
        """The file or directory of a key, whether or not it exists."""
        ...


class CheckpointPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When checkpoints are saved and which are kept: the config key ``checkpoint``.

    Attributes:
        every: save after each so many iterations; 0: never by count.
        at_end: save after the last iteration. None: if the trainable can save at all.
        keep: how many to keep; None: all. The newest is kept besides, if it is not among them.
        metric: keep the best by this metric, nested names joined with ``/``; None: the newest.
        mode: whether more (``max``) or less (``min``) of it is better.
    """

    every: int = 0
    at_end: bool | None = None
    keep: int | None = None
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    def due(self, iteration: int) -> bool:
        """Whether `every` asks for a checkpoint after this iteration (from 1)."""
        return self.every > 0 and iteration % self.every == 0


class RunCheckpoints:
    """The checkpoints of one run, below its directory.

    Args:
        root: the run's ``checkpoints/`` directory; made when the first one is saved.
        run_id: goes into every manifest.
        policy: which are kept.
    """

    def __init__(self, root: Path, run_id: str, policy: CheckpointPolicy | None = None) -> None:
        self.root = root
        self.run_id = run_id
        self.policy = policy or CheckpointPolicy()
        self._next = 0

    def all(self) -> list[Checkpoint]:
        """Those that are committed, by index."""
        return [Checkpoint(path) for _, path in self._directories() if (path / MANIFEST_NAME).is_file()]

    @property
    def next_index(self) -> int:
        """The index that the next save gets: one that was never used in this run, not even by a failed one."""
        taken = [int(found[1]) + 1 for name in self._names() if (found := _NAME.match(name))]  # damaged ones too
        self._next = max([self._next, *taken])
        return self._next

    def stage(self) -> Staging:
        """Begin a checkpoint."""
        return Staging(self.root)

    def commit(self, staging: Staging, *, counters: Counters, metrics: dict[str, Any], journal_seq: int) -> Checkpoint:
        """Make a staged checkpoint the newest one. Older ones go only by :meth:`retain`, once it is on record."""
        index = self.next_index
        self._next = index + 1
        return staging.commit(
            self.root / f"checkpoint_{index:06d}",
            run_id=self.run_id,
            index=index,
            counters=counters,
            metrics=metrics,
            journal_seq=journal_seq,
        )

    def best(self, metric: str | None, mode: str = "max") -> Checkpoint | None:
        """The best by a metric, ties to the newer; the newest where no metric is given."""
        found = self._by_score(metric, mode)
        return found[-1] if found else None

    def newest_good(self) -> Checkpoint | None:
        """The newest one that verifies. Damaged ones on the way are set aside under another name, with a warning.

        Raises:
            CheckpointError: one cannot be read, or is of a newer trainyard: neither is a reason to go back.
        """
        for index, path in reversed(self._directories()):
            if not (path / MANIFEST_NAME).is_file():
                continue
            checkpoint = Checkpoint(path)
            try:
                checkpoint.verify()
            except CheckpointCorrupt as error:
                self._next = max(self._next, index + 1)
                aside = path.with_name(f"{path.name}.damaged")
                logger.warning(
                    "%s; falling back to the checkpoint before it, and keeping this one as %s", error, aside.name
                )
                with contextlib.suppress(OSError):
                    os.rename(path, aside)
            else:
                return checkpoint
        return None

    def retain(self) -> list[Checkpoint]:
        """Delete what the policy does not keep. The newest always stays; a failure to delete is only logged.

        Returns:
            Those that were deleted.
        """
        keep = self.policy.keep
        if keep is None:
            return []
        ranked = self._by_score(self.policy.metric, self.policy.mode)
        if not ranked:
            return []
        newest = max(ranked, key=lambda checkpoint: checkpoint.index)
        gone = [checkpoint for checkpoint in ranked[:-keep] if checkpoint.index != newest.index]
        for checkpoint in gone:
            self.remove(checkpoint)
        return gone

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete one at once or not at all: it loses its name first, then its files."""
        path = Path(checkpoint.path)
        aside = path.with_name(f"{_REMOVED_PREFIX}{path.name}-{secrets.token_hex(4)}")
        try:
            os.rename(path, aside)
            sync_directory(path.parent)
            shutil.rmtree(aside)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("could not delete the checkpoint %s: %s", path, error)

    def collect_garbage(self) -> None:
        """Delete what was never committed. Only for the one process that holds the run's lock."""
        if not self.root.is_dir():
            return
        for entry in list(self.root.iterdir()):
            leftover = entry.name.startswith((STAGING_PREFIX, _REMOVED_PREFIX))
            if not leftover and _NAME.fullmatch(entry.name) and entry.is_dir() and not (entry / MANIFEST_NAME).exists():
                leftover = time.time() - entry.stat().st_mtime > _GRACE_S
            if leftover:
                shutil.rmtree(entry, ignore_errors=True)

    def _directories(self) -> list[tuple[int, Path]]:
        return sorted((int(found[1]), self.root / name) for name in self._names() if (found := _NAME.fullmatch(name)))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []

    def _by_score(self, metric: str | None, mode: str) -> list[Checkpoint]:
        """Worst first; among equals the older first."""
        ranked = []
        for checkpoint in self.all():
            try:
                ranked.append((score(checkpoint.metrics, metric, mode), checkpoint.index, checkpoint))
            except CheckpointError as error:
                logger.warning("%s: left out of retention", error)
        return [checkpoint for _, _, checkpoint in sorted(ranked, key=lambda item: item[:2])]
