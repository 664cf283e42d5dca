"""Every hook, in the order in which things happen: the table of contents of the system.

There are three kinds. *Events* have no answer. *Questions* stop at the first answer that is not None. *Services* are
objects that a question hands back (:class:`trainyard.Store`).

A plugin is a class. It implements the hooks that it wants, marks each with :data:`hookimpl`, and takes only the
arguments that it uses. Its constructor's parameters are its options, and the constructor does no I/O.

Where hooks run
    *lane*: in the thread or process that delivers to this one tracker, never in the training thread. A lane hands over
    one thing at a time and in order. Whatever a hook raises there, SystemExit included, is logged once an outage; the
    lane closes the plugin, waits, and begins again with ``log_start`` and the `notes` as they were last confirmed.
    *training process*: in the training thread; an exception propagates to the user.
    *launching process*: before any training; an exception stops the launch and names the plugin.

What it promises
    A tracker's class attribute ``guarantee`` is one sentence on its delivery, which ``trainyard doctor`` shows.
    ``one_per_run = True`` says that two of its kind in one run would write the same files, which is then a mistake.
    ``notes["environment"]`` names environment variables by which its own library joins the run from the training process
    (:meth:`trainyard.Run.export_environment`).

Exactly once
    Delivery is at least once and in order. Every result carries ``(run.id, result.seq)`` and the time it was logged
    at. What a tracker puts into `notes` is saved together with the lane's cursor, in one step, after `flush`: a file
    tracker that notes its size in `log_results` and cuts the file back to it in `log_start` has each result exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from trainyard.records import Artifact, CheckpointInfo, Outcome, Result, RunInfo
    from trainyard.resources import Resources
    from trainyard.storage import Store

__all__ = ["PROJECT", "Hooks", "hookimpl"]

PROJECT = "trainyard"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a method of a plugin as the implementation of the hook of that name."""


