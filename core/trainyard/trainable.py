"""Trainable: the class style, with the lifecycle of Ray Tune's class of that name.

What each method does is what ``ray.tune.Trainable`` of Ray 2.x does, to the key of its results, except where that is a
defect: a failed step, save or restore changes nothing here, counters live inside the checkpoint, and a bare trainable
still logs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainyard.active_run import Run, how_it_ended, open_new_run
from trainyard.checkpoint import MANIFEST_NAME, Checkpoint, Staging, local_path, refuse_escape
from trainyard.console import capture
from trainyard.errors import CheckpointCorrupt, CheckpointError, ConfigError, MetricError, unknown
from trainyard.redaction import resolve_environment
from trainyard.resources import Resources
from trainyard.results import DUPLICATE, date_string
from trainyard.signatures import check_signature, parameters_bound
from trainyard.state import load_state
from trainyard.sysusage import UsageMonitor
from trainyard.version import __version__

__all__ = ["Trainable", "validate_save_restore", "with_parameters", "with_resources"]

logger = logging.getLogger("trainyard")

SETUP_HINT_S = 10.0
"""A ``setup`` that takes longer than this many seconds gets a hint in the log."""

EXPORT_FORMATS = ("checkpoint", "model", "onnx", "h5")

_NAMES_OF_2019 = {
    "_setup": "setup",
    "_train": "step",
    "_save": "save_checkpoint",
    "_restore": "load_checkpoint",
    "_stop": "cleanup",
    "_log_result": "log_result",
}

_OBJECT_FORMAT = "trainyard-object"


class _TheRun:
    """The attribute ``run``, which gives way to one of the user's own of that name."""

    def __get__(self, instance: Trainable | None, owner: type[Trainable]) -> Any:
        return self if instance is None else instance._run


