"""The sync process: one per experiment and surroundings, tied to its training, never in its way, and nothing gets lost."""

from __future__ import annotations

import collections
import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

import trainyard as ty
from trainyard import active_run, sync
from trainyard.delivery import LaneState
from trainyard.journal import EndedRecord, JournalReader, JournalWriter
from trainyard.rundir import RunDirectory
from trainyard.sync_client import SyncedDelivery, runtime_folder

pytestmark = pytest.mark.sync_process

HERE = Path(__file__).parent
SECRET = "s3cret-value"

TRAIN = """
import json, os, sys, time
import trainyard as ty
from trainyard import active_run

options = json.loads(sys.argv[1])
count, pause, before = options.pop("count"), options.pop("pause", 0.0), options.pop("before", "")
active_run.DRAIN_S = options.pop("drain", 30.0)

def train(config):
    exec(before)
    start = ty.get_checkpoint()
    for i in range((start.load()["i"] if start else 0) + 1, count + 1):
        ty.report({"i": i}, checkpoint={"i": i} if i % 10 == 0 else None)
        print("result", i, flush=True)
        time.sleep(pause)

result = ty.run(train, **{"name": "it", "experiment": "exp", **options})
print("status", result.status, flush=True)
"""
"""Reports i = 1, 2, ... `count`, every `pause` seconds, and tells so. The rest of its JSON argument is for run()."""


SHORTEN = """
import os, sys

def nice(increment, nice=os.nice):   # the first thing that the sync process does
    process = sys.modules["__main__"]
    if hasattr(process, "Follower"):
        process.DEADLINE_S = float(os.environ.get("TRAINYARD_TEST_DEADLINE_S", "30"))
        process._MEMORY_LIMIT = int(os.environ.get("TRAINYARD_TEST_MEMORY_MIB", "1024")) << 20
    return nice(increment)

os.nice = nice
"""
"""A sitecustomize.py that gives the sync process other constants."""


class World:
    """A storage root and a runtime folder of their own, and the processes that were started with them."""

    def __init__(self, folder):
        self.storage = folder / "runs"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.site = folder / "site"
        self.noisy = False
        self._started = []
        metadata = self.site / "bad_trackers-1.0.dist-info"
        metadata.mkdir(parents=True)
        points = "".join(f"{name} = {place}\n" for name, place in __import__("bad_trackers").ENTRY_POINTS.items())
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-trackers\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[trainyard]\n{points}")
        (self.site / "bad_trackers.py").write_text((HERE / "bad_trackers.py").read_text())
        (self.site / "sitecustomize.py").write_text(SHORTEN)

    @property
    def run(self):
        """The directory of the run that most tests have."""
        return self.storage / "exp" / "it"

    @property
    def runtime(self):
        return self.temporary / f"trainyard-{os.getuid()}"

    def start(self, code=TRAIN, *arguments, cwd=None, environment=None, **options):
        """Start a script. Keyword arguments are the TRAIN script's options."""
        if code is TRAIN:
            arguments = (json.dumps({"storage": str(self.storage), **options}),)
        child = subprocess.Popen(
            [sys.executable, *([code] if isinstance(code, Path) else ["-c", code]), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.storage.parent,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
                "TMPDIR": str(self.temporary),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH")])),
                "TRAINYARD_TEST_DEADLINE_S": "3",
                **(environment or {}),
            },
            start_new_session=True,
        )
        self._started.append(child)
        return child

    def train(self, **options):
        """Run the TRAIN script to its end. Returns its status and what it wrote to stderr."""
        out, errors = self.start(**options).communicate(timeout=100)
        assert "Traceback" not in errors, errors
        return next((line.split()[1] for line in out.splitlines() if line.startswith("status")), None), errors

    def processes(self):
        """All live processes of this world but this one."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(self.temporary):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def syncs(self):
        """The live sync processes."""
        found = []
        for process in self.processes():
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if "trainyard.sync" in line and "--token" in line:
                found.append(process)
        return found

    def log(self):
        """All that sync processes have written to their logs."""
        return "".join(path.read_text(errors="replace") for path in self.runtime.glob("*.log"))

    def clean_up(self):
        for child in self._started:
            child.kill()
            child.communicate()
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A world, which is also that of this process; nothing in its log is a traceback, unless the test says `noisy`."""
    monkeypatch.syspath_prepend(HERE)
    world = World(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(world.temporary))
    monkeypatch.setenv("TMPDIR", str(world.temporary))
    yield world
    try:
        assert world.noisy or "Traceback" not in world.log(), world.log()
    finally:
        world.clean_up()


def wait(condition, seconds=30):
    """Wait until a condition holds, and return what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    pytest.fail(f"it did not come true within {seconds} s")


def arguments(process):
    """With which a sync process was started."""
    line = process.cmdline()
    return line[line.index("trainyard.sync") + 1 :]


def lines(path):
    """The objects in a file of JSON lines; a line that is being written does not count."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def delivered(run):
    """What stands in result.json and progress.csv."""
    table = run / "progress.csv"
    with open(table if table.exists() else os.devnull, newline="") as file:
        return [row["i"] for row in lines(run / "result.json")], [int(row["i"]) for row in csv.DictReader(file)]


def twice(count):
    """What `delivered` returns of a run with so many results."""
    return list(range(1, count + 1)), list(range(1, count + 1))


def told(run, event="log_results"):
    return [line for line in lines(run / "told.jsonl") if line["event"] == event]


