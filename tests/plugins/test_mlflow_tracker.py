"""The mlflow tracker against real servers: one run, each point once, whatever breaks on the way."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trainyard
from servers import BlackHole, MlflowServer, Proxy
from trainyard import plugins
from trainyard.errors import PluginConfigError, Rejected
from trainyard.records import Artifact, CheckpointInfo, MediaFile, Outcome, Result, RunInfo
from trainyard_plugins.trackers import mlflow as module
from trainyard_plugins.trackers.mlflow import MLflowTracker, escape, unescape

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
]

T0 = 1_700_000_000.0
_ids = iter(range(1, 10_000))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No MLflow settings from outside, and none left behind."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)
    module._sizes.clear()
    yield
    for name in set(os.environ) - set(before):
        if name.startswith("MLFLOW_"):
            del os.environ[name]


@pytest.fixture(scope="session")
def sqlite_server(tmp_path_factory):
    """A server over sqlite."""
    with MlflowServer(tmp_path_factory.mktemp("mlflow-sqlite")) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory):
    """A server over PostgreSQL."""
    with MlflowServer(tmp_path_factory.mktemp("mlflow-postgres"), "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_file(tmp_path_factory):
    """A sqlite file without a server."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow-file') / 'mlflow.db'}"


@pytest.fixture(params=["sqlite server", "postgres server", "sqlite file"])
def uri(request):
    """Each kind of backend."""
    if request.param == "sqlite file":
        return request.getfixturevalue("sqlite_file")
    return request.getfixturevalue(request.param.replace(" ", "_")).uri


@pytest.fixture
def server(sqlite_server):
    """The sqlite server's URI."""
    return sqlite_server.uri


@pytest.fixture
def proxy(server):
    """A proxy before the sqlite server."""
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def run(tmp_path):
    """A run of its own experiment."""
    return make_run(tmp_path)


def make_run(folder, config=None, tags=None, experiment=None, record=None):
    number = next(_ids)
    experiment = experiment or f"experiment {number}"
    path = Path(folder, "runs", f"e{number}", f"run_{number}")
    path.mkdir(parents=True)
    if record is not None:
        (path / "run.json").write_text(json.dumps(record))
    return RunInfo(f"{number:010x}", f"run_{number}", experiment, str(path), config or {}, tags or {})


def results(first, last, shift=0.0, **metrics):
    return [
        Result(
            seq, T0 + shift + seq / 8, seq,
            {"training_iteration": seq, "time_total_s": shift + seq / 4, "loss": 1 / seq, **metrics},
        )
        for seq in range(first, last + 1)
    ]  # fmt: skip


def start(run, notes, uri, **options):
    tracker = MLflowTracker(tracking_uri=uri, **options)
    tracker.log_start(run=run, notes=notes)
    return tracker


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def runs_of(uri, run, view=1):
    """The MLflow runs of the run's experiment, the active ones."""
    experiment = client(uri).get_experiment_by_name(run.experiment)
    return client(uri).search_runs([experiment.experiment_id], run_view_type=view, max_results=1000)


def history(uri, notes, key):
    return [(m.step, m.value, m.timestamp) for m in client(uri).get_metric_history(notes["run_id"], key)]


def steps(uri, notes, key="loss"):
    return [step for step, _, _ in history(uri, notes, key)]


def data(uri, notes):
    return client(uri).get_run(notes["run_id"]).data


# ---- options ---------------------------------------------------------------------------------------------------------


def test_the_constructor_touches_nothing(tmp_path, monkeypatch):
    """A tracker that was never started leaves no file, and imports no MLflow, and can be closed."""
    monkeypatch.chdir(tmp_path)
    script = (
        "import sys; from trainyard_plugins.trackers.mlflow import MLflowTracker; MLflowTracker().close();"
        "sys.exit('mlflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"long_params": "cut"}, "truncate, tag, artifact, error"),
        ({"checkpoints": "copy"}, "link, upload, none"),
        ({"on_replay": "new"}, "skip, append"),
        ({"experiment": "a", "experiment_id": 1}, "not both"),
    ],
)
def test_a_wrong_option_names_the_choices(options, words):
    """Before training, with what may be given."""
    with pytest.raises(PluginConfigError, match=words):
        plugins.build("mlflow", options)


def test_an_unknown_option_is_refused():
    """By core, with the nearest name."""
    with pytest.raises(PluginConfigError, match="did you mean 'tracking_uri'"):
        plugins.build("mlflow", {"tracking_url": "http://x"})


def test_without_mlflow_it_says_what_to_install(monkeypatch):
    """Before training, not at the first result."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PluginConfigError, match=r"pip install 'trainyard\[mlflow\]'"):
        MLflowTracker()


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "/data/mlruns", "file:///data/mlruns", "file:mlruns"])
def test_file_stores_are_refused_by_name(uri, monkeypatch):
    """The message has a sqlite URI to use; MLflow's own switch lets them pass."""
    with pytest.raises(PluginConfigError, match=r"sqlite:///.*mlruns/mlflow\.db"):
        MLflowTracker(tracking_uri=uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(PluginConfigError, match="sqlite"):
        MLflowTracker()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MLflowTracker()


def test_words_of_mlflow_are_no_file_stores():
    """Databricks has URIs without a scheme."""
    for uri in ("databricks", "databricks://profile", "databricks-uc", "http://host", "postgresql://u@h/d"):
        MLflowTracker(tracking_uri=uri)


# ---- where it goes ---------------------------------------------------------------------------------------------------


def test_the_default_is_a_sqlite_file_in_the_storage_root(tmp_path, monkeypatch, run):
    """With the artifacts beside it, and nothing in the working directory."""
    monkeypatch.chdir(tmp_path)
    notes: dict = {}
    tracker = start(run, notes, None)
    tracker.log_results(run=run, results=results(1, 3), notes=notes)
    (tmp_path / "a.txt").write_text("hello")
    tracker.log_artifact(artifact=Artifact("a.txt", str(tmp_path / "a.txt"), 5, T0))
    tracker.close()
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert notes["tracking_uri"] == uri
    assert steps(uri, notes) == [1, 2, 3]
    assert (tmp_path / "runs" / "mlartifacts" / notes["run_id"] / "artifacts" / "a.txt").read_text() == "hello"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "a.txt"}


