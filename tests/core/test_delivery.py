"""Lanes: each tracker gets every result, in order, once, whatever goes wrong with it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from trainables import FILLED, Counting, iterations, run

import trainyard as ty
from trainyard import active_run
from trainyard.delivery import BATCH, Lane, LaneState, TrackerSpec
from trainyard.journal import ArtifactRecord, JournalWriter
from trainyard.plugins import hold


class Double:
    """A tracker that keeps what it is given in ``service``, which outlives it, and fails when told to.

    It uses its notes as a tracker should: what a failure leaves behind its confirmed count is cut off at log_start.
    """

    def __init__(self, service):
        self.service = service
        service.calls.append("build")

    @ty.hookimpl
    def log_start(self, run, notes):
        self.service.enter("log_start")
        self.service.starts.append(dict(notes))
        del self.service.rows[notes.setdefault("count", 0) :]

    @ty.hookimpl
    def log_results(self, run, results, notes):
        for result in results:
            self.service.enter("log_results", result.seq)
            self.service.rows.append((result.seq, result.metrics))
        self.service.batches.append([result.seq for result in results])
        notes["count"] += len(results)

    @ty.hookimpl
    def log_artifact(self, artifact):
        self.service.enter("log_artifact")
        self.service.others.append(artifact)

    @ty.hookimpl
    def log_checkpoint(self, checkpoint):
        self.service.enter("log_checkpoint")
        self.service.others.append(checkpoint)

    @ty.hookimpl
    def log_rewind(self, results, notes):
        self.service.enter("log_rewind")
        self.service.rows[:] = [(result.seq, result.metrics) for result in results]
        self.service.rewinds.append([result.seq for result in results])
        notes["count"] = len(self.service.rows)

    @ty.hookimpl
    def log_end(self, outcome):
        self.service.enter("log_end")
        self.service.others.append(outcome)

    @ty.hookimpl
    def flush(self):
        self.service.enter("flush")

    @ty.hookimpl
    def close(self):
        self.service.enter("close")


class Service:
    """What a Double reports to.

    Attributes:
        fails: hook to a list of exceptions, raised one at each call until there are none left.
        refuses: seqs that are rejected.
    """

    def __init__(self):
        self.fails, self.refuses = {}, set()
        self.calls, self.starts, self.batches, self.rewinds, self.rows, self.others = [], [], [], [], [], []

    def enter(self, hook, seq=None):
        """Note the call, and fail if that is due."""
        self.calls.append(hook)
        if self.fails.get(hook):
            raise self.fails[hook].pop(0)
        if seq in self.refuses:
            raise ty.Rejected([seq], "not of this shape")

    @property
    def seqs(self):
        """The results that it has, in order."""
        return [seq for seq, _ in self.rows]

    def spec(self, **options):
        """A tracker spec that builds a Double of this service."""
        return TrackerSpec("double", "double", lambda: hold("double", Double(self)), **options)


@pytest.fixture
def service():
    """A service of doubles."""
    return Service()


@pytest.fixture
def opened(tmp_path):
    """An open run without trackers of its own."""
    made = ty.start_run(storage=tmp_path, trackers=[], config={"lr": 0.1})
    yield made
    made.finish()


def log(run, count, **more):
    """Log so many results."""
    for _ in range(count):
        run.log({"n": run.seq + 1, **more})


def state_of(lane):
    """The state as it lies on the disk."""
    return LaneState.read(Path(lane.run.path, "delivery", f"{lane.spec.name}.json"))


# -- the straight way ------------------------------------------------------------------------------------------------


def test_everything_is_delivered_in_order(opened, service, tmp_path):
    """Results, artifacts, checkpoints and the end come once each, in the order in which they were logged."""
    (tmp_path / "plot.png").write_bytes(b"12345")
    log(opened, 2)
    opened.log_artifact(tmp_path / "plot.png")
    log(opened, 1)
    opened.save_checkpoint({"a": 1})
    opened.finish()
    lane = Lane(opened.info, service.spec())
    assert lane.attempt()
    assert [call for call in service.calls if call != "flush"] == [
        "build", "log_start", "log_results", "log_results", "log_artifact", "log_results", "log_checkpoint", "log_end",
    ]  # fmt: skip
    artifact, checkpoint, outcome = service.others
    assert (artifact.name, artifact.size, Path(artifact.path).read_bytes()) == ("plot.png", 5, b"12345")
    assert (checkpoint.index, checkpoint.iteration, checkpoint.metrics["n"]) == (0, 3, 3)
    assert (outcome.status, outcome.error) == ("completed", None)
    state = state_of(lane)
    assert (state.seq, state.delivered, state.ended, state.error) == (3, 3, True, None)


def test_a_result_is_whole(opened, service):
    """A tracker gets all keys that train() returned, with the time and step of the logging."""
    returned = opened.log({"n": 1, "nested": {"a": 2}}, step=9)
    seen = []

    class Keeps:
        @ty.hookimpl
        def log_results(self, results):
            seen.extend(results)

    Lane(opened.info, TrackerSpec("k", "k", lambda: hold("k", Keeps()))).attempt()
    [result] = seen
    assert result.metrics == returned
    assert (result.seq, result.step) == (1, 9)
    assert int(result.time) == returned["timestamp"]


@pytest.mark.parametrize("count", [1, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH + 3])
def test_batches_have_1_to_500_results_in_order(opened, service, count):
    """A backlog is handed over in batches of at most 500, none of them empty, without a gap."""
    log(opened, count)
    Lane(opened.info, service.spec()).attempt()
    assert all(1 <= len(batch) <= 500 for batch in service.batches)
    assert [seq for batch in service.batches for seq in batch] == list(range(1, count + 1))
    assert len(service.batches) == -(-count // 500)


def test_nothing_new_is_nothing_done(opened, service):
    """An attempt without new records calls no hook at all."""
    log(opened, 3)
    lane = Lane(opened.info, service.spec())
    lane.attempt()
    calls = list(service.calls)
    assert lane.attempt()
    assert service.calls == calls


def test_a_later_attempt_takes_up_where_the_cursor_is(opened, service):
    """What was confirmed never comes again in the same process."""
    lane = Lane(opened.info, service.spec())
    for expected in ([1, 2], [1, 2, 3, 4]):
        log(opened, 2)
        lane.attempt()
        assert service.seqs == expected
    assert service.calls.count("log_start") == 1


def test_flush_comes_before_the_cursor_moves(opened, service):
    """While a flush has not returned, the state on the disk is the old one."""
    log(opened, 2)
    lane = Lane(opened.info, service.spec())
    lane.attempt()
    log(opened, 2)
    seen = []

    class Looks(Double):
        @ty.hookimpl
        def flush(self):
            seen.append((state_of(lane).seq, len(self.service.rows)))

    looking = Lane(opened.info, TrackerSpec("double", "double", lambda: hold("double", Looks(service))))
    looking.attempt()
    assert seen == [(2, 4)]
    assert state_of(looking).seq == 4


def test_notes_survive_a_restart(opened, service):
    """A new process gets log_start again, with the notes as they were confirmed, and only what is new."""
    log(opened, 3)
    Lane(opened.info, service.spec()).attempt()
    log(opened, 2)
    Lane(opened.info, service.spec()).attempt()
    assert service.starts == [{}, {"count": 3}]
    assert service.seqs == [1, 2, 3, 4, 5]


def test_notes_and_cursor_are_saved_in_one_step(opened, service):
    """The file with the cursor holds the notes of the same moment."""
    log(opened, 3)
    lane = Lane(opened.info, service.spec())
    lane.attempt()
    raw = json.loads(Path(opened.path, "delivery", "double.json").read_text())
    assert (raw["seq"], raw["notes"], raw["tracker"]) == (3, {"count": 3}, "double")


def test_notes_of_a_failed_attempt_are_forgotten(opened, service):
    """What a tracker noted before it failed is gone at the next log_start."""
    log(opened, 2)
    lane = Lane(opened.info, service.spec())
    lane.attempt()
    log(opened, 2)
    service.fails["flush"] = [OSError("disk")]
    assert not lane.attempt()
    assert lane.attempt()
    assert service.starts[-1] == {"count": 2}
    assert service.seqs == [1, 2, 3, 4]


def test_a_damaged_state_file_delivers_from_the_beginning(opened, service, caplog):
    """A state that cannot be read is told, and everything is delivered again."""
    log(opened, 2)
    Lane(opened.info, service.spec()).attempt()
    Path(opened.path, "delivery", "double.json").write_text("{")
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        Lane(opened.info, service.spec()).attempt()
    assert service.seqs == [1, 2]
    assert "double.json" in caplog.text


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["log_start", "log_results", "log_artifact", "log_checkpoint", "log_end", "flush"])
@pytest.mark.parametrize(
    "error",
    [ConnectionError("down"), SystemExit(1), KeyboardInterrupt(), MemoryError()],
    ids=lambda e: type(e).__name__,
)
def test_a_transient_failure_delivers_exactly_once_after_it(opened, service, hook, error, caplog):
    """Whatever a hook raises, SystemExit included, the next attempt delivers all of it once, with one warning."""
    log(opened, 3)
    opened.log_artifact(__file__)
    opened.save_checkpoint({"a": 1})
    log(opened, 2)
    opened.finish()
    service.fails[hook] = [error]
    lane = Lane(opened.info, service.spec())
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        assert not lane.attempt()
        assert state_of(lane).error.startswith(type(error).__name__)
        assert state_of(lane).failing_since is not None
        assert lane.attempt()
    assert service.seqs == [1, 2, 3, 4, 5]
    assert (state_of(lane).error, state_of(lane).failing_since, state_of(lane).ended) == (None, None, True)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"tracker 'double' failed for run {opened.name}",
        "tracker 'double' works again",
    ]


def test_a_failure_in_the_middle_of_a_batch(opened, service):
    """A tracker that took half of a batch and failed has each result once after the retry."""
    log(opened, 10)

    class Halfway(Double):
        broken = [True]

        @ty.hookimpl
        def log_results(self, results, notes):
            for result in results:
                if result.seq == 6 and self.broken:
                    self.broken.clear()
                    raise ConnectionError("in the middle")
                self.service.rows.append((result.seq, result.metrics))
            notes["count"] += len(results)

    lane = Lane(opened.info, TrackerSpec("double", "double", lambda: hold("double", Halfway(service))))
    assert not lane.attempt()
    assert service.seqs == [1, 2, 3, 4, 5]
    assert lane.attempt()
    assert service.seqs == list(range(1, 11))


def test_a_long_outage_warns_once(opened, service, caplog):
    """However many attempts fail, an outage is one warning, and its end is one more."""
    log(opened, 1)
    lane = Lane(opened.info, service.spec())
    service.fails["log_results"] = [ConnectionError("down")] * 20
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        for _ in range(20):
            assert not lane.attempt()
        assert lane.attempt()
    assert len(caplog.records) == 2


def test_every_failure_closes_and_builds_anew(opened, service):
    """After each failure the plugin is closed, and a new one is built and started."""
    log(opened, 1)
    lane = Lane(opened.info, service.spec())
    service.fails["log_results"] = [OSError("1"), OSError("2")]
    while not lane.attempt():
        pass
    calls = [call for call in service.calls if call in ("build", "log_start", "close")]
    assert calls == ["build", "log_start", "close", "build", "log_start", "close", "build", "log_start"]


def test_a_failing_close_is_only_logged(opened, service, caplog):
    """What close raises ends nothing."""
    log(opened, 1)
    lane = Lane(opened.info, service.spec())
    service.fails = {"log_results": [OSError("down")], "close": [SystemExit(1)]}
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        assert not lane.attempt()
        assert lane.attempt()
    assert service.seqs == [1]
    assert "failed to close" in caplog.text


def test_a_build_that_fails_is_a_failure_like_any_other(opened, service):
    """A plugin that cannot be built for a while is retried."""
    log(opened, 2)
    left = [RuntimeError("no"), SystemExit(2)]

    def build():
        if left:
            raise left.pop(0)
        return hold("double", Double(service))

    lane = Lane(opened.info, TrackerSpec("double", "double", build))
    assert [lane.attempt() for _ in range(3)] == [False, False, True]
    assert service.seqs == [1, 2]


def test_another_lane_is_not_disturbed(tmp_path, service, monkeypatch):
    """While one tracker is down, the others get everything, and training sees nothing of it."""
    monkeypatch.setattr(active_run, "DRAIN_S", 0.3)

    class Down:
        @ty.hookimpl
        def log_results(self):
            raise ConnectionError("down")

    result = run(Counting, tmp_path, trackers=[Down(), Double(service), "json"], stop={"count": 5})
    assert result.status == "completed"
    assert service.seqs == [1, 2, 3, 4, 5]
    assert len(Path(result.path, "result.json").read_text().splitlines()) == 5
    states = {state.tracker: (state.seq, state.ended) for state in result.lanes()}
    assert states == {"Down": (0, False), "Double": (5, True), "json": (5, True)}


def test_what_is_owed_stays_and_is_told(tmp_path, monkeypatch, caplog):
    """At the drain deadline the run ends, a warning tells how much is owed, and a later lane delivers it."""
    monkeypatch.setattr(active_run, "DRAIN_S", 0.2)

    class Down:
        @ty.hookimpl
        def log_results(self):
            raise ConnectionError("down")

    with caplog.at_level(logging.WARNING, logger="trainyard"):
        result = run(Counting, tmp_path, trackers=[Down()], stop={"count": 3})
    assert "'Down' is still owed 3 results" in caplog.text
    later = Service()
    spec = TrackerSpec("Down", "Down", lambda: hold("Down", Double(later)))
    assert Lane(result.info(), spec).attempt()
    assert later.seqs == [1, 2, 3]
    assert "log_end" in later.calls


# -- rejected --------------------------------------------------------------------------------------------------------


def test_rejected_results_are_set_aside_and_the_rest_goes_on(opened, service, caplog):
    """Rejected results lie in a file with the reason, are told once, and all others arrive."""
    log(opened, 10)
    service.refuses = {3, 7}
    lane = Lane(opened.info, service.spec())
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        assert lane.attempt()
    assert service.seqs == [1, 2, 4, 5, 6, 8, 9, 10]
    lines = Path(opened.path, "delivery", "double.rejected.jsonl").read_text().splitlines()
    aside = [json.loads(line) for line in lines]
    assert [(row["why"], row["result"]["seq"], row["result"]["metrics"]["n"]) for row in aside] == [
        ("not of this shape", 3, 3),
        ("not of this shape", 7, 7),
    ]
    state = state_of(lane)
    assert (state.rejected, state.seq, state.delivered, state.error) == ([3, 7], 10, 8, None)
    assert "double.rejected.jsonl" in caplog.text


def test_a_whole_batch_may_be_rejected(opened, service):
    """When every result is rejected the lane still gets to the end."""
    log(opened, 3)
    opened.finish()
    service.refuses = {1, 2, 3}
    lane = Lane(opened.info, service.spec())
    assert lane.attempt()
    assert (service.seqs, state_of(lane).seq, state_of(lane).ended) == ([], 3, True)


def test_many_rejected_results_do_not_end_the_lane(opened, service):
    """A tracker may reject results one by one, however many there are."""
    log(opened, 1200)
    service.refuses = set(range(1, 1200))
    lane = Lane(opened.info, service.spec())
    assert lane.attempt()
    assert (service.seqs, len(state_of(lane).rejected)) == ([1200], 1199)


def test_rejecting_what_was_not_handed_over_is_a_failure(opened, service):
    """Rejected with seqs that are not in the batch, or with none, is an ordinary failure, not an endless loop."""
    log(opened, 2)
    lane = Lane(opened.info, service.spec())
    service.fails["log_results"] = [ty.Rejected([99], "what?"), ty.Rejected([], "nothing")]
    assert [lane.attempt() for _ in range(3)] == [False, False, True]
    assert service.seqs == [1, 2]
    assert not Path(opened.path, "delivery", "double.rejected.jsonl").exists()


def test_rejected_out_of_another_hook_is_a_failure(opened, service):
    """log_end and flush have no results to reject."""
    log(opened, 2)
    opened.finish()
    lane = Lane(opened.info, service.spec())
    service.fails = {"log_end": [ty.Rejected([1], "late")]}
    assert not lane.attempt()
    assert lane.attempt()
    assert service.seqs == [1, 2]


def test_rejected_results_are_remembered(opened, service):
    """A new process does not hand over again what was rejected."""
    log(opened, 2)
    service.refuses = {1}
    Lane(opened.info, service.spec()).attempt()
    log(opened, 1)
    service.refuses = set()
    Lane(opened.info, service.spec()).attempt()
    assert service.seqs == [2, 3]


def test_a_full_disk_while_setting_aside_is_a_failure(opened, service, monkeypatch):
    """When the file for rejected results cannot be written, the lane stays where it was and tries again."""
    log(opened, 2)
    service.refuses = {1}
    lane = Lane(opened.info, service.spec())
    blocker = Path(opened.path, "delivery", "double.rejected.jsonl")
    blocker.mkdir()
    assert not lane.attempt()
    blocker.rmdir()
    assert lane.attempt()
    assert service.seqs == [2]


# -- on_error --------------------------------------------------------------------------------------------------------


def test_drop_drops_the_batch_and_counts_it(opened, service):
    """With on_error drop a batch is lost at its first failure, counted, and what comes later arrives."""
    log(opened, 3)
    lane = Lane(opened.info, service.spec(on_error="drop"))
    service.fails["log_results"] = [ConnectionError("down")]
    assert not lane.attempt()
    log(opened, 2)
    assert lane.attempt()
    assert service.seqs == [4, 5]
    state = state_of(lane)
    assert (state.dropped, state.delivered, state.seq, state.error) == (3, 2, 5, None)


def test_drop_loses_nothing_that_was_taken(opened, service):
    """A failure drops its own batch only: batches that were taken before it stay, and the end still comes."""
    log(opened, 3)
    opened.log_artifact(__file__)
    log(opened, 3)
    opened.finish()
    lane = Lane(opened.info, service.spec(on_error="drop"))
    service.fails["log_artifact"] = [ConnectionError("down")]
    assert not lane.attempt()
    assert lane.attempt()
    assert service.seqs == [1, 2, 3, 4, 5, 6]
    assert service.others[-1].status == "completed"
    assert state_of(lane).dropped == 0


def test_drop_of_a_start_that_always_fails_never_hangs(tmp_path, service):
    """A tracker with drop that cannot even start costs the run nothing: it ends at once."""
    with ty.start_run(storage=tmp_path, trackers=[]) as opened:
        log(opened, 5)
    service.fails["log_start"] = [OSError("down")] * 1000
    lane = Lane(opened.info, service.spec(on_error="drop"))
    closing = threading.Event()
    closing.set()
    lane.follow(closing, lambda: time.monotonic() + 20)
    state = state_of(lane)
    assert state.seq == 5
    assert state.dropped == 5
    assert len(service.fails["log_start"]) > 900


def test_raise_tells_the_run(opened, service):
    """With on_error raise the run is told at once, with the names of tracker and reason; nothing is lost."""
    log(opened, 2)
    told = []
    lane = Lane(opened.info, service.spec(on_error="raise"), told.append)
    service.fails["log_results"] = [ConnectionError("no route")]
    assert not lane.attempt()
    assert told == ["tracker 'double' failed: ConnectionError: no route"]
    assert lane.attempt()
    assert service.seqs == [1, 2]


def test_raise_fails_the_run_at_its_next_report(tmp_path, monkeypatch):
    """The run refuses its next result with a DeliveryError, fails, and keeps what it had recorded."""

    @ty.hookimpl
    def flush(self):
        raise ConnectionError("no route")

    monkeypatch.setattr(active_run, "DRAIN_S", 0.2)
    monkeypatch.setattr("trainyard_plugins.trackers.json.JsonTracker.flush", flush)

    class Patient(Counting):
        def step(self):
            time.sleep(0.01)
            assert self.count < 1000
            return super().step()

    result = run(Patient, tmp_path, trackers={"json": {"on_error": "raise"}})
    assert result.status == "failed"
    assert isinstance(result.error, ty.DeliveryError)
    assert "'json' failed: ConnectionError: no route" in str(result.error)
    assert iterations(result) == list(range(1, len(result.history()) + 1))


def test_spool_is_the_default(service):
    """A tracker that says nothing keeps its results for later."""
    assert service.spec().on_error == "spool"


# -- following -------------------------------------------------------------------------------------------------------


def follow(lane):
    """Follow the lane in a thread. Returns a function that ends it."""
    closing, until = threading.Event(), []
    thread = threading.Thread(target=lane.follow, args=(closing, lambda: until[0]), daemon=True)
    thread.start()

    def end(seconds=10.0):
        until.append(time.monotonic() + seconds)
        closing.set()
        thread.join(20)
        assert not thread.is_alive()

    return end


def wait_for(condition):
    """Wait until something holds, as long as it is likely to come."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_following_delivers_while_it_is_logged(opened, service):
    """A lane that follows delivers without being asked, and what is left at its end."""
    end = follow(Lane(opened.info, service.spec()))
    log(opened, 2)
    wait_for(lambda: service.seqs == [1, 2])
    log(opened, 3)
    end()
    assert service.seqs == [1, 2, 3, 4, 5]
    assert service.calls[-1] == "close"