def state(run, tracker):
    return LaneState.read(run / "delivery" / f"{tracker}.json") or LaneState(tracker, tracker)


def first_results(child, count=1):
    """Wait until a training has reported so many results."""
    for _ in range(count):
        line = child.stdout.readline()
        assert line.startswith("result"), line + child.stderr.read()


def killed(child):
    """Kill a training with -9. Returns the number of the last result that it was promised."""
    child.kill()
    out, errors = child.communicate()
    assert "Traceback" not in errors, errors
    return max((int(line.split()[1]) for line in out.splitlines(keepends=True) if line.endswith("\n")), default=0)


def show(world, run):
    """What ``trainyard show`` says."""
    code = "import sys; from trainyard.cli.main import call; sys.exit(call(sys.argv[1:]))"
    out, errors = world.start(code, "show", run, environment={"COLUMNS": "400"}).communicate(timeout=60)
    assert not errors, errors
    return out


# -- which process ---------------------------------------------------------------------------------------------------


def test_one_process_for_an_experiment_and_its_surroundings(world):
    """Trainings of one experiment share a process whatever their rank and GPU; another experiment or environment has its own."""
    probe = {"trackers": {"json": {}, "csv": {}, "probe": {}}, "count": 60, "pause": 0.1}
    trainings = {
        "a/one": {},
        "a/two": {"RANK": "1", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "1"},
        "b/one": {},
        "a/other": {"MLFLOW_TRACKING_URI": "http://elsewhere"},
    }
    children = []
    for place, environment in trainings.items():
        experiment, name = place.split("/")
        children.append(world.start(experiment=experiment, name=name, environment=environment, **probe))
        first_results(children[-1])
        wait(lambda place=place: told(world.storage / place))
    found = collections.Counter(Path(arguments(process)[0]).name for process in world.syncs())
    assert found == {"a": 2, "b": 1}
    assert all(child.communicate(timeout=60)[0].splitlines()[-1:] == ["status completed"] for child in children)
    pids = {}
    for place in trainings:
        assert twice(60) == delivered(world.storage / place)
        assert list(range(1, 61)) == [line["i"] for line in told(world.storage / place)]
        assert {place.split("/")[1]} == {line["run"] for line in told(world.storage / place)}
        (pids[place],) = {line["pid"] for line in told(world.storage / place)}
    assert pids["a/one"] == pids["a/two"]
    assert len(set(pids.values())) == 3
    wait(lambda: not world.syncs())


def test_a_variable_that_an_option_names_is_the_runs_own(world):
    """Two ranks in one job, with ``${env:RANK}`` in an option: each tracker gets the value of its own training."""
    trackers = {"json": {}, "csv": {}, "probe": {"value": "rank ${env:RANK}"}}
    children = [
        world.start(name=f"r{rank}", trackers=trackers, count=20, pause=0.1, environment={"RANK": str(rank)})
        for rank in range(2)
    ]
    assert all(child.wait(timeout=60) == 0 for child in children)
    for rank in range(2):
        assert {f"'rank {rank}'"} == {line["value"] for line in told(world.storage / "exp" / f"r{rank}")}


def test_a_second_process_for_the_same_work_goes(world):
    """Of two processes with one token one goes at once; and `trainyard sync` beside a live one says so, and exits with 0."""
    child = world.start(count=1000, pause=0.02)
    first_results(child)
    (process,) = wait(world.syncs)
    wait(lambda: delivered(world.run)[1])
    second = world.start("import sys; from trainyard.sync import main; main(sys.argv[1:])", *arguments(process))
    assert second.wait(timeout=20) == 0
    assert [process] == world.syncs()
    code = "import sys; from trainyard.cli.main import call; sys.exit(call(sys.argv[1:]))"
    by_hand = world.start(code, "sync", world.run)
    out, errors = by_hand.communicate(timeout=30)
    assert (by_hand.returncode, errors, "being delivered" in out) == (0, "", True)
    last = killed(child)
    wait(lambda: not world.syncs())
    found = delivered(world.run)
    assert last <= found[0][-1]
    assert twice(found[0][-1]) == found


def test_a_forked_worker_does_not_keep_it(world):
    """A data loader that outlives its killed training holds neither the run nor the process that delivers it."""
    before = "if os.fork() == 0: os.closerange(0, 3); time.sleep(60); os._exit(0)"
    child = world.start(count=1000, pause=0.02, before=before)
    first_results(child, 5)
    wait(lambda: delivered(world.run)[1])
    child.kill()
    wait(lambda: not world.syncs(), 20)
    assert json.loads((world.run / "run.json").read_text())["status"] == "killed"
    world.clean_up()


# -- kills -----------------------------------------------------------------------------------------------------------


def test_trainings_that_are_killed(world):
    """Twenty trainings, four at a time in one experiment, are killed: each is ended as such, all it was promised is there once."""
    rng = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    trackers = ["json", "csv", "tensorboard"] if has_tensorboard() else ["json", "csv"]
    for batch in range(5):
        children = {
            f"{batch}-{i}": world.start(name=f"{batch}-{i}", trackers=trackers, count=100_000, pause=0.002)
            for i in range(4)
        }
        for child in children.values():
            first_results(child)
        if batch:  # else before it has even started
            time.sleep(rng.random())
        promised = {name: killed(child) for name, child in children.items()}
        wait(lambda: not world.syncs())
        for name, last in promised.items():
            run = world.storage / "exp" / name
            assert (
                ty.open_run(run).status,
                json.loads((run / "run.json").read_text())["status"],
            ) == ("killed", "killed")
            (end,) = JournalReader(run / "journal" / "sync.log")
            assert isinstance(end, EndedRecord)
            assert end.status == "killed"
            found = delivered(run)
            assert last <= len(found[0])
            assert twice(len(found[0])) == found
            if "tensorboard" in trackers:
                assert found[0] == in_tensorboard(run)
    assert len(os.listdir(world.storage / "exp")) == 20


