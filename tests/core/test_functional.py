"""The function style: report(), get_checkpoint(), and the step-by-step view of a function."""

from __future__ import annotations

import logging
import threading
import traceback
from pathlib import Path

import pytest
from trainables import FILLED, build, iterations, python, run

import trainyard as ty
from trainyard import functional


@pytest.fixture
def _fresh_warnings(monkeypatch):
    """As in a process in which nothing has warned yet."""
    monkeypatch.setattr(functional, "_warned", set())


@pytest.fixture
def make(tmp_path):
    """Builds trainables with runs of their own, and stops them."""
    made = []

    def build_one(cls, config=None):
        made.append(build(cls, tmp_path, config))
        return made[-1]

    yield build_one
    for trainable in made:
        trainable.stop()


def three(config):
    """Reports three times."""
    for i in range(3):
        ty.report({"i": i})


def drain(trainable):
    """All results of train() until the function's end."""
    results = []
    while "__duplicate__" not in (result := trainable.train()):
        results.append(result)
    return results


# -- under run() -----------------------------------------------------------------------------------------------------


def test_each_report_is_a_result(tmp_path):
    """Every report() is one iteration, with the auto-filled keys and checkpoint_dir_name."""
    result = run(three, tmp_path)
    assert result.status == "completed"
    assert [row["i"] for row in result.history()] == [0, 1, 2]
    assert iterations(result) == [1, 2, 3]
    assert set(result.metrics) == FILLED | {"i", "checkpoint_dir_name"}
    assert result.metrics["checkpoint_dir_name"] is None


def test_the_function_gets_the_config(tmp_path):
    """The function is called once with the run's config."""
    got = []

    def train(config):
        got.append(config)

    config = {"lr": 0.1}
    run(train, tmp_path, config)
    assert got == [{"lr": 0.1}]


def test_a_function_that_changes_its_config_does_not_change_the_record(tmp_path):
    """What the function does to its config stays out of run.json, the results and the caller's dict."""

    def train(config):
        config["lr"] = 99
        config["inner"].append(1)
        ty.report({})

    config = {"lr": 0.1, "inner": []}
    result = run(train, tmp_path, config)
    assert ty.open_run(result.path).config == {"lr": 0.1, "inner": []}
    assert result.metrics["config"] == {"lr": 0.1, "inner": []}
    assert config == {"lr": 0.1, "inner": []}


def test_a_second_attempt_gets_the_config_as_it_was(tmp_path):
    """A function that takes its config apart finds it whole again when it is called after a failure."""
    found = []

    def train(config):
        found.append(config.pop("lr", "gone"))
        if len(found) == 1:
            raise RuntimeError("once")

    run(train, tmp_path, {"lr": 0.1}, failures={"max_failures": 1})
    assert found == [0.1, 0.1]


def test_report_with_a_directory(tmp_path):
    """A reported directory is copied, durable on return, named in the result, and left in place."""
    source = tmp_path / "mine"
    source.mkdir()
    seen = []

    def train(config):
        for i in range(2):
            (source / "w.txt").write_text(str(i))
            ty.report({"i": i}, checkpoint=source)
            seen.append(ty.open_run(ty.get_run().path).checkpoint.iteration)

    result = run(train, tmp_path)
    assert seen == [1, 2]
    assert (source / "w.txt").read_text() == "1"
    assert [Path(c.path, "w.txt").read_text() for c in result.checkpoints] == ["0", "1"]
    assert [row["checkpoint_dir_name"] for row in result.history()] == ["checkpoint_000000", "checkpoint_000001"]
    assert result.metrics["should_checkpoint"] is True
    assert result.checkpoint.metrics["i"] == 1