def test_close_is_always_called_at_the_end(opened, service):
    """A lane that ends in an outage has closed its tracker as often as it built one."""
    service.fails["log_results"] = [OSError("down")] * 1000
    log(opened, 1)
    end = follow(Lane(opened.info, service.spec()))
    wait_for(lambda: "close" in service.calls)
    end(0.1)
    assert service.calls.count("close") == service.calls.count("build")


def test_close_is_called_in_quarantine_too(opened, service):
    """After results were rejected the tracker is closed as well, at the end too."""
    log(opened, 4)
    service.refuses = {2}
    end = follow(Lane(opened.info, service.spec()))
    end()
    assert service.seqs == [1, 3, 4]
    assert service.calls.count("close") == service.calls.count("build") == 2


def test_an_outage_ends_while_following(opened, service):
    """A lane retries by itself and catches up once the tracker is there again."""
    service.fails["log_results"] = [ConnectionError("down"), SystemExit(3)]
    end = follow(Lane(opened.info, service.spec()))
    log(opened, 3)
    wait_for(lambda: service.seqs == [1, 2, 3])
    end()
    assert service.seqs == [1, 2, 3]


def test_a_lane_that_another_process_holds_is_left_to_it(opened, service):
    """While another process holds the lane's lock nothing is delivered here; once it is gone, all that it left is."""
    log(opened, 2)
    lock = Path(opened.path, "delivery", ".double.lock")
    code = f"""
import sys
from pathlib import Path
from trainyard.locks import FileLock
lock = FileLock(Path({str(lock)!r}))
assert lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    try:
        end = follow(Lane(opened.info, service.spec()))
        end(0.3)
        assert service.calls == []
    finally:
        child.communicate()
    end = follow(Lane(opened.info, service.spec()))
    end()
    assert service.seqs == [1, 2]


def test_what_another_process_delivered_meanwhile_is_not_delivered_again(opened, service):
    """A lane that gets the lock later begins at the state that the other one left."""
    log(opened, 3)
    late = Lane(opened.info, service.spec())
    Lane(opened.info, service.spec()).attempt()
    end = follow(late)
    end()
    assert service.batches == [[1, 2, 3]]


# -- rewinding -------------------------------------------------------------------------------------------------------


def test_a_rewind_gets_exactly_the_surviving_history(tmp_path, service):
    """After a resume log_rewind gets the results that still count, and then the new ones come."""

    class Fails(Counting):
        def step(self):
            if self.count == 5:
                raise RuntimeError("at 6")
            return super().step()

    first = run(Fails, tmp_path, name="it", checkpoint={"every": 2}, trackers=[Double(service)])
    assert service.seqs == [1, 2, 3, 4, 5]
    result = run(Counting, tmp_path, name="it", resume="must", trackers=[Double(service)], stop={"count": 7})
    assert result.id == first.id
    assert service.rewinds == [[1, 2, 3, 4]]
    assert service.seqs == [1, 2, 3, 4, 6, 7, 8]
    assert [metrics["training_iteration"] for _, metrics in service.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [seq for seq, _ in service.rows] == [row.seq for row in result.history()]


def test_a_rewind_in_the_middle_of_a_run(tmp_path, service):
    """A retry within a run rewinds too, and a tracker that sees it all at once ends with the same history."""
    left = [True]

    class Fails(Counting):
        def step(self):
            if self.count == 3 and left:
                left.clear()
                raise RuntimeError("once")
            return super().step()

    options = {"checkpoint": {"every": 2}, "failures": {"max_failures": 1}, "stop": {"count": 5}}
    result = run(Fails, tmp_path, trackers=[Double(service)], **options)
    late = Service()
    Lane(result.info(), late.spec()).attempt()
    assert service.seqs == late.seqs == [row.seq for row in result.history()] == [1, 2, 4, 5, 6]
    assert late.rewinds == [[1, 2]]


def test_a_history_may_be_iterated_again(opened):
    """The results of a rewind can be read any number of times."""
    seen = []

    class Twice:
        @ty.hookimpl
        def log_rewind(self, results):
            seen.append([[result.seq for result in results] for _ in range(3)])

    log(opened, 3)
    opened.restore_counters(None)
    log(opened, 1)
    Lane(opened.info, TrackerSpec("t", "t", lambda: hold("t", Twice()))).attempt()
    assert seen == [[[], [], []]]


def test_several_rewinds_each_get_their_own_history(tmp_path, service):
    """Each rewind is told the history as it stood at that resume."""
    with ty.start_run(storage=tmp_path, trackers=[]) as opened:
        log(opened, 2)
        first = opened.save_checkpoint({"a": 1})
        log(opened, 2)
        opened.restore_counters(first)
        log(opened, 2)
        second = opened.save_checkpoint({"a": 2})
        log(opened, 2)
        opened.restore_counters(second)
        log(opened, 1)
        opened.restore_counters(first)
        log(opened, 1)
    Lane(opened.info, service.spec()).attempt()
    assert service.rewinds == [[1, 2], [1, 2, 5, 6], [1, 2]]
    assert service.seqs == [1, 2, 10]
    assert [row.seq for row in ty.open_run(opened.path).history()] == [1, 2, 10]


def test_a_run_that_ended_and_goes_on_is_started_again(tmp_path, service):
    """After log_end a resumed run gets log_start before anything else."""
    run(Counting, tmp_path, name="it", trackers=[Double(service)], stop={"count": 1})
    run(Counting, tmp_path, name="it", trackers=[Double(service)], stop={"count": 2}, resume="must")
    late = Service()
    Lane(ty.open_run(tmp_path / "default" / "it").info(), late.spec()).attempt()
    ends = [i for i, call in enumerate(late.calls) if call == "log_end"]
    assert len(ends) == 2
    between = [call for call in late.calls[ends[0] + 1 : ends[1]] if call != "flush"]
    assert between[0] == "log_start"
    assert late.seqs == [1, 2]


# -- include and exclude ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"include": ("loss",)}, {"loss"}),
        ({"include": ("val/*",)}, {"val"}),
        ({"exclude": ("val/*",)}, {"loss", "grad"}),
        ({"include": ("*",), "exclude": ("grad",)}, {"loss", "val"}),
        ({"include": ("val/a*",)}, {"val"}),
        ({"exclude": ("*",)}, set()),
        ({"include": ("LOSS",)}, set()),
        ({}, {"loss", "val", "grad"}),
    ],
)
def test_include_and_exclude_act_on_user_metrics_only(opened, service, options, kept):
    """Globs choose among the user's metrics, nested ones by their joined name; the filled keys are always there."""
    opened.log({"loss": 1.0, "val": {"acc": 2.0, "f1": 3.0}, "grad": 4.0, "timesteps_this_iter": 5})
    Lane(opened.info, service.spec(**options)).attempt()
    [(_, metrics)] = service.rows
    assert set(metrics) >= FILLED | {"timesteps_total", "timesteps_since_restore"}
    assert set(metrics) - FILLED - {"timesteps_total", "timesteps_since_restore", "timesteps_this_iter"} == kept
    if options.get("include") == ("val/a*",):
        assert metrics["val"] == {"acc": 2.0}