def has_tensorboard():
    return any(plugin.name == "tensorboard" for plugin in ty.plugins.installed())


def in_tensorboard(run):
    """The values of `i` in a run's event files, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if tag == "i" or tag.endswith("/i")]
    return [round(event.value) for event in events.Scalars(tag)]


def test_the_process_is_killed_again_and_again(world):
    """Twenty kills of the sync process, every fourth along with the training: it is begun anew, nothing is lost or there twice."""
    rng = random.Random(seed := random.randrange(1 << 32))
    print("seed", seed)
    options = {"count": 900, "resume": "allow", "trackers": {"json": {}, "csv": {}, "probe": {}}}
    for _ in range(5):
        child = world.start(pause=0.02, **options)
        for _ in range(3):
            (process,) = wait(world.syncs)
            time.sleep(rng.random() * 0.5)
            process.kill()
            wait(lambda process=process: process not in world.syncs())
        (process,) = wait(world.syncs)
        time.sleep(rng.random() * 0.5)
        child.kill()
        process.kill()
        child.communicate()
        wait(lambda: not world.syncs())
    assert world.train(**options)[0] == "completed"
    assert twice(900) == delivered(world.run)
    wait(lambda: not world.syncs())


def test_it_is_killed_while_the_run_waits_for_it(world):
    """A process that dies after the last result is begun anew as well: the end does not wait in vain."""
    go = world.storage.parent / "go"
    trackers = {"json": {}, "csv": {}, "probe": {"fails_until": str(go)}}
    child = world.start(count=10, trackers=trackers)
    wait(lambda: ty.open_run(world.run).status == "completed" if (world.run / "run.json").exists() else False)
    (process,) = wait(world.syncs)
    wait(lambda: state(world.run, "probe").error)
    process.kill()
    go.touch()
    _out, errors = child.communicate(timeout=60)
    assert "still owed" not in errors
    assert list(range(1, 11)) == [line["i"] for line in told(world.run)]


def test_an_end_that_was_half_written(world):
    """A process that dies between the two places where it notes the end leaves it to the next one to note the second."""
    child = world.start(count=1000, pause=0.02)
    first_results(child)
    (process,) = wait(world.syncs)
    process.kill()
    child.kill()
    directory = RunDirectory(world.run)
    wait(lambda: directory.lock.free)
    journal = JournalWriter(directory.sync_journal)
    journal.append(EndedRecord(seq=1, time=time.time(), status="killed"))
    journal.close()
    sync.sync_run(ty.open_run(world.run))
    assert json.loads(directory.json.read_text())["status"] == "killed"


# -- how long it lives -----------------------------------------------------------------------------------------------


def test_it_goes_when_its_work_is_done(world):
    """In a notebook it goes soon after the last run, comes back for the next one, and leaves no zombie and no litter."""
    code = """
import sys, trainyard as ty
for name in sys.stdin:
    with ty.start_run(storage=sys.argv[1], experiment="exp", name=name.strip()) as run:
        run.log({"i": 1})
    print("result", flush=True)
"""
    notebook = subprocess.Popen(
        [sys.executable, "-c", code, str(world.storage)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(world.temporary)},
    )
    with notebook:
        left = []
        for name in ("one", "two", "three"):
            notebook.stdin.write(f"{name}\n")
            notebook.stdin.flush()
            first_results(notebook)
            assert twice(1) == delivered(world.storage / "exp" / name)
            wait(lambda: not world.syncs(), 15)
            wait(lambda: not psutil.Process(notebook.pid).children(), 15)
            left.append(sorted(os.listdir(world.runtime)))
        notebook.stdin.close()
    assert left[0] == left[1] == left[2]
    assert sorted(os.listdir(world.storage / "exp")) == ["one", "three", "two"]
    inside = {
        path.relative_to(world.storage / "exp" / "one").as_posix()
        for path in (world.storage / "exp" / "one").rglob("*")
    }
    visible = {name for name in inside if not name.split("/")[-1].startswith(".")}
    assert visible == {
        "delivery", "delivery/csv.json", "delivery/json.json", "journal", "journal/0.log", "params.json", "params.pkl",
        "progress.csv", "result.json", "run.json",
    }  # fmt: skip
    assert not any(name.endswith(".tmp") for name in inside)


def test_what_stays_in_the_runtime_folder_does_not_grow(world):
    """However many trainings with secrets there were, each with a process of its own: the next one tidies up after them."""
    counts = []
    for i in range(4):
        trackers = {"json": {}, "probe": {"api_key": SECRET}}
        assert world.train(name=f"r{i}", count=1, trackers=trackers)[0] == "completed"
        wait(lambda: not world.syncs())
        counts.append(len(os.listdir(world.runtime)))
    assert counts[-1] <= counts[0] + 2


def test_many_short_runs(world):
    """Thirty short runs in one process are all delivered, by few processes, none of which stays."""
    code = """
import sys, time, trainyard as ty
for n in range(30):
    began = time.monotonic()
    with ty.start_run(storage=sys.argv[1], experiment="exp", name=f"r{n}") as run:
        for i in range(1, 6):
            run.log({"i": i})
    assert time.monotonic() - began < 20, n