@pytest.mark.parametrize("kind", ["str", "path", "checkpoint", "dict"])
def test_every_way_to_give_a_checkpoint(tmp_path, kind):
    """A checkpoint is given as a path, a Checkpoint or a dict."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "w.txt").write_text("7")
    given = {
        "str": str(tmp_path / "mine"),
        "path": tmp_path / "mine",
        "checkpoint": ty.Checkpoint.from_directory(tmp_path / "mine"),
        "dict": {"w": 7},
    }[kind]

    def train(config):
        ty.report({}, checkpoint=given)

    saved = run(train, tmp_path).checkpoint
    assert (saved.load() == {"w": 7}) if kind == "dict" else (Path(saved.path, "w.txt").read_text() == "7")


@pytest.mark.parametrize("given", [7, "nowhere"])
def test_a_checkpoint_that_is_none_fails_the_run(tmp_path, given):
    """What is no checkpoint is a CheckpointError out of report()."""

    def train(config):
        ty.report({}, checkpoint=given)

    result = run(train, tmp_path)
    assert isinstance(result.error, ty.CheckpointError)


def test_get_checkpoint_is_none_on_a_fresh_start(tmp_path):
    """A run that resumes nothing has no checkpoint to start from."""
    got = []

    def train(config):
        got.append(ty.get_checkpoint())
        ty.report({}, checkpoint={"a": 1})
        got.append(ty.get_checkpoint())

    run(train, tmp_path)
    assert got == [None, None]


def test_get_checkpoint_after_a_failure_is_the_newest(tmp_path):
    """A function that failed is called again, and finds the newest checkpoint it reported; each iteration counts once."""
    starts = []

    def train(config):
        start = ty.get_checkpoint()
        first = start.load()["i"] + 1 if start else 0
        starts.append(first)
        for i in range(first, 6):
            if i == 4 and len(starts) == 1:
                raise RuntimeError("once")
            ty.report({"i": i}, checkpoint={"i": i} if i % 2 == 0 else None)

    result = run(train, tmp_path, failures={"max_failures": 1})
    assert starts == [0, 3]
    assert result.status == "completed"
    assert [row["i"] for row in result.history()] == [0, 1, 2, 3, 4, 5]
    assert iterations(result) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ({"loss": 1}, {"loss": 1}),
        (2.5, {"_metric": 2.5}),
        (7, {"_metric": 7}),
        (None, None),
        ({}, None),
    ],
)
def test_what_a_function_returns(tmp_path, returned, expected):
    """A returned dict is one more report, a number is _metric, and nothing is nothing."""
    result = run(lambda config: returned, tmp_path)
    assert result.status == "completed"
    if expected is None:
        assert result.history() == []
    else:
        [row] = result.history()
        assert expected.items() <= row.metrics.items()


@pytest.mark.parametrize("zero", [0, 0.0])
def test_a_returned_zero_is_a_metric(tmp_path, zero):
    """A returned zero is a number like any other."""
    assert run(lambda config: zero, tmp_path).metrics["_metric"] == zero


@pytest.mark.parametrize("returned", ["done", [1], object()])
def test_other_returned_values_fail_the_run(tmp_path, returned):
    """What is no dict, number or None is refused by its type."""
    result = run(lambda config: returned, tmp_path)
    assert result.status == "failed"
    assert type(returned).__name__ in str(result.error)


def test_a_numpy_number_may_be_returned(tmp_path):
    """A numpy scalar is a number too."""
    import numpy

    result = run(lambda config: numpy.float32(0.5), tmp_path)
    assert result.status == "completed"
    assert result.metrics["_metric"] == 0.5


def test_a_generator_yields_reports(tmp_path):
    """Each yield is a report, and so is what the generator returns."""

    def train(config):
        yield {"x": 1}
        yield 2.0
        ty.report({"x": 3})
        return {"x": 4}

    history = run(train, tmp_path).history()
    assert [row.get("x", row.get("_metric")) for row in history] == [1, 2.0, 3, 4]


def test_the_reporter_of_2019(tmp_path):
    """train(config, reporter) reports by calling it, with names or with a dict."""

    def train(config, reporter):
        reporter(mean_accuracy=0.5)
        reporter({"mean_accuracy": 0.75}, extra=1)

    history = run(train, tmp_path).history()
    assert [row["mean_accuracy"] for row in history] == [0.5, 0.75]
    assert history[1]["extra"] == 1


def test_a_stop_condition_unwinds_the_function(tmp_path):
    """At the stop condition report() does not return: finally blocks and context managers run, the rest does not."""
    seen = []

    def train(config):
        try:
            for i in range(100):
                ty.report({"i": i})
                seen.append(i)
        except Exception:
            seen.append("an except Exception must not see it")
        finally:
            seen.append("finally")
        seen.append("behind")

    result = run(train, tmp_path, stop={"training_iteration": 3})
    assert result.status == "completed"
    assert seen == [0, 1, "finally"]
    assert iterations(result) == [1, 2, 3]


def test_a_stop_condition_unwinds_a_generator(tmp_path):
    """A generator is closed at the stop condition, with its finally blocks run."""
    seen = []

    def train(config):
        try:
            while True:
                yield {"x": len(seen)}
                seen.append(1)
        finally:
            seen.append("finally")

    result = run(train, tmp_path, stop={"training_iteration": 2})
    assert result.status == "completed"
    assert seen == [1, "finally"]


def test_done_ends_a_function(tmp_path):
    """A reported done unwinds the function too."""

    def train(config):
        for i in range(100):
            ty.report({"done": i == 1})

    assert iterations(run(train, tmp_path)) == [1, 2]


def test_an_exception_keeps_its_type_and_traceback(tmp_path):
    """result.error is the function's own exception object, with its traceback; error.txt has it in words."""
    raised = KeyError("my own")

    def train(config):
        ty.report({"i": 1})
        raise raised

    result = run(train, tmp_path)
    assert result.status == "failed"
    assert result.error is raised
    assert traceback.extract_tb(result.error.__traceback__)[-1].name == "train"
    assert "in train" in Path(result.path, "error.txt").read_text()
    assert iterations(result) == [1]


