"""From YAML, the command line, the environment and code to a run: what wins, and how mistakes are told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trainables import RECORDER, Counting, build, install, iterations, python, run

import trainyard as ty
from trainyard.cli.main import call
from trainyard.config import apply_overrides, load_trainable, parse_config, read_yaml

TRAINING = """
import trainyard as ty

class Model(ty.Trainable):
    def setup(self, config):
        self.lr = config.get("lr")

    def step(self):
        return {"lr": self.lr, "kind": type(self.lr).__name__}

def loop(config):
    ty.report({"lr": config.get("lr")})

NUMBER = 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with training code in training.py; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("STORAGE", "EXPERIMENT", "TRACKERS"):
        monkeypatch.delenv(f"TRAINYARD_{name}", raising=False)
    (tmp_path / "training.py").write_text(TRAINING)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


BASE = "trainable: training.py:Model\nstop: {training_iteration: 1}\n"


@pytest.fixture
def mistake(project, capsys):
    """Runs a YAML text with a mistake, and returns the one line that is said of it."""

    def run_yaml(text, *arguments):
        (project / "run.yaml").write_text(text)
        code = call(["run", "run.yaml", *arguments])
        captured = capsys.readouterr()
        assert code == 2, captured
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert len(captured.err.splitlines()) == 1
        assert not (project / "runs").exists()
        return captured.err.removesuffix("\n")

    return run_yaml


@pytest.fixture
def good(project, capsys):
    """Runs a YAML text, and returns the run."""

    def run_yaml(text, *arguments, storage="runs"):
        (project / "run.yaml").write_text(text)
        assert call(["run", "run.yaml", *arguments]) == 0, capsys.readouterr()
        [path] = (project / storage).glob("*/*/run.json")
        return ty.open_run(path.parent)

    return run_yaml