"""
    child = world.start(code, world.storage)
    most = 0
    while child.poll() is None:
        most = max(most, len(world.syncs()))
        time.sleep(0.1)
    assert (child.returncode, child.stderr.read()) == (0, "")
    assert most == 1
    assert all(twice(5) == delivered(world.storage / "exp" / f"r{n}") for n in range(30))
    wait(lambda: not world.syncs())


def test_runs_with_a_pause_as_long_as_its_patience(world, monkeypatch):
    """A run that begins in the moment in which the process leaves, idle, does not wait for it in vain."""
    for n in range(4):
        time.sleep(sync._LINGER_S + random.random() * 0.1)
        began = time.monotonic()
        with ty.start_run(storage=world.storage, experiment="exp", name=f"r{n}") as run:
            run.log({"i": 1})
        assert time.monotonic() - began < 20
        assert twice(1) == delivered(world.storage / "exp" / f"r{n}")


def test_leftovers_are_delivered_by_the_next(world):
    """Runs whose training and sync process were both killed are ended and delivered by the next run's process."""
    secret = {"json": {}, "csv": {}, "probe": {"api_key": SECRET}}  # which was on no disk, so it stays owed
    trackers = [["json", "csv"], ["json", "csv"], secret]
    children = [world.start(name=f"r{i}", count=1000, pause=0.02, trackers=trackers[i]) for i in range(3)]
    for child in children:
        first_results(child, 3)
    wait(lambda: len(world.syncs()) == 2)
    for process in world.syncs():
        process.suspend()  # so that it does not begin with the first one that dies
    last = [killed(child) for child in children]
    for process in world.syncs():
        process.kill()
    assert world.train(name="next", count=3)[0] == "completed"
    wait(lambda: not world.syncs())
    for i in range(3):
        run = world.storage / "exp" / f"r{i}"
        found = delivered(run)
        assert last[i] <= len(found[0])
        assert twice(len(found[0])) == found
        assert json.loads((run / "run.json").read_text())["status"] == "killed"
    assert "kept secret" in state(world.storage / "exp" / "r2", "probe").error


def test_leftovers_that_cannot_be_delivered_do_not_keep_it(world):
    """Many dead runs with a tracker that is down do not keep the process long after its training has gone."""
    for i in range(24):
        with ty.start_run(storage=world.storage, experiment="exp", name=f"r{i}", trackers=["json"]) as run:
            run.log({"i": 1})
        record = RunDirectory(Path(run.path)).read()
        record.settings["trackers"] = {"json": {}, "bad": {"how": "raises"}}
        RunDirectory(Path(run.path)).write(record)
    wait(lambda: not world.syncs())
    trackers = {"json": {}, "csv": {}, "probe": {}}
    assert world.train(name="next", count=3, trackers=trackers)[0] == "completed"
    wait(lambda: not world.syncs(), 12)  # a deadline is 3 s here


# -- trackers that misbehave -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "misdeeds",
    [["raises", "exits"], ["sleeps"], ["dies"], ["segfaults"], ["prints"], ["closes"]],
    ids="+".join,
)
def test_a_bad_tracker_harms_only_itself(world, misdeeds):
    """Whatever a tracker does: json, csv and the training go on, the end keeps its deadline, and `show` says who and why."""
    world.noisy = True
    trackers = {"json": {}, "csv": {}, **{name: {"type": "bad", "how": name} for name in misdeeds}}
    began = time.monotonic()
    status, errors = world.train(count=60, pause=0.05, trackers=trackers, drain=3)
    assert ("completed", twice(60)) == (status, delivered(world.run))
    assert time.monotonic() - began < 40
    wait(lambda: not world.syncs())
    reasons = {
        "raises": "ConnectionError: nobody answers",
        "exits": "SystemExit: it had enough",
        "sleeps": "has not returned",
        "dies": "ended with 7",
        "segfaults": "SIGSEGV",
        "closes": "OSError: it closed what it should not",
    }
    said = show(world, world.run)
    for name in misdeeds:
        if name == "prints":
            assert state(world.run, name).ended
        else:
            (row,) = [row for row in said.splitlines() if row.strip().startswith(name)]
            assert reasons[name] in row
            assert f"tracker '{name}'" in errors


def test_a_tracker_that_leaks(world):
    """One that grows without end gets a process of its own, begun anew whenever it is too large, and everything it is owed."""
    trackers = {"json": {}, "csv": {}, "leaks": {"type": "bad", "how": "leaks"}, "probe": {}}
    environment = {"TRAINYARD_TEST_MEMORY_MIB": "200", "TRAINYARD_TEST_DEADLINE_S": "30"}
    child = world.start(count=300, pause=0.05, trackers=trackers, environment=environment)
    out, _errors = child.communicate(timeout=100)
    assert out.splitlines()[-1] == "status completed"
    assert twice(300) == delivered(world.run)
    assert list(range(1, 301)) == [line["i"] for line in told(world.run)]
    found = state(world.run, "leaks")
    assert (found.delivered, found.ended) == (300, True)
    assert found.restarts
    assert found.restarted_for == "its process grew over 200 MiB"
    assert "grew over 200 MiB" in show(world, world.run)


def test_a_tracker_that_cannot_be_built_there(world):
    """One that takes the process down already by being built is kept away from the others."""
    status, _ = world.train(count=60, pause=0.05, trackers={"json": {}, "csv": {}, "deadly": {}}, drain=8)
    assert ("completed", twice(60)) == (status, delivered(world.run))