@pytest.mark.parametrize("bad", [3, "loss", None, [("a", 1)]])
def test_report_of_no_dict_raises_in_the_function(tmp_path, bad):
    """report() of something else is an error at that very line, which the function may handle."""
    caught = []

    def train(config):
        try:
            ty.report(bad)
        except TypeError as error:
            caught.append(error)
        ty.report({"ok": 1})

    result = run(train, tmp_path)
    assert len(caught) == 1
    assert iterations(result) == [1]


def test_a_refused_metric_raises_in_the_function_and_counts_for_nothing(tmp_path):
    """A value that cannot be recorded is a MetricError out of report(); the function may go on."""

    def train(config):
        with pytest.raises(ty.MetricError, match="'bad'"):
            ty.report({"good": 1, "bad": object()})
        ty.report({"good": 2})

    result = run(train, tmp_path)
    assert result.status == "completed"
    assert [(row.seq, row["good"], row["training_iteration"]) for row in result.history()] == [(1, 2, 1)]


def test_a_refused_metric_saves_no_checkpoint(tmp_path):
    """When the metrics of a report are refused, its checkpoint is not saved either."""

    def train(config):
        ty.report({"bad": object()}, checkpoint={"a": 1})

    assert run(train, tmp_path).checkpoints == []


def test_reports_from_a_thread_that_the_function_started(tmp_path):
    """report(), get_run() and get_checkpoint() work in a thread of the function's."""
    seen = []

    def train(config):
        def work():
            ty.report({"from": "thread"})
            seen.append((ty.get_run().name, ty.get_checkpoint()))

        ty.report({"from": "main"})
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ty.report({"from": "main"})

    result = run(train, tmp_path)
    assert [row["from"] for row in result.history()] == ["main", "thread", "main"]
    assert seen == [(result.name, None)]


