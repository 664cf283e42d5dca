"""The ``mlflow`` tracker: one MLflow run for each run, in a sqlite file or on any tracking server.

What becomes of what MLflow cannot hold, each by one rule:

- *Names* may hold letters, digits and ``/ _ - . :`` and space. Any other character is written ``_xHH_`` with its hexadecimal
  code (``loss@1`` is ``loss_x40_1``), which :func:`unescape` undoes; a name over 250 characters ends in a hash instead. The
  tag ``trainyard.name.<name there>`` keeps the original.
- *Values*: bools are 1 and 0, NaN stays NaN. An infinity is the largest float of its sign, which is what MLflow makes of
  it anyway, and the tag ``trainyard.infinite.<name>`` says that it was one. Integers are exact up to 2**53. The last
  value of a string is the tag ``trainyard.last.<name>``. Lists, arrays and bytes are not sent.
- *Time*: a point carries the millisecond at which it was logged. Two points of one metric that agree in millisecond,
  step and value are one point to MLflow, so what is delivered twice stands once.
- *Params* cannot change: what a resumed run has otherwise is in the tag ``trainyard.param.<name>``.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib
import importlib.util
import itertools
import json
import logging
import math
import os
import posixpath
import re
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from trainyard import (
    Artifact,
    CheckpointInfo,
    MediaFile,
    Outcome,
    PluginConfigError,
    Rejected,
    Result,
    RunInfo,
    flatten,
    hookimpl,
    strict_json,
)
from trainyard_plugins.trackers._mlflow_names import IMAGE_KEY, escape, escaped, fitting, path_name, unescape
from trainyard_plugins.trackers._results import NOT_METRICS, media_apart, media_path

logger = logging.getLogger("trainyard")

LongParams = Literal["truncate", "tag", "artifact", "error"]
Checkpoints = Literal["link", "upload", "none"]
OnReplay = Literal["skip", "append"]

_METRICS_A_REQUEST = 1000  # MLflow's documented limits
_BYTES_A_REQUEST = 800_000
_PARAMS_A_REQUEST = 100
_PARAM_LIMIT = 6000
_TAG_LIMIT = 8000
_FEWEST_A_REQUEST = 10
_LARGEST = 1.7976931348623157e308
_CHECK_S = 5

_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # retrying is the lane's part
    "MLFLOW_DISABLE_TELEMETRY": "true",  # nothing of ours calls home
}
"""What MLflow's client is told, where the user has not said otherwise; it reads this at each call, per process."""

_SYSTEM = (
    (re.compile(r"perf/cpu_util_percent"), "system/cpu_utilization_percentage", 1),
    (re.compile(r"perf/ram_util_percent"), "system/system_memory_usage_percentage", 1),
    (re.compile(r"perf/gpu_util_percent(\d+)"), r"system/gpu_\1_utilization_percentage", 100),
    (re.compile(r"perf/vram_util_percent(\d+)"), r"system/gpu_\1_memory_usage_percentage", 100),
)
"""Our machine metrics, the keys that MLflow's own page for them reads, and the factor between them."""

_STATUS = {
    "completed": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "preempted": "KILLED",
    "killed": "KILLED",
}

_uploaded: set[tuple[str, str]] = set()
"""MLflow run and path of the media that were uploaded: a batch that comes again after a failure gets further each time."""

_sizes: dict[str, int] = {}
"""URI to the metrics a request that its server takes in time, where that was seen to be fewer than the limit."""

_making = threading.Lock()
"""Held while a parent is made or a run is joined: of the lanes of one process, one does it and the others find it."""