def test_no_process_of_a_bad_tracker_stays(world):
    """A tracker that first kills its process and then hangs is gone too, also when the sync process is killed."""
    world.noisy = True
    deaths = world.storage.parent / "deaths"
    trackers = {"json": {}, "csv": {}, "bad": {"how": "dies_then_sleeps"}}
    child = world.start(count=1000, pause=0.02, trackers=trackers, environment={"DEATHS": str(deaths)})
    wait(lambda: deaths.exists() and len(deaths.read_text().splitlines()) == 3)

    (process,) = world.syncs()
    process.kill()
    child.kill()
    child.communicate()
    wait(lambda: not world.processes(), 15)


def test_drop_and_raise(world):
    """`drop` counts what it did not deliver and lets the run complete; `raise` fails the run with a DeliveryError."""
    bad = {"type": "bad", "how": "raises"}
    status, _ = world.train(count=30, name="drops", trackers={"json": {}, "csv": {}, "x": {**bad, "on_error": "drop"}})
    found = state(world.storage / "exp" / "drops", "x")
    assert (status, found.dropped, found.ended) == ("completed", 30, True)
    options = {"trackers": {"json": {}, "csv": {}, "x": {**bad, "on_error": "raise"}}, "drain": 3}
    status, _ = world.train(count=1000, pause=0.05, name="raises", **options)
    run = ty.open_run(world.storage / "exp" / "raises")
    assert (status, run.status) == ("failed", "failed")
    assert "DeliveryError: tracker 'x' failed: ConnectionError: nobody answers" in str(run.error)
    found = delivered(world.storage / "exp" / "raises")
    assert twice(len(found[0])) == found
    assert 0 < len(found[0]) < 1000


# -- what it costs, and what it must not tell ------------------------------------------------------------------------


def test_the_training_process_imports_no_sdk(world):
    """With the trackers that write files and MLflow, a training imports neither numpy nor any SDK."""
    known = {plugin.name for plugin in ty.plugins.installed()}
    trackers = {name: {} for name in ("json", "csv", "tensorboard", "mlflow") if name in known}
    if "mlflow" in trackers:
        trackers["mlflow"] = {"tracking_uri": "http://127.0.0.1:9"}
    code = """
import json, sys, trainyard as ty
from trainyard import active_run
active_run.DRAIN_S = 1.0
with ty.start_run(storage=sys.argv[1], experiment="exp", name="it", trackers=json.loads(sys.argv[2])) as run:
    run.log({"i": 1})
print(*sys.modules)
"""
    out, errors = world.start(code, world.storage, json.dumps(trackers)).communicate(timeout=60)
    roots = {name.partition(".")[0] for name in out.split()}
    assert "trainyard" in roots, errors
    assert not roots & {
        "numpy",
        "mlflow",
        "tensorboard",
        "tensorboardX",
        "torch",
        "google",
        "requests",
        "pandas",
        "PIL",
        "yaml",
    }


