"""`trainyard doctor`: what answers, what does not, and why."""

from __future__ import annotations

import pytest
from trainables import python

import trainyard as ty
from trainyard.cli import doctor
from trainyard.cli.main import call
from trainyard.hookspecs import hookimpl
from trainyard.plugins import Plugin


class Answering:
    """A tracker with a `check`."""

    guarantee = "now and then"

    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def log_results(self, results):
        """Take them."""

    @hookimpl
    def check(self, storage):
        """Answer."""
        if isinstance(self.answer, BaseException):
            raise self.answer
        return f"{self.answer} of {storage}"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a YAML file, runs doctor on it, and gives the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        (tmp_path / "run.yaml").write_text(text)
        return call(["doctor", "run.yaml", *arguments])

    return run


def test_without_a_file_the_defaults_are_looked_at(tmp_path, monkeypatch, capsys):
    """The default store and trackers are fine, and nothing is made by looking."""
    monkeypatch.chdir(tmp_path)
    assert call(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "./runs" in out
    assert "will be made in" in out
    assert "json" in out
    assert "csv" in out
    assert "Exactly once" in out
    assert list(tmp_path.iterdir()) == []


def test_each_tracker_gets_a_line(config, capsys):
    """What a check says, what the tracker promises, and the package; one that is unknown does not hide the others."""
    assert config("trainable: a:b\ntrackers: {json: {}, jsn: {}}\nstorage: here\n") == 1
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("tracker")}
    assert "ok" in lines["json"]
    assert "run.yaml:2: trackers.jsn: unknown tracker 'jsn': did you mean 'json'?" in lines["jsn"]


def test_a_storage_that_cannot_be_written_is_told(config, tmp_path, capsys):
    """A file where the storage should be."""
    (tmp_path / "taken").write_text("a file")
    assert config("trainable: a:b\nstorage: taken/below\n") == 1
    assert "NotADirectoryError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("fine", "fine of "),
        (ConnectionError("nobody there"), "ConnectionError: nobody there"),
        (SystemExit(3), "SystemExit"),
    ],
)
def test_what_a_check_says_is_shown(config, monkeypatch, capsys, answer, words):
    """Its words, or its error of whatever kind."""
    spec = doctor.TrackerSpec("mine", "mine", lambda: Plugin("mine", Answering(answer)))
    monkeypatch.setattr(doctor, "tracker_specs", lambda *_: [spec])
    assert config("trainable: a:b\ntrackers: [mine]\n") == (0 if isinstance(answer, str) else 1)
    out = capsys.readouterr().out
    assert words in out
    assert "now and then" in out


def test_a_check_that_never_returns_is_told(config, monkeypatch, capsys):
    """The others still get their lines."""
    spec = doctor.TrackerSpec("mine", "mine", lambda: Plugin("mine", Answering("fine")))
    monkeypatch.setattr(doctor, "tracker_specs", lambda *_: [spec])
    monkeypatch.setattr(doctor, "_check", lambda *_: __import__("threading").Event().wait())
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.05)
    assert config("trainable: a:b\ntrackers: [mine]\n") == 1
    assert "no answer within" in capsys.readouterr().out


def test_secrets_are_hidden(config, monkeypatch, capsys):
    """An error may repeat an option that is a secret."""
    spec = doctor.TrackerSpec(
        "mine", "mine", lambda: Plugin("mine", Answering(ConnectionError("no such key: hushhush"))),
        secrets=frozenset({"hushhush"}),
    )  # fmt: skip
    monkeypatch.setattr(doctor, "tracker_specs", lambda *_: [spec])
    assert config("trainable: a:b\ntrackers: [mine]\n") == 1
    assert "hushhush" not in capsys.readouterr().out


def test_live_runs_and_their_lag_are_shown(config, tmp_path, capsys):
    """A run of this moment, and how far its trackers are behind."""
    with ty.start_run(storage=tmp_path / "here", name="alive", trackers=["json"]) as run:
        run.log({"a": 1})
        assert config("trainable: a:b\nstorage: here\n", "--set", "trackers=[csv]") == 0
    out = capsys.readouterr().out
    assert "alive" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("tracker")] == ["csv"]


def test_a_yaml_mistake_is_a_mistake(config, capsys):
    """Exit code 2, and the place."""
    assert config("a: [\n") == 2
    assert "run.yaml" in capsys.readouterr().err


def test_it_imports_no_sdk(tmp_path):
    """Looking at json and csv loads no SDK of another tracker."""
    code = """
import sys
from trainyard.cli.main import call
call(["doctor"])
print(sorted({"mlflow", "tensorboardX", "numpy"} & set(sys.modules)))
"""
    assert python(code, cwd=tmp_path).stdout.splitlines()[-1] == "[]"