def test_a_relative_sqlite_path_is_seen_from_where_the_run_was_started(tmp_path, monkeypatch):
    """Whoever delivers it, and wherever that runs."""
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = make_run(tmp_path, record={"directory": str(tmp_path / "project")})
    start(run, {}, "sqlite:///tracked.db").close()
    assert (tmp_path / "project" / "tracked.db").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_environment_says_where(server, monkeypatch, tmp_path):
    """MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_EXPERIMENT_ID count where no option does."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    first: dict = {}
    start(make_run(tmp_path), first, None).close()
    assert client(server).get_experiment(first["experiment_id"]).name == "from the environment"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", first["experiment_id"])
    second: dict = {}
    start(make_run(tmp_path), second, None).close()
    assert second["experiment_id"] == first["experiment_id"]
    third: dict = {}
    start(make_run(tmp_path), third, None, experiment="by option").close()
    assert client(server).get_experiment(third["experiment_id"]).name == "by option"


def test_a_deleted_experiment_is_named(server, run):
    """The message says how to restore it."""
    experiment = client(server).create_experiment(run.experiment)
    client(server).delete_experiment(experiment)
    with pytest.raises(ConnectionError, match=r"deleted there: restore it .*--experiment-id"):
        start(run, {}, server)


def test_its_client_makes_one_short_try(server, run, monkeypatch):
    """Without a word of the user; with one, that."""
    start(run, {}, server).close()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    start(run, {}, server).close()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


# ---- one run ---------------------------------------------------------------------------------------------------------


def test_one_run_for_each_run(uri, run):
    """With notes or without, started once or often, it is the same MLflow run."""
    notes: dict = {}
    start(run, notes, uri).close()
    for known in (copy.deepcopy(notes), {}, {}):
        start(run, known, uri).close()
        assert known == {**known, "run_id": notes["run_id"], "tracking_uri": uri}
    (there,) = runs_of(uri, run)
    assert (there.info.run_name, there.data.tags["trainyard.run_id"]) == (run.name, run.id)


def test_a_create_whose_answer_is_lost_makes_no_second_run(proxy, run):
    """The next start finds it."""
    proxy.drop_answer, proxy.only = True, lambda method, path: path.endswith("/runs/create")
    with pytest.raises(ConnectionError, match="breaks off"):
        start(run, {}, proxy.uri)
    proxy.heal()
    notes: dict = {}
    start(run, notes, proxy.uri).close()
    assert [there.info.run_id for there in runs_of(proxy.uri, run)] == [notes["run_id"]]


def test_a_create_that_comes_through_late_leaves_no_second_run(proxy, run, monkeypatch):
    """It lands after the search that looked for it: at the end its empty twin is gone."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    proxy.delay_s, proxy.times = 2.5, 1
    proxy.only = lambda method, path: path.endswith("/runs/create")
    with pytest.raises(ConnectionError, match="does not answer in time"):
        start(run, {}, proxy.uri)
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    tracker.log_results(run=run, results=results(1, 2), notes=notes)
    time.sleep(2.5)
    assert len(runs_of(proxy.uri, run)) == 2
    tracker.log_end(run=run, outcome=Outcome("completed", None, T0), notes=notes)
    assert [there.info.run_id for there in runs_of(proxy.uri, run)] == [notes["run_id"]]
    assert steps(proxy.uri, notes) == [1, 2]


def test_a_deleted_run_is_waited_for(server, run):
    """Nothing goes to a new one in silence; the message says how to restore it."""
    notes: dict = {}
    tracker = start(run, notes, server)
    client(server).delete_run(notes["run_id"])
    with pytest.raises(ConnectionError, match="was deleted: restore it"):
        tracker.log_results(run=run, results=results(1, 1), notes=notes)
    with pytest.raises(ConnectionError, match="was deleted: restore it"):
        start(run, notes, server)
    client(server).restore_run(notes["run_id"])
    tracker = start(run, notes, server)
    tracker.log_results(run=run, results=results(1, 1), notes=notes)
    assert steps(server, notes) == [1]


def test_another_server_gets_a_run_of_its_own(server, sqlite_file, run, caplog):
    """When the URI was changed the rest goes there, and the user is told."""
    notes: dict = {}
    start(run, notes, server).close()
    start(run, notes, sqlite_file).close()
    assert notes["tracking_uri"] == sqlite_file
    assert "trainyard replay" in caplog.text


def test_the_run_of_the_environment_is_joined_by_one(server, monkeypatch, tmp_path):
    """MLFLOW_RUN_ID is the MLflow run of the first run, and the parent of the next."""
    experiment = client(server).create_experiment(f"joined {next(_ids)}")
    outer = client(server).create_run(experiment, run_name="outer").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", outer)
    first, second, again = {}, {}, {}
    one, two = make_run(tmp_path), make_run(tmp_path)
    start(one, first, server).close()
    start(two, second, server).close()
    start(one, again, server).close()
    assert first["run_id"] == again["run_id"] == outer
    assert second["run_id"] != outer
    assert second["experiment_id"] == experiment
    assert data(server, second).tags["mlflow.parentRunId"] == outer
    assert client(server).get_run(outer).info.run_name == "outer"


# ---- tags and params -------------------------------------------------------------------------------------------------


def test_tags_note_and_commit(server, tmp_path):
    """The user's words, the commit, and MLflow's own tags; what people edit in its pages stays."""
    record = {
        "created": T0, "host": "node7", "trainable": "train.py:Digits", "directory": str(tmp_path),
        "git": {"commit": "c0ffee", "dirty": True},
    }  # fmt: skip
    run = make_run(tmp_path, tags={"team": "vision", "a@b": "x", "note": "first try"}, record=record)
    notes: dict = {}
    start(run, notes, server).close()
    there = client(server).get_run(notes["run_id"])
    expected = {
        "team": "vision", "a_x40_b": "x", "trainyard.name.a_x40_b": "a@b", "mlflow.note.content": "first try",
        "mlflow.source.git.commit": "c0ffee", "mlflow.source.git.dirty": "true", "mlflow.source.name": "train.py:Digits",
        "trainyard.host": "node7", "trainyard.path": run.path, "mlflow.runName": run.name,
    }  # fmt: skip
    assert there.data.tags == {**there.data.tags, **expected}
    assert there.info.start_time == T0 * 1000
    client(server).set_tag(notes["run_id"], "mlflow.note.content", "edited")
    start(run, notes, server).close()
    assert data(server, notes).tags["mlflow.note.content"] == "edited"


