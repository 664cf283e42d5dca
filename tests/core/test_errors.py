"""The exceptions: their tree, their messages, their way through pickle."""

from __future__ import annotations

import inspect
import pickle

import pytest

import trainyard as ty
from trainyard import errors

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_exception_is_a_trainyard_error_and_exported(error):
    """One `except TrainyardError` catches each, and each is a top-level name."""
    assert issubclass(error, ty.TrainyardError)
    assert getattr(ty, error.__name__) is error


def test_no_exception_is_left_out_of_the_list():
    """Every exception class that the module defines is in its `__all__`."""
    defined = {n for n, c in vars(errors).items() if inspect.isclass(c) and c.__module__ == errors.__name__}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (errors.ConfigError, ValueError),
        (errors.MetricError, TypeError),
        (errors.NotFound, errors.StoreError),
        (errors.Exists, errors.StoreError),
        (errors.Denied, errors.StoreError),
        (errors.Transient, errors.StoreError),
        (errors.Full, errors.StoreError),
        (errors.CheckpointCorrupt, errors.CheckpointError),
        (errors.PickleRefused, errors.CheckpointError),
    ],
)
def test_the_tree_is_as_documented(child, parent):
    """What is drawn at the top of the module is what the classes say."""
    assert issubclass(child, parent)
    assert f"{child.__name__} " in errors.__doc__


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_exception_survives_pickle(error):
    """An exception reaches another process with its words."""
    made = error([1, 2], "too long") if error is errors.Rejected else error("what went wrong")
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is error
    assert str(again) == str(made)


def test_rejected_names_the_results_and_the_reason():
    """A rejection keeps its seqs as a list, whatever sequence it was given."""
    rejected = errors.Rejected((3, 5), "too long")
    assert rejected.seqs == [3, 5]
    assert rejected.why == "too long"
    assert "[3, 5]" in str(rejected)
    assert "too long" in str(rejected)


def test_unknown_names_the_nearest_and_all():
    """An unknown name is answered with the nearest one and everything that there is."""
    message = errors.unknown("tracker", "mlfow", ["mlflow", "json"], label="installed")
    assert message == "unknown tracker 'mlfow': did you mean 'mlflow'? installed: json, mlflow"


def test_unknown_does_not_guess_wildly():
    """Where nothing is near, nothing is guessed, and an empty list reads `none`."""
    assert errors.unknown("store", "zzz", ["file"]) == "unknown store 'zzz': known: file"
    assert errors.unknown("store", "zzz", []) == "unknown store 'zzz': known: none"