def test_a_secret_reaches_the_tracker_and_nothing_else(world):
    """A literal secret gets to the plugin, also in a process that was begun anew, but into no file and no command line."""
    trackers = {
        "json": {},
        "csv": {},
        "mine": {"type": "probe", "api_key": SECRET, "logins": [{"password": SECRET}]},
    }
    child = world.start(count=100, pause=0.05, trackers=trackers)
    (process,) = wait(world.syncs)
    wait(lambda: told(world.run))
    seen = [" ".join(process.cmdline()) for process in world.syncs()]
    process.kill()
    before = len(told(world.run))
    wait(lambda: len(told(world.run)) > before)
    seen += [" ".join(process.cmdline()) for process in world.syncs()]
    out, errors = child.communicate(timeout=60)
    wait(lambda: not world.syncs())
    assert {len(SECRET)} == {line["key"] for line in told(world.run)}
    assert {(len(SECRET),)} == {tuple(line["passwords"]) for line in told(world.run)}
    assert "completed" in out
    assert not [text for text in [out, errors, *seen] if SECRET in text]
    files = [path for folder in (world.storage, world.temporary) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_secret_in_a_list_reaches_the_tracker(world):
    """A secret that lies in a list is one as well."""
    trackers = {"json": {}, "csv": {}, "mine": {"type": "probe", "logins": [{"password": SECRET}]}}
    world.train(count=5, trackers=trackers)
    assert {(len(SECRET),)} == {tuple(line["passwords"]) for line in told(world.run)}


def test_a_secret_arrives_late(world):
    """A process that is quicker than its training's secrets waits for them."""
    code = TRAIN.replace(
        "options = json", "from trainyard import sync_client\ntell = sync_client._SyncClient._tell\n"
        "def slowly(self, what):\n    time.sleep(1.5)\n    tell(self, what)\n"
        "sync_client._SyncClient._tell = slowly\noptions = json",
    )  # fmt: skip
    options = {"storage": str(world.storage), "count": 100, "pause": 0.05, "drain": 5}
    trackers = {"json": {}, "csv": {}, "mine": {"type": "probe", "api_key": SECRET}}
    child = world.start(code, json.dumps({**options, "trackers": trackers}))
    child.communicate(timeout=60)
    assert list(range(1, 101)) == [line["i"] for line in told(world.run)]


def test_an_error_shows_no_secret(world):
    """A tracker that puts its secret into its errors tells it to nobody."""
    trackers = {"json": {}, "mine": {"type": "probe", "api_key": SECRET, "fails_until": "/nowhere"}}
    _, errors = world.train(count=40, pause=0.05, trackers=trackers, drain=2)
    wait(lambda: not world.syncs())
    assert "nobody answers to <redacted>" in errors
    assert "nobody answers to <redacted>" in state(world.run, "mine").error
    assert SECRET not in errors + show(world, world.run) + world.log()


def test_environment_variables_in_options(world):
    """``${env:NAME}`` is looked up in the sync process, in the training's environment."""
    trackers = {"json": {}, "csv": {}, "mine": {"type": "probe", "api_key": "${env:MINE}", "value": "${env:THAT}"}}
    world.train(count=5, trackers=trackers, environment={"MINE": SECRET, "THAT": "this"})
    assert {(len(SECRET), "'this'")} == {(line["key"], line["value"]) for line in told(world.run)}
    assert {False} == {SECRET.encode() in path.read_bytes() for path in world.storage.rglob("*") if path.is_file()}


# -- who delivers ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_sent_stays_here(world):
    """Plugin objects, and options that are no plain values, are served by this process; the others by the sync process."""
    code = """
import datetime, os, sys, time
import trainyard as ty
import bad_trackers
trackers = [
    "json", "csv", bad_trackers.Probe(where="object.jsonl"),
    {"function": {"type": "probe", "where": "function.jsonl", "value": lambda x: x + 1}},
    {"bytes": {"type": "probe", "where": "bytes.jsonl", "value": b"some"}},
    {"set": {"type": "probe", "where": "set.jsonl", "value": {1}}},
    {"date": {"type": "probe", "where": "date.jsonl", "value": datetime.date(2024, 1, 2)}},
    {"tuple": {"type": "probe", "where": "tuple.jsonl", "value": [1, {"a": None, "b": 1e300}]}},
]
with ty.start_run(storage=sys.argv[1], experiment="exp", name="it", trackers=trackers) as run:
    for i in range(1, 31):
        run.log({"i": i})
        time.sleep(0.03)
print(os.getpid())
"""
    folder = world.storage.parent
    child = world.start(code, world.storage)
    out, errors = child.communicate(timeout=60)
    assert errors == ""
    found = {path.stem: lines(path) for path in folder.glob("*.jsonl")}
    assert {name: list(range(1, 31)) for name in found} == {
        name: [line["i"] for line in told if line["event"] == "log_results"] for name, told in found.items()
    }
    values = {name: {line["value"] for line in told} for name, told in found.items()}
    assert values == {
        "object": {"None"}, "function": {"2"}, "bytes": {"b'some'"}, "set": {"{1}"},
        "date": {"datetime.date(2024, 1, 2)"}, "tuple": {"[1, {'a': None, 'b': 1e+300}]"},
    }  # fmt: skip
    here = {name for name, told in found.items() if {int(out)} == {line["pid"] for line in told}}
    assert {"object", "function"} <= here
    assert "tuple" not in here
    assert twice(30) == delivered(world.run)


def test_what_stays_here_is_not_taken_over(world):
    """While a tracker that only its training can build fails, the sync process does not try its hand at it."""
    code = """
import os, sys, time, trainyard as ty
options = {"type": "probe", "value": lambda x: "mine", "fails_until": "go"}
with ty.start_run(storage=sys.argv[1], experiment="exp", name="it", trackers={"json": {}, "here": options}) as run:
    for i in range(1, 101):
        run.log({"i": i})
        time.sleep(0.02)
    open("go", "w").close()
"""
    _out, _errors = world.start(code, world.storage).communicate(timeout=60)
    assert {"'mine'"} == {line["value"] for line in told(world.run, "log_start") + told(world.run)}
    assert len({line["pid"] for line in told(world.run)}) == 1
    assert list(range(1, 101)) == [line["i"] for line in told(world.run)]
    wait(lambda: not world.syncs())
    assert state(world.run, "here").error is None


@pytest.mark.parametrize("obstacle", ["no process", "no folder"])
@pytest.mark.parametrize("pause", [0.0, 0.02], ids=["short", "long"])
def test_threads_deliver_where_no_process_can_be_started(world, monkeypatch, caplog, obstacle, pause):
    """Where a process cannot be had, the training's own threads do it, after one warning."""
    if obstacle == "no process":

        def refuse(*args, **kwargs):
            raise OSError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(subprocess, "Popen", refuse)
    else:
        monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    before = set(threading.enumerate())
    attach = SyncedDelivery._attach
    monkeypatch.setattr(SyncedDelivery, "_attach", lambda self: time.sleep(0.2) or attach(self))
    began = time.monotonic()
    with ty.start_run(storage=world.storage, experiment="exp", name="it") as run:
        for i in range(1, 21):
            run.log({"i": i})
            time.sleep(pause)
    assert twice(20) == delivered(world.run)
    assert len([record for record in caplog.records if "threads do it" in record.message]) == 1
    assert time.monotonic() - began < 15
    left = {thread.name for thread in threading.enumerate() if thread not in before}
    assert not left & {"trainyard-json", "trainyard-csv"}


def test_two_states_in_one_tick_of_the_clock(tmp_path):
    """The training sees a lane's newest state also where it was written twice within one tick of the filesystem's clock."""
    (tmp_path / "delivery").mkdir()
    info = ty.RunInfo("id", "it", "exp", str(tmp_path), {}, {})
    delivery = SyncedDelivery(info, [], lambda error: None)
    path = tmp_path / "delivery" / "json.json"
    for seq in (1, 2):
        LaneState("json", "json", seq=seq).write(path)
        os.utime(path, ns=(1, 1))
        assert seq == delivery._state("json").seq


# -- resume ----------------------------------------------------------------------------------------------------------


def test_a_resume_while_the_old_process_still_delivers(world):
    """A run is killed and resumed several times while a tracker is down: in the end everything has each iteration once."""
    go = world.storage.parent / "go"
    options = {
        "trackers": {"json": {}, "csv": {}, "later": {"type": "probe", "fails_until": str(go)}},
        "resume": "allow",
        "environment": {"TRAINYARD_TEST_DEADLINE_S": "30"},
    }
    for count in range(4):
        child = world.start(count=1000, pause=0.005, **options)
        first_results(child, 15 + 2 * count)
        killed(child)
    child = world.start(count=100, **options)
    wait(lambda: ty.open_run(world.run).status == "completed")
    go.touch()
    out, errors = child.communicate(timeout=60)
    assert out.splitlines()[-1] == "status completed", errors
    assert "still owed" not in errors
    assert twice(100) == delivered(world.run)
    found = [line["i"] for line in told(world.run)]
    assert 100 == found[-1] == len(set(found))
    wait(lambda: not world.syncs())


def test_a_quick_resume_is_not_overlooked(world):
    """A resumed run that ends within a blink, while the old process waits for a tracker that is down, is delivered."""
    bad = {"type": "bad", "how": "raises"}
    options = {
        "trackers": {"json": {}, "csv": {}, "bad": bad},
        "resume": "allow",
        "environment": {"TRAINYARD_TEST_DEADLINE_S": "30"},
    }
    child = world.start(count=1000, pause=0.01, **options)
    first_results(child, 15)
    killed(child)
    wait(lambda: state(world.run, "json").ended and state(world.run, "csv").ended)
    for count in (20, 30):
        status, _ = world.train(count=count, drain=6, stop={"i": count}, **options)
        assert status == "completed"
        assert twice(count) == delivered(world.run)


def test_a_resume_does_not_stumble_over_the_end(world):
    """A training that is resumed while a sync process notes its death waits for that rather than give up."""
    child = world.start(count=1000, pause=0.01)
    first_results(child, 15)
    (process,) = wait(world.syncs)
    process.kill()
    killed(child)
    code = """
import sys, time, trainyard.sync as sync
noted = sync.end_if_killed
def slowly(*arguments):   # as in a run with a million results
    print("at it", flush=True)
    time.sleep(1.5)
    noted(*arguments)
sync.end_if_killed = slowly
sync.main(sys.argv[1:])
"""
    slow = world.start(code, world.run.parent, "--token", "slow")
    assert "at it" in slow.stdout.readline()
    out, errors = world.start(count=20, resume="must").communicate(timeout=60)
    assert (out.splitlines() or [""])[-1] == "status completed", errors
    assert twice(20) == delivered(world.run)


# -- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_for_the_training(world):
    """Ctrl-C reaches every process of the terminal; the training is interrupted, and that is delivered."""
    child = world.start(count=1000, pause=0.02, trackers={"json": {}, "csv": {}, "probe": {}})
    first_results(child, 3)
    wait(lambda: told(world.run))
    os.killpg(child.pid, signal.SIGINT)
    for process in world.syncs():
        process.send_signal(signal.SIGINT)
    _out, _errors = child.communicate(timeout=60)
    assert ty.open_run(world.run).status == "interrupted"
    assert [line["status"] for line in told(world.run, "log_end")] == ["interrupted"]
    found = delivered(world.run)
    assert twice(len(found[0])) == found
    wait(lambda: not world.syncs())


def test_ctrl_c_ends_the_waiting_for_a_tracker(world):
    """Ctrl-C at the end lets the process go with the run's status; the tracker keeps its deadline, in the background."""
    go = world.storage.parent / "go"
    trackers = {"json": {}, "csv": {}, "probe": {"fails_until": str(go)}}
    child = world.start(count=20, trackers=trackers, environment={"TRAINYARD_TEST_DEADLINE_S": "30"})
    wait(lambda: ty.open_run(world.run).status == "completed" if (world.run / "run.json").exists() else False)
    wait(lambda: state(world.run, "probe").error)
    time.sleep(0.5)
    os.killpg(child.pid, signal.SIGINT)
    out, errors = child.communicate(timeout=20)
    assert (child.returncode, out.splitlines()[-1]) == (0, "status completed"), errors
    assert "not waiting for the trackers any longer" in errors
    assert world.syncs()
    go.touch()
    wait(lambda: told(world.run, "log_end"))
    assert list(range(1, 21)) == [line["i"] for line in told(world.run)]
    wait(lambda: not world.syncs())


# -- where it happens ------------------------------------------------------------------------------------------------


def test_no_room_for_the_trackers_files(world):
    """While the disk is full for the sync process, the training goes on; when there is room, the lanes catch up."""
    child = world.start(count=300, pause=0.02)
    first_results(child)
    (process,) = wait(world.syncs)
    wait(lambda: delivered(world.run)[1])
    size = (world.run / "progress.csv").stat().st_size
    psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    at = len(ty.open_run(world.run).history())
    wait(lambda: len(ty.open_run(world.run).history()) > at + 50)
    psutil.Process(process.pid).rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    out, errors = child.communicate(timeout=60)
    assert ("status completed", twice(300)) == (out.splitlines()[-1], delivered(world.run))
    assert "No space left on device" in errors
    assert "works again" in errors


def test_relative_places(world):
    """A relative path in an option means the directory the training was started in, wherever it goes, for every process."""
    elsewhere = world.storage.parent / "elsewhere"
    elsewhere.mkdir()
    trackers = {"json": {}, "csv": {}, "probe": {"where": "told.jsonl"}}
    child = world.start(
        count=150, pause=0.03, trackers=trackers, before=f"os.chdir({str(elsewhere)!r})", storage="runs"
    )
    here = world.storage.parent / "told.jsonl"
    wait(lambda: here.exists() or (elsewhere / "told.jsonl").exists())
    (process,) = world.syncs()
    process.kill()
    out, errors = child.communicate(timeout=60)
    assert out.splitlines()[-1] == "status completed", errors
    assert not (elsewhere / "told.jsonl").exists()
    assert set(range(1, 151)) == {line["i"] for line in lines(here) if line["event"] == "log_results"}
    assert twice(150) == delivered(world.run)


def test_modules_in_the_way(world):
    """Files named like modules of the standard library, in the working directory or beside the script, are in nobody's way."""
    for folder, name in (("cwd", "json"), ("cwd", "queue"), ("scripts", "argparse")):
        (world.storage.parent / folder).mkdir(exist_ok=True)
        (world.storage.parent / folder / f"{name}.py").write_text("raise RuntimeError('not the one you want')")
    script = world.storage.parent / "scripts" / "train.py"
    script.write_text(TRAIN)
    options = {"storage": str(world.storage), "count": 3, "drain": 6}
    out, errors = world.start(script, json.dumps(options), cwd=world.storage.parent / "cwd").communicate(timeout=60)
    assert "status completed" in out, errors
    assert twice(3) == delivered(world.run)


@pytest.mark.parametrize(
    "place", ["with spaces/und Umläute/run '\"$x", "/".join(["deep" * 20] * 4)], ids=["odd", "long"]
)
def test_odd_storage_paths(world, place):
    """Spaces, quotes, unicode and length in the storage path are no matter."""
    storage = world.storage / place
    assert world.train(count=5, storage=str(storage))[0] == "completed"
    assert twice(5) == delivered(storage / "exp" / "it")


def test_another_temporary_directory(world):
    """A script that sets TMPDIR after the temporary directory was asked for is served like any other."""
    other = world.storage.parent / "other"
    other.mkdir()
    code = f"import os, tempfile\ntempfile.gettempdir()\nos.environ['TMPDIR'] = {str(other)!r}\n"
    options = {"storage": str(world.storage), "count": 10_000, "pause": 0.02}
    first_results(world.start(code + TRAIN, json.dumps(options)))
    wait(lambda: delivered(world.run)[1], 10)


def test_bytes_in_the_environment(world):
    """An environment variable that is not text is no matter either."""
    status, errors = world.train(count=5, drain=6, environment={"ODD": os.fsdecode(b"\xff\xfe")})
    assert ("completed", "", twice(5)) == (status, errors, delivered(world.run))


def test_a_run_directory_that_is_taken_away(world):
    """A run whose directory somebody deletes under way is told of as such, and nobody says so again and again."""
    code = """
import shutil, sys, time, trainyard as ty
from trainyard import active_run
active_run.DRAIN_S = 2.0
run = ty.start_run(storage=sys.argv[1], experiment="exp", name="it")
for i in range(200):
    run.log({"i": i})
    time.sleep(0.02)
    if i == 50:
        shutil.rmtree(run.path)
try:
    run.finish()
except ty.ConfigError as error:
    print(error)
"""
    world.noisy = True
    out, errors = world.start(code, world.storage).communicate(timeout=60)
    assert "is not a run directory" in out, errors
    wait(lambda: not world.syncs())
    assert world.log().count("\n") < 10


def test_a_runtime_folder_of_somebody_else(world, monkeypatch):
    """A folder that belongs to another user is not trusted."""
    runtime_folder()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    (world.temporary / "trainyard-4711").mkdir()
    with pytest.raises(PermissionError, match="not ours alone"):
        runtime_folder()


def test_the_constants_that_are_shortened_here():
    """The names that SHORTEN sets in the process are still those that it uses."""
    assert sync.DEADLINE_S == active_run.DRAIN_S == 30
    assert sync._MEMORY_LIMIT == 1 << 30
    assert sync.Follower


def test_two_processes_for_one_dead_run_both_go(world):
    """Processes of different surroundings that meet at a run whose tracker is down keep each other from nothing."""
    trackers = {"json": {}, "csv": {}, "probe": {"fails_until": str(world.storage.parent / "never")}}
    child = world.start(count=1000, pause=0.02, trackers=trackers)
    first_results(child)
    (process,) = wait(world.syncs)
    process.kill()
    killed(child)
    code = "import sys, trainyard.sync as sync; sync.main(sys.argv[1:])"
    both = [world.start(code, world.run.parent, "--token", token) for token in ("one", "two")]
    assert [child.wait(timeout=60) for child in both] == [0, 0]
    assert ty.open_run(world.run).status == "killed"


def test_odd_entries_of_the_path_are_passed_over(world):
    """A Path in ``sys.path``, which Python ignores, is no reason to deliver nothing."""
    status, errors = world.train(count=5, before="import pathlib; sys.path.insert(0, pathlib.Path('src'))")
    assert (status, errors) == ("completed", "")
    assert twice(5) == delivered(world.run)