# -- mistakes in YAML, with their place ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("expriment: e", ["run.yaml:3: expriment", "did you mean 'experiment'"]),
        ("checkpoint: {evry: 5}", ["run.yaml:3: checkpoint.evry", "did you mean 'every'"]),
        ("checkpoint:\n  keep: 1\n  mod: max", ["run.yaml:5: checkpoint.mod", "did you mean 'mode'"]),
        ("failures: {max_failurs: 1}", ["run.yaml:3: failures.max_failurs", "did you mean 'max_failures'"]),
        ("resources: {cpus: 1}", ["run.yaml:3: resources", "did you mean 'cpu'"]),
        ("trackers: {jsn: {}}", ["run.yaml:3: trackers.jsn", "did you mean 'json'"]),
        ("trackers: [csv, jsn]", ["run.yaml:3: trackers.jsn", "did you mean 'json'"]),
        ("trackers: {mine: {type: cvs}}", ["run.yaml:3: trackers.mine", "did you mean 'csv'"]),
        ("trackers:\n  csv:\n    includ: ['a']", ["run.yaml:", "trackers.csv", "includ"]),
        ("trackers: {csv: {on_error: ignore}}", ["run.yaml:3: trackers.csv.on_error", "spool, drop, raise"]),
        ("trackers: {csv: {include: 5}}", ["run.yaml:3: trackers.csv.include", "globs"]),
        ("trackers: {csv: 5}", ["run.yaml:3: trackers.csv", "mapping"]),
        ("trackers: {file: {}}", ["run.yaml:3: trackers.file", "store", "not a tracker"]),
        ("trackers: json", ["run.yaml:3: trackers", "list of names"]),
        ("trackers: [csv, csv]", ["run.yaml:3: trackers", "two trackers are named 'csv'"]),
        ("executor: lcal", ["run.yaml:3: executor", "lcal"]),
        ("resume: maybe", ["run.yaml:3: resume", "maybe"]),
        ("checkpoint: {keep: 0}", ["run.yaml:3: checkpoint.keep", "at least 1"]),
        ("checkpoint: {every: -1}", ["run.yaml:3: checkpoint.every"]),
        ("checkpoint: {mode: best}", ["run.yaml:3: checkpoint.mode", "best"]),
        ("checkpoint: {every: often}", ["run.yaml:3: checkpoint.every", "int"]),
        ("checkpoint: 5", ["run.yaml:3: checkpoint"]),
        ("failures: {max_failures: many}", ["run.yaml:3: failures.max_failures", "int"]),
        ("resources: {cpu: -1}", ["run.yaml:3: resources", "cpu"]),
        ("config: 5", ["run.yaml:3: config"]),
        ("config: [a]", ["run.yaml:3: config"]),
        ("name: a/b", ["run.yaml:3: name", "'a-b'"]),
        ("experiment: a b", ["run.yaml:3: experiment", "'a-b'"]),
        ("tags: {a: [1]}", ["run.yaml:3: tags"]),
        ("log_to_file: [a, b, c]", ["run.yaml:3: log_to_file"]),
        ("chdir: maybe", ["run.yaml:3: chdir"]),
        ("config: {a: '${env:NOT_SET_ANYWHERE}'}", ["run.yaml:3: config.a", "NOT_SET_ANYWHERE"]),
        ("storage: 's4://bucket/x'", ["run.yaml:3: storage", "s4"]),
        ("checkpoint: {at_end: true}", ["run.yaml:3: checkpoint.at_end", "save_checkpoint"]),
        ("1: x", ["run.yaml:3", "1"]),
        ("config: {lr: 1}\nconfig: {lr: 2}", ["run.yaml:4", "config", "twice"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(mistake, line, words):
    """A mistake ends with exit code 2 before anything is written; its one line names file, line, key path and mend."""
    said = mistake(BASE + line + "\n")
    assert said.startswith("error: ")
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        ("training.py:Modle", ["run.yaml:1: trainable", "did you mean 'Model'", "loop"]),
        ("training:Modle", ["run.yaml:1: trainable", "did you mean 'Model'"]),
        ("nowhere.py:Model", ["run.yaml:1: trainable", "no file nowhere.py"]),
        ("nowhere.at.all:Model", ["run.yaml:1: trainable", "nowhere.at.all"]),
        ("training.py", ["run.yaml:1: trainable", "module:name or path.py:name"]),
        ("':Model'", ["run.yaml:1: trainable", "module:name or path.py:name"]),
        ("training.py:NUMBER", ["run.yaml:1: trainable", "3"]),
        ("collections:OrderedDict", ["run.yaml:1: trainable", "no subclass of trainyard.Trainable"]),
        ("broken.py:Model", ["run.yaml:1: trainable", "broken.py", "ZeroDivisionError"]),
        ("syntax.py:Model", ["run.yaml:1: trainable", "syntax.py", "SyntaxError"]),
        ("exits.py:Model", ["run.yaml:1: trainable", "exits.py", "SystemExit"]),
        ("5", ["run.yaml:1: trainable", "5"]),
        ("[a]", ["run.yaml:1: trainable"]),
    ],
)
def test_a_trainable_that_cannot_be_had_is_told(project, mistake, trainable, words):
    """A trainable that does not exist, cannot be imported or is none is told with its place and the nearest name."""
    (project / "broken.py").write_text("1 / 0\n")
    (project / "syntax.py").write_text("def (:\n")
    (project / "exits.py").write_text("import sys\nsys.exit(3)\n")
    said = mistake(f"trainable: {trainable}\n")
    for word in words:
        assert word in said


def test_a_missing_trainable_is_told(mistake):
    """Without the key trainable the message says how to write one."""
    said = mistake("config: {lr: 1}\n")
    assert "run.yaml" in said
    assert "'trainable' is missing" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2\nb: 3\n", ["run.yaml:2", "not valid YAML"]),
        ("a: 'unfinished\n", ["run.yaml:", "not valid YAML"]),
        ("a:\n\tb: 1\n", ["run.yaml:2", "not valid YAML"]),
        ("trainable: !!python/object/apply:os.system ['true']\n", ["run.yaml:1", "not valid YAML"]),
        ("a: 1\n---\nb: 2\n", ["run.yaml:", "not valid YAML"]),
        ("- a\n- b\n", ["run.yaml", "mapping", "list"]),
        ("", ["run.yaml", "mapping", "nothing"]),
        ("just words\n", ["run.yaml", "mapping"]),
        ("{[1, 2]: 3}\n", ["run.yaml:1"]),
    ],
)
def test_yaml_that_is_none_is_told(mistake, text, words):
    """A file that is no YAML, or no mapping, is told with file and line; no Python tag is ever run."""
    said = mistake(text)
    for word in words:
        assert word in said