def test_a_commit_that_is_known_late(server, run):
    """git answers after the start; the end looks again."""
    notes: dict = {}
    tracker = start(run, notes, server)
    Path(run.path, "run.json").write_text(json.dumps({"git": {"commit": "abc", "dirty": False}}))
    tracker.log_end(run=run, outcome=Outcome("completed", None, T0), notes=notes)
    assert data(server, notes).tags["mlflow.source.git.commit"] == "abc"


def test_params_are_flat_and_never_a_failure(uri, tmp_path):
    """Any config arrives, and a value that changed is a tag."""
    config = {
        "lr": 0.1, "net": {"layers": [64, 32], "act": "relu"}, "none": None, "on": True, "odd@name": 1, "": "",
        "text": "a\0b\ud800", **{f"p{i}": i for i in range(250)},
    }  # fmt: skip
    run = make_run(tmp_path, config)
    notes: dict = {}
    start(run, notes, uri).close()
    params = data(uri, notes).params
    expected = {
        "lr": "0.1",
        "net/layers": "[64,32]",
        "net/act": "relu",
        "none": "None",
        "on": "True",
        "odd_x40_name": "1",
    }
    assert params == {**params, **expected, "p249": "249", "_x_": "", "text": "a\\x00b\\ud800"}
    changed = RunInfo(run.id, run.name, run.experiment, run.path, {**config, "lr": 0.5, "new": 1})
    start(changed, notes, uri).close()
    after = data(uri, notes)
    assert (after.params["lr"], after.params["new"], after.tags["trainyard.param.lr"]) == ("0.1", "1", "0.5")
    start(run, notes, uri).close()
    assert data(uri, notes).tags["trainyard.param.lr"] == "0.1"


def test_a_rewind_brings_the_resumed_config(server, run):
    """A run that is resumed in its process has its new params."""
    notes: dict = {}
    tracker = start(run, notes, server)
    resumed = RunInfo(run.id, run.name, run.experiment, run.path, {"new": 2})
    tracker.log_rewind(run=resumed, notes=notes)
    assert data(server, notes).params["new"] == "2"


@pytest.mark.parametrize("policy", ["truncate", "tag", "artifact"])
def test_long_params(server, tmp_path, policy):
    """Cut with a note of how long it was; with tag and artifact all of it is kept there. Again changes nothing."""
    long = "".join(chr(97 + i % 26) for i in range(20_001))
    run = make_run(tmp_path, {"prompt": long, "short": 1})
    notes: dict = {}
    for _ in range(2):
        start(run, notes, server, long_params=policy).close()
        there = data(server, notes)
        assert there.params["short"] == "1"
        assert len(there.params["prompt"]) == 6000
        assert there.params["prompt"].startswith(long[:5000])
        assert "20001 characters" in there.params["prompt"]
    tags = {name: value for name, value in there.tags.items() if name.startswith("trainyard.param.")}
    if policy == "tag":
        assert (
            tags["trainyard.param.prompt"] + tags["trainyard.param.prompt.2"] + tags["trainyard.param.prompt.3"] == long
        )
    else:
        assert tags == {}
    if policy == "artifact":
        assert Path(client(server).download_artifacts(notes["run_id"], "params/prompt.txt")).read_text() == long


def test_long_params_as_an_error(server, tmp_path):
    """Nothing is delivered, and the message names the param."""
    with pytest.raises(ValueError, match=r"'net/prompt' has 7000 characters .* long_params"):
        start(make_run(tmp_path, {"net": {"prompt": "x" * 7000}}), {}, server, long_params="error")


# ---- metrics ---------------------------------------------------------------------------------------------------------

NASTY = st.text(st.sampled_from("_x41F2/.:@é ~\n"), max_size=14) | st.text(max_size=12)


@given(NASTY)
@example("_x_")
@example("_x41_x42_")
@example("_x41(")
@example("a//b/./../c/")
@settings(max_examples=1500, deadline=None)
def test_escaping_is_reversible_and_legal(name):
    """Every name comes back, so no two become one, and MLflow takes it."""
    from mlflow.utils.validation import _validate_metric_name

    assert unescape(escape(name)) == name
    _validate_metric_name(escape(name))
    assert ".." not in module.path_name(name).split("/")
    assert unescape(module.path_name(name)) == name


def test_good_names_stay_and_long_ones_are_told_apart():
    """What MLflow takes is left alone; two long names with one beginning stay two."""
    for name in ("loss", "val/acc", "a b-c.d:e_f", "grad_x1_y", "é"):
        assert escape(name) == name
    one, two = escape("n" * 300 + "1"), escape("n" * 300 + "2")
    assert one != two
    assert len(one) == len(two) == 250


def test_every_value_by_its_rule(uri, run, caplog):
    """NaN, infinities, bools, strings, nested names and bad names; twice, and nothing is doubled."""
    metrics = {
        "nan": math.nan, "up": math.inf, "down": -math.inf, "yes": True, "no": False, "big": 2**60, "none": None,
        "word": "warm", "val": {"acc": 0.5, "a@b": 1}, "list": [1], "hostname": "h", "pid": 3, "config": {"lr": 1},
    }  # fmt: skip
    notes: dict = {}
    batch = results(1, 2, **metrics)
    for _ in range(2):
        tracker = start(run, copy.deepcopy(notes) if notes else notes, uri)
        tracker.log_results(run=run, results=batch, notes=copy.deepcopy(notes))
        tracker.close()
    there = data(uri, notes)
    assert set(there.metrics) == {
        "nan", "up", "down", "yes", "no", "big", "val/acc", "val/a_x40_b", "loss", "time_total_s"
    }  # fmt: skip
    for key in there.metrics:
        assert steps(uri, notes, key) == [1, 2], key
    assert all(math.isnan(value) for _, value, _ in history(uri, notes, "nan"))
    assert there.metrics["up"] == -there.metrics["down"] == sys.float_info.max
    assert (there.metrics["yes"], there.metrics["no"], there.metrics["big"]) == (1.0, 0.0, 2.0**60)
    assert there.tags["trainyard.infinite.up"] == "inf"
    assert there.tags["trainyard.infinite.down"] == "-inf"
    assert there.tags["trainyard.last.word"] == "warm"
    assert there.tags["trainyard.name.val/a_x40_b"] == "val/a@b"
    assert history(uri, notes, "loss")[0] == (1, 1.0, round((T0 + 1 / 8) * 1000))
    assert caplog.text.count("'list' is a list") == 2  # once for each start