class Trainable:
    """A training loop, cut into steps. Override :meth:`setup`, :meth:`step`, and to be able to save and restore
    :meth:`save_checkpoint` and :meth:`load_checkpoint`.

    One built by hand opens a run of its own, logs to json and csv, and ends it in :meth:`stop`.

    Args:
        config: handed to ``setup`` as a deep copy; kept as ``self.config``.
        run: the run to report to; it stays its owner's.
        storage: where a run of its own lives; default ``TRAINYARD_STORAGE``, else ``./runs``.
        trackers: for a run of its own; default ``TRAINYARD_TRACKERS``, else json and csv.

    Raises:
        ConfigError, PluginNotFound, PluginConfigError: a mistake in `storage` or `trackers`.
    """

    _old_save = False
    run = _TheRun()

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        run: Run | None = None,
        storage: str | os.PathLike[str] | None = None,
        trackers: Any = None,
    ) -> None:
        self.config: dict[str, Any] = {} if config is None else config
        self._owns_run = run is None
        self._storage, self._trackers = storage, trackers
        written = self.config
        stdout, stderr = self._pop_log_files()
        if run is None:
            self.config = _resolved(self.config)
            run = self._open_run(written)
        self._run = run
        self._cleanups = contextlib.ExitStack()
        self._stopped = False
        self._restored = False
        self._monitor: UsageMonitor | None = None
        try:
            self._cleanups.enter_context(capture(stdout, stderr))
            started = time.perf_counter()
            self.setup(copy.deepcopy(self.config))
            took = time.perf_counter() - started
            if took > SETUP_HINT_S:
                logger.info(
                    "setup() of %s took %.1f s, more than %.0f s: if runs are many, let reset_config() return True, so that "
                    "one trainable can serve several",
                    type(self).__name__, took, SETUP_HINT_S,
                )  # fmt: skip
            if self.config.get("log_sys_usage"):
                self._monitor = UsageMonitor()
        except BaseException as error:
            self._cleanups.close()
            if self._owns_run:
                run.finish(*how_it_ended(error))
            raise
        self._before_recording = (
            self._on_filled if self._monitor or type(self).log_result is not Trainable.log_result else None
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        old = [name for name in _NAMES_OF_2019 if name in vars(cls) and _NAMES_OF_2019[name] not in vars(cls)]
        for name in old:
            setattr(cls, _NAMES_OF_2019[name], vars(cls)[name])
        if "_save" in old:
            cls._old_save = True
        elif "save_checkpoint" in vars(cls):
            cls._old_save = False
        if old:
            new = ", ".join(f"{name} is now {_NAMES_OF_2019[name]}" for name in old)
            warnings.warn(f"{cls.__name__} uses method names of 2019: {new}", DeprecationWarning, stacklevel=2)

    # -- to override ---------------------------------------------------------------------------------------------

    def setup(self, config: dict[str, Any]) -> None:
        """Called once before the first step.

        Args:
            config: a deep copy of the config.
        """

    def step(self) -> dict[str, Any]:
        """One iteration of training. Returns its metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no step(): override it, and return a dict of metrics")

    def save_checkpoint(self, checkpoint_dir: str) -> dict[Any, Any] | str | None:
        """Save what :meth:`load_checkpoint` needs.

        Args:
            checkpoint_dir: an empty directory, for files.

        Returns:
            A dict, which is saved without pickle where that can be; or None (or `checkpoint_dir`) after writing files.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_checkpoint(): override it to save checkpoints")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Restore what :meth:`save_checkpoint` saved.

        Args:
            checkpoint: the dict that it returned, or else the directory with its files.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_checkpoint(): override it to restore checkpoints")

    def log_result(self, result: dict[str, Any]) -> None:
        """Called with each filled result before it is recorded; may change it in place."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take another config without being built anew. Returns whether that was possible."""
        return False

    def cleanup(self) -> None:
        """Called once at the end."""

    def _export_model(self, export_formats: list[str], export_dir: str) -> dict[str, str]:
        """Export the model. Returns the path of each format."""
        return {}

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Resources | dict[str, Any] | None:
        """What one run needs; None: one CPU."""
        return None

    @classmethod
    def resource_help(cls, config: dict[str, Any]) -> str:
        """How to set the resources of this trainable, for the message that they cannot be had."""
        return ""

    # -- called by whoever runs it -------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Run one step and record its result.

        Returns:
            The metrics with the auto-filled keys. A result that holds ``__duplicate__`` is returned as it is, counted
            nowhere and recorded nowhere.

        Raises:
            MetricError: ``step`` returned no dict, or a value that cannot be recorded; no counter has changed.
            Exception: whatever ``step`` raises; no counter has changed.
        """
        started = time.perf_counter()
        metrics = self.step()
        duration = time.perf_counter() - started
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            raise MetricError(f"step() of {type(self).__name__} needs to return a dict, not {type(metrics).__name__}")
        if DUPLICATE in metrics:
            return metrics
        return self._run.record_result(metrics, duration, before=self._before_recording)

    def train_buffered(self, buffer_time_s: float, max_buffer_length: int = 1000) -> list[dict[str, Any]]:
        """Run steps until the time is over, the buffer is full, or a result wants attention.

        Args:
            buffer_time_s: seconds.
            max_buffer_length: results.

        Returns:
            At least one result; the last one may be ``done``, want a checkpoint, or be a duplicate.
        """
        results = []
        until = time.perf_counter() + buffer_time_s
        while True:
            result = self.train()
            results.append(result)
            wants_attention = result.get("done") or result.get("should_checkpoint") or DUPLICATE in result
            if wants_attention or time.perf_counter() >= until or len(results) >= max_buffer_length:
                return results

    def save(self, checkpoint_dir: str | os.PathLike[str] | None = None) -> Checkpoint:
        """Save a checkpoint with the counters in it.

        Args:
            checkpoint_dir: where; a new or empty directory, or a checkpoint to replace. None: the next one of the run,
                under its retention.

        Raises:
            CheckpointError: it could not be saved; there is nothing of it.
            NotImplementedError: ``save_checkpoint`` is not overridden.
        """
        if checkpoint_dir is None:
            return self._run.save_checkpoint(self._fill)
        target = local_path(checkpoint_dir)
        with Staging(target.parent) as staging:
            self._fill(staging)
            return staging.commit(target, **self._moment())

    def restore(self, checkpoint: Checkpoint | str | os.PathLike[str], *, allow_pickle: bool = False) -> None:
        """Go on from a checkpoint: verified, counters and all.

        Args:
            checkpoint: a Checkpoint, its directory, or a ``file://`` URL.
            allow_pickle: run the code in pickled leaves; not needed for a checkpoint of this very run.

        Raises:
            CheckpointError: it is missing, damaged, or from a newer trainyard.
            PickleRefused: it holds pickled leaves of another run.
            Exception: whatever ``load_checkpoint`` raises. Counters are as they were then.
        """
        if not isinstance(checkpoint, Checkpoint):
            if not isinstance(checkpoint, str | os.PathLike):
                raise TypeError(f"restore() takes a Checkpoint, a path or a URL, not a {type(checkpoint).__name__}")
            checkpoint = Checkpoint(checkpoint)
        manifest = checkpoint.manifest
        checkpoint.verify()
        if checkpoint.holds_state:
            trusted = allow_pickle or manifest.pickled_by == self._run.id
            self.load_checkpoint(load_state(Path(checkpoint.path), allow_pickle=trusted))
        else:
            self.load_checkpoint(
                os.path.join(checkpoint.path, manifest.restore_path) if manifest.restore_path else checkpoint.path
            )
        self._run.restore_counters(checkpoint)
        self._restored = True

    def save_to_object(self) -> bytes:
        """A checkpoint in memory."""
        with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
            target = Path(folder, "checkpoint")
            with Staging(Path(folder)) as staging:
                self._fill(staging)
                checkpoint = staging.commit(target, **self._moment())
            names = [MANIFEST_NAME, *(entry.path for entry in checkpoint.manifest.files)]
            files = {name: (target / name).read_bytes() for name in names}
        return msgspec.msgpack.encode({"format": _OBJECT_FORMAT, "version": 1, "files": files})

    def restore_from_object(self, obj: bytes, *, allow_pickle: bool = False) -> None:
        """Go on from what :meth:`save_to_object` returned. Raises what :meth:`restore` raises."""
        folder = unpacked(obj)
        try:
            self.restore(folder, allow_pickle=allow_pickle)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def delete_checkpoint(self, checkpoint: Checkpoint | str | os.PathLike[str]) -> None:
        """Delete a checkpoint, at once or not at all. One that does not exist is no error.

        Raises:
            CheckpointError: there is something else at that place.
        """
        found = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        if not os.path.exists(found.path):
            return
        if not found.committed:
            raise CheckpointError(f"{found.path} is not a checkpoint: it has no {MANIFEST_NAME}")
        self._run.checkpoints.remove(found)

    def export_model(self, export_formats: str | list[str], export_dir: str | None = None) -> dict[str, str]:
        """Export the model.

        Args:
            export_formats: one or more of ``checkpoint``, ``model``, ``onnx``, ``h5``.
            export_dir: where to; default :attr:`logdir`.

        Returns:
            The path of each format that the trainable exported.

        Raises:
            ConfigError: an unknown format.
        """
        asked = [export_formats] if isinstance(export_formats, str) else export_formats
        formats = [name.strip().lower() for name in asked]
        for name in formats:
            if name not in EXPORT_FORMATS:
                raise ConfigError(unknown("export format", name, EXPORT_FORMATS, label="formats"))
        return self._export_model(formats, export_dir or self.logdir)

    def reset(self, new_config: dict[str, Any]) -> bool:
        """Begin a new run with another config, if :meth:`reset_config` can take it.

        Returns:
            Whether it could. If not, nothing has changed.

        Raises:
            ConfigError: the run is not this trainable's own.
        """
        if not self._owns_run:
            raise ConfigError("reset() starts a new run, and this trainable was handed a run of somebody else")
        old, self.config = self.config, _resolved(new_config)
        try:
            taken = self.reset_config(copy.deepcopy(self.config))
        except BaseException:
            self.config = old
            raise
        if not taken:
            self.config = old
            return False
        self._cleanups.close()
        self._run.finish()
        stdout, stderr = self._pop_log_files()
        self._run = self._open_run(new_config)
        self._cleanups.enter_context(capture(stdout, stderr))
        self._restored = False
        return True

    def stop(self) -> None:
        """End: clean up, and end a run of its own. Calling it again does nothing."""
        if self._stopped:
            return
        self._stopped = True
        error: BaseException | None = None
        try:
            if self._monitor is not None:
                self._monitor.stop()
            self.cleanup()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._cleanups.close()
            if self._owns_run:
                self._run.finish("failed" if error else "completed", error)

    # -- what can be asked ---------------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """How many results were recorded, over all restores."""
        return self._run.counters.iteration

    training_iteration = iteration

    @property
    def logdir(self) -> str:
        """The run directory."""
        return self._run.path

    @property
    def trial_id(self) -> str:
        """The run's id."""
        return self._run.id

    @property
    def trial_name(self) -> str:
        """The run's name."""
        return self._run.name

    @property
    def trial_resources(self) -> Resources | None:
        """What the run was given; None for a trainable built by hand."""
        return self._run.resources

    def get_config(self) -> dict[str, Any]:
        """The config."""
        return self.config

    def get_state(self) -> dict[str, Any]:
        """The counters, the last result, and the version."""
        counters = self._run.counters
        return {
            "iteration": counters.iteration,
            "timesteps_total": counters.timesteps_total,
            "time_total": counters.time_total,
            "episodes_total": counters.episodes_total,
            "last_result": self._run.last_result,
            "trainyard_version": __version__,
        }

    def get_auto_filled_metrics(
        self,
        now: float | None = None,
        time_this_iter: float | None = None,
        timestamp: int | None = None,
        debug_metrics_only: bool = False,
    ) -> dict[str, Any]:
        """The keys that are filled into every result, as they are at this moment.

        Args:
            now: seconds since the epoch, for ``date`` and ``timestamp``.
            time_this_iter: seconds, for ``time_this_iter_s``.
            timestamp: overrides the one from `now`.
            debug_metrics_only: only ``trial_id, date, timestamp, pid, hostname, node_ip, config``.
        """
        now = time.time() if now is None else now
        fixed = {
            "date": date_string(int(now)),
            "timestamp": timestamp or int(now),
            **self._run.context,
        }
        if debug_metrics_only:
            return fixed
        counters = self._run.counters
        filled = {
            **fixed,
            "done": False,
            "training_iteration": counters.iteration,
            "time_total_s": counters.time_total,
            "time_since_restore": counters.time_since_restore,
            "iterations_since_restore": counters.iterations_since_restore,
            "timesteps_since_restore": counters.timesteps_since_restore,
        }
        return filled if time_this_iter is None else {**filled, "time_this_iter_s": time_this_iter}

    # -- inside --------------------------------------------------------------------------------------------------

    def _open_run(self, written_config: dict[str, Any]) -> Run:
        name = getattr(self, "_name", None) or type(self).__name__
        return open_new_run(
            trainable=name,
            config=self.config,
            written_config=written_config,
            storage=self._storage,
            trackers=self._trackers,
            delivery="thread",
        )

    def _on_filled(self, result: dict[str, Any]) -> None:
        if self._monitor is not None:
            result["perf"] = self._monitor.read()
        self.log_result(result)

    def _fill(self, staging: Staging) -> None:
        directory = str(staging.path)
        saved = self.save_checkpoint(directory)
        if isinstance(saved, dict):
            staging.add_state(saved)
        elif isinstance(saved, str):
            inside = os.path.relpath(saved, directory)
            if inside != "." and not (self._old_save and not inside.startswith("..")):
                raise CheckpointError(
                    f"save_checkpoint() of {type(self).__name__} returned the path {saved!r}; it returns a dict, or None "
                    f"after it has written files into the directory it was given"
                )
            staging.restore_path = "" if inside == "." else Path(inside).as_posix()
        elif saved is not None:
            raise CheckpointError(
                f"save_checkpoint() of {type(self).__name__} returned a {type(saved).__name__}; it returns a dict, or None "
                "after it has written files into the directory it was given"
            )

    def _moment(self) -> dict[str, Any]:
        """What a manifest says of this moment, for a checkpoint that is not one of the run's own."""
        run = self._run
        metrics = run.written_metrics()
        return {"run_id": run.id, "index": 0, "counters": run.counters, "metrics": metrics, "journal_seq": run.head}

    def _pop_log_files(self) -> tuple[Path | None, Path | None]:
        """Ray Tune's two magic config keys: files to copy stdout and stderr into."""
        popped = (
            [self.config.pop(key, None) for key in ("__stdout_file__", "__stderr_file__")]
            if self.config
            else [None, None]
        )
        stdout, stderr = (Path(os.path.abspath(name)) if name else None for name in popped)
        return stdout, stderr


def _resolved(config: dict[str, Any]) -> dict[str, Any]:
    """The config with its environment variables; the very object if it has none."""
    resolved: dict[str, Any] = resolve_environment(config)
    return config if resolved == config else resolved


def unpacked(obj: bytes) -> str:
    """Write the checkpoint in what ``save_to_object`` returned into a new temporary directory.

    Raises:
        CheckpointCorrupt: it is something else.
    """
    try:
        data = msgspec.msgpack.decode(obj)
        if data["format"] != _OBJECT_FORMAT:
            raise KeyError("format")
        files = msgspec.convert(data["files"], dict[str, bytes])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise CheckpointCorrupt("these bytes are not what save_to_object() returns") from error
    for name in files:
        refuse_escape(name, "the object")
    folder = tempfile.mkdtemp(prefix="trainyard-")
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


for _old, _new in _NAMES_OF_2019.items():
    setattr(Trainable, _old, getattr(Trainable, _new))  # so that super()._setup(config) works in ported code


def with_parameters(trainable: Any, **parameters: Any) -> Any:
    """A trainable that gets further arguments, kept out of the config: data sets, models, anything large.

    Args:
        trainable: a class, whose ``setup(config, **parameters)`` gets them, or a function ``train(config, **parameters)``.
        parameters: by reference; nothing is copied.

    Returns:
        A new trainable; the given one is left as it is.
    """
    if isinstance(trainable, type) and issubclass(trainable, Trainable):

        def setup(self: Trainable, config: dict[str, Any]) -> None:
            trainable.setup(self, config, **parameters)

        return _subclass(trainable, setup=setup)
    if not callable(trainable):
        raise ConfigError(f"with_parameters() takes a Trainable class or a function, not {trainable!r}")
    return check_signature(parameters_bound(trainable, parameters))


def with_resources(trainable: Any, resources: Resources | dict[str, Any] | Callable[[dict[str, Any]], Any]) -> Any:
    """A trainable that asks for resources.

    Args:
        trainable: a class or a function.
        resources: amounts, or a function of the config that returns them.

    Returns:
        A new trainable of the same name; the given one is left as it is.

    Raises:
        ConfigError: no trainable, or no resources.
    """
    if not callable(resources):
        resources = Resources.parse(resources, "with_resources")
    answer: Callable[[dict[str, Any]], Any] = resources if callable(resources) else lambda config: resources
    if isinstance(trainable, type) and issubclass(trainable, Trainable):
        request = classmethod(lambda cls, config: Resources.parse(answer(config), "with_resources"))
        return _subclass(trainable, default_resource_request=request)
    if not callable(trainable) or isinstance(trainable, type) or inspect.isbuiltin(trainable):
        raise ConfigError(f"with_resources() takes a Trainable class or a function, not {trainable!r}")
    bound = parameters_bound(trainable, {})
    bound.default_resource_request = lambda config: Resources.parse(answer(config), "with_resources")  # type: ignore[attr-defined]
    return bound


def _subclass(cls: type[Trainable], **members: Any) -> type[Trainable]:
    return type(
        cls.__name__,
        (cls,),
        {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, **members},
    )


def validate_save_restore(trainable: type[Trainable], config: dict[str, Any] | None = None) -> bool:
    """Prove that a trainable resumes: train three times, save, restore in a fresh process, train on.

    Args:
        trainable: the class.
        config: its config.

    Returns:
        True.

    Raises:
        CheckpointError: the iterations do not go on as 4 and 5.
        Exception: whatever the trainable raises in this process.
    """
    import subprocess
    import sys

    import cloudpickle

    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        first = trainable(dict(config or {}), storage=folder, trackers=[])
        try:
            for _ in range(3):
                first.train()
            saved = first.save()
        finally:
            first.stop()
        task = cloudpickle.dumps((trainable, dict(config or {}), saved.path, folder))
        # the path travels ahead of the class, whose module may lie beside a script
        code = f"import sys; sys.path[:] = {sys.path!r}; from trainyard.trainable import _continue_in_child as go; go()"
        child = subprocess.run([sys.executable, "-c", code], input=task, capture_output=True)
        iterations = child.stdout.decode().rpartition("iterations:")[2].split()
        if child.returncode or iterations != ["4", "5"]:
            raise CheckpointError(
                f"{trainable.__name__} does not resume: in a fresh process the iterations after a restore were "
                f"{iterations or 'none'}, not 4 and 5\n{child.stderr.decode()}"
            )
    return True


def _continue_in_child() -> None:
    import pickle
    import sys

    trainable, config, path, folder = pickle.load(sys.stdin.buffer)
    second = trainable(config, storage=folder, trackers=[])
    second.restore(path, allow_pickle=True)
    iterations = [second.train()["training_iteration"] for _ in range(2)]
    second.stop()
    print("iterations:", *iterations)