def test_a_file_that_cannot_be_read(project, capsys):
    """A missing file, a directory, and one that is not UTF-8 are told by name."""
    (project / "latin.yaml").write_bytes(b"name: \xe9\n")
    for name, word in (("nowhere.yaml", "No such file"), (".", "directory"), ("latin.yaml", "UTF-8")):
        assert call(["run", name]) == 2
        said = capsys.readouterr().err
        assert name in said
        assert word in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": 5}, ["storage"]),
        ({"checkpoint": {"evry": 1}}, ["checkpoint.evry", "did you mean 'every'"]),
        ({"trackers": ["jsn"]}, ["trackers.jsn", "did you mean 'json'"]),
        ({"trackers": {"json": {"indent": 2}}}, ["trackers.json", "unknown option 'indent'"]),
        ({"failures": {"max_failures": "x"}}, ["failures.max_failures"]),
        ({"resources": {"gpus": 1}}, ["resources", "did you mean 'gpu'"]),
        ({"executor": "ryy"}, ["executor"]),
        ({"config": 5}, ["config"]),
    ],
)
def test_a_mistake_in_code_names_the_argument(tmp_path, monkeypatch, options, words):
    """The same mistakes in code are a TrainyardError that names the argument and key path."""
    monkeypatch.chdir(tmp_path)
    config = options.pop("config", None)
    with pytest.raises(ty.TrainyardError) as caught:
        ty.run(Counting, config, **options)
    for word in words:
        assert word in str(caught.value)
    assert not list(tmp_path.iterdir())


# -- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_change_one_setting(good):
    """--set beats YAML, reaches into nested keys, makes those that are missing, and its value is YAML."""
    result = good(
        BASE + "config: {lr: 0.1, other: 1}\n",
        "--set", "config.lr=0.5", "--set", "config.new.deep=[1, a]", "--set", "tags.team=x", "--set", "trackers=[json]",
    )  # fmt: skip
    assert result.config == {"lr": 0.5, "other": 1, "new": {"deep": [1, "a"]}}
    assert result.record.tags == {"team": "x"}
    assert [state.tracker for state in result.lanes()] == ["json"]


def test_the_last_override_wins(good):
    """Of two overrides of one key the later one holds."""
    assert good(BASE, "--set", "config.lr=1", "--set", "config.lr=2").metrics["lr"] == 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("0.01", "float"),
        ("1e-3", "float"),
        ("1E5", "float"),
        ("3", "int"),
        ("true", "bool"),
        ("abc", "str"),
        ("'1'", "str"),
        ("", "NoneType"),
    ],
)
def test_the_type_of_an_overrides_value(good, text, kind):
    """Numbers are numbers, 1e-3 among them; quotes make strings."""
    assert good(BASE, "--set", f"config.lr={text}").metrics["kind"] == kind


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "-1e4", "1.e2"])
def test_numbers_without_a_point_are_numbers_in_yaml_too(good, text):
    """lr: 1e-3 in YAML is the number that everyone means."""
    assert good(BASE + f"config: {{lr: {text}}}\n").metrics["lr"] == float(text)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("config.lr", ["--set config.lr", "KEY=VALUE"]),
        ("=3", ["--set =3", "KEY=VALUE"]),
        ("config..lr=3", ["KEY=VALUE"]),
        ("stop.training_iteration.x=3", ["stop.training_iteration", "no keys"]),
        ("config.lr=[1", ["not valid YAML"]),
        ("chekpoint.every=1", ["--set chekpoint", "did you mean 'checkpoint'"]),
        ("checkpoint.evry=1", ["--set checkpoint.evry", "did you mean 'every'"]),
        ("trackers.jsn={}", ["--set trackers.jsn", "did you mean 'json'"]),
        ("trainable=training.py:Modle", ["--set trainable", "did you mean 'Model'"]),
    ],
)
def test_a_mistake_in_an_override_names_it(mistake, override, words):
    """A mistake on the command line names the override rather than a line of the file."""
    said = mistake(BASE, "--set", override)
    for word in words:
        assert word in said
    assert "run.yaml:" not in said