def test_infinities_of_both_signs_are_remembered(server, run):
    """Over restarts."""
    notes: dict = {}
    for step, value in enumerate((math.inf, 1.0, -math.inf), 1):
        tracker = start(run, notes, server)
        tracker.log_results(run=run, results=results(step, step, x=value), notes=notes)
    assert data(server, notes).tags["trainyard.infinite.x"] == "-inf inf"


def test_machine_metrics_have_mlflows_keys(server, run):
    """So that its page for them shows them."""
    perf = {"cpu_util_percent": 12.5, "ram_util_percent": 50.0, "gpu_util_percent0": 0.75, "vram_util_percent1": 0.5}
    notes: dict = {}
    tracker = start(run, notes, server)
    tracker.log_results(run=run, results=results(1, 1, perf=perf), notes=notes)
    assert {key: value for key, value in data(server, notes).metrics.items() if key.startswith("system/")} == {
        "system/cpu_utilization_percentage": 12.5, "system/system_memory_usage_percentage": 50.0,
        "system/gpu_0_utilization_percentage": 75.0, "system/gpu_1_memory_usage_percentage": 50.0,
    }  # fmt: skip


def test_batches_keep_to_the_limits(proxy, run):
    """Requests are full: a thousand metrics, or less where names are long."""
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    del proxy.requests[:]
    tracker.log_results(run=run, results=results(1, 500, **{f"m{i}": i for i in range(8)}), notes=notes)
    assert len([path for _, path in proxy.requests if "log-batch" in path]) == 5
    sizes = []
    log_batch = tracker._store.log_batch
    tracker._store.log_batch = lambda **kw: (sizes.append(len(kw["metrics"])), log_batch(**kw))
    try:
        tracker.log_results(
            run=run, results=results(501, 600, **{"é" * 240 + str(i): i for i in range(8)}), notes=notes
        )
    finally:
        del tracker._store.log_batch
    assert sum(sizes) == 1000
    assert max(sizes) * (240 * 6 + 100) <= 1_000_000


@pytest.mark.parametrize("end", ["late", "early"])
def test_what_the_server_refuses_is_set_aside(uri, run, monkeypatch, end):
    """A result that is refused for ever is named, and the others stand."""
    notes: dict = {}
    tracker = start(run, notes, uri)
    batch = results(1, 9)
    batch[6 if end == "late" else 0].metrics["x"] = 1.0
    tracker._names["x"] = ("bad@key", 1)
    with pytest.raises(Rejected) as refusal:
        tracker.log_results(run=run, results=batch, notes=notes)
    seq = 7 if end == "late" else 1
    assert refusal.value.seqs == [seq]
    tracker.log_results(run=run, results=[result for result in batch if result.seq != seq], notes=notes)
    assert steps(uri, notes) == [step for step in range(1, 10) if step != seq]


def test_a_step_beyond_64_bits_is_set_aside(uri, run):
    """It cannot even be encoded, which is no reason to wait for ever."""
    notes: dict = {}
    tracker = start(run, notes, uri)
    batch = [*results(1, 2), Result(3, T0, 2**63, {"loss": 1.0})]
    with pytest.raises(Rejected) as refusal:
        tracker.log_results(run=run, results=batch, notes=notes)
    assert refusal.value.seqs == [3]


def test_a_server_that_refuses_everything_rejects_nothing(proxy, run):
    """What is not about the data is waited for."""
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    proxy.status = 400
    with pytest.raises(ConnectionError):
        tracker.log_results(run=run, results=results(1, 3), notes=notes)


# ---- exactly once ----------------------------------------------------------------------------------------------------


def test_the_same_batch_twice(uri, run):
    """With the notes of before, by a new tracker: each point once."""
    notes: dict = {}
    tracker = start(run, notes, uri)
    confirmed = copy.deepcopy(notes)
    tracker.log_results(run=run, results=results(1, 700, a=1.5, nan=math.nan), notes=notes)
    tracker.close()
    start(run, confirmed, uri).log_results(run=run, results=results(1, 701, a=1.5, nan=math.nan), notes=confirmed)
    for key in ("loss", "a", "nan"):
        assert steps(uri, notes, key) == list(range(1, 702))


def test_an_acknowledgement_that_was_lost(proxy, run):
    """The server has the batch, we do not know it: it comes again and stands once."""
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    confirmed = copy.deepcopy(notes)
    for round_ in range(3):
        proxy.drop_answer, proxy.times = True, 1 + round_
        proxy.only = lambda method, path: path.endswith("log-batch")
        for _ in range(1 + round_):
            with pytest.raises(ConnectionError, match="breaks off"):
                tracker.log_results(run=run, results=results(1, 400, a=1, b=2), notes=copy.deepcopy(confirmed))
    proxy.heal()
    tracker.log_results(run=run, results=results(1, 401, a=1, b=2), notes=confirmed)
    for key in ("loss", "a", "b"):
        assert steps(proxy.uri, notes, key) == list(range(1, 402))


def test_a_server_killed_in_the_middle_of_a_batch(tmp_path, run):
    """It comes back with whatever it had, and in the end everything is there once."""
    with MlflowServer(tmp_path / "server") as server:
        notes: dict = {}
        tracker = start(run, notes, server.uri)
        confirmed = copy.deepcopy(notes)
        batch = results(1, 500, **{f"m{i}": i / 7 for i in range(20)})
        killer = threading.Timer(0.6, server.kill)
        killer.start()

        def deliver():
            nonlocal batch
            while True:
                tracker.log_results(run=run, results=batch, notes=notes)
                batch = results(batch[-1].seq + 1, batch[-1].seq + 500, **{f"m{i}": i / 7 for i in range(20)})

        with pytest.raises(ConnectionError, match="cannot be reached"):
            deliver()
        killer.join()
        tracker.close()
        last = batch[-1].seq
        server.start()
        tracker = start(run, confirmed, server.uri)
        for first in range(1, last, 500):
            group = results(first, first + 499, **{f"m{i}": i / 7 for i in range(20)})
            tracker.log_results(run=run, results=group, notes=confirmed)
        for key in ("loss", "m0", "m19"):
            assert steps(server.uri, confirmed, key) == list(range(1, last + 1))


