"""Which keys are filled into a result, who wins, and what is counted."""

from __future__ import annotations

import math
import os
import platform
import time

import numpy
import pytest
from trainables import FILLED, Returning, build

import trainyard as ty
from trainyard.results import Counters


@pytest.fixture
def trainable(tmp_path):
    """A trainable whose steps return what the test says."""
    made = build(Returning, tmp_path, {"lr": 0.1})
    yield made
    made.stop()


def one(trainable, **returned):
    return trainable.results(returned)[0]


def test_an_empty_dict_gets_exactly_thirteen_keys(trainable):
    """A step that returns {} yields the 13 auto-filled keys and no other."""
    assert set(one(trainable)) == FILLED
    assert len(FILLED) == 13


def test_types_of_the_filled_keys(trainable):
    """Each filled key has the type that readers of Tune's results expect."""
    result = one(trainable)
    assert type(result["done"]) is bool
    for key in ("training_iteration", "timestamp", "pid", "iterations_since_restore"):
        assert type(result[key]) is int, key
    for key in ("time_this_iter_s", "time_total_s", "time_since_restore"):
        assert type(result[key]) is float, key
    for key in ("date", "hostname", "node_ip", "trial_id"):
        assert type(result[key]) is str, key


def test_values_of_the_filled_keys(trainable):
    """The filled keys tell of this process, this moment and this run."""
    before = int(time.time())
    result = one(trainable)
    assert result["done"] is False
    assert result["training_iteration"] == result["iterations_since_restore"] == 1
    assert result["pid"] == os.getpid()
    assert result["hostname"] == platform.node()
    assert result["trial_id"] == trainable.trial_id
    assert before <= result["timestamp"] <= time.time()
    assert time.mktime(time.strptime(result["date"], "%Y-%m-%d_%H-%M-%S")) == pytest.approx(result["timestamp"], abs=1)


def test_config_is_the_trainables_own_object(trainable):
    """The config in a result is self.config itself, not a copy."""
    assert one(trainable)["config"] is trainable.config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("done", True),
        ("done", 0),
        ("training_iteration", 77),
        ("training_iteration", 0),
        ("time_this_iter_s", 2.5),
        ("time_this_iter_s", 0),
        ("timesteps_total", 1000),
        ("timesteps_total", 0),
        ("episodes_total", 50),
        ("timestamp", 12345),
        ("loss", 0.5),
        ("hostname_of_mine", "x"),
    ],
)
def test_the_user_wins(trainable, key, value):
    """What the user returns under these keys stands."""
    assert one(trainable, **{key: value})[key] == value


@pytest.mark.parametrize(
    "key",
    [
        "pid",
        "date",
        "hostname",
        "node_ip",
        "trial_id",
        "time_total_s",
        "time_since_restore",
        "iterations_since_restore",
    ],
)
def test_the_system_wins(trainable, key):
    """What the user returns under these keys is overridden."""
    assert one(trainable, **{key: "mine"})[key] != "mine"


def test_the_system_wins_for_config(trainable):
    """A config among the metrics is replaced by the trainable's."""
    assert one(trainable, config={"lr": 9})["config"] is trainable.config


def test_a_zero_timestamp_is_replaced(trainable):
    """A timestamp counts as given only if it is truthy."""
    assert one(trainable, timestamp=0)["timestamp"] > 0


def test_a_time_of_none_is_replaced(trainable):
    """A time_this_iter_s of None counts as not given."""
    assert type(one(trainable, time_this_iter_s=None)["time_this_iter_s"]) is float


def test_given_times_add_up(trainable):
    """time_this_iter_s of the user's goes into the totals."""
    first, second = trainable.results({"time_this_iter_s": 2.5}, {"time_this_iter_s": 1.5})
    assert (first["time_total_s"], second["time_total_s"]) == (2.5, 4.0)
    assert second["time_since_restore"] == 4.0


def test_a_given_iteration_leaves_the_counter_alone(trainable):
    """training_iteration of the user's shows in that result only."""
    first, second = trainable.results({"training_iteration": 77}, {})
    assert (first["training_iteration"], second["training_iteration"]) == (77, 2)
    assert trainable.iteration == 2


@pytest.mark.parametrize("what", ["timesteps", "episodes"])
def test_totals_appear_once_they_are_counted(trainable, what):
    """A total is absent until its *_this_iter was returned once, and stays from then on."""
    without, first, second, later = trainable.results({}, {f"{what}_this_iter": 10}, {f"{what}_this_iter": 5}, {})
    assert f"{what}_total" not in without
    assert [r[f"{what}_total"] for r in (first, second, later)] == [10, 15, 15]