# -- what wins -------------------------------------------------------------------------------------------------------


def test_code_beats_the_environment(tmp_path, monkeypatch):
    """Arguments of run() beat TRAINYARD_*; what they leave out comes from there, and then from the defaults."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINYARD_STORAGE", str(tmp_path / "env"))
    monkeypatch.setenv("TRAINYARD_EXPERIMENT", "env")
    monkeypatch.setenv("TRAINYARD_TRACKERS", "csv")
    stop = {"count": 1}
    given = ty.run(Counting, stop=stop, storage=tmp_path / "code", experiment="code", trackers=["json"])
    assert Path(given.path).parent == tmp_path / "code" / "code"
    assert [state.tracker for state in given.lanes()] == ["json"]
    left = ty.run(Counting, stop=stop)
    assert Path(left.path).parent == tmp_path / "env" / "env"
    assert [state.tracker for state in left.lanes()] == ["csv"]


def test_the_defaults(tmp_path, monkeypatch):
    """Without anything said a run lies in ./runs/default, with json and csv."""
    monkeypatch.chdir(tmp_path)
    for name in ("STORAGE", "EXPERIMENT", "TRACKERS"):
        monkeypatch.delenv(f"TRAINYARD_{name}", raising=False)
    result = ty.run(Counting, stop={"count": 1})
    assert Path(result.path).parent == tmp_path / "runs" / "default"
    assert {state.tracker for state in result.lanes()} == {"csv", "json"}


def test_overrides_beat_yaml_and_yaml_beats_the_environment(project, good, monkeypatch):
    """--set beats the file, and the file beats TRAINYARD_*."""
    monkeypatch.setenv("TRAINYARD_STORAGE", str(project / "env"))
    monkeypatch.setenv("TRAINYARD_EXPERIMENT", "env")
    monkeypatch.setenv("TRAINYARD_TRACKERS", "csv, json")
    text = BASE + "storage: ./yaml\nexperiment: yaml\ntrackers: [json]\n"
    result = good(text, "--set", "experiment=set", storage="yaml")
    assert (result.experiment, [state.tracker for state in result.lanes()]) == ("set", ["json"])
    result = good(BASE, storage="env")
    assert (result.experiment, [state.tracker for state in result.lanes()]) == ("env", ["csv", "json"])


def test_the_environment_serves_start_run_and_bare_trainables(tmp_path, monkeypatch):
    """start_run() and a bare Trainable take their defaults from TRAINYARD_* too."""
    monkeypatch.setenv("TRAINYARD_STORAGE", str(tmp_path / "env"))
    monkeypatch.setenv("TRAINYARD_EXPERIMENT", "env")
    monkeypatch.setenv("TRAINYARD_TRACKERS", "csv")
    with ty.start_run() as opened:
        opened.log({"a": 1})
    bare = Counting({})
    bare.stop()
    for path in (opened.path, bare.logdir):
        assert Path(path).parent == tmp_path / "env" / "env"
        assert [state.tracker for state in ty.open_run(path).lanes()] == ["csv"]


def test_an_empty_list_of_trackers_is_none(tmp_path, monkeypatch):
    """trackers=[] and trackers: {} mean no tracker, whatever the environment says."""
    monkeypatch.setenv("TRAINYARD_TRACKERS", "csv")
    for none in ([], {}):
        assert ty.run(Counting, stop={"count": 1}, storage=tmp_path, trackers=none).lanes() == []


@pytest.mark.parametrize(("name", "value"), [("TRACKERS", "jsn"), ("EXPERIMENT", "a/b"), ("STORAGE", "s4://x")])
def test_a_mistake_in_the_environment_names_the_variable(tmp_path, monkeypatch, name, value):
    """A mistake that came from TRAINYARD_* names the variable, since nothing in code or YAML is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"TRAINYARD_{name}", value)
    with pytest.raises(ty.TrainyardError, match=f"TRAINYARD_{name}"):
        ty.run(Counting, stop={"count": 1})


# -- secrets ---------------------------------------------------------------------------------------------------------

SECRET = "hunter2-5c1f9e"

