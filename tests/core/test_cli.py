"""The command line, as a person and a script use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainyard as ty
from trainyard.cli.main import call

MODULE = """
import time
import trainyard as ty

class Steps(ty.Trainable):
    def setup(self, config):
        self.n = 0
    def step(self):
        self.n += 1
        if self.config.get("sleep", 0) > 1:
            print("in a long step", flush=True)
        time.sleep(self.config.get("sleep", 0))
        if self.n == self.config.get("fail_at"):
            raise RuntimeError("it broke")
        return {"loss": 1 / self.n, "nested": {"n": self.n}}
    def save_checkpoint(self, checkpoint_dir):
        return {"n": self.n}
    def load_checkpoint(self, checkpoint):
        self.n = checkpoint["n"]

class Nothing(ty.Trainable):
    def step(self):
        return None
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with a trainable and a YAML file, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "steps.py").write_text(MODULE)
    (tmp_path / "steps.yaml").write_text(
        "trainable: steps.py:Steps\nexperiment: cli\nstop:\n  training_iteration: 6\ncheckpoint: {every: 2, keep: 2}\n"
    )
    yield tmp_path
    sys.modules.pop("steps", None)


def the_run(project):
    (path,) = (project / "runs" / "cli").iterdir()
    return path


def test_version(capsys):
    """`--version` names the program and its version."""
    assert call(["--version"]) == 0
    assert f"trainyard {ty.__version__}\n" == capsys.readouterr().out


def test_run_says_where_everything_is_and_what_comes_next(project, capsys):
    """A run that went well exits with 0 and ends with a summary."""
    assert call(["run", "steps.yaml"]) == 0
    out = capsys.readouterr().out
    for words in (
        "completed",
        "iteration 6",
        "runs/cli/Steps_",
        "result.json",
        "checkpoint_000002",
        "show",
        "runs --storage",
    ):
        assert words in out


def test_a_failed_run_exits_with_1(project, capsys):
    """The error stands in the summary, the traceback in error.txt, and none on the terminal."""
    assert call(["run", "steps.yaml", "--set", "config.fail_at=3"]) == 1
    shown = capsys.readouterr()
    assert "RuntimeError: it broke" in shown.out
    assert "resume" in shown.out
    assert "Traceback" not in shown.out + shown.err
    assert "Traceback" in (the_run(project) / "error.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nothing.yaml"], ["nothing.yaml: No such file"]),
        (["run", "steps.yaml", "--set", "stopp=3"], ["unknown key 'stopp'", "did you mean 'stop'"]),
        (
            ["run", "steps.yaml", "--set", "trackers={jsn: {}}"],
            ["trackers.jsn", "unknown tracker 'jsn'", "did you mean 'json'"],
        ),
        (["run", "steps.yaml", "--set", "trackers={json: {indent: 2}}"], ["trackers.json", "unknown option 'indent'"]),
        (["run", "steps.yaml", "--set", "trackers={file: {}}"], ["trackers.file", "is a store, not a tracker"]),
        (
            ["run", "steps.yaml", "--set", "trainable=steps.py:Stps"],
            ["unknown trainable 'Stps'", "did you mean 'Steps'"],
        ),
        (["run", "steps.yaml", "--set", "trainable=steps"], ["write module:name or path.py:name"]),
        (["run", "steps.yaml", "--set", "checkpoint.every=often"], ["checkpoint.every", "expected int"]),
        (["run", "steps.yaml", "--set", "checkpoint.keep=0"], ["checkpoint.keep", "at least 1"]),
        (["run", "steps.yaml", "--set", "trainable=steps.py:Nothing"], ["checkpoint.every", "save_checkpoint"]),
        (["run", "steps.yaml", "--set", "storage=s3://bucket/x"], ["unknown store 's3'", "file"]),
        (["run", "steps.yaml", "--set", "executor=ray"], ["unknown executor 'ray'", "inline"]),
        (["run", "steps.yaml", "--set", "resources={cpu: -1}"], ["resources", "zero or more"]),
        (
            ["run", "steps.yaml", "--set", "config.key=${env:NOT_SET_ANYWHERE}"],
            ["config.key", "NOT_SET_ANYWHERE", "not set"],
        ),
        (["run", "steps.yaml", "--resume"], ["no unfinished run"]),
        (["resume", "nobody"], ["unknown run 'nobody'"]),
        (["show", "nobody"], ["unknown run 'nobody'"]),
        (["checkpoints", "verify", "nobody"], ["unknown run 'nobody'"]),
        (["rnu"], ["unknown command 'rnu'", "did you mean 'run'"]),
    ],
    ids=lambda value: " ".join(value)[:60].replace("/", "-"),
)
def test_a_mistake_is_one_line_and_exit_code_2(project, capsys, arguments, words):
    """Every mistake is found before the first step: exit code 2, no traceback, nothing made."""
    assert call(arguments) == 2
    shown = capsys.readouterr()
    for word in words:
        assert word in shown.err
    assert "Traceback" not in shown.err
    assert not (project / "runs").exists()


def test_a_mistake_names_file_and_line(project, capsys):
    """The place is the line in the YAML file, or the --set that made it."""
    Path("steps.yaml").write_text("trainable: steps.py:Steps\nstop: {training_iteration: 1}\ncheckpoint:\n  evry: 3\n")
    assert call(["run", "steps.yaml"]) == 2
    assert "error: steps.yaml:4: checkpoint.evry: unknown key 'evry': did you mean 'every'?" in capsys.readouterr().err
    assert call(["run", "steps.yaml", "--set", "checkpoint={every: x}"]) == 2
    assert "error: --set checkpoint.every: expected int" in capsys.readouterr().err


