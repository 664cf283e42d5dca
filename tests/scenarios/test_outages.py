"""Real trainings, the sync process and a real MLflow server, which goes down, hangs, lies and is killed: each result once."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shlex
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
import pytest

import trainyard as ty
from servers import BlackHole, MlflowServer, Proxy, free_port
from trainyard.delivery import LaneState

pytestmark = [
    pytest.mark.sync_process,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow"),
]

SCRIPT = Path(__file__).with_name("train_through_outages.py")

SITE = """
import importlib.machinery, os, sys

real = importlib.machinery.PathFinder.find_spec
hidden = os.environ.get("TEST_HIDDEN")
deadline = os.environ.get("TEST_DEADLINE_S")

def find_spec(name, path=None, target=None):
    if name == hidden:
        return None
    if deadline and name.startswith("trainyard_plugins"):
        for module in map(sys.modules.get, ("__main__", "trainyard.sync")):
            if hasattr(module, "DEADLINE_S"):
                module.DEADLINE_S = float(deadline)
        sys.modules["trainyard.delivery"]._LONGEST_BACKOFF_S = 2.0
    return real(name, path, target)

importlib.machinery.PathFinder.find_spec = find_spec
"""
"""A sitecustomize.py: hides a package as if it were not installed; sets how long the lanes of a run that is over have, and
has them try again sooner while it lasts."""

QUICK = """
import json, pathlib, time
import trainyard as ty
from trainyard import active_run

active_run.DRAIN_S = 1.0

def train(config):
    print("TRAINED", flush=True)
    for i in range(1, 21):
        ty.report({"i": i, "loss": 1 / i})
    state = pathlib.Path(ty.get_run().path, "delivery", "mlflow.json")
    while not state.exists() or not json.loads(state.read_text())["error"]:
        time.sleep(0.05)
"""
"""What `trainyard run` runs: a training that ends once MLflow was seen to fail."""

ALL = ("json", "csv", "tensorboard", "mlflow")
NO_METRICS = {"training_iteration", "timestamp", "pid", "iterations_since_restore", "time_since_restore"}


# -- helpers: what is started ----------------------------------------------------------------------------------------


class Training:
    """A training in a process of its own. What it tells goes into files, so that nobody has to read it."""

    def __init__(self, command, folder, environment):
        self._out, self._errors = folder / "out", folder / "errors"
        folder.mkdir(parents=True)
        with open(self._out, "wb") as out, open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    @property
    def errors(self):
        return self._errors.read_text()

    def told(self, word):
        """What it has told behind that word, each time."""
        lines = [line.split() for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line[1:] for line in lines if line[:1] == [word]]

    @property
    def results(self):
        """The number of the last result that it was promised."""
        return int((self.told("result") or [["0"]])[-1][0])

    @property
    def over(self):
        """Whether the training itself has ended; its trackers may still be waited for."""
        return bool(self.told("over"))

    def wait_for_more(self, count=0):
        """Until it has reported another result, or more of them."""
        seen = self.results
        wait(lambda: self.results > seen + count)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def ended(self):
        """Wait for the end of the process. Returns its exit code."""
        code = self.process.wait(100)
        assert "Traceback" not in self.errors, self.errors
        return code


class World:
    """A storage root, a runtime folder and an environment of their own, and the processes that were started in them."""

    def __init__(self, folder):
        self.folder = folder
        self.storage = folder / "runs"
        self.go = folder / "go"
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PYTEST_"))
        }
        site, temporary = folder / "site", folder / "tmp"
        for place in (site, temporary):
            place.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        (folder / "train.py").write_text(SCRIPT.read_text())
        self._temporary = str(temporary)
        self.environment |= {
            "TMPDIR": self._temporary,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
            "TEST_DEADLINE_S": "60",
            "COLUMNS": "500",
            "NO_COLOR": "1",
        }
        self._started = []

    @property
    def run(self):
        """The directory of the run that most tests have."""
        return self.storage / "exp" / "it"

    def train(self, uri, *, trackers=ALL, environment=None, mlflow=None, **options):
        """Start the script; what `options` leaves out has a default here or there. `mlflow`: options of the tracker."""
        options = {"experiment": "exp", "storage": str(self.storage), "count": 20, **options}
        options["trackers"] = {
            name: {"tracking_uri": uri, **(mlflow or {})} if name == "mlflow" else {} for name in trackers
        }
        return self.start([SCRIPT, json.dumps(options)], environment)

    def start(self, command, environment=None):
        folder = self.folder / f"process-{len(self._started)}"
        self._started.append(Training([sys.executable, *command], folder, {**self.environment, **(environment or {})}))
        return self._started[-1]

    def cli(self, *arguments, environment=None, deadline_s=60):
        """Call ``trainyard``. Returns its exit code, output and errors."""
        done = subprocess.run(
            [sys.executable, "-m", "trainyard.cli.main", *map(str, arguments)], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, cwd=self.folder, timeout=100,
            env={**self.environment, "TEST_DEADLINE_S": str(deadline_s), **(environment or {})},
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    def write_yaml(self, uri, **options):
        """Write a run.yaml with a short training."""
        (self.folder / "quick.py").write_text(QUICK)
        trackers = {"json": {}, "csv": {}, "tensorboard": {}, "mlflow": {"tracking_uri": uri, **options}}
        content = {
            "trainable": "quick.py:train", "storage": str(self.storage), "experiment": "exp", "name": "it",
            "trackers": trackers,
        }  # fmt: skip
        (self.folder / "run.yaml").write_text(json.dumps(content))  # JSON is YAML
        return "run.yaml"

    def syncs(self):
        """The live sync processes of this world."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "trainyard.sync" in line and "--token" in line and self._is_ours(process):
                    found.append(process)
        return found

    def log(self):
        """All that sync processes have written to their logs."""
        return "".join(path.read_text(errors="replace") for path in Path(self._temporary).glob("trainyard-*/*.log"))

    def _is_ours(self, process):
        return process.environ().get("TMPDIR") == self._temporary

    def clean_up(self):
        for training in self._started:
            training.kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and self._is_ours(process):
                    process.kill()