WITH_SECRETS = """
import sys, trainyard as ty

class Model(ty.Trainable):
    def setup(self, config):
        assert config["login"]["service"].startswith("https://user:hunter2")
        self.n = 0

    def step(self):
        self.n += 1
        if self.n == 3 and self.config["fail"]:
            raise RuntimeError("at 3")
        return {"n": self.n}

    def save_checkpoint(self, checkpoint_dir):
        return {"n": self.n}

    def load_checkpoint(self, checkpoint):
        self.n = checkpoint["n"]

def settings(fail):
    config = {"login": {"service": "https://user:${env:PASSWORD}@host/x", "list": ["${env:PASSWORD}"]}, "fail": fail}
    return {
        "config": config, "storage": sys.argv[1], "name": "it", "log_to_file": True,
        "trackers": {"json": {}, "csv": {}, "recorder": {"token": "${env:PASSWORD}"}},
        "checkpoint": {"every": 1}, "stop": {"training_iteration": 4},
    }

class Sees:
    @ty.hookimpl
    def on_result(self, run, result):
        assert "hunter2" not in str(run)

assert ty.run(Model, **settings(True), callbacks=[Sees()]).status == "failed"
result = ty.run(Model, **settings(False), resume="must", callbacks=[Sees()])
assert result.status == "completed", result.error
made = Model({**settings(False)["config"]}, storage=sys.argv[1])
made.train()
made.save()
made.stop()
with ty.start_run(storage=sys.argv[1], config=settings(False)["config"]) as run:
    assert run.config["login"]["list"] == ["hunter2-5c1f9e"]
    run.log({"a": 1})
    run.save_checkpoint({"a": 1})
print(result.path)
"""


def test_a_secret_is_resolved_at_use_and_written_nowhere(tmp_path):
    """${env:NAME} reaches the trainable and the tracker resolved; no file of any run holds the value."""
    install(
        tmp_path / "site", "recorder-plugin", {"recorder": "recorder_module:Recorder"}, {"recorder_module": RECORDER}
    )
    done = python(WITH_SECRETS, tmp_path / "runs", PASSWORD=SECRET, PYTHONPATH=str(tmp_path / "site"))
    path = Path(done.stdout.strip())
    assert (path / "recorded.txt").read_text().startswith(f"1 {len(SECRET)} ")
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(files) > 30
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []
    assert b"${env:PASSWORD}" in (path / "run.json").read_bytes()
    assert b"${env:PASSWORD}" in (path / "params.json").read_bytes()
    assert SECRET not in done.stderr


def test_reset_resolves_the_environment_too(tmp_path, monkeypatch):
    """The config of a reset is resolved like the first one, and recorded unresolved."""
    monkeypatch.setenv("MY_TOKEN", SECRET)
    seen = []

    class Resettable(Counting):
        def setup(self, config):
            super().setup(config)
            seen.append(config["login"])

        def reset_config(self, new_config):
            seen.append(new_config["login"])
            return True

    made = build(Resettable, tmp_path, {"login": "${env:MY_TOKEN}"})
    made.reset({"login": "${env:MY_TOKEN}"})
    made.train()
    made.stop()
    assert seen == [SECRET, SECRET]
    assert made.config["login"] == SECRET
    assert ty.open_run(made.logdir).config == {"login": "${env:MY_TOKEN}"}