@pytest.mark.parametrize("seed", range(4))
def test_random_kill_points(proxy, run, seed):
    """Wherever the lane dies and from whichever confirmed notes it begins again, each point stands once."""
    chance = random.Random(seed)
    saved: dict = {}
    confirmed = delivered = 0
    while confirmed < 60:
        notes, head = copy.deepcopy(saved), confirmed
        proxy.heal()
        proxy.times = None
        if chance.random() < 0.7:
            fault = chance.choice(["drop_answer", "refuse", "status"])
            setattr(proxy, fault, 500 if fault == "status" else True)
            left = [chance.randint(0, 6)]

            def strikes(method, path, left=left):
                left[0] -= 1
                return left[0] < 0

            proxy.only = strikes
        try:
            tracker = start(run, notes, proxy.uri)
            while head < 60:
                size = chance.randint(1, 15)
                tracker.log_results(run=run, results=results(head + 1, head + size), notes=notes)
                head += size
                delivered = max(delivered, head)
                if chance.random() < 0.5:
                    confirmed, saved = head, json.loads(json.dumps(notes))
                if chance.random() < 0.2:
                    break
            confirmed, saved = head, json.loads(json.dumps(notes))
        except ConnectionError:
            pass
    proxy.heal()
    assert len(runs_of(proxy.uri, run)) == 1
    assert steps(proxy.uri, saved) == list(range(1, delivered + 1))


# ---- replay ----------------------------------------------------------------------------------------------------------


def resumed_history(run, uri, on_replay):
    """Ten steps and validation at 5 and 10, then again from 5, with other times; restarts in between."""
    notes: dict = {}

    def batch(first, last, shift):
        out = results(first, last, shift)
        for result in out:
            if result.step % 5 == 0:
                result.metrics["val"] = float(result.step)
        return out

    start(run, notes, uri, on_replay=on_replay).log_results(run=run, results=batch(1, 10, 0), notes=notes)
    notes = json.loads(json.dumps(notes))
    tracker = start(run, notes, uri, on_replay=on_replay)
    tracker.log_rewind(run=run, notes=notes)
    tracker.log_results(run=run, results=batch(6, 8, 100), notes=notes)
    notes = json.loads(json.dumps(notes))
    tracker = start(run, notes, uri, on_replay=on_replay)
    tracker.log_results(run=run, results=batch(9, 15, 100), notes=notes)
    return notes


def test_replayed_steps_are_skipped(uri, run):
    """Each step stands once, for each metric by its own steps."""
    notes = resumed_history(run, uri, "skip")
    assert steps(uri, notes) == list(range(1, 16))
    assert steps(uri, notes, "val") == [5, 10, 15]
    assert notes["skip"] == {}


def test_replayed_steps_are_appended(uri, run):
    """Both times stand, on request."""
    notes = resumed_history(run, uri, "append")
    assert sorted(steps(uri, notes)) == sorted([*range(1, 11), *range(6, 16)])
    assert sorted(steps(uri, notes, "val")) == [5, 10, 10, 15]