@pytest.fixture
def world(tmp_path):
    """A world. In the end no sync process stays, and none has written a traceback."""
    world = World(tmp_path)
    try:
        yield world
        wait(lambda: not world.syncs())
        assert "Traceback" not in world.log(), world.log()
    finally:
        world.clean_up()


@pytest.fixture(autouse=True)
def _no_mlflow_settings(monkeypatch):
    """None from outside."""
    for name in list(os.environ):
        if name.startswith("MLFLOW_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that no test harms."""
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The servers that tests may harm, one of each kind; it runs whenever it is asked for."""
    made = {}

    def of_kind(kind):
        if kind not in made:
            made[kind] = MlflowServer(tmp_path_factory.mktemp(f"mlflow-{kind}"), kind)
        return made[kind] if answers(made[kind].uri) else made[kind].start()

    yield of_kind
    for server in made.values():
        server.stop()


@pytest.fixture
def proxy(server):
    """A proxy before the server that no test harms."""
    with Proxy(server.uri) as proxy:
        yield proxy


def answers(uri):
    """Whether there is a server."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=20):
        return True
    return False


def wait(condition, seconds=60):
    """Wait until a condition holds, and return what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    pytest.fail(f"it did not come true within {seconds} s")


# -- helpers: what became of it --------------------------------------------------------------------------------------


def lane(run, tracker="mlflow"):
    """How far a tracker of a run is."""
    return LaneState.read(run / "delivery" / f"{tracker}.json") or LaneState(tracker, tracker)


def wait_until_delivered(run, trackers=ALL):
    """Until each has confirmed the end of the run."""
    wait(lambda: all(lane(run, name).ended for name in trackers))
    for name in trackers:
        assert (lane(run, name).rejected, lane(run, name).dropped, lane(run, name).error) == ([], 0, None)


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def mlflow_runs(uri, run, active=True):
    """The MLflow runs of a run, those that are not deleted, or those that are."""
    experiment = client(uri).get_experiment_by_name(run.parent.name)
    its_own = f"tags.`trainyard.run_id` = '{ty.open_run(run).record.id}'"
    return client(uri).search_runs([experiment.experiment_id], its_own, run_view_type=1 if active else 2)


def mlflow_points(uri, found):
    """Of each metric of an MLflow run all points: step, value and millisecond, in the order of their steps."""
    return {
        key: sorted((p.step, p.value, p.timestamp) for p in client(uri).get_metric_history(found.info.run_id, key))
        for key in found.data.metrics
    }


def in_tensorboard(run):
    """The points of a run's curves ``i`` and ``loss``, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in ("i", "loss")}


def check_files(run, count):
    """The result files and the event file hold each result once, in order."""
    expected = list(range(1, count + 1))
    rows = [json.loads(line) for line in (run / "result.json").read_bytes().splitlines()]
    assert expected == [row["i"] for row in rows] == [row["training_iteration"] for row in rows]
    with open(run / "progress.csv", newline="") as file:
        assert [str(i) for i in expected] == [row["i"] for row in csv.DictReader(file)]
    shown = in_tensorboard(run)
    assert [(i, i) for i in expected] == [(step, round(value)) for step, value in shown["i"]]
    assert expected == [step for step, _ in shown["loss"]]
    assert [1 / i for i in expected] == pytest.approx([value for _, value in shown["loss"]])
    assert expected == [result.metrics["i"] for result in ty.open_run(run).history()]


def check_mlflow(uri, run, count, status="FINISHED", resumed=False):
    """MLflow has one run of it, with each point of each metric once, and the right status. Returns that run.

    Args:
        resumed: some results were superseded, so clocks differ: only what the training itself reports is compared.
    """
    (found,) = mlflow_runs(uri, run)
    assert status == found.info.status
    assert found.info.end_time >= found.info.start_time
    for twin in mlflow_runs(uri, run, active=False):  # left by a create whose answer was lost; it is empty
        assert twin.data.metrics == {}
    points = mlflow_points(uri, found)
    history = list(ty.open_run(run).history())
    assert count == len(history)
    names = {
        name for result in history for name, value in result.metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in NO_METRICS
    }  # fmt: skip
    assert names == set(points)
    for name, found_points in points.items():
        expected = [(r.step, float(r.metrics[name]), round(r.time * 1000)) for r in history]
        assert [step for step, _, _ in expected] == [step for step, _, _ in found_points], name
        if not resumed:
            assert expected == found_points
        elif not name.startswith("time_"):
            assert [point[:2] for point in expected] == [point[:2] for point in found_points]
    return found


def check(uri, run, count, **options):
    """All four trackers hold the run, once."""
    wait_until_delivered(run)
    check_files(run, count)
    return check_mlflow(uri, run, count, **options)


def check_completed(training, uri, run):
    """A training that came to its end by itself is everywhere, once."""
    assert training.ended() == 0
    assert [[run.name, "completed"]] == training.told("status")
    check(uri, run, training.results)


# -- 1. outages ------------------------------------------------------------------------------------------------------


def test_down_at_the_start(world, servers):
    """The server comes up while training goes on, which then gets its whole history, from the beginning."""
    server = servers("sqlite")
    server.kill()
    training = world.train(server.uri, hold=str(world.go), pause=0.02)
    wait(lambda: lane(world.run).error)
    wait(lambda: training.results > 20)
    assert "cannot be reached: connection refused" in lane(world.run).error
    server.start()
    wait(lambda: lane(world.run).seq > 20)
    assert not training.over
    world.go.touch()
    check_completed(training, server.uri, world.run)
    assert training.errors.count("cannot be reached") == 1
    assert "works again" in training.errors


def test_down_until_long_after_the_end(world, servers):
    """What nobody could deliver stays owed, which `trainyard sync` says by its exit code until it has delivered it."""
    server = servers("sqlite")
    server.kill()
    training = world.train(server.uri, hold=str(world.go), pause=0.02, drain=0.5, environment={"TEST_DEADLINE_S": "1"})
    wait(lambda: lane(world.run).error)
    world.go.touch()
    assert training.ended() == 0
    assert training.told("status") == [["it", "completed"]]
    count = training.results
    assert f"still owed {count} results of run it (ConnectionError: {server.uri} cannot be reached" in training.errors
    wait(lambda: not world.syncs())
    check_files(world.run, count)
    code, out, _ = world.cli("sync", world.run, deadline_s=1)
    assert (code, "connection refused" in out) == (1, True)
    server.start()
    code, out, _ = world.cli("sync", world.run)
    assert (code, "refused" in out) == (0, False)
    check(server.uri, world.run, count)
    assert world.cli("sync", world.run)[0] == 0  # nothing to do
    check(server.uri, world.run, count)


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_down_in_the_middle(world, servers, backend):
    """Training ends while the server is down; it gets the rest when it is back."""
    server = servers(backend)
    training = world.train(server.uri, hold=str(world.go), pause=0.02)
    wait(lambda: lane(world.run).seq > 10)
    server.kill()
    wait(lambda: lane(world.run).error)
    training.wait_for_more(10)
    world.go.touch()
    wait(lambda: training.over)
    assert not lane(world.run).ended
    server.start()
    check_completed(training, server.uri, world.run)


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_killed_in_the_middle_of_a_batch(world, servers, backend):
    """A kill between the requests of one batch, and within one: what was taken before is not there twice after."""
    server = servers(backend)
    with Proxy(server.uri) as proxy:
        training = world.train(proxy.uri, count=500, width=25)
        for batches in (3, 6):
            before = len(proxy.requests)
            wait(lambda before=before, batches=batches: batch_requests(proxy.requests[before:]) >= batches)
            server.kill()
            wait(lambda: training.over)
            assert not lane(world.run).ended
            server.start()
        check_completed(training, server.uri, world.run)


def batch_requests(requests):
    return sum(path.endswith("/runs/log-batch") for _, path in requests)


def test_errors_for_a_while(world, server, proxy):
    """A server that answers each request with a 500, from the first one, and again later."""
    proxy.status = 500
    training = world.train(proxy.uri, hold=str(world.go), pause=0.02)
    wait(lambda: lane(world.run).error)
    proxy.heal()
    wait(lambda: lane(world.run).seq)
    proxy.status = 503
    wait(lambda: lane(world.run).error)
    world.go.touch()
    wait(lambda: training.over)
    proxy.heal()
    check_completed(training, server.uri, world.run)


def test_a_black_hole(world, server, proxy):
    """A server that takes each connection and never answers keeps nobody; a real one in its place gets everything."""
    proxy.delay_s = 3600.0
    training = world.train(proxy.uri, environment={"MLFLOW_HTTP_REQUEST_TIMEOUT": "1"})
    wait(lambda: training.over)
    wait(lambda: "does not answer in time" in (lane(world.run).error or ""))
    wait(lambda: all(lane(world.run, name).ended for name in ("json", "csv", "tensorboard")))
    proxy.heal()
    check_completed(training, server.uri, world.run)


def test_a_slow_server(world, server, proxy):
    """With two seconds an answer it takes its time, but not training's."""
    proxy.delay_s = 2.0
    training = world.train(proxy.uri, hold=str(world.go), pause=0.02)
    wait(lambda: lane(world.run).seq)
    world.go.touch()
    wait(lambda: training.over)
    assert not lane(world.run).ended
    check_completed(training, server.uri, world.run)


def test_answers_that_come_too_late(world, server, proxy):
    """A server that does what it was asked, always after we have given up waiting, and then recovers."""
    proxy.delay_s = 2.0
    training = world.train(proxy.uri, environment={"MLFLOW_HTTP_REQUEST_TIMEOUT": "1"})
    proxy.only = lambda method, path: path.endswith(("/create", "/log-batch"))
    wait(lambda: training.over)
    wait(lambda: sum(path.endswith("/runs/create") for _, path in proxy.requests) >= 2)
    proxy.only = lambda method, path: path.endswith("/log-batch")
    wait(lambda: batch_requests(proxy.requests) >= 2)
    proxy.heal()
    check_completed(training, server.uri, world.run)


def test_lost_answers(world, server, proxy):
    """Of each kind of request that changes something the first two are done, and their answers lost."""
    asked = Counter()

    def is_new(method, path):
        asked[path] += method == "POST" and not path.endswith("/search")
        return 0 < asked[path] <= 2

    proxy.drop_answer, proxy.only = True, is_new
    training = world.train(proxy.uri, count=30, every=10)
    check_completed(training, server.uri, world.run)
    assert {"create", "log-batch", "update"} <= {path.rpartition("/")[2] for path in asked if asked[path]}
    assert len(models(server.uri, world.run)) == 3


def models(uri, run):
    """The LoggedModels of a run's checkpoints, by their serial number."""
    experiment = client(uri).get_experiment_by_name(run.parent.name)
    found, token = [], None
    while token is None or token:
        page = client(uri).search_logged_models([experiment.experiment_id], page_token=token)
        found += [model for model in page if model.tags["trainyard.run_id"] == ty.open_run(run).record.id]
        token = page.token or ""
    serials = {model.tags["trainyard.checkpoint"]: model for model in found}
    assert len(serials) == len(found)
    return serials


# -- 2. kills --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victims", ["training", "sync process", "both"])
def test_kills(world, server, victims):
    """Six kills at random moments, whoever is hit: after the last resume each step stands once in all four trackers."""
    rng = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    options = {"resume": "allow", "every": 5, "hold": str(world.go), "pause": 0.03}
    training, furthest = world.train(server.uri, **options), 0
    for _ in range(6):
        training.wait_for_more()
        time.sleep(rng.random() * 2)
        syncs = wait(world.syncs) if victims != "training" else []
        if victims != "sync process":
            training.kill()
            assert "Traceback" not in training.errors
            furthest = max(furthest, training.results)
        for process in syncs:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if victims != "sync process":
            training = world.train(server.uri, **options)
        else:
            wait(lambda syncs=syncs: set(world.syncs()) - set(syncs))
    wait(lambda: training.results > furthest + 1)  # MLflow keeps the points of steps that nobody does again
    world.go.touch()
    wait(lambda: training.process.poll() is not None)
    assert training.told("status") == [["it", "completed"]], training.errors
    check(server.uri, world.run, int(training.told("over")[-1][0]), resumed=True)
    serials = [f"{ty.open_run(world.run).record.id}/{c.index}" for c in ty.open_run(world.run).checkpoints]
    assert set(serials) <= set(models(server.uri, world.run))


# -- 3. - 5. many at once --------------------------------------------------------------------------------------------


def test_a_sweep(world, server):
    """Two processes, each with its own sync process, run fifty runs of one sweep: one parent, fifty children, all finished."""
    names = [f"r{n}" for n in range(50)]
    trainings = [
        world.train(
            server.uri, trackers=("json", "mlflow"), names=names[part::2], count=3, tags={"trainyard.sweep": "s1"},
            experiment="sweep", drain=drain, environment={"WORKER": str(part)},
        )
        for part, drain in enumerate((60.0, 0.5))  # one hurries: many of its runs are delivered at once
    ]  # fmt: skip
    for training in trainings:
        assert training.ended() == 0
        assert sum(status == "completed" for _, status in training.told("status")) == 25
    for name in names:
        wait_until_delivered(world.storage / "sweep" / name, ("json", "mlflow"))
    experiment = client(server.uri).get_experiment_by_name("sweep")
    found = client(server.uri).search_runs([experiment.experiment_id], max_results=1000)
    (parent,) = (each for each in found if each.data.tags.get("trainyard.kind") == "sweep")
    children = [each for each in found if each is not parent]
    assert sorted(names) == sorted(child.info.run_name for child in children)
    assert {parent.info.run_id} == {child.data.tags["mlflow.parentRunId"] for child in children}
    assert {"FINISHED"} == {each.info.status for each in found}
    for name in names[::10]:
        check_mlflow(server.uri, world.storage / "sweep" / name, 3)


def test_two_experiments(world, server):
    """At once into one server, with runs of the same name: each has its own MLflow runs, with its own points."""
    options = {"names": ["it", "other"], "pause": 0.005}
    trainings = {
        experiment: world.train(server.uri, experiment=experiment, count=count, **options)
        for experiment, count in (("left", 30), ("right", 50))
    }
    for experiment, training in trainings.items():
        assert training.ended() == 0
        for name in options["names"]:
            check(server.uri, world.storage / experiment / name, {"left": 30, "right": 50}[experiment])
        found = client(server.uri).get_experiment_by_name(experiment)
        assert len(client(server.uri).search_runs([found.experiment_id], run_view_type=3)) == 2


def test_forked_data_loaders(world, server):
    """Forked workers that live during the run and beyond its end, and try to log, add nothing and hold nothing up."""
    training = world.train(server.uri, workers=4, count=100, every=20, names=["it", "other"])
    assert training.ended() == 0
    assert training.told("status") == [["it", "completed"], ["other", "completed"]]
    for name in ("it", "other"):
        check(server.uri, world.storage / "exp" / name, 100)


FORKS = """
import multiprocessing, subprocess, sys, threading, time
import trainyard as ty
from trainyard import active_run

active_run.DRAIN_S = 15.0
real, starting, forked = subprocess._fork_exec, threading.Event(), threading.Event()

def slowly(arguments, *rest):
    if "trainyard.sync" in arguments:
        starting.set()
        forked.wait(2)
    return real(arguments, *rest)

subprocess._fork_exec = slowly
worker = multiprocessing.get_context("fork").Process(target=threading.Event().wait, args=(300,), daemon=True)

def train(config):
    if worker.pid is None:
        starting.wait(30)
        worker.start()
        forked.set()
    ty.report({"i": 1})

for name in ("one", "two", "three"):
    if name == "three":
        time.sleep(3)  # it has gone by then
    result = ty.run(train, name=name, experiment="exp", storage=sys.argv[1])
    assert all(lane.ended for lane in result.lanes()) and len(result.lanes()) == 2, name
worker.kill()
"""


def test_a_fork_while_the_sync_process_is_started(world):
    """A worker that is forked in that moment, and lives on, keeps nobody from starting it again for a later run."""
    training = world.start(["-c", FORKS, world.storage])
    assert training.ended() == 0
    assert "owed" not in training.errors


# -- 6. - 8. the command line ----------------------------------------------------------------------------------------


def command_in(out):
    """The arguments of the command that the summary of a run names for what is owed."""
    (line,) = (line for line in out.splitlines() if line.strip().startswith("deliver the rest"))
    words = shlex.split(line)
    return words[words.index("sync") :]


def answer_of(out, tracker):
    """What doctor says of a tracker: a cell of its table, in one line."""
    lines = out.splitlines()
    (head,) = (line for line in lines if "what it promises" in line)
    begin, end, name = map(head.index, ("answer", "what it promises", "name"))
    (first,) = (n for n, line in enumerate(lines) if line.split()[:2] == ["tracker", tracker])
    behind = (n for n, line in enumerate(lines) if n > first and line[: name + 1].strip())
    return " ".join(" ".join(line[begin:end] for line in lines[first : next(behind, len(lines))]).split())


def test_wrong_credentials(world, server, proxy):
    """Training goes on; the end says what is owed and how to send it; doctor says whose credentials are refused."""
    proxy.auth = ("alice", "right")
    file = world.write_yaml(proxy.uri)
    wrong = {"MLFLOW_TRACKING_USERNAME": "alice", "MLFLOW_TRACKING_PASSWORD": "wr0ng-one"}
    wrong["TEST_DEADLINE_S"] = "3"
    code, out, errors = world.cli("run", file, environment=wrong, deadline_s=3)
    said = f"{proxy.uri} refuses the credentials of user 'alice' (HTTP 401)"
    assert (code, said in errors, "still owed 20 results of run it" in errors) == (0, True, True), out + errors
    assert "mlflow is behind: 0 delivered" in out
    command = command_in(out)
    check_files(world.run, 20)
    code, doctor, _ = world.cli("doctor", file, environment=wrong)
    assert (code, said in answer_of(doctor, "mlflow")) == (1, True), doctor
    assert answer_of(doctor, "json") == "ok"
    code, out, _ = world.cli("doctor", file)
    assert (code, "refuses the credentials of nobody" in answer_of(out, "mlflow")) == (1, True), out
    wait(lambda: not world.syncs())
    assert world.cli(*command, environment=wrong, deadline_s=1)[0] == 1
    right = {**wrong, "MLFLOW_TRACKING_PASSWORD": "right"}
    code, out, errors = world.cli(*command, environment=right)
    assert code == 0, out + errors
    proxy.auth = None
    check(server.uri, world.run, 20)
    everything = doctor + errors + world.log() + (world.run / "delivery" / "mlflow.json").read_text()
    assert "wr0ng-one" not in everything


def test_an_address_where_nobody_is(world, server):
    """As with wrong credentials; another address then takes all of it."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    file = world.write_yaml("${env:WHERE}")
    environment = {"WHERE": nowhere, "TEST_DEADLINE_S": "1"}
    code, out, errors = world.cli("run", file, environment=environment, deadline_s=1)
    said = "cannot be reached: connection refused"
    assert (code, "still owed 20 results of run it" in errors) == (0, True), out + errors
    assert said in errors
    command = command_in(out)
    code, out, _ = world.cli("doctor", file, environment=environment)
    assert (code, said in answer_of(out, "mlflow")) == (1, True), out
    wait(lambda: not world.syncs())
    code, out, _ = world.cli(*command, environment={"WHERE": server.uri})
    assert code == 0, out
    check(server.uri, world.run, 20)


def test_doctor_before_a_black_hole(world):
    """It ends, within its limit for each tracker, and says who does not answer; the others are well."""
    with BlackHole() as hole:
        code, out, _ = world.cli("doctor", world.write_yaml(hole.uri))
    assert code == 1
    assert any(words in answer_of(out, "mlflow") for words in ("does not answer in time", "no answer within")), out
    assert answer_of(out, "json") == "ok"


@pytest.mark.parametrize(
    ("uri", "options", "environment", "words"),
    [
        ("http://127.0.0.1:1", {}, {"TEST_HIDDEN": "mlflow"}, "pip install 'trainyard[mlflow]'"),
        ("file:///data/mlruns", {}, {}, "use a sqlite file, sqlite:////data/mlruns/mlflow.db"),
        ("./mlruns", {}, {}, "use a sqlite file, sqlite:///./mlruns/mlflow.db"),
        ("http://127.0.0.1:1", {"experimnet": "x"}, {}, "did you mean 'experiment'"),
    ],
    ids=["not installed", "file store", "directory", "unknown option"],
)
def test_mistakes_are_found_before_training(world, uri, options, environment, words):
    """Exit code 2, and what to do about it; nothing was run and there is no run."""
    code, out, errors = world.cli("run", world.write_yaml(uri, **options), environment=environment)
    assert (code, words in errors) == (2, True), out + errors
    assert "TRAINED" not in out
    assert not world.run.exists()


# -- 9. replay -------------------------------------------------------------------------------------------------------


def test_replay_to_mlflow(world, servers):
    """Of a run that never had it, interrupted by a kill of the server and by one of itself, and called again: each point once."""
    server = servers("sqlite")
    assert world.train(server.uri, trackers=("json", "csv"), count=700, width=20).ended() == 0
    with Proxy(server.uri) as proxy:
        replay = ["-m", "trainyard.cli.main", "replay", world.run, "--to", "mlflow", "--option"]
        replay.append(f"tracking_uri={proxy.uri}")
        first = world.start(replay, {"TEST_DEADLINE_S": "8"})
        wait(lambda: batch_requests(proxy.requests) >= 4)
        server.kill()
        assert first.ended() == 1
        server.start()
        before = len(proxy.requests)
        second = world.start(replay)
        wait(lambda: batch_requests(proxy.requests[before:]) >= 2)
        second.kill()
        for _ in range(2):
            assert world.start(replay).ended() == 0
            check_mlflow(server.uri, world.run, 700)


def test_replay_to_tensorboard(world):
    """The same; there is no server, so it is the replay that is killed, at random moments."""
    rng = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    assert world.train("", trackers=("json", "csv"), count=2000).ended() == 0
    for _ in range(4):
        replay = world.start(["-m", "trainyard.cli.main", "replay", world.run, "--to", "tensorboard"])
        wait(
            lambda replay=replay: (world.run / "delivery" / ".tensorboard.lock").exists() or replay.process.poll() == 0
        )
        time.sleep(rng.random() * 0.3)
        replay.kill()
    for _ in range(2):
        code, out, errors = world.cli("replay", world.run, "--to", "tensorboard")
        assert (code, "tensorboard has all 2000 results" in out) == (0, True), out + errors
        check_files(world.run, 2000)


# -- 10. MLflow's own functions --------------------------------------------------------------------------------------

JOIN = """
import json, os, sys
import trainyard as ty

def mlflow_variables():
    return {name: value for name, value in os.environ.items() if name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI")}

options, storage, fails, names = json.loads(sys.argv[1])
before = mlflow_variables()

def train(config):
    ty.get_run().export_environment("mlflow")
    assert ty.get_run().trackers["mlflow"]["run_id"] == os.environ["MLFLOW_RUN_ID"]
    import mlflow
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    mlflow.sklearn.autolog(log_models=False, log_datasets=False)
    x = np.random.default_rng(0).normal(size=(100, 4))
    for _ in range(2):
        LogisticRegression(C=0.5).fit(x, x[:, 0] > 0)
    for i in range(1, 6):
        ty.report({"i": i, "loss": 1 / i})
        mlflow.log_metric("theirs", 10 * i, step=i)
    if fails:
        raise RuntimeError("as told")

for name in names:
    trackers = {"json": {}, "mlflow": options}
    result = ty.run(train, name=name, experiment="joined", storage=storage, trackers=trackers)
    assert mlflow_variables() == before, mlflow_variables()
    print("status", name, result.status, flush=True)
"""


@pytest.mark.parametrize(
    ("place", "fails"), [("option", False), ("variable", True), ("option, and a variable for another place", False)]
)
def test_autolog_joins(world, server, place, fails):
    """What MLflow itself logs in the training process lies in that run's MLflow run, and does not change how it ends."""
    options = {} if place == "variable" else {"tracking_uri": server.uri}
    environment = {} if place == "option" else {"MLFLOW_TRACKING_URI": server.uri}
    if place.startswith("option,"):
        environment["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:1"
    names, status = ["one", "two"], "failed" if fails else "completed"
    code = world.start(["-c", JOIN, json.dumps([options, str(world.storage), fails, names])], environment)
    assert code.process.wait(60) == 0, code.errors  # in the end MLflow's own functions wait for nobody either
    assert [["one", status], ["two", status]] == code.told("status")
    for name in names:
        run = world.storage / "joined" / name
        wait_until_delivered(run, ("json", "mlflow"))
        (found,) = mlflow_runs(server.uri, run)
        points = mlflow_points(server.uri, found)
        assert [(i, i) for i in range(1, 6)] == [point[:2] for point in points["i"]]
        assert [(i, 10 * i) for i in range(1, 6)] == [point[:2] for point in points["theirs"]]
        assert "training_score" in found.data.metrics
        assert found.data.params["C"] == "0.5"
        assert {False: "FINISHED", True: "FAILED"}[fails] == found.info.status
    strays = client(server.uri).search_runs([e.experiment_id for e in client(server.uri).search_experiments()])
    assert not [
        stray
        for stray in strays
        if "trainyard.run_id" not in stray.data.tags and "trainyard.kind" not in stray.data.tags
    ]
    assert not list(world.folder.rglob("mlflow.db"))