def test_a_mistake_in_a_trackers_options_tells_no_secret(tmp_path):
    """When a tracker refuses a resolved option, neither the message nor any file holds the value."""
    source = RECORDER.replace("self.token = token", "raise ValueError('bad token ' + token)")
    install(tmp_path / "site", "recorder-plugin", {"recorder": "recorder_module:Recorder"}, {"recorder_module": source})
    code = """
import sys, trainyard as ty
def train(config): ty.report({})
try:
    ty.run(train, storage=sys.argv[1], trackers={"recorder": {"token": "${env:PASSWORD}"}})
except ty.PluginConfigError as error:
    print("bad token" in str(error), "hunter2" in str(error))
"""
    done = python(code, tmp_path / "runs", PASSWORD=SECRET, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout.split() == ["True", "False"]


def test_a_failing_tracker_writes_no_secret(tmp_path):
    """What a tracker raises may hold its resolved option; no file of the run holds the value."""
    source = RECORDER.replace(
        "with open(self.path", "raise ConnectionError('no answer for ' + self.token)\n        with open(self.path"
    )
    install(tmp_path / "site", "recorder-plugin", {"recorder": "recorder_module:Recorder"}, {"recorder_module": source})
    code = """
import sys, time, trainyard as ty
from trainyard import active_run
active_run.DRAIN_S = 0.3
def train(config):
    while True:
        ty.report({})
        time.sleep(0.01)
result = ty.run(train, storage=sys.argv[1], trackers={"recorder": {"token": "${env:PASSWORD}", "on_error": "raise"}})
assert isinstance(result.error, ty.DeliveryError)
"""
    python(code, tmp_path / "runs", PASSWORD=SECRET, PYTHONPATH=str(tmp_path / "site"))
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert any(b"no answer for" in file.read_bytes() for file in files)
    assert [file.name for file in files if SECRET.encode() in file.read_bytes()] == []


def test_an_environment_reference_in_the_storage_makes_no_odd_directory(tmp_path, monkeypatch):
    """storage: ${env:SCRATCH}/runs is resolved, or refused: no directory is ever named like the reference."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    try:
        ty.run(Counting, stop={"count": 1}, storage="${env:SCRATCH}/runs", trackers=[])
    except ty.ConfigError:
        pass
    else:
        assert (tmp_path / "scratch" / "runs").is_dir()
    assert not list(tmp_path.glob("${env*"))


# -- trainables by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["training.py:Model", "./training.py:Model", "training:Model", "training:loop"])
def test_trainables_are_found_by_file_or_module(good, spec):
    """module:name and path.py:name both mean the same code, class or function."""
    result = good(f"trainable: {spec}\nconfig: {{lr: 2}}\nstop: {{training_iteration: 1}}\n")
    assert result.metrics["lr"] == 2
    assert result.record.trainable == spec


def test_a_trainable_beside_the_yaml_file_is_found(project, good):
    """A relative path is looked for in the working directory, then beside the file that names it."""
    (project / "sub").mkdir()
    (project / "sub" / "beside.py").write_text("import neighbour\n" + TRAINING)
    (project / "sub" / "neighbour.py").write_text("")
    (project / "sub" / "run.yaml").write_text("trainable: beside.py:Model\nstop: {training_iteration: 1}\n")
    assert call(["run", "sub/run.yaml"]) == 0


def test_two_files_of_one_name_are_two_modules(project):
    """A second file of the same name elsewhere does not get the first one's code."""
    for folder, number in (("a", 1), ("b", 2)):
        (project / folder).mkdir()
        (project / folder / "same.py").write_text(f"def train(config):\n    return {number}\n")
    assert [load_trainable(f"{folder}/same.py:train")({}) for folder in "ab"] == [1, 2]


def test_a_nested_name(project):
    """A name may have dots: a class within a class."""
    (project / "nested.py").write_text("class A:\n    def train(config): return 7\n")
    assert load_trainable("nested.py:A.train")({}) == 7


def test_run_takes_words_in_python_too(project):
    """run("path.py:name") is the same as the object."""
    assert iterations(run("training.py:loop", project)) == [1]


def test_yaml_and_code_know_the_same_words(project):
    """Each keyword of run() that data can say is a YAML key, and the other way round."""
    import inspect

    from trainyard.config import RunConfig

    words = set(inspect.signature(ty.run).parameters)
    assert set(RunConfig.__struct_fields__) <= words
    assert words - set(RunConfig.__struct_fields__) == {"callbacks"}


def test_the_place_of_a_key(tmp_path):
    """place() says file and line of a key, of the nearest one above, or the override that set it."""
    path = tmp_path / "run.yaml"
    path.write_text("trainable: x:y\nconfig:\n  a: 1\n  b:\n    c: 2\n")
    source = read_yaml(path)
    assert source.place("config.b.c") == f"{path}:5: config.b.c"
    assert source.place("config.b.d") == f"{path}:4: config.b.d"
    assert source.place("nowhere") == f"{path}: nowhere"
    apply_overrides(source, ["config.b=3"])
    assert source.place("config.b") == "--set config.b"
    assert parse_config(source.data, source).config == {"a": 1, "b": 3}