def test_metrics_of_slower_steps_are_not_skipped(server, run):
    """A second counter that is far behind the first loses nothing to a replay."""
    notes: dict = {}
    tracker = start(run, notes, server)
    rows = [(1, T0, 900, {"gen": 1.0}), (2, T0 + 1, 5, {"disc": 1.0}), (3, T0 + 2, 1000, {"gen": 2.0})]
    tracker.log_results(run=run, results=[Result(*row) for row in rows], notes=notes)
    tracker.log_rewind(run=run, notes=notes)
    rows = [(4, T0 + 3, 6, {"disc": 2.0}), (5, T0 + 4, 1000, {"gen": 2.0}), (6, T0 + 5, 1100, {"gen": 3.0})]
    tracker.log_results(run=run, results=[Result(*row) for row in rows], notes=notes)
    assert steps(server, notes, "disc") == [5, 6]
    assert steps(server, notes, "gen") == [900, 1000, 1100]


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "there"),
    [
        ("completed", "FINISHED"),
        ("failed", "FAILED"),
        ("interrupted", "KILLED"),
        ("preempted", "KILLED"),
        ("killed", "KILLED"),
    ],
)
def test_the_status_on_the_end(server, run, status, there, capsys):
    """With its time, its error, and nothing printed; a run that goes on runs again."""
    notes: dict = {}
    tracker = start(run, notes, server)
    tracker.log_end(
        run=run, outcome=Outcome(status, "ValueError: no" if status == "failed" else None, T0 + 9), notes=notes
    )
    tracker.close()
    info = client(server).get_run(notes["run_id"]).info
    assert (info.status, info.end_time) == (there, round((T0 + 9) * 1000))
    tags = data(server, notes).tags
    assert tags["trainyard.status"] == status
    assert tags.get("trainyard.error") == ("ValueError: no" if status == "failed" else None)
    tracker = start(run, notes, server)
    assert client(server).get_run(notes["run_id"]).info.status == "RUNNING"
    tracker.log_end(run=run, outcome=Outcome("completed", None, T0 + 10), notes=notes)
    assert not data(server, notes).tags.get("trainyard.error")
    assert capsys.readouterr().out == ""


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def test_fifty_runs_of_a_sweep_have_one_parent(uri, tmp_path):
    """Whichever of their lanes begins, and they begin at once; the last that ends, ends it."""
    experiment = f"sweep {next(_ids)}"
    runs = [make_run(tmp_path, {"i": i}, {"trainyard.sweep": "s1"}, experiment) for i in range(50)]
    notes: list[dict] = [{} for _ in runs]
    trackers: list = [None] * len(runs)

    def go(worker):
        for i in range(worker, 50, 8):
            for _ in range(20):
                try:
                    trackers[i] = start(runs[i], notes[i], uri)
                    break
                except ConnectionError:  # as the lane does: sqlite may be busy
                    time.sleep(0.05)

    threads = [threading.Thread(target=go, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = runs_of(uri, runs[0])
    (parent,) = (one for one in there if one.data.tags.get("trainyard.kind") == "sweep")
    children = [one for one in there if one.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert (len(there), len(children), parent.info.run_name) == (51, 50, "s1")
    for i in (0, 1):
        trackers[i].log_end(run=runs[i], outcome=Outcome("completed", None, T0), notes=notes[i])
    assert client(uri).get_run(parent.info.run_id).info.status == "RUNNING"
    for tracker, run, note in zip(trackers[2:], runs[2:], notes[2:], strict=True):
        tracker.log_end(run=run, outcome=Outcome("completed", None, T0 + 5), notes=note)
        tracker.close()
    assert client(uri).get_run(parent.info.run_id).info.status == "FINISHED"


RACER = """
import sys, time
from trainyard.records import Outcome, RunInfo
from trainyard_plugins.trackers.mlflow import MLflowTracker
uri, path, experiment, worker, at = sys.argv[1:]
import mlflow.tracking
MLflowTracker(tracking_uri=uri)
time.sleep(max(0, float(at) - time.time()))
notes, trackers = {}, []
for i in range(4):
    run = RunInfo(f"{worker}{i}", f"run {worker}{i}", experiment, path, {}, {"trainyard.sweep": "raced"})
    trackers.append((MLflowTracker(tracking_uri=uri), run, {}))
    trackers[-1][0].log_start(run=run, notes=trackers[-1][2])
for tracker, run, notes in trackers:
    tracker.log_end(run=run, outcome=Outcome("completed", None, time.time()), notes=notes)
"""


def test_processes_that_race_for_a_parent_have_one(server, tmp_path):
    """Four processes begin one sweep at once: one parent, and every run below it."""
    experiment = f"race {next(_ids)}"
    client(server).create_experiment(experiment)
    at = str(time.time() + 9)
    command = [sys.executable, "-c", RACER, server, str(tmp_path), experiment]
    racers = [subprocess.Popen([*command, worker, at]) for worker in "abcd"]
    assert [racer.wait() for racer in racers] == [0, 0, 0, 0]
    there = runs_of(server, RunInfo("", "", experiment, ""))
    (parent,) = (one for one in there if one.data.tags.get("trainyard.kind") == "sweep")
    children = [one for one in there if "trainyard.run_id" in one.data.tags]
    assert len(children) == 16
    assert {one.data.tags["mlflow.parentRunId"] for one in children} == {parent.info.run_id}
    assert parent.info.status == "FINISHED"


def test_two_parents_become_one_at_the_end(server, tmp_path):
    """A second one that was not seen in time is left by its runs and removed."""
    run = make_run(tmp_path, tags={"trainyard.sweep": "it's"})
    notes: dict = {}
    tracker = start(run, notes, server)
    tags = {"trainyard.sweep": "it's", "trainyard.kind": "sweep"}
    older = client(server).create_run(notes["experiment_id"], start_time=1000, tags=tags).info.run_id
    tracker.log_end(run=run, outcome=Outcome("completed", None, T0), notes=notes)
    parents = [one.info.run_id for one in runs_of(server, run) if one.data.tags.get("trainyard.kind")]
    assert parents == [older]
    assert data(server, notes).tags["mlflow.parentRunId"] == older


# ---- files -----------------------------------------------------------------------------------------------------------


def listed(uri, notes, path=None):
    out = []
    for file in client(uri).list_artifacts(notes["run_id"], path):
        out += listed(uri, notes, file.path) if file.is_dir else [file.path]
    return sorted(out)


def test_artifacts(uri, run, tmp_path, caplog):
    """Files and directories under their names, whatever characters these have; the same name overwrites."""
    notes: dict = {}
    tracker = start(run, notes, uri)
    (tmp_path / "d" / "sub").mkdir(parents=True)
    for name, text in (("d/a.txt", "a"), ("d/sub/b#1?.txt", "b"), ("plot 100%.txt", "old")):
        (tmp_path / name).write_text(text)
    for text in ("old", "new"):
        (tmp_path / "plot 100%.txt").write_text(text)
        for name in ("plot 100%.txt", "d"):
            tracker.log_artifact(artifact=Artifact(name, str(tmp_path / name), 1, T0))
    tracker.log_artifact(artifact=Artifact("gone", str(tmp_path / "gone"), 1, T0))
    assert listed(uri, notes) == ["d/a.txt", "d/sub/b_x23_1_x3F_.txt", "plot 100_x25_.txt"]
    there = client(uri).download_artifacts(notes["run_id"], "plot 100_x25_.txt")
    assert Path(there).read_text() == "new"
    assert "'gone' is gone" in caplog.text


def test_media(server, run, caplog):
    """Images where MLflow's page of images looks, tables where that of tables does, the rest as files; twice is once."""
    from PIL import Image

    folder = Path(run.path, "media")
    folder.mkdir()
    Image.new("RGB", (640, 480), "red").save(folder / "i.png")
    (folder / "t.json").write_text(json.dumps({"columns": ["a", "b"], "data": [[1, 2], [3, 4]]}))
    (folder / "x.txt").write_text("hello")
    media = {
        "sample/img": MediaFile("image", "media/i.png", 1), "table": MediaFile("table", "media/t.json", 1),
        "words": MediaFile("text", "media/x.txt", 1), "lost": MediaFile("audio", "media/lost.wav", 1),
    }  # fmt: skip
    notes: dict = {}
    for _ in range(2):
        tracker = start(run, notes, server)
        tracker.log_results(run=run, results=results(7, 7, **media), notes=copy.deepcopy(notes))
    files = listed(server, notes)
    stem = files[0].removesuffix("+compressed.webp")
    assert stem.startswith(f"images/sample~img+step+7+timestamp+{round((T0 + 7 / 8) * 1000)}+")
    assert files == [
        f"{stem}+compressed.webp", f"{stem}.png", "media/table/step_00000007_7.json", "media/words/step_00000007_7.txt"
    ]  # fmt: skip
    tags = data(server, notes).tags
    assert tags["mlflow.loggedImages"] == "True"
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "media/table/step_00000007_7.json", "type": "table"}]
    from mlflow.tracking.client import MlflowClient

    table = MlflowClient._read_from_file(None, client(server).download_artifacts(notes["run_id"], files[2]))
    assert table.b.tolist() == [2, 4]
    assert "'lost' is gone" in caplog.text
    assert steps(server, notes) == [7]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoint_of(result, index=0):
    return CheckpointInfo(index, result.step, f"s3://key:secret@bucket/checkpoint_{index:06d}", result.metrics, 99)


def models(uri, notes):
    return client(uri).search_logged_models([notes["experiment_id"]])


def test_checkpoints_are_linked(uri, run):
    """A LoggedModel each, ready, with its address and metrics; redelivered, with or without memory, it is the same one."""
    notes: dict = {}
    batch = results(1, 4, acc=0.5, nan=math.nan)
    tracker = start(run, notes, uri)
    tracker.log_results(run=run, results=batch, notes=notes)
    tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[1]))
    tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[1]))
    tracker = start(run, notes, uri)
    tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[1]))
    tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[3], 1))
    second, first = sorted(models(uri, notes), key=lambda model: model.tags["trainyard.checkpoint"], reverse=True)
    assert str(first.status).endswith("READY")
    assert first.source_run_id == notes["run_id"]
    assert first.tags["trainyard.url"] == "s3://bucket/checkpoint_000000"
    assert first.tags["trainyard.iteration"] == "2"
    assert {m.key: (m.value, m.step) for m in first.metrics} == {
        "loss": (0.5, 2), "acc": (0.5, 2), "time_total_s": (0.5, 2)
    }  # fmt: skip
    assert {m.key: m.step for m in second.metrics} == {"loss": 4, "acc": 4, "time_total_s": 4}
    outputs = client(uri).get_run(notes["run_id"]).outputs.model_outputs
    assert sorted((o.model_id, o.step) for o in outputs) == sorted([(first.model_id, 2), (second.model_id, 4)])
    for key in ("loss", "acc", "nan"):
        assert steps(uri, notes, key) == [1, 2, 3, 4]  # the run has no points of the models besides its own