class Hooks:
    """The hooks; never built, only read."""

    # ---- before training ---------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def open_store(self, url: str, options: dict[str, Any]) -> Store | None:
        """Called when a store is first needed. The plugin's entry-point name is the URL's scheme.

        Question; launching process, before training. Since 0.1.

        Args:
            url: as the user wrote it: ``./runs`` or ``s3://bucket/prefix``.
            options: the store's options from the config.

        Returns:
            The store, or None if the URL is not for this plugin.

        Example:
            See ``trainyard_plugins/stores/file.py``.
        """

    @hookspec(firstresult=True)
    def request_resources(self, trainable: Any, config: dict[str, Any]) -> Resources | dict[str, Any] | None:
        """Called once a run, to ask what it needs. The executor `inline`, which has nothing to give, does not ask.

        Question; launching process. Since 0.1.

        Args:
            trainable: the class or function.
            config: the run's config.

        Returns:
            The request, or None to leave the answer to the next: other policies, the config's ``resources``,
            ``with_resources``, ``Trainable.default_resource_request``, and at last one CPU.

        Example::

            @hookimpl
            def request_resources(self, config):
                return {"cpu": 4} if config.get("big") else None
        """

    # ---- every result, in the training process -----------------------------------------------------------------

    @hookspec
    def on_result(self, run: RunInfo, result: Result) -> None:
        """Called with every result before it is written; may change ``result.metrics``.

        Event; training process, training thread. What it raises refuses the result. Since 0.1.

        Args:
            run: which run.
            result: the result, auto-filled keys included.

        Example::

            @hookimpl
            def on_result(self, result):
                result["gap"] = result["train_loss"] - result["loss"]
        """

    @hookspec(firstresult=True)
    def should_stop(self, run: RunInfo, result: Result) -> bool | None:
        """Called with every result after it was written.

        Question; training process, training thread. The first plugin that answers decides: True ends the run as
        `completed`, False lets it go on past the plugins after it. Since 0.1.

        Args:
            run: which run.
            result: as it was written.

        Example::

            @hookimpl
            def should_stop(self, result):
                return True if result["loss"] > 1e6 else None
        """

    # ---- delivery to a tracker, in its lane ---------------------------------------------------------------------

    @hookspec
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Called before anything else, and again by a new process after a restart, and after every failure.

        Event; lane. Since 0.1.

        Args:
            run: which run.
            notes: this tracker's own dict for this run, as it was last confirmed; empty at the very first start.
                It holds what JSON can hold.

        Example::

            @hookimpl
            def log_start(self, run, notes):
                if "remote_id" not in notes:
                    notes["remote_id"] = self.client.find_or_create(run.id)
        """

    @hookspec
    def log_results(self, run: RunInfo, results: list[Result], notes: dict[str, Any]) -> None:
        """Called with 1 to 500 results, in order.

        Event; lane. Raise :class:`trainyard.Rejected` for results that can never be taken, before anything of the
        batch is recorded: they are set aside in ``delivery/<tracker>.rejected.jsonl``, and the rest comes again.
        Since 0.1.

        Args:
            run: which run.
            results: the batch.
            notes: as in `log_start`.

        Example::

            @hookimpl
            def log_results(self, results):
                for result in results:
                    self.file.write(json.dumps(result.metrics))
        """

    @hookspec
    def log_artifact(self, run: RunInfo, artifact: Artifact, notes: dict[str, Any]) -> None:
        """Called with a file or directory that was added to the run.

        Event; lane. Since 0.1.

        Args:
            run: which run.
            artifact: where it lies.
            notes: as in `log_start`.
        """

    @hookspec
    def log_checkpoint(self, run: RunInfo, checkpoint: CheckpointInfo, notes: dict[str, Any]) -> None:
        """Called with a checkpoint once its store has confirmed it.

        Event; lane. It may be gone again by now, if retention did not keep it. Since 0.1.

        Args:
            run: which run.
            checkpoint: where it lies, and the metrics it was saved with.
            notes: as in `log_start`.
        """

    @hookspec
    def log_rewind(self, run: RunInfo, results: Iterable[Result], notes: dict[str, Any]) -> None:
        """Called when a run was resumed from an earlier point than it had reached.

        Event; lane. A local tracker rewrites its files to hold exactly `results`; a remote one may rather skip what
        comes again. Since 0.1.

        Args:
            run: which run; its config is that of the resumed run.
            results: the history that still counts, read from the journal as you iterate; may be iterated again.
            notes: as in `log_start`.
        """

    @hookspec
    def log_end(self, run: RunInfo, outcome: Outcome, notes: dict[str, Any]) -> None:
        """Called last, with how the run ended. A run that is resumed later is started again.

        Event; lane. Since 0.1.

        Args:
            run: which run.
            outcome: status, error and time.
            notes: as in `log_start`.
        """

    @hookspec
    def flush(self) -> None:
        """Called before the lane's cursor moves. Once it returns, what was handed over must be safe.

        Event; lane. The `notes` are saved right after it, together with the cursor. Since 0.1.
        """

    @hookspec
    def close(self) -> None:
        """Called at the end and after every failure, always, whatever happened before; what it raises is logged.

        Event; lane. Since 0.1.
        """

    # ---- beside the tracker's own library --------------------------------------------------------------------------

    @hookspec
    def join(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Called when the run has exported the variables in ``notes["environment"]``, if those alone are not enough.

        Event; training process, in the thread that asked for it. Since 0.1.

        Args:
            run: which run.
            notes: as the lane has confirmed them.
        """

    @hookspec
    def leave(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Called at the end of a run that was joined, before the variables are set back. It must not wait for anything.

        Event; training process. Since 0.1.

        Args:
            run: which run.
            notes: as the lane has confirmed them.
        """

    # ---- by hand ------------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def check(self, storage: str) -> str | None:
        """Called by ``trainyard doctor``: reach what this plugin writes to, and say in a line what answered.

        Question; in the command's process. Raise what is wrong, within a few seconds. Since 0.1.

        Args:
            storage: the local directory that run directories live below.

        Returns:
            What answered: an address, a version, who one is there.

        Example::

            @hookimpl
            def check(self):
                return f"{self.url}: version {self.client.version()}"
        """