class MLflowTracker:
    """Delivers each run to an MLflow run of its own.

    MLflow's environment variables count wherever an option is not given: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_ID,
    MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID (the MLflow run to join; a second run becomes a child of it), and all that its
    client reads itself: MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN and so on.

    Args:
        tracking_uri: an MLflow server, or a database; by default ``mlflow.db`` in the storage root, a sqlite file.
        experiment: the name of the MLflow experiment; by default the run's experiment.
        experiment_id: its id instead.
        long_params: what becomes of a param over 6000 characters: ``truncate``; ``tag`` or ``artifact``, which keep all
            of it there besides; ``error``, which delivers nothing until it is shorter.
        checkpoints: ``link`` makes a LoggedModel of each that points at the store, ``upload`` copies its files into it,
            ``none`` does nothing.
        on_replay: whether the steps that a resumed run does again are sent again: ``skip`` or ``append``.
    """

    guarantee = (
        "Each result stands exactly once: redelivered points equal those that are there (name, step, millisecond, value), "
        "which MLflow's SQL stores drop; its old file store is refused."
    )

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        experiment_id: str | int | None = None,
        long_params: LongParams = "truncate",
        checkpoints: Checkpoints = "link",
        on_replay: OnReplay = "skip",
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise PluginConfigError("the mlflow tracker needs MLflow: pip install 'trainyard[mlflow]'")
        for option, value, choices in (
            ("long_params", long_params, get_args(LongParams)),
            ("checkpoints", checkpoints, get_args(Checkpoints)),
            ("on_replay", on_replay, get_args(OnReplay)),
        ):
            if value not in choices:
                raise ValueError(f"{option} is {value!r}: it is one of {', '.join(choices)}")
        if experiment is not None and experiment_id is not None:
            raise ValueError("give experiment or experiment_id, not both")
        self._given_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None
        if self._given_uri is not None:
            self._given_uri = str(self._given_uri)
            _refuse_file_store(self._given_uri)
        if experiment is None and experiment_id is None:
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") or None
            experiment = None if experiment_id else os.environ.get("MLFLOW_EXPERIMENT_NAME") or None
        self._experiment = None if experiment is None else str(experiment)
        self._experiment_id = None if experiment_id is None else str(experiment_id)
        self._long_params, self._checkpoints, self._on_replay = long_params, checkpoints, on_replay
        self._uri = ""
        self._client: Any = None
        self._store: Any = None
        self._run_id = self._run_experiment = ""
        self._tags: dict[str, str] = {}
        self._names: dict[str, tuple[str, float]] = {}
        self._longest = 0
        self._moments: dict[float, tuple[int, int]] = {}
        self._told: set[str] = set()
        self._without_models = False

    # -- the run -------------------------------------------------------------------------------------------------

    @hookimpl
    def log_start(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Find the MLflow run by what was noted or by its tag, or make it; then send what the run is made of."""
        self.close()
        record = _record(run)
        with self._reaching():
            self._open(self._given_uri, Path(run.path).parent.parent, record.get("directory"))
            there = self._find_or_create(run, notes, record)
            self._run_id, self._run_experiment = there.info.run_id, there.info.experiment_id
            uri = _without_password(self._uri)
            notes.update(run_id=self._run_id, experiment_id=self._run_experiment, tracking_uri=uri)
            notes["environment"] = {"MLFLOW_RUN_ID": self._run_id}  # what joins it from the training process
            if os.environ.get("MLFLOW_TRACKING_URI") != self._given_uri or self._given_uri is None:
                notes["environment"]["MLFLOW_TRACKING_URI"] = uri
            self._tags = dict(there.data.tags)
            if there.info.status != "RUNNING":
                self._set_status(self._run_id, "RUNNING")
            self._set_tags(_tags_of(run, record))
            self._send_params(run.config, there.data.params)

    @hookimpl
    def log_results(self, run: RunInfo, results: list[Result], notes: dict[str, Any]) -> None:
        """Send the metrics of all results in requests as large as MLflow takes."""
        beyond = [result.seq for result in results if not -(1 << 63) <= result.step < 1 << 63]
        if beyond:
            raise Rejected(beyond, "MLflow's steps are integers of 64 bits")
        tags: dict[str, str] = {}
        media: list[tuple[str, Result, MediaFile]] = []
        rows = [self._points(result, notes, tags, media) for result in results]
        with self._reaching():
            self._send(results, rows)  # first, so that it is there whatever becomes of the files
            for name, result, file in media:
                self._send_media(run, name, result, file, tags)
            self._set_tags(tags)

    @hookimpl
    def log_rewind(self, run: RunInfo, notes: dict[str, Any]) -> None:
        """Note up to which step each metric was delivered: MLflow cannot delete points, so these steps are not sent anew."""
        if self._on_replay == "skip":
            notes["skip"] = dict(notes.get("steps", {}))
        with self._reaching():
            self._send_params(run.config, self._client.get_run(self._run_id).data.params)

    @hookimpl
    def log_end(self, run: RunInfo, outcome: Outcome, notes: dict[str, Any]) -> None:
        """Set the status, and close the sweep's parent if this was the last of its runs that ran."""
        tags = {**_git_tags(_record(run)), "trainyard.status": outcome.status}
        if outcome.error or "trainyard.error" in self._tags:
            tags["trainyard.error"] = outcome.error or ""
        ended = _milliseconds(outcome.time)
        with self._reaching():
            self._set_tags(tags)
            self._remove_twins(run)
            self._set_status(self._run_id, _STATUS[outcome.status], ended)
            self._end_parent(run, ended)

    @hookimpl
    def close(self) -> None:
        """Let go of the connections to a database; those to a server are the process' own, kept by MLflow."""
        engine = getattr(self._store, "engine", None)
        self._client = self._store = None
        if engine is not None:
            engine.dispose()

    @hookimpl
    def join(self, notes: dict[str, Any]) -> None:
        """Make it the active run of MLflow's own functions: these forget MLFLOW_RUN_ID after its first use."""
        import mlflow

        active = mlflow.active_run()
        if active is None or active.info.run_id != notes["run_id"]:
            mlflow.start_run(run_id=notes["run_id"], nested=active is not None)

    @hookimpl
    def leave(self, notes: dict[str, Any]) -> None:
        """Take it from MLflow's own functions, in all threads; they would log the next run's metrics into it, and end it
        at exit, at whatever place is set by then.
        """
        stacks = getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_run_stack", None)
        if stacks is not None:
            for stack in stacks.get_all_thread_values().values():
                stack[:] = [run for run in stack if run.info.run_id != notes.get("run_id")]

    @hookimpl
    def check(self, storage: str) -> str:
        """Ask the server for its version, and for an experiment as the user that we are."""
        with self._reaching():
            uri = _resolved(self._given_uri, Path(storage), None)
            name = _without_password(uri)
            path = _sqlite_path(uri)
            if path is not None and not path.exists():
                return f"{name}: a new file, made by the first run"
            self._uri, version, who = uri, "", ""
            if urlsplit(uri).scheme in ("http", "https"):
                version, who = self._ask_version(uri)
            self._open(uri, Path(storage), None)
            self._client.search_experiments(max_results=1)
            self.close()
            return ", ".join(part for part in (f"{name}: {version or 'MLflow'}", who) if part)

    # -- reaching MLflow -----------------------------------------------------------------------------------------

    def _open(self, given: str | None, storage: Path, directory: str | None) -> None:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        uri = self._uri = _resolved(given, storage, directory)
        for name in ("alembic", "mlflow.store.db.utils"):  # they tell of each table that they make
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        _probe_database(uri)
        with _alone(uri) if _sqlite_path(uri) else contextlib.nullcontext():
            self._client = MlflowClient(uri)
        # The store takes an end time without printing links, and metrics without copying each
        self._store = self._client._tracking_client.store

    def _ask_version(self, uri: str) -> tuple[str, str]:
        credentials, rest = (importlib.import_module(f"mlflow.utils.{name}") for name in ("credentials", "rest_utils"))

        answer = rest.http_request(
            credentials.get_default_host_creds(uri), "/version", "GET", timeout=_CHECK_S, max_retries=0
        )
        version = answer.text.strip() if answer.status_code == 200 else ""
        user = self._user()
        return f"MLflow {version}" if re.fullmatch(r"[\w.+-]{1,40}", version) else "", f"as {user}" if user else ""

    def _user(self) -> str:
        """Who we are to the server, for messages."""
        parts = urlsplit(self._uri)
        if parts.scheme not in ("http", "https"):
            return ""
        with contextlib.suppress(Exception):
            creds = importlib.import_module("mlflow.utils.credentials").get_default_host_creds(self._uri)
            user = creds.username or parts.username
            return (
                f"user {user!r}" if user else "the bearer of a token" if creds.token else "nobody: no credentials given"
            )
        return ""

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        """Word what MLflow raises: which server, what is wrong, no credentials."""
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _ABROAD:
                raise
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> OSError:
        uri, status, text = _without_password(self._uri), _http_status(error), str(error)
        if status == 401:
            return PermissionError(
                f"{uri} refuses the credentials of {self._user() or 'this user'} (HTTP 401): see MLFLOW_TRACKING_USERNAME, "
                "MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_TOKEN"
            )
        if status == 403:
            return PermissionError(f"{uri} does not allow {self._user() or 'this user'} to do that (HTTP 403)")
        for pattern, reason in _UNREACHABLE:
            if re.search(pattern, text):
                return ConnectionError(f"{uri} cannot be reached: {reason}")
        first = re.sub(r"://\S*@", "://", text.strip().partition("\n")[0])
        return ConnectionError(f"{uri}: {first[:300]}")

    # -- find or create ------------------------------------------------------------------------------------------

    def _find_or_create(self, run: RunInfo, notes: dict[str, Any], record: dict[str, Any]) -> Any:
        """The MLflow run of this run. Every create is preceded by a search, since its answer may have been lost."""
        if "run_id" in notes:
            there = self._noted(notes)
            if there is not None:
                return there
        joined = self._client.get_run(os.environ["MLFLOW_RUN_ID"]) if os.environ.get("MLFLOW_RUN_ID") else None
        experiment = joined.info.experiment_id if joined else self._find_experiment(run)
        found = self._search(experiment, **{"trainyard.run_id": run.id})
        if found:  # one with data before an empty twin, which a create that came through late can have left
            return min(found, key=lambda there: (not (there.data.metrics or there.data.params), *_age(there)))
        tags = {"trainyard.run_id": run.id, "mlflow.user": _os_user(), **_context_tags()}
        if joined is not None:
            if self._join(joined, run):
                return self._client.get_run(joined.info.run_id)
            tags["mlflow.parentRunId"] = joined.info.run_id
        elif "trainyard.sweep" in run.tags:
            tags["mlflow.parentRunId"] = self._find_parent(experiment, run.tags["trainyard.sweep"])
        return self._client.create_run(
            experiment, start_time=_milliseconds(record.get("created")), tags=tags, run_name=run.name
        )

    def _noted(self, notes: dict[str, Any]) -> Any:
        """The run that was noted; None if it was at another URI and is not here."""
        run_id, uri = notes["run_id"], _without_password(self._uri)
        try:
            there = self._client.get_run(run_id)
        except Exception as error:
            if _http_status(error) != 404:
                raise
            if notes.get("tracking_uri") != uri:
                logger.warning(
                    "MLflow run %s is at %s: what follows goes to a new run at %s, and `trainyard replay` can send all of it",
                    run_id, notes.get("tracking_uri"), uri,
                )  # fmt: skip
                return None
            there = None
        if there is None or there.info.lifecycle_stage != "active":
            restore = "" if there is None else f"restore it (mlflow runs restore --run-id {run_id}), or "
            raise ConnectionError(
                f"{uri}: MLflow run {run_id} was deleted: {restore}remove this tracker's file in the run's delivery/ "
                "to send everything to a new one"
            )
        return there

    def _search(self, experiment: str, **tags: str) -> list[Any]:
        clauses = [f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items()]
        return list(self._client.search_runs([experiment], " AND ".join(clauses), max_results=1000))

    def _find_experiment(self, run: RunInfo) -> str:
        if self._experiment_id is not None:
            experiment = self._client.get_experiment(self._experiment_id)
        else:
            name = self._experiment or run.experiment
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                try:
                    return str(self._client.create_experiment(name, artifact_location=_artifacts_of(self._uri)))
                except Exception as error:
                    if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                        raise
                    experiment = self._client.get_experiment_by_name(name)  # somebody else was faster
        if experiment.lifecycle_stage != "active":
            raise ConnectionError(
                f"{_without_password(self._uri)}: the experiment {experiment.name!r} was deleted there: restore it "
                f"(mlflow experiments restore --experiment-id {experiment.experiment_id}), or name another"
            )
        return str(experiment.experiment_id)

    def _join(self, joined: Any, run: RunInfo) -> bool:
        """Make the MLflow run of MLFLOW_RUN_ID ours; False if it is a parent, or another run's."""
        run_id = joined.info.run_id
        with _making:
            tags = self._client.get_run(run_id).data.tags
            if "trainyard.sweep" in run.tags or tags.get("trainyard.kind") == "sweep":
                return False
            if tags.get("trainyard.run_id", run.id) != run.id:
                return False
            self._client.set_tag(run_id, "trainyard.run_id", run.id)
        return True

    def _find_parent(self, experiment: str, sweep: str) -> str:
        """The one MLflow run that a sweep's runs are nested in.

        Of several that were made at once, everybody takes the oldest, and who made another one removes it.
        """
        known = {"trainyard.sweep": sweep, "trainyard.kind": "sweep"}
        with _making:
            found = self._search(experiment, **known)
            if not found:
                mine = self._client.create_run(experiment, tags={**known, "mlflow.user": _os_user()}, run_name=sweep)
                found = self._search(experiment, **known) or [mine]
                if min(found, key=_age).info.run_id != mine.info.run_id:
                    self._client.delete_run(mine.info.run_id)
            parent = min(found, key=_age)
            if parent.info.status != "RUNNING":
                self._set_status(parent.info.run_id, "RUNNING")
        return str(parent.info.run_id)

    def _end_parent(self, run: RunInfo, ended: int | None) -> None:
        """Hold to the oldest parent, should two have been made at once, and end it with the last of its runs."""
        if "trainyard.sweep" not in run.tags or os.environ.get("MLFLOW_RUN_ID"):
            return
        experiment = self._run_experiment
        parents = sorted(
            self._search(experiment, **{"trainyard.sweep": run.tags["trainyard.sweep"], "trainyard.kind": "sweep"}),
            key=_age,
        )
        if not parents:
            return
        parent = parents[0].info.run_id
        self._set_tags({"mlflow.parentRunId": parent}, replace=True)
        for other in parents[1:]:
            if not self._search(experiment, **{"mlflow.parentRunId": other.info.run_id}):
                self._client.delete_run(other.info.run_id)
        children = f"tags.`mlflow.parentRunId` = '{parent}' AND attributes.status = 'RUNNING'"
        if not self._client.search_runs([experiment], children, max_results=1):
            self._set_status(parent, "FINISHED", ended)

    def _remove_twins(self, run: RunInfo) -> None:
        """Delete empty runs of our tag: a create that we gave up waiting for, and that came through after we searched."""
        for there in self._search(self._run_experiment, **{"trainyard.run_id": run.id}):
            if there.info.run_id != self._run_id and not there.data.metrics and not there.data.params:
                self._client.delete_run(there.info.run_id)

    def _set_status(self, run_id: str, status: str, ended: int | None = None) -> None:
        from mlflow.entities import RunStatus

        self._store.update_run_info(run_id, RunStatus.from_string(status), ended, None)

    # -- tags and params -----------------------------------------------------------------------------------------

    def _set_tags(self, tags: dict[str, str], *, replace: bool = False) -> None:
        """Set those that are not so already. MLflow's own, which people edit in its pages, only where there is none."""
        from mlflow.entities import RunTag

        wanted = []
        for name, value in tags.items():
            text = _clean(value)[:_TAG_LIMIT]
            there = self._tags.get(name)
            if there == text or (there is not None and name.startswith("mlflow.") and not replace):
                continue
            self._tags[name] = text
            wanted.append(RunTag(name, text))
        for batch in _chunks(wanted, _PARAMS_A_REQUEST):
            self._store.log_batch(run_id=self._run_id, metrics=[], params=[], tags=batch)

    def _send_params(self, config: dict[str, Any], there: dict[str, str]) -> None:
        from mlflow.entities import Param

        tags: dict[str, str] = {}
        new = []
        for original, value in flatten(config):
            name, text = escape(original), _clean(_text_of(value))
            if name != original:
                tags[fitting(f"trainyard.name.{name}")] = original
            tag = escape(f"trainyard.param.{original}")
            if len(text) > _PARAM_LIMIT:
                text = self._shortened(name, tag, text, tags)
            if name not in there:
                new.append(Param(name, text))
            elif there[name] != text or self._tags.get(tag, text) != text:
                tags.setdefault(tag, text)
        for batch in _chunks(new, _PARAMS_A_REQUEST):
            try:
                self._store.log_batch(run_id=self._run_id, metrics=[], params=batch, tags=[])
            except Exception as error:
                if not self._is_refusal(error):
                    raise
                for param in batch:  # one of them: keep the others, and that one as a tag
                    try:
                        self._store.log_batch(run_id=self._run_id, metrics=[], params=[param], tags=[])
                    except Exception as refusal:
                        if not self._is_refusal(refusal):
                            raise
                        tags[escape(f"trainyard.param.{unescape(param.key)}")] = param.value
        self._set_tags(tags)

    def _shortened(self, name: str, tag: str, text: str, tags: dict[str, str]) -> str:
        """What stands in the param of a value that is too long for it."""
        kept = ""
        if self._long_params == "error":
            raise ValueError(
                f"the param {unescape(name)!r} has {len(text)} characters and MLflow takes {_PARAM_LIMIT}: shorten it, or set "
                "the tracker's long_params to truncate, tag or artifact"
            )
        if self._long_params == "tag":
            for i, piece in enumerate(_chunks(text, _TAG_LIMIT)):
                tags[tag if i == 0 else escape(f"{unescape(tag)}.{i + 1}")] = piece
            kept = f", all of it in the tag {tag}"
        elif self._long_params == "artifact":
            path = f"params/{path_name(unescape(name))}.txt"
            self._upload(path, text.encode())
            kept = f", all of it in the artifact {path}"
        note = f" [{len(text)} characters{kept}]"
        return text[: _PARAM_LIMIT - len(note)] + note

    # -- metrics -------------------------------------------------------------------------------------------------

    def _points(
        self, result: Result, notes: dict[str, Any], tags: dict[str, str], media: list[tuple[str, Result, MediaFile]]
    ) -> list[Any]:
        """The points of one result; what is not a number goes into `tags` or `media`."""
        from mlflow.entities import Metric

        skip, steps = notes.setdefault("skip", {}), notes.setdefault("steps", {})
        step, moment = result.step, round(result.time * 1000)
        points = []
        for name, value in flatten({name: value for name, value in result.metrics.items() if name not in NOT_METRICS}):
            if value is None:
                continue
            if skip and name in skip:
                if step <= skip[name]:
                    continue
                del skip[name]  # the replay of this metric is over
            if self._on_replay == "skip" and step > steps.get(name, -math.inf):
                steps[name] = step
            if isinstance(value, int | float):
                key, factor = self._names.get(name) or self._name(name, tags)
                number = value * factor if factor != 1 else float(value)
                if number in (math.inf, -math.inf):
                    self._note_infinity(name, number, tags)
                    number = math.copysign(_LARGEST, number)
                points.append(Metric(key, number, moment, step))
            elif isinstance(value, str):
                tags[escape(f"trainyard.last.{name}")] = value
            else:
                for each, item in media_apart(name, value):
                    if isinstance(item, MediaFile):
                        media.append((each, result, item))
                    else:
                        kind = type(item).__name__
                        self._tell_once(
                            f"metric {each!r} is a {kind}, and MLflow's metrics are numbers: it is not sent"
                        )
        if points and isinstance(total := result.get("time_total_s"), float):
            self._moments[total] = (step, moment)
            if len(self._moments) > 2000:
                del self._moments[next(iter(self._moments))]
        return points

    def _name(self, name: str, tags: dict[str, str]) -> tuple[str, float]:
        """The key of a metric and the factor on its values."""
        found: tuple[str, float] = (escape(name), 1)
        for pattern, key, factor in _SYSTEM:
            if match := pattern.fullmatch(name):
                found = (match.expand(key), factor)
                break
        else:
            if found[0] != name:
                tags[fitting(f"trainyard.name.{found[0]}")] = name
        self._names[name] = found
        self._longest = max(self._longest, len(json.dumps(found[0])))
        return found

    def _note_infinity(self, name: str, number: float, tags: dict[str, str]) -> None:
        tag = escape(f"trainyard.infinite.{name}")
        signs = {*(tags.get(tag) or self._tags.get(tag, "")).split(), "inf" if number > 0 else "-inf"}
        tags[tag] = " ".join(sorted(signs - {""}))

    def _send(self, results: list[Result], rows: list[list[Any]]) -> None:
        try:
            self._send_points(list(itertools.chain.from_iterable(rows)))
        except Exception as error:
            if not self._is_refusal(error):
                raise
            self._assert_run_takes_data()
            refused = self._refused(list(zip(results, rows)))
            if not refused:
                raise
            raise Rejected(refused, f"MLflow refuses them: {str(error).partition(chr(10))[0][:300]}") from None

    def _send_points(self, points: list[Any]) -> None:
        fits = max(1, min(_METRICS_A_REQUEST, _BYTES_A_REQUEST // (self._longest + 100)))
        size = min(fits, _sizes.get(self._uri, fits))
        try:
            for batch in _chunks(points, size):
                self._store.log_batch(run_id=self._run_id, metrics=batch, params=[], tags=[])
        except Exception as error:
            if re.search(_TIMEOUT, str(error)):  # else a slow server would never take any of it
                _sizes[self._uri] = max(size // 2, _FEWEST_A_REQUEST)
            raise
        if size < fits:
            _sizes[self._uri] = min(2 * size, fits)

    def _refused(self, rows: list[tuple[Result, list[Any]]]) -> list[int]:
        """Which results the server refuses, by halving; the others are recorded on the way."""
        try:
            self._send_points([point for _, points in rows for point in points])
        except Exception as error:
            if not self._is_refusal(error):
                raise
            if len(rows) == 1:
                return [rows[0][0].seq]
            middle = len(rows) // 2
            return self._refused(rows[:middle]) + self._refused(rows[middle:])
        return []

    def _is_refusal(self, error: Exception) -> bool:
        """Whether it is about what we sent: trying again would change nothing."""
        if type(error) in (TypeError, ValueError, OverflowError):  # it cannot even be encoded
            return True
        return _http_status(error) == 400 and getattr(error, "error_code", "") in (
            "INVALID_PARAMETER_VALUE",
            "BAD_REQUEST",
        )

    def _assert_run_takes_data(self) -> None:
        """Raise what has nothing to do with the data: a run deleted meanwhile, a server that refuses everything."""
        there = self._client.get_run(self._run_id)
        if there.info.lifecycle_stage != "active":
            raise ConnectionError(
                f"{_without_password(self._uri)}: MLflow run {self._run_id} was deleted: restore it "
                f"(mlflow runs restore --run-id {self._run_id})"
            )
        from mlflow.entities import RunTag

        probe = RunTag("trainyard.run_id", self._tags["trainyard.run_id"])
        self._store.log_batch(run_id=self._run_id, metrics=[], params=[], tags=[probe])

    # -- files ---------------------------------------------------------------------------------------------------

    @hookimpl
    def log_artifact(self, artifact: Artifact) -> None:
        """Upload the file or directory; the same name overwrites."""
        path = Path(artifact.path)
        if not path.exists():
            self._tell_once(f"the artifact {artifact.name!r} is gone: {path} is not sent")
            return
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        files = [file for file in files if file.is_file() and not file.is_symlink()]
        with self._reaching():
            for file in files:
                relative = file.relative_to(path).as_posix()
                self._upload(path_name(artifact.name if file == path else f"{artifact.name}/{relative}"), file)

    def _send_media(self, run: RunInfo, name: str, result: Result, file: MediaFile, tags: dict[str, str]) -> None:
        path = media_path(run.path, file)
        if path is None:
            self._tell_once(f"the {file.kind} {name!r} is gone: {file.path} is not sent")
            return
        if file.kind == "image" and path.suffix.lower() == ".png":
            # The names of MlflowClient.log_image, which its page of images reads; ours are the same at each delivery
            key = escaped(name, IMAGE_KEY).replace("/", "~")
            serial = uuid.uuid5(uuid.NAMESPACE_OID, f"{run.id}/{result.seq}/{name}")
            target = f"images/{key}+step+{result.step}+timestamp+{_milliseconds(result.time)}+{serial}"
            if (self._run_id, target) not in _uploaded:
                self._upload(f"{target}.png", path)
                if (small := _thumbnail(path)) is not None:
                    self._upload(f"{target}+compressed.webp", small)
                _uploaded.add((self._run_id, target))
            tags["mlflow.loggedImages"] = "True"
            return
        target = f"media/{path_name(name)}/step_{result.step:08d}_{result.seq}{path.suffix}"
        if (self._run_id, target) not in _uploaded:
            self._upload(target, path)
            _uploaded.add((self._run_id, target))
        if file.kind == "table" and path.suffix == ".json":
            self._note_table(target)

    def _note_table(self, target: str) -> None:
        """Put it on the list from which MLflow's pages show tables, as far as that fits."""
        tables = json.loads(self._tags.get("mlflow.loggedArtifacts", "[]"))
        entry = {"path": target, "type": "table"}
        if entry not in tables and len(text := json.dumps([*tables, entry])) <= _TAG_LIMIT:
            self._set_tags({"mlflow.loggedArtifacts": text}, replace=True)

    def _upload(self, target: str, source: Path | bytes) -> None:
        """Put a file at a path of the run's artifacts."""
        folder, name = posixpath.split(target)
        with contextlib.ExitStack() as stack:
            if isinstance(source, bytes) or source.name != name:
                temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()), name)
                if isinstance(source, bytes):
                    temporary.write_bytes(source)
                else:
                    temporary.symlink_to(source.absolute())
                source = temporary
            try:
                self._client.log_artifact(self._run_id, str(source), folder or None)
            except Exception as error:
                if _http_status(error) not in (400, 413, 414):  # it is refused, too large, or has too long a name
                    raise
                self._tell_once(f"MLflow refuses the artifact {target!r}: {str(error).partition(chr(10))[0][:200]}")

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @hookimpl
    def log_checkpoint(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        """Make a LoggedModel of it, with its metrics, that says where it lies or holds its files."""
        if self._checkpoints == "none" or self._without_models:
            return
        with self._reaching():
            model = self._find_model(run, checkpoint)
            if model is not None:
                self._output(model.model_id, checkpoint)
                self._link_metrics(model.model_id, checkpoint)

    def _find_model(self, run: RunInfo, checkpoint: CheckpointInfo) -> Any:
        experiment = self._run_experiment
        serial = f"{run.id}/{checkpoint.index}"
        try:
            found = self._client.search_logged_models([experiment], f"tags.`trainyard.checkpoint` = '{serial}'")
        except Exception as error:
            if not isinstance(error, NotImplementedError) and _http_status(error) not in (404, 405, 501):
                raise
            self._without_models = True
            self._tell_once(
                f"{_without_password(self._uri)} knows no LoggedModels (MLflow 3): checkpoints are not shown there"
            )
            return None
        tags = {
            "trainyard.checkpoint": serial,
            "trainyard.run_id": run.id,
            "trainyard.url": _without_password(checkpoint.url),
            "trainyard.iteration": str(checkpoint.iteration),
            "trainyard.size": str(checkpoint.size),
        }
        files = Path(run.path, "checkpoints", f"checkpoint_{checkpoint.index:06d}")
        upload = self._checkpoints == "upload" and files.is_dir()
        if self._checkpoints == "upload" and not upload:
            self._tell_once(f"{files} is gone already: its MLflow model only says where the checkpoint was")
        if not upload:
            tags["mlflow.model.isExternal"] = "true"
        if found:
            model = min(found, key=lambda model: (model.creation_timestamp, model.model_id))
            if any(model.tags.get(name) != value for name, value in tags.items()):
                self._client.set_logged_model_tags(model.model_id, tags)
        else:
            name = re.sub(r"[/:.%\"']", "-", f"{run.name}-{checkpoint.index:06d}")
            model = self._client.create_logged_model(
                experiment, name=name, source_run_id=self._run_id, tags=tags, model_type="checkpoint"
            )
        if str(model.status).rpartition(".")[2] != "READY":
            if upload:
                self._client.log_model_artifacts(model.model_id, str(files))
            self._client.finalize_logged_model(model.model_id, "READY")
        return model

    def _output(self, model_id: str, checkpoint: CheckpointInfo) -> None:
        """Show the model among the run's outputs, once."""
        from mlflow.entities import LoggedModelOutput

        outputs = self._client.get_run(self._run_id).outputs
        if all(output.model_id != model_id for output in (outputs.model_outputs if outputs else ())):
            self._client.log_outputs(self._run_id, [LoggedModelOutput(model_id, checkpoint.iteration)])

    def _link_metrics(self, model_id: str, checkpoint: CheckpointInfo) -> None:
        """Log the checkpoint's metrics with the model's id, at the step and time of their result: no new points of the run."""
        from mlflow.entities import Metric

        total = checkpoint.metrics.get("time_total_s")
        moment = self._moments.get(total) if isinstance(total, float) else None
        if moment is None and isinstance(total, float):  # its result came before a restart
            history = self._client.get_metric_history(self._run_id, "time_total_s")
            moment = next(((point.step, point.timestamp) for point in history if point.value == total), None)
        if moment is None:
            return
        step, time = moment
        ignored: dict[str, str] = {}
        metrics = []
        for name, value in flatten(
            {k: v for k, v in checkpoint.metrics.items() if k not in NOT_METRICS and k != "perf"}
        ):
            if isinstance(value, int | float) and math.isfinite(value):
                key, _ = self._names.get(name) or self._name(name, ignored)
                metrics.append(Metric(key, float(value), time, step, model_id=model_id))
        self._set_tags(ignored)
        for batch in _chunks(metrics, _METRICS_A_REQUEST):
            self._store.log_batch(run_id=self._run_id, metrics=batch, params=[], tags=[])

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning("mlflow: %s", message)


# ---- small things ------------------------------------------------------------------------------------------------

_ABROAD = frozenset(
    {"mlflow", "requests", "urllib3", "sqlalchemy", "alembic", "sqlite3", "psycopg2", "psycopg", "pymysql"}
)
_TIMEOUT = r"(?i)timed out|timeout exception"
_UNREACHABLE = (
    (r"Connection refused", "connection refused"),
    (r"NameResolution|Name or service not known|getaddrinfo", "no such host"),
    (_TIMEOUT, "it does not answer in time"),
    (r"RemoteDisconnected|Connection reset|Connection aborted|Broken pipe", "it breaks off the connection"),
    (r"No route to host|Network is unreachable", "no route to it"),
    (r"too many (\d+) error responses", "it answers with errors"),
    (r"(?i)SSL|CERTIFICATE", "its certificate is not trusted"),
)


def _http_status(error: Exception) -> int:
    """The HTTP status that an error of MLflow's stands for; 0 for others."""
    response = getattr(error, "response", None)
    if response is not None and getattr(response, "status_code", None):
        return int(response.status_code)
    ask = getattr(error, "get_http_status_code", None)
    status = int(ask()) if ask else 0
    code = re.search(r"failed with error code (\d{3})", str(error))
    return int(code[1]) if code else status


def _refuse_file_store(uri: str) -> None:
    if (urlsplit(uri).scheme in ("", "file") or re.match(r"[A-Za-z]:", uri)) and uri not in _WORDS:
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
            return
        path = uri.removeprefix("file://").removeprefix("file:")
        database = path if path.endswith((".db", ".sqlite")) else f"{path.rstrip('/')}/mlflow.db"
        raise PluginConfigError(
            f"tracking_uri {uri!r} is a directory of files, which MLflow 3 does not take any more: use a sqlite file, "
            f"sqlite:///{database}"
        )


_WORDS = ("databricks", "databricks-uc", "uc")


def _resolved(given: str | None, storage: Path, directory: str | None) -> str:
    """The URI, a sqlite file's path absolute: by default in the storage root, else as seen where the run was started."""
    if given is None:
        return f"sqlite:///{(storage / 'mlflow.db').absolute()}"
    scheme, separator, path = given.partition(":///")
    if scheme.partition("+")[0] == "sqlite" and separator and path and not path.startswith((":", "file:")):
        return f"{scheme}:///{Path(directory or '.', path).absolute()}"
    return given


def _sqlite_path(uri: str) -> Path | None:
    scheme, _, path = uri.partition(":///")
    return Path(path.partition("?")[0]) if scheme.partition("+")[0] == "sqlite" and path else None


def _artifacts_of(uri: str) -> str | None:
    """Where the artifacts of a new experiment lie: beside a sqlite file; else the server says."""
    path = _sqlite_path(uri)
    return None if path is None else (path.parent / "mlartifacts").as_uri()


def _without_password(uri: str) -> str:
    """A URI without who one is: a password may hold a slash or an @ where it is a database's, and stand in the query."""
    info = r"^(https?://)[^/?#]*@" if uri.startswith("http") else r"^([\w.+-]+://)[^?#]*@"
    return re.sub(
        r"(?i)([?&][\w.-]*(?:password|pwd|token|secret|key)=)[^&#]*", r"\1<redacted>", re.sub(info, r"\1", uri)
    )


def _probe_database(uri: str) -> None:
    """Fail soon where a database server is not there: MLflow itself would try for minutes."""
    port = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}.get(uri.partition("://")[0].partition("+")[0])
    if port is None:
        return
    url = importlib.import_module("sqlalchemy.engine").make_url(uri)
    if url.host:
        try:
            socket.create_connection((url.host, url.port or port), timeout=_CHECK_S).close()
        except OSError as error:
            raise ConnectionError(f"{_without_password(uri)} cannot be reached: {error}") from None


@contextlib.contextmanager
def _alone(uri: str) -> Iterator[None]:
    """One process at a time: two that make the tables of a new sqlite file at once leave a broken one."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    database = _sqlite_path(uri) or Path()
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(database.with_name(f".{database.name}.lock"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record(run: RunInfo) -> dict[str, Any]:
    """What ``run.json`` says; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(Path(run.path, "run.json").read_bytes())
        return record if isinstance(record, dict) else {}
    return {}


def _tags_of(run: RunInfo, record: dict[str, Any]) -> dict[str, str]:
    tags = {
        "trainyard.run_id": run.id,
        "trainyard.path": run.path,
        "mlflow.runName": run.name,
        "mlflow.user": _os_user(),
        "mlflow.source.type": "LOCAL",
        **_git_tags(record),
    }
    if record.get("host"):
        tags["trainyard.host"] = record["host"]
    if record.get("trainable"):
        tags["mlflow.source.name"] = record["trainable"]
    for name, value in run.tags.items():
        key = escape(name)
        if key != name:
            tags[fitting(f"trainyard.name.{key}")] = name
        tags[key] = value
    note = run.tags.get("note") or run.tags.get("description")
    if note:
        tags["mlflow.note.content"] = note
    return tags


def _git_tags(record: dict[str, Any]) -> dict[str, str]:
    git = record.get("git") or {}
    if not git.get("commit"):
        return {}
    return {"mlflow.source.git.commit": git["commit"], "mlflow.source.git.dirty": str(bool(git.get("dirty"))).lower()}


def _context_tags() -> dict[str, str]:
    """The tags that MLFLOW_RUN_CONTEXT holds."""
    with contextlib.suppress(ValueError):
        context = json.loads(os.environ.get("MLFLOW_RUN_CONTEXT") or "{}")
        return {str(name): str(value) for name, value in context.items()} if isinstance(context, dict) else {}
    return {}


def _os_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _quoted(value: str) -> str:
    """A string in a search of MLflow's, which knows two kinds of quotes and no escapes."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def _age(there: Any) -> tuple[int, str]:
    return there.info.start_time or 0, there.info.run_id


def _text_of(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else str(value)
        if not isinstance(value, list | tuple)
        else strict_json(value).decode()
    )


def _clean(text: str) -> str:
    """Text that every database takes: PostgreSQL has no NUL, and nothing encodes half a surrogate pair."""
    return str(text).replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _chunks(items: Any, size: int) -> Iterator[Any]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _thumbnail(path: Path) -> bytes | None:
    """A small copy as MLflow's page of images shows it; None without Pillow."""
    import io

    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(path) as image:
            image.thumbnail((256, 256))
            out = io.BytesIO()
            image.save(out, "webp")
    except Exception:  # a damaged or enormous picture, a Pillow without webp: the picture itself is sent all the same
        return None
    return out.getvalue()