def test_a_model_whose_answer_is_lost_is_not_made_twice(proxy, run):
    """At each of the requests that make one."""
    notes: dict = {}
    batch = results(1, 1)
    tracker = start(run, notes, proxy.uri)
    tracker.log_results(run=run, results=batch, notes=notes)
    for requests in range(1, 9):
        left = [requests]

        def strikes(method, path, left=left):
            left[0] -= 1
            return left[0] == 0

        proxy.drop_answer, proxy.only = True, strikes
        try:
            tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[0]))
        except ConnectionError:
            continue
    proxy.heal()
    (model,) = models(proxy.uri, notes)
    assert str(model.status).endswith("READY")


def test_checkpoints_are_uploaded(uri, run, caplog):
    """Their files lie in the model; one that retention has removed is a link."""
    folder = Path(run.path, "checkpoints", "checkpoint_000000")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights").write_bytes(b"w")
    notes: dict = {}
    batch = results(1, 1)
    tracker = start(run, notes, uri, checkpoints="upload")
    tracker.log_results(run=run, results=batch, notes=notes)
    tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[0]))
    tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(batch[0], 1))
    uploaded, gone = sorted(models(uri, notes), key=lambda model: model.tags["trainyard.checkpoint"])
    files = client(uri).list_logged_model_artifacts(uploaded.model_id, "sub")
    assert [file.path for file in files] == ["sub/weights"]
    assert "mlflow.model.isExternal" not in uploaded.tags
    assert gone.tags["mlflow.model.isExternal"] == "true"
    assert "checkpoint_000001 is gone already" in caplog.text


def test_no_checkpoints_on_request(server, run):
    """Nothing is made of them."""
    notes: dict = {}
    start(run, notes, server, checkpoints="none").log_checkpoint(run=run, checkpoint=checkpoint_of(results(1, 1)[0]))
    assert list(models(server, notes)) == []


def test_an_old_server_without_models(proxy, run, caplog):
    """It is told once, and nothing fails."""
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    proxy.status, proxy.only = 404, lambda method, path: "logged-models" in path
    for index in range(2):
        tracker.log_checkpoint(run=run, checkpoint=checkpoint_of(results(1, 1)[0], index))
    assert caplog.text.count("knows no LoggedModels") == 1


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_unreachable_server_is_named(run):
    """At once, without the credentials in its URL."""
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9 cannot be reached: connection refused") as error:
        start(run, {}, "http://user:secret@127.0.0.1:9")
    assert "secret" not in str(error.value)
    assert time.monotonic() - began < 15


def test_an_unreachable_database_is_named(run):
    """MLflow itself would try for minutes."""
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"postgresql://127\.0\.0\.1:9/x cannot be reached") as error:
        start(run, {}, "postgresql://user:secret@127.0.0.1:9/x")
    assert "secret" not in str(error.value)
    assert time.monotonic() - began < 10


def test_a_black_hole_costs_one_timeout(run, monkeypatch):
    """And is named as what it is."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with BlackHole() as hole:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="does not answer in time"):
            start(run, {}, hole.uri)
        assert time.monotonic() - began < 10
        with pytest.raises(ConnectionError, match="does not answer in time"):
            MLflowTracker(tracking_uri=hole.uri).check(storage="/nowhere")


def test_errors_of_the_server_are_transient(proxy, run):
    """500, 502, 503, 429: nothing is rejected, and afterwards all is there."""
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    for status in (500, 502, 503, 429):
        proxy.status = status
        with pytest.raises(ConnectionError, match=proxy.uri):
            tracker.log_results(run=run, results=results(1, 2), notes=copy.deepcopy(notes))
    proxy.heal()
    tracker.log_results(run=run, results=results(1, 2), notes=notes)
    assert steps(proxy.uri, notes) == [1, 2]


def test_a_slow_server_gets_smaller_requests(proxy, run, monkeypatch):
    """One that cannot take a thousand points in time would else never take any."""
    notes: dict = {}
    tracker = start(run, notes, proxy.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    proxy.delay_s, proxy.times = 1.5, 2
    for _ in range(2):
        with pytest.raises(ConnectionError, match="in time"):
            tracker.log_results(run=run, results=results(1, 10), notes=copy.deepcopy(notes))
    assert module._sizes[proxy.uri] == 250
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    tracker.log_results(run=run, results=results(1, 10), notes=notes)
    assert module._sizes[proxy.uri] == 500
    assert steps(proxy.uri, notes) == list(range(1, 11))


def test_wrong_credentials_name_the_user(proxy, run, monkeypatch):
    """Never the password; with the right ones it works, and check says who one is."""
    proxy.auth = ("ann", "right")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    for attempt in (
        lambda: start(run, {}, proxy.uri),
        lambda: MLflowTracker(tracking_uri=proxy.uri).check(storage="x"),
    ):
        with pytest.raises(PermissionError, match=r"refuses the credentials of user 'ann' \(HTTP 401\)") as error:
            attempt()
        assert "hunter2" not in str(error.value)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "right")
    start(run, {}, proxy.uri).close()
    assert "as user 'ann'" in MLflowTracker(tracking_uri=proxy.uri).check(storage="x")
    proxy.auth, proxy.status = None, 403
    with pytest.raises(PermissionError, match=r"does not allow user 'ann'"):
        start(run, {}, proxy.uri)


def test_check(server, tmp_path, sqlite_file):
    """A line with the address and the version; a file that is not there yet is not made."""
    import mlflow

    assert (
        MLflowTracker(tracking_uri=server)
        .check(storage=str(tmp_path))
        .startswith(f"{server}: MLflow {mlflow.__version__}")
    )
    assert (
        MLflowTracker().check(storage=str(tmp_path))
        == f"sqlite:///{tmp_path}/mlflow.db: a new file, made by the first run"
    )
    assert list(tmp_path.iterdir()) == []
    assert MLflowTracker(tracking_uri=sqlite_file).check(storage=str(tmp_path)) == f"{sqlite_file}: MLflow"
    with pytest.raises(ConnectionError, match="cannot be reached"):
        MLflowTracker(tracking_uri="http://127.0.0.1:9").check(storage=str(tmp_path))


TABLES = """
import sys, time
from trainyard.records import RunInfo
from trainyard_plugins.trackers.mlflow import MLflowTracker
uri, path, worker, at = sys.argv[1:]
import mlflow.tracking
time.sleep(max(0, float(at) - time.time()))
for attempt in range(20):
    try:
        MLflowTracker(tracking_uri=uri).log_start(run=RunInfo(worker, worker, "e", path), notes={})
        break
    except Exception as error:
        if "lock" not in str(error).lower():
            raise
        time.sleep(0.2)