@pytest.mark.parametrize("what", ["timesteps", "episodes"])
def test_counting_zero_counts(trainable, what):
    """Zero steps make a total of zero, which is there."""
    assert one(trainable, **{f"{what}_this_iter": 0})[f"{what}_total"] == 0


@pytest.mark.parametrize("what", ["timesteps", "episodes"])
def test_a_given_total_leaves_the_sum_alone(trainable, what):
    """A total of the user's shows in that result only; the inner sum goes on."""
    this, total = f"{what}_this_iter", f"{what}_total"
    first, second, third = trainable.results({this: 10}, {this: 1, total: 999}, {this: 1})
    assert [r[total] for r in (first, second, third)] == [10, 999, 12]


def test_a_given_total_alone_starts_no_count(trainable):
    """A total that is only ever given is not carried on to the next result."""
    first, second = trainable.results({"timesteps_total": 5}, {})
    assert first["timesteps_total"] == 5
    assert "timesteps_total" not in second


def test_timesteps_since_restore_only_when_not_zero(trainable):
    """timesteps_since_restore is there exactly when there are some."""
    none, zero, some = trainable.results({}, {"timesteps_this_iter": 0}, {"timesteps_this_iter": 3})
    assert "timesteps_since_restore" not in none
    assert "timesteps_since_restore" not in zero
    assert some["timesteps_since_restore"] == 3


def test_the_since_restore_keys_start_anew_after_a_restore(trainable):
    """A restore zeroes the *_since_restore counters and keeps the totals."""
    counters = Counters(iteration=4, time_total=8.0, timesteps_total=40, episodes_total=2, timesteps_since_restore=40)
    result, after = counters.restored().fill({"time_this_iter_s": 1.0, "timesteps_this_iter": 5}, 0.0, 1.0)
    assert (result["training_iteration"], result["iterations_since_restore"]) == (5, 1)
    assert (result["time_total_s"], result["time_since_restore"]) == (9.0, 1.0)
    assert (result["timesteps_total"], result["timesteps_since_restore"]) == (45, 5)
    assert after.episodes_total == 2


def test_the_users_dict_is_left_alone(trainable):
    """The result is a copy: the dict that step returned gains no keys."""
    mine = {"loss": 1.0}
    assert trainable.results(mine)[0] is not mine
    assert mine == {"loss": 1.0}


def test_numpy_counts_are_counted(trainable):
    """Counts and times may be numpy scalars."""
    first, second = trainable.results(
        {"timesteps_this_iter": numpy.int64(3), "time_this_iter_s": numpy.float32(0.5)},
        {"timesteps_this_iter": numpy.int32(4)},
    )
    assert second["timesteps_total"] == 7
    assert first["time_total_s"] == 0.5


@pytest.mark.parametrize("key", ["timesteps_this_iter", "episodes_this_iter", "time_this_iter_s"])
def test_a_count_that_is_no_number_is_refused_by_name(trainable, key):
    """A count that cannot be added is a MetricError that names it, and counts for nothing."""
    with pytest.raises(ty.MetricError, match=f"{key}.*str"):
        one(trainable, **{key: "many"})
    assert trainable.iteration == 0


@pytest.mark.parametrize(
    ("value", "kind"), [({1, 2}, "set"), (object(), "object"), (1j, "complex"), (1 << 70, "int"), (print, "builtin")]
)
def test_a_refused_metric_refuses_the_whole_result(trainable, value, kind):
    """A value that cannot be recorded is named with its type; no counter moves and nothing is written."""
    with pytest.raises(ty.MetricError, match=f"'inner/bad'.*{kind}"):
        one(trainable, good=1, timesteps_this_iter=5, inner={"bad": value})
    assert trainable.iteration == 0
    assert one(trainable, timesteps_this_iter=1)["timesteps_total"] == 1
    assert [r.seq for r in trainable.run.finish().history()] == [1]


def test_nan_and_infinity_are_metrics(trainable):
    """NaN and the infinities come back from the journal as they were."""
    one(trainable, a=math.nan, b=math.inf, c=-math.inf)
    [row] = trainable.run.finish().history()
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_history_holds_what_train_returned(trainable):
    """A result that is read back equals the one that train() returned, auto-filled keys and all."""
    returned = trainable.results(
        {"loss": 0.25, "val": {"acc": 1}}, {"loss": 0.125, "flag": True, "name": "x", "no": None}
    )
    assert [row.metrics for row in trainable.run.finish().history()] == returned


def test_step_is_the_iteration_and_seq_has_no_gaps(trainable):
    """A result's step is its training_iteration, given or not; its seq counts from 1."""
    trainable.results({}, {"training_iteration": 50}, {})
    assert [(row.seq, row.step) for row in trainable.run.finish().history()] == [(1, 1), (2, 50), (3, 3)]