def test_filled_keys_that_are_nested_are_not_filtered(opened, service):
    """The config and perf stay whole, whatever the globs say."""
    opened.log({"perf": {"cpu_util_percent": 1.0}, "x": 1})
    Lane(opened.info, service.spec(exclude=("*",))).attempt()
    [(_, metrics)] = service.rows
    assert metrics["perf"] == {"cpu_util_percent": 1.0}
    assert metrics["config"] == {"lr": 0.1}


def test_a_rewind_is_filtered_too(opened, service):
    """log_rewind sees the metrics through the same globs."""
    opened.log({"keep": 1, "drop": 2})
    saved = opened.save_checkpoint({"a": 1})
    opened.log({"keep": 1, "drop": 2})
    opened.restore_counters(saved)
    Lane(opened.info, service.spec(include=("keep",))).attempt()
    assert [("keep" in metrics, "drop" in metrics) for _, metrics in service.rows] == [(True, False)]


def test_filters_from_the_config(tmp_path):
    """include and exclude are taken out of a tracker's options and work on its files."""
    trackers = {"csv": {"include": "cou*"}, "all": {"type": "json", "exclude": ["count"]}}
    result = run(Counting, tmp_path, trackers=trackers, stop={"count": 2})
    header = Path(result.path, "progress.csv").read_text().splitlines()[0]
    assert "count" in header.split(",")
    rows = [json.loads(line) for line in Path(result.path, "result.json").read_text().splitlines()]
    assert ["count" in row for row in rows] == [False, False]
    assert all(row["training_iteration"] for row in rows)