"""


def test_processes_that_make_a_sqlite_file_at_once(tmp_path):
    """Its tables are made once and whole."""
    uri = f"sqlite:///{tmp_path / 'new.db'}"
    at = str(time.time() + 7)
    racers = [subprocess.Popen([sys.executable, "-c", TABLES, uri, str(tmp_path), worker, at]) for worker in "abc"]
    assert [racer.wait() for racer in racers] == [0, 0, 0]
    assert len(runs_of(uri, RunInfo("", "", "e", ""))) == 3


# ---- all together ----------------------------------------------------------------------------------------------------


class Counting(trainyard.Trainable):
    """Counts its steps."""

    def step(self):
        return {"score": float(self.training_iteration + 1), "nested": {"x": 1}}

    def save_checkpoint(self, checkpoint_dir):
        return {"at": self.training_iteration}

    def load_checkpoint(self, checkpoint):
        pass


def test_a_whole_run(server, tmp_path):
    """From the trainable to the server: params, every step once, checkpoints, the end."""
    result = trainyard.run(
        Counting,
        {"lr": 0.1},
        stop={"training_iteration": 12},
        trackers={"mlflow": {"tracking_uri": server}},
        delivery="thread",
        storage=tmp_path,
        experiment=f"whole{next(_ids)}",
        checkpoint={"every": 4},
        tags={"team": "all"},
    )
    result.raise_if_failed()
    notes = json.loads(Path(result.path, "delivery", "mlflow.json").read_text())["notes"]
    there = client(server).get_run(notes["run_id"])
    assert (there.info.status, there.data.params["lr"], there.data.tags["team"]) == ("FINISHED", "0.1", "all")
    assert steps(server, notes, "score") == list(range(1, 13))
    assert {model.tags["trainyard.iteration"] for model in models(server, notes)} >= {"4", "8", "12"}
    assert all(len(model.metrics) >= 2 for model in models(server, notes))


def test_a_whole_run_without_a_server(tmp_path, caplog, monkeypatch):
    """Training ends as it should; what is owed stays, and the warning names the server."""
    monkeypatch.setattr("trainyard.active_run.DRAIN_S", 2.0)
    with caplog.at_level(logging.WARNING, "trainyard"):
        result = trainyard.run(
            Counting,
            stop={"training_iteration": 3},
            trackers={"json": {}, "mlflow": {"tracking_uri": "http://127.0.0.1:9"}},
            delivery="thread",
            storage=tmp_path,
        )
    assert result.status == "completed"
    assert "http://127.0.0.1:9 cannot be reached: connection refused" in caplog.text


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://user:geheim@host/a@b", "https://host/a@b"),
        ("postgresql://u:p@ss@host/db", "postgresql://host/db"),
        ("postgresql://u:pa/ss@host/db", "postgresql://host/db"),
        ("postgresql://host/db?user=a&password=geheim", "postgresql://host/db?user=a&password=<redacted>"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_a_uri_is_shown_without_its_password(uri, shown):
    """Wherever SQLAlchemy or a browser would find one."""
    assert module._without_password(uri) == shown


def test_a_damaged_picture_holds_nothing_up(sqlite_file, run):
    """What Pillow cannot make a small copy of is sent all the same, and so are pictures in a list and all metrics."""
    media = Path(run.path, "media")
    media.mkdir()
    whole = b"\x89PNG\r\n\x1a\n" + b"not much of a picture"
    for i in range(2):
        (media / f"{i}.png").write_bytes(whole)
    pictures = [MediaFile("image", f"media/{i}.png", len(whole)) for i in range(2)]
    notes = {}
    tracker = start(run, notes, sqlite_file)
    (one,) = results(1, 1)
    tracker.log_results(
        run=run, results=[Result(one.seq, one.time, one.step, {**one.metrics, "p": pictures})], notes=notes
    )
    tracker.close()
    assert steps(sqlite_file, notes) == [1]
    sent = [file.path for file in client(sqlite_file).list_artifacts(notes["run_id"], "images")]
    assert sorted(path.rpartition("/")[2][:4] for path in sent) == ["p~0+", "p~1+"]


def test_media_outside_of_the_run_is_not_sent(sqlite_file, run, tmp_path):
    """A link in a run directory from elsewhere leads nobody out of it."""
    (tmp_path / "secret.txt").write_text("secret")
    media = Path(run.path, "media")
    media.mkdir()
    (media / "0.txt").symlink_to(tmp_path / "secret.txt")
    notes = {}
    tracker = start(run, notes, sqlite_file)
    (one,) = results(1, 1)
    outside = {"text": MediaFile("text", "media/0.txt", 6)}
    tracker.log_results(run=run, results=[Result(one.seq, one.time, one.step, {**one.metrics, **outside})], notes=notes)
    tracker.close()
    assert steps(sqlite_file, notes) == [1]
    assert client(sqlite_file).list_artifacts(notes["run_id"]) == []