def test_many_threads_report_each_once(tmp_path):
    """Concurrent reports are all recorded, numbered without gaps."""

    def train(config):
        threads = [
            threading.Thread(target=lambda n=n: [ty.report({"n": n, "i": i}) for i in range(25)]) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    history = run(train, tmp_path).history()
    assert [row.seq for row in history] == list(range(1, 101))
    assert {(row["n"], row["i"]) for row in history} == {(n, i) for n in range(4) for i in range(25)}
    assert [row["training_iteration"] for row in history] == list(range(1, 101))


def test_two_runs_in_two_threads_do_not_mix(tmp_path):
    """Functions that run at the same time in threads of one process each report to their own run."""
    barrier = threading.Barrier(2, timeout=20)
    results = {}

    def train(config):
        for i in range(5):
            barrier.wait()
            ty.report({"who": config["who"], "i": i})

    def start(who):
        results[who] = run(train, tmp_path, {"who": who})

    threads = [threading.Thread(target=start, args=(who,)) for who in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for who in "ab":
        assert [(row["who"], row["i"]) for row in results[who].history()] == [(who, i) for i in range(5)]


def test_a_run_inside_of_a_run(tmp_path):
    """A function may call run() itself; afterwards its reports go to its own run again."""

    def inner(config):
        ty.report({"level": "inner"})

    def outer(config):
        ty.report({"level": "outer"})
        run(inner, tmp_path, experiment="inner")
        ty.report({"level": "outer"})

    result = run(outer, tmp_path)
    assert [row["level"] for row in result.history()] == ["outer", "outer"]
    [path] = (tmp_path / "inner").iterdir()
    assert [row["level"] for row in ty.open_run(path).history()] == ["inner"]


def test_report_inside_of_start_run(tmp_path):
    """Inside of start_run() report() and get_checkpoint() belong to that run."""
    with ty.start_run(storage=tmp_path, trackers=[]) as opened:
        ty.report({"x": 1}, checkpoint={"w": 1})
        assert ty.get_checkpoint() is None
    found = ty.open_run(opened.path)
    assert iterations(found) == [1]
    assert found.checkpoint.load() == {"w": 1}


@pytest.mark.usefixtures("_fresh_warnings")
def test_outside_of_a_run_each_warns_once(caplog):
    """report() and get_checkpoint() outside of a run return None, with one warning each, however often called."""
    with caplog.at_level(logging.WARNING, logger="trainyard"):
        for _ in range(3):
            assert ty.report({"x": 1}) is None
            assert ty.get_checkpoint() is None
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("report()")
    assert messages[1].startswith("get_checkpoint()")


@pytest.mark.usefixtures("_fresh_warnings")
def test_after_a_run_one_is_outside_again(tmp_path, caplog):
    """Once run() has returned, report() goes nowhere."""
    result = run(three, tmp_path)
    ty.report({"i": 3})
    assert len(ty.open_run(result.path).history()) == 3
    assert "outside of a run" in caplog.text


@pytest.mark.parametrize(
    "function",
    [lambda: None, lambda config, other: None, lambda *, config: None, lambda config, *, needed: None],
    ids=["none", "two", "keyword", "needed"],
)
def test_functions_of_another_form_are_refused_before_anything_runs(tmp_path, function):
    """A function that cannot be called with the config alone is a ConfigError for run() and wrap_function()."""
    with pytest.raises(ty.ConfigError, match="no training function"):
        run(function, tmp_path)
    with pytest.raises(ty.ConfigError, match="no training function"):
        ty.wrap_function(function)
    assert not list(tmp_path.iterdir())


def test_defaulted_and_variadic_arguments_are_fine(tmp_path):
    """Further arguments with defaults, and *args and **kwargs, are allowed."""

    def train(config, scale=2, *rest, **more):
        ty.report({"scale": scale, "rest": len(rest), "more": len(more)})

    assert run(train, tmp_path).metrics["scale"] == 2


def test_any_callable_will_do(tmp_path):
    """A bound method, a partial and an object with __call__ are training functions."""
    import functools

    class Loop:
        def method(self, config):
            ty.report({"via": "method"})

        def __call__(self, config):
            ty.report({"via": "call"})

    def base(word, config):
        ty.report({"via": word})

    assert run(Loop().method, tmp_path).metrics["via"] == "method"
    assert run(Loop(), tmp_path).metrics["via"] == "call"
    assert run(functools.partial(base, "partial"), tmp_path).metrics["via"] == "partial"


# -- step by step ----------------------------------------------------------------------------------------------------


def test_wrap_function_steps(make):
    """Each train() is one report; after the end there is one duplicate, and then an error."""
    wrapped = ty.wrap_function(three)
    assert wrapped.__name__ == "three"
    assert issubclass(wrapped, ty.Trainable)
    made = make(wrapped)
    assert [made.train()["i"] for _ in range(3)] == [0, 1, 2]
    assert made.train() == {"__duplicate__": True, "should_checkpoint": False, "checkpoint_dir_name": None}
    with pytest.raises(RuntimeError, match="ended"):
        made.train()
    assert made.iteration == 3
    made.stop()


def test_the_function_waits_between_the_steps(make):
    """Nothing of the function runs before the first train(), nor behind a report before the next one."""
    seen = []

    def train(config):
        seen.append("start")
        ty.report({})
        seen.append("behind")
        ty.report({})

    made = make(ty.wrap_function(train))
    assert seen == []
    made.train()
    assert seen == ["start"]
    made.train()
    assert seen == ["start", "behind"]
    made.stop()


def test_function_trainables_interleave(make):
    """Any number of function trainables live in one process, and may be stepped in turn."""
    many = [make(ty.wrap_function(three), {"n": n}) for n in range(5)]
    for i in range(3):
        for n, made in enumerate(many):
            result = made.train()
            assert (result["i"], result["config"]["n"], result["training_iteration"]) == (i, n, i + 1)
    for made in many:
        made.stop()


def test_get_run_and_get_checkpoint_inside_of_a_stepped_function(make):
    """In a stepped function get_run() is its own run, with others alive beside it."""

    def train(config):
        while True:
            ty.report({"name": ty.get_run().name, "start": ty.get_checkpoint() is None})

    first, second = (make(ty.wrap_function(train)) for _ in range(2))
    for made in (first, second, first):
        result = made.train()
        assert (result["name"], result["start"]) == (made.trial_name, True)
    first.stop()
    second.stop()


def test_stop_unwinds_a_stepped_function(make):
    """stop() ends the function at its report(), finally blocks run, and no thread is left."""
    seen = []

    def train(config):
        try:
            while True:
                ty.report({})
        finally:
            seen.append("finally")

    made = make(ty.wrap_function(train))
    made.train()
    made.stop()
    assert seen == ["finally"]
    assert "trainyard-train" not in [thread.name for thread in threading.enumerate()]


def test_an_exception_of_a_stepped_function(make):
    """It comes out of train() after all reports, as the same object, with the function's line in its traceback."""

    class Mine(Exception):
        """Nobody else's."""

    def train(config):
        ty.report({"i": 0})
        raise Mine("here")

    made = make(ty.wrap_function(train))
    assert made.train()["i"] == 0
    with pytest.raises(Mine, match="here") as caught:
        made.train()
    assert "train" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    made.stop()


def test_a_refused_metric_of_a_stepped_function(make):
    """A metric that cannot be recorded raises at the function's own report(), which may handle it, as under run()."""

    def train(config):
        try:
            ty.report({"bad": object()})
        except ty.MetricError:
            ty.report({"handled": True})

    made = make(ty.wrap_function(train))
    assert made.train()["handled"] is True
    assert made.iteration == 1
    made.stop()


def test_a_checkpoint_is_durable_when_a_stepped_report_returns(make):
    """Once report() has returned in the function, its checkpoint is committed; train() tells its name."""
    seen = []

    def train(config):
        ty.report({}, checkpoint={"w": 1})
        seen.append(len(ty.open_run(ty.get_run().path).checkpoints))
        ty.report({})

    made = make(ty.wrap_function(train))
    assert made.train()["checkpoint_dir_name"] == "checkpoint_000000"
    made.train()
    assert seen == [1]
    made.stop()


def test_save_of_a_stepped_function_is_the_newest_reported(tmp_path, make):
    """save() gives the newest reported checkpoint, here or copied; before the first one it says how to make one."""

    def train(config):
        ty.report({"i": 0})
        ty.report({"i": 1}, checkpoint={"w": 1})

    made = make(ty.wrap_function(train))
    made.train()
    with pytest.raises(ty.CheckpointError, match="reported no checkpoint"):
        made.save()
    made.train()
    assert made.save().load() == {"w": 1}
    copy = made.save(tmp_path / "copy")
    assert (copy.load(), copy.iteration) == ({"w": 1}, 2)
    made.stop()


def test_restore_of_a_stepped_function(make):
    """restore() starts the function anew from a checkpoint, which get_checkpoint() gives it; counters go on."""

    def train(config):
        start = ty.get_checkpoint()
        i = start.load()["i"] if start else 0
        while True:
            i += 1
            ty.report({"i": i}, checkpoint={"i": i})

    first = make(ty.wrap_function(train))
    for _ in range(3):
        first.train()
    path = first.save().path
    first.stop()
    second = make(ty.wrap_function(train))
    second.train()
    second.restore(path)
    result = second.train()
    assert (result["i"], result["training_iteration"], result["iterations_since_restore"]) == (4, 4, 1)
    second.stop()


def test_a_failed_restore_of_a_stepped_function_changes_nothing(tmp_path, make):
    """A restore from nowhere is an error, and the function goes on where it was."""
    made = make(ty.wrap_function(three))
    made.train()
    with pytest.raises(ty.CheckpointError):
        made.restore(tmp_path / "nowhere")
    assert made.train()["i"] == 1
    made.stop()


def test_restore_from_object_of_a_stepped_function(make):
    """What save_to_object() gives starts the function anew, too."""

    def train(config):
        start = ty.get_checkpoint()
        i = start.load()["i"] if start else 0
        while True:
            i += 1
            ty.report({"i": i}, checkpoint={"i": i})

    made = make(ty.wrap_function(train))
    made.train()
    data = made.save_to_object()
    made.train()
    made.restore_from_object(data)
    result = made.train()
    assert (result["i"], result["training_iteration"]) == (2, 2)
    made.stop()


def test_reset_of_a_stepped_function(make):
    """reset() ends the function, and the next train() starts it with the new config in a new run."""

    def train(config):
        while True:
            ty.report({"n": config["n"]})

    made = make(ty.wrap_function(train), {"n": 1})
    made.train()
    old = made.logdir
    assert made.reset({"n": 2}) is True
    result = made.train()
    assert (result["n"], result["training_iteration"]) == (2, 1)
    assert made.logdir != old
    made.stop()


def test_generators_and_returned_values_step_too(make):
    """A wrapped generator steps from yield to yield, and what it returns is the last step."""

    def train(config):
        yield {"x": 1}
        yield 2
        return {"x": 3}

    made = make(ty.wrap_function(train))
    assert [r.get("x", r.get("_metric")) for r in drain(made)] == [1, 2, 3]
    made.stop()


def test_the_old_reporter_steps_too(make):
    """A wrapped train(config, reporter) steps by its reporter."""

    def train(config, reporter):
        reporter(a=1)
        reporter(a=2)

    made = make(ty.wrap_function(train))
    assert [r["a"] for r in drain(made)] == [1, 2]
    made.stop()


@pytest.mark.parametrize("others", [0, 1])
def test_a_thread_of_a_stepped_function_never_loses_a_report(make, others):
    """A report from a thread that the function started is recorded, or raises there: it is never just dropped."""
    raised = []

    def work():
        try:
            ty.report({"from": "thread"})
        except ty.TrainyardError as error:
            raised.append(error)

    def train(config):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ty.report({"from": "main"})

    for _ in range(others):
        make(ty.wrap_function(three)).train()
    made = make(ty.wrap_function(train))
    seen = [made.train()["from"], made.train().get("from")]
    assert "thread" in seen or raised


def test_a_stop_condition_in_a_thread_of_the_function_is_quiet(tmp_path, monkeypatch, capsys):
    """When a thread's report ends the run, that thread and the function end without a word."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # Python's own, not pytest's

    def train(config):
        def work():
            for i in range(100):
                ty.report({"i": i})

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        ty.report({"i": "never"})

    result = run(train, tmp_path, stop={"training_iteration": 3})
    assert result.status == "completed"
    assert iterations(result) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_a_wrapped_function_under_run(tmp_path):
    """run() takes the class that wrap_function makes, and stops it like any other."""
    result = run(ty.wrap_function(three), tmp_path, stop={"training_iteration": 2})
    assert (result.status, iterations(result)) == ("completed", [1, 2])
    assert iterations(run(ty.wrap_function(three), tmp_path)) == [1, 2, 3]


def test_wrap_function_keeps_the_resources():
    """The class asks for the resources of the function."""
    wrapped = ty.wrap_function(ty.with_resources(three, {"cpu": 4}))
    assert wrapped.default_resource_request({}) == ty.Resources(cpu=4)


def test_a_stepped_function_never_keeps_the_process_alive(tmp_path):
    """A process whose function trainable was left in the middle still ends, and its run is ended."""
    code = """
import sys, trainyard as ty
def train(config):
    while True:
        ty.report({"x": 1})
made = ty.wrap_function(train)({}, storage=sys.argv[1], trackers=[])
made.train()
print(made.logdir)
"""
    path = python(code, tmp_path).stdout.strip()
    assert ty.open_run(path).status == "completed"