# -- the training thread never waits ---------------------------------------------------------------------------------


def test_a_tracker_that_never_returns_stops_nobody(tmp_path, monkeypatch, caplog):
    """A tracker that hangs is left behind at the deadline; training, the other trackers and the end go on."""
    monkeypatch.setattr(active_run, "DRAIN_S", 0.2)
    release = threading.Event()

    class Hangs:
        @ty.hookimpl
        def log_results(self):
            release.wait(20)

    with caplog.at_level(logging.WARNING, logger="trainyard"):
        result = run(Counting, tmp_path, trackers=[Hangs(), "json"], stop={"count": 3})
    release.set()
    assert (result.status, iterations(result)) == ("completed", [1, 2, 3])
    assert "'Hangs' does not return" in caplog.text
    assert len(Path(result.path, "result.json").read_text().splitlines()) == 3


def test_a_tracker_gets_its_own_metrics(tmp_path, service):
    """A tracker that changes the metrics it was given changes neither another's nor the record."""

    class Vandal:
        @ty.hookimpl
        def log_results(self, results):
            for result in results:
                result.metrics.clear()

    result = run(Counting, tmp_path, trackers=[Vandal(), Double(service)], stop={"count": 3})
    assert [metrics["count"] for _, metrics in service.rows] == [1, 2, 3]
    assert [row["count"] for row in result.history()] == [1, 2, 3]


def test_an_artifact_outside_of_the_run_is_not_delivered(tmp_path, caplog):
    """A journal from elsewhere can name any file; only those of the run are handed over."""
    heard = []

    class Hearing:
        @ty.hookimpl
        def log_artifact(self, artifact):
            heard.append(artifact.name)

    (tmp_path / "secret").write_text("secret")
    with ty.start_run(storage=tmp_path, name="it", trackers=[]) as opened:
        opened.log({"a": 1})
    journal = JournalWriter(Path(opened.path, "journal", "0.log"))
    for name, path in (("a", str(tmp_path / "secret")), ("../../../secret", ""), ("b", "run.json")):
        journal.append(ArtifactRecord(seq=1, time=1.0, name=name, size=6, path=path))
    journal.close()
    lane = Lane(opened.info, TrackerSpec("hearing", "hearing", lambda: hold("hearing", Hearing())))
    assert lane.attempt()
    assert heard == ["b"]
    assert "leads out of run" in caplog.text