def test_storage_that_cannot_be_written(project, capsys):
    """A file where the storage should be is one line."""
    Path("taken").write_text("")
    assert call(["run", "steps.yaml", "--set", "storage=taken"]) == 2
    assert "storage: cannot write to" in capsys.readouterr().err


def test_a_stop_metric_with_a_typing_mistake_is_told(project, capsys, caplog):
    """A threshold on a metric that no result has would never stop the run, so it is told after the first result."""
    assert call(["run", "steps.yaml", "--set", "stop.los=0"]) == 0
    told = next(r.message for r in caplog.records if "los" in r.message)
    assert told.startswith("stop: unknown metric 'los': did you mean 'loss'?")


def test_runs_and_show_are_tables_and_json(project, capsys):
    """Both print a table for people, and with --json what a script needs."""
    call(["run", "steps.yaml"])
    name = the_run(project).name
    capsys.readouterr()
    assert call(["runs"]) == 0
    table = capsys.readouterr().out
    assert name in table
    assert "completed" in table
    assert call(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (name, "completed", 6) == (row["name"], row["status"], row["metrics"]["training_iteration"])
    assert call(["show", name]) == 0
    shown = capsys.readouterr().out
    for words in ("loss", "nested/n", "checkpoint_000002", "json", "csv", "done"):
        assert words in shown
    assert call(["show", row["id"][:6], "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    assert [checkpoint["iteration"] for checkpoint in details["checkpoints"]] == [4, 6]
    assert [(lane["tracker"], lane["delivered"]) for lane in details["trackers"]] == [("csv", 6), ("json", 6)]


def test_runs_of_an_empty_place(project, capsys):
    """Where there are no runs, it says how to get one."""
    assert call(["runs"]) == 0
    assert "trainyard run" in capsys.readouterr().out


def test_resume_goes_on_where_it_failed(project, capsys):
    """`resume` continues a failed run; `run --resume` finds the newest unfinished one by itself."""
    assert call(["run", "steps.yaml", "--set", "config.fail_at=5"]) == 1
    assert call(["resume", the_run(project).name, "--set", "config.fail_at=6"]) == 1
    assert call(["run", "steps.yaml", "--resume"]) == 0
    run = ty.open_run(the_run(project))
    assert run.status == "completed"
    assert list(range(1, 7)) == [result["training_iteration"] for result in run.history()]


def test_resume_asks_for_secrets_again(project, capsys):
    """A secret that was written out is not on record, so a resume asks for it."""
    assert call(["run", "steps.yaml", "--set", "config.api_key=hush", "--set", "config.fail_at=3"]) == 1
    capsys.readouterr()
    assert call(["resume", the_run(project).name]) == 2
    assert "--set config.api_key=" in capsys.readouterr().err
    assert call(["resume", the_run(project).name, "--set", "config.api_key=hush", "--set", "config.fail_at=9"]) == 0
    for path in the_run(project).rglob("*"):
        assert not path.is_file() or b"hush" not in path.read_bytes(), path


def test_plugins_lists_and_checks(project, capsys):
    """The list imports nothing; --check tells kinds, hooks and options."""
    assert call(["plugins"]) == 0
    assert "trainyard_plugins.trackers.json:JsonTracker" in capsys.readouterr().out
    assert call(["plugins", "--check", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["csv"]["kind"], rows["file"]["kind"], rows["json"]["status"]) == ("tracker", "store", "ok")
    assert "log_results" in rows["json"]["hooks"]


def test_checkpoints_ls_and_verify(project, capsys):
    """`ls` lists, `verify` reads every byte and exits with 1 when one is wrong."""
    call(["run", "steps.yaml"])
    path = the_run(project)
    capsys.readouterr()
    assert call(["checkpoints", "ls", path.name, "--json"]) == 0
    assert [row["iteration"] for row in json.loads(capsys.readouterr().out)] == [4, 6]
    assert call(["checkpoints", "verify", str(path)]) == 0
    damaged = path / "checkpoints" / "checkpoint_000002" / "state.msgpack"
    content = bytearray(damaged.read_bytes())
    content[3] ^= 1
    damaged.write_bytes(content)
    assert call(["checkpoints", "verify", str(path)]) == 1
    assert "state.msgpack is damaged" in capsys.readouterr().out
    assert call(["checkpoints", "verify", str(path / "checkpoints" / "checkpoint_000001")]) == 0


@pytest.mark.parametrize(
    ("sent", "code", "status"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "preempted")]
)
def test_a_signal_ends_the_run_cleanly(project, sent, code, status):
    """After the step a last checkpoint is saved, and the outcome and exit code say what happened."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trainyard.cli.main",
            "run",
            "steps.yaml",
            "--set",
            "config.sleep=0.02",
            "--set",
            "stop=null",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    child.stderr.readline()  # the first line of progress
    child.send_signal(sent)
    out, errors = child.communicate(timeout=30)
    assert (code, "") == (child.returncode, errors.partition("Traceback")[2])
    run = ty.open_run(the_run(project))
    assert status == run.status
    assert status in out
    assert run.metrics["training_iteration"] == run.checkpoint.iteration
    assert "ended" not in os.listdir(run.path)


def test_a_second_ctrl_c_stops_at_once(project):
    """Twice Ctrl-C does not wait for the step; what was recorded stays."""
    child = subprocess.Popen(
        [sys.executable, "-m", "trainyard.cli.main", "run", "steps.yaml", "--set", "config.sleep=60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "in a long step\n"
    child.send_signal(signal.SIGINT)
    assert "Ctrl-C again" in child.stderr.readline() + child.stderr.readline()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors.strip().splitlines()[-1]) == (130, "interrupted")
    assert ty.open_run(the_run(project)).status == "interrupted"
