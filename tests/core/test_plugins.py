"""Plugins: found by name, built with options, held one by one; and how each mistake of theirs is told."""

from __future__ import annotations

import inspect
import json

import pytest
from trainables import RECORDER, Counting, install, python, run

import trainyard as ty
from trainyard import plugins
from trainyard.hookspecs import Hooks

ODD_HOOKS = """
from trainyard import hookimpl
class Unknown:
    @hookimpl
    def log_reslts(self, results): pass
    @hookimpl
    def log_results(self, results): pass
class Argument:
    @hookimpl
    def log_results(self, reslts): pass
class Refuses:
    def __init__(self, level=1):
        raise ValueError(f"level {level} is too high")
    @hookimpl
    def log_results(self): pass
class Crashes:
    def __init__(self):
        raise RuntimeError("no connection")
    @hookimpl
    def log_results(self): pass
class Needs:
    def __init__(self, url, depth=1): pass
    @hookimpl
    def log_results(self): pass
"""
"""The source of a module with plugins that are wrong in their hooks or options."""


class Tracker:
    """A tracker with every hook and every argument."""

    def __init__(self, needed, *, depth=1):
        self.options = (needed, depth)

    @ty.hookimpl
    def log_start(self, run, notes):
        """Nothing."""

    @ty.hookimpl
    def log_results(self, run, results, notes):
        """Nothing."""


def command(site, *arguments, check=True):
    """The trainyard command with that folder of packages. Returns the finished process."""
    code = "import sys; from trainyard.cli.main import call; sys.exit(call(sys.argv[1:]))"
    return python(code, *arguments, check=check, cwd=site, PYTHONPATH=str(site))


def said_by(site, trackers, **environment):
    """The kind and text of the error that run() raises with these trackers, and whether anything was written."""
    code = """
import json, sys, pathlib, trainyard as ty
def train(config): ty.report({"a": 1})
try:
    result = ty.run(train, storage="runs", trackers=json.loads(sys.argv[1]))
except ty.TrainyardError as error:
    print(type(error).__name__, error)
    assert not pathlib.Path("runs").exists()
else:
    print("ran", result.status)
"""
    return python(code, json.dumps(trackers), cwd=site, PYTHONPATH=str(site), **environment).stdout.strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages, most of them broken in their own way."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "good-plugin", {"good": "good_module:Recorder"}, {"good_module": RECORDER}, version="2.3")
    install(folder, "missing-sdk", {"sdk": "sdk_module:Thing"}, {"sdk_module": "import an_sdk_that_is_not_there\n"})
    install(folder, "missing-module", {"gone": "no_such_module:Thing"}, {})
    install(folder, "missing-class", {"classless": "classless_module:Thing"}, {"classless_module": "Other = 1\n"})
    install(folder, "bad-syntax", {"syntax": "syntax_module:Thing"}, {"syntax_module": "def (:\n"})
    install(folder, "raises-at-import", {"raises": "raises_module:Thing"}, {"raises_module": "1 / 0\n"})
    install(folder, "exits-at-import", {"exits": "exits_module:Thing"}, {"exits_module": "import sys\nsys.exit(3)\n"})
    install(folder, "an-object", {"object": "object_module:thing"}, {"object_module": "thing = object()\n"})
    install(folder, "no-hooks", {"hookless": "hookless_module:Thing"}, {"hookless_module": "class Thing: pass\n"})
    install(folder, "one-of-two", {"double": "good_module:Recorder"}, {}, version="1.1")
    install(folder, "two-of-two", {"double": "good_module:Recorder"}, {}, version="2.2")
    points = {name.lower(): f"odd_module:{name}" for name in ("Unknown", "Argument", "Refuses", "Crashes", "Needs")}
    install(folder, "odd-plugins", points, {"odd_module": ODD_HOOKS})
    return folder


# -- objects ---------------------------------------------------------------------------------------------------------


def test_a_class_instead_of_an_object(tmp_path):
    """A class where an object belongs is PluginBroken, and the message says what to write."""
    with pytest.raises(ty.PluginBroken, match=r"class Tracker: hand over an object, Tracker\(\.\.\.\)"):
        run(Counting, tmp_path, trackers=[Tracker])
    with pytest.raises(ty.PluginBroken, match=r"Tracker\(\.\.\.\)"):
        run(Counting, tmp_path, callbacks=[Tracker])
    assert not list(tmp_path.iterdir())


def test_an_unknown_hook_is_told_with_the_nearest():
    """An implementation of a hook that does not exist names the class and the nearest hook."""

    class Odd:
        @ty.hookimpl
        def log_resluts(self, results):
            """Never called."""

    with pytest.raises(ty.PluginBroken, match=r"Odd.*unknown hook 'log_resluts': did you mean 'log_results'"):
        plugins.hold("odd", Odd())


def test_an_unknown_hook_of_a_base_class_is_told_with_the_nearest():
    """The hint is there also when the wrong hook is inherited."""

    class Base:
        @ty.hookimpl
        def on_reslt(self, result):
            """Never called."""

    class Odd(Base):
        """Nothing of its own."""

    with pytest.raises(ty.PluginBroken, match="did you mean 'on_result'"):
        plugins.hold("odd", Odd())


def test_an_unknown_argument_of_a_hook_is_told():
    """A hook that takes an argument which does not exist names the plugin, the hook and the argument."""

    class Odd:
        @ty.hookimpl
        def log_results(self, resluts):
            """Never called."""

    with pytest.raises(ty.PluginBroken, match=r"(?s)Odd.*log_results.*resluts"):
        plugins.hold("odd", Odd())


@pytest.mark.parametrize("name", plugins.HOOK_NAMES)
def test_a_hook_may_take_any_of_its_arguments(name):
    """Each hook works with all of its arguments, and with none."""
    arguments = list(inspect.signature(getattr(Hooks, name)).parameters)[1:]
    given = ", ".join(arguments)
    scope = {"seen": [], "hookimpl": ty.hookimpl}
    exec(f"class All:\n @hookimpl\n def {name}(self{given and ', ' + given}): seen.append([{given}])\n", scope)
    exec(f"class Nothing:\n @hookimpl\n def {name}(self): seen.append([])\n", scope)
    for cls in ("All", "Nothing"):
        plugins.hold("it", scope[cls]()).call(name, **{argument: argument for argument in arguments})
    assert scope["seen"] == [arguments, []]


def test_a_hook_that_is_not_implemented_is_left_in_peace():
    """call() of another hook answers None."""
    held = plugins.hold("it", Tracker(1))
    assert held.hooks == {"log_start", "log_results"}
    assert held.call("should_stop", run=None, result=None) is None


def test_a_question_stops_at_the_first_answer():
    """ask() goes in order, takes the first answer that is not None, and tells whose it is."""
    asked = []

    def answering(name, answer):
        class Policy:
            @ty.hookimpl
            def request_resources(self, config):
                asked.append(name)
                return answer

        return plugins.hold(name, Policy())

    row = [answering("a", None), answering("b", {"cpu": 2}), answering("c", {"cpu": 3})]
    answer, who = plugins.ask(row, "request_resources", trainable=None, config={})
    assert (answer, who.name, asked) == ({"cpu": 2}, "b", ["a", "b"])
    assert plugins.ask(row[:1], "request_resources", trainable=None, config={}) == (None, None)


def test_the_hooks_are_those_of_the_table():
    """The hooks, in order, are the documented ones."""
    assert plugins.HOOK_NAMES == (
        "open_store", "request_resources", "on_result", "should_stop", "log_start", "log_results", "log_artifact",
        "log_checkpoint", "log_rewind", "log_end", "flush", "close", "join", "leave", "check",
    )  # fmt: skip


def test_plugin_objects_are_trackers_too(tmp_path):
    """An object in the list of trackers is served under its class's name; two of a class get two names."""

    class Mine:
        def __init__(self):
            self.seqs = []

        @ty.hookimpl
        def log_results(self, results):
            self.seqs += [result.seq for result in results]

    first, second = Mine(), Mine()
    result = run(Counting, tmp_path, trackers=[first, second, "json"], stop={"count": 3})
    assert first.seqs == second.seqs == [1, 2, 3]
    assert {state.tracker for state in result.lanes()} == {"Mine", "Mine-2", "json"}


def test_three_objects_of_one_class_get_three_names(tmp_path):
    """Any number of objects of one class are told apart."""

    class Mine:
        @ty.hookimpl
        def log_results(self, results):
            """Nothing."""

    result = run(Counting, tmp_path, trackers=[Mine() for _ in range(4)], stop={"count": 1})
    assert len(result.lanes()) == 4


def test_an_object_that_is_no_tracker_is_refused(tmp_path):
    """An object without a tracker's hook is a ConfigError that names what it is."""

    class Stops:
        @ty.hookimpl
        def should_stop(self):
            return True

    with pytest.raises(ty.ConfigError, match=r"Stops.*is a callback, not a tracker"):
        run(Counting, tmp_path, trackers=[Stops()])


def test_a_builtin_plugin_comes_in_by_the_same_door():
    """The bundled plugins are entry points in the group, like anyone's."""
    by_name = {plugin.name: plugin for plugin in plugins.installed()}
    for name in ("json", "csv", "file"):
        assert by_name[name].package == "trainyard"
        assert by_name[name].module.startswith("trainyard_plugins.")


# -- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        (["goood"], ["PluginNotFound", "trackers.goood", "did you mean 'good'", "csv", "json"]),
        (["sdk"], ["PluginBroken", "missing-sdk 1.0", "ModuleNotFoundError", "an_sdk_that_is_not_there"]),
        (["gone"], ["PluginBroken", "missing-module 1.0", "no_such_module"]),
        (["classless"], ["PluginBroken", "missing-class 1.0", "Thing"]),
        (["syntax"], ["PluginBroken", "bad-syntax 1.0", "SyntaxError"]),
        (["raises"], ["PluginBroken", "raises-at-import 1.0", "ZeroDivisionError"]),
        (["exits"], ["PluginBroken", "exits-at-import 1.0", "SystemExit"]),
        (["object"], ["PluginBroken", "an-object 1.0", "not a class"]),
        (["hookless"], ["ConfigError", "trackers.hookless", "not a tracker"]),
        (["double"], ["PluginBroken", "'double'", "one-of-two 1.1", "two-of-two 2.2", "uninstall one"]),
        (["unknown"], ["PluginBroken", "'unknown'", "did you mean 'log_results'"]),
        (["argument"], ["PluginBroken", "'argument'", "reslts"]),
        (["refuses"], ["PluginConfigError", "trackers.refuses", "level 1 is too high"]),
        ([{"refuses": {"level": 9}}], ["PluginConfigError", "trackers.refuses", "level 9 is too high"]),
        (["crashes"], ["PluginBroken", "'crashes'", "RuntimeError", "no connection"]),
        (["needs"], ["PluginConfigError", "trackers.needs", "'url' is required"]),
        ([{"needs": {"url": 1, "dpth": 2}}], ["PluginConfigError", "trackers.needs", "did you mean 'depth'"]),
        ({"mine": {"type": "needs"}}, ["PluginConfigError", "trackers.mine", "'url' is required"]),
        ({"json": {"indent": 2}}, ["PluginConfigError", "trackers.json", "unknown option 'indent'", "options: none"]),
    ],
    ids=str,
)
def test_a_broken_plugin_stops_before_training_and_is_named(site, trackers, words):
    """Each way to be broken is an error of its kind before anything is written; it names plugin, package and reason."""
    said = said_by(site, trackers)
    for word in words:
        assert word in said


def test_a_constructor_that_exits_is_told(site, tmp_path):
    """A constructor that calls sys.exit() is PluginBroken like one that raises."""
    folder = tmp_path / "site"
    source = RECORDER.replace("self.token = token", "raise SystemExit(4)")
    install(folder, "exits-when-built", {"leaver": "leaver_module:Recorder"}, {"leaver_module": source})
    said = said_by(folder, ["leaver"])
    assert said.startswith("PluginBroken")
    assert "'leaver'" in said


def test_a_good_plugin_works_beside_broken_ones(site):
    """A broken package breaks nobody: a run that names only good trackers runs."""
    assert said_by(site, ["good", "json"]) == "ran completed"


def test_nothing_is_imported_that_was_not_named(site):
    """A run imports only the plugins that it names."""
    code = """
import sys, trainyard as ty
def train(config): ty.report({"a": 1})
ty.run(train, storage="lazy", trackers=["good"])
print(*sorted(name for name in sys.modules if name.endswith("_module") or name.startswith("trainyard_plugins.trackers.")))
"""
    assert python(code, cwd=site, PYTHONPATH=str(site)).stdout.split() == ["good_module"]


def test_listing_imports_nothing_and_shows_all(site):
    """`trainyard plugins` lists every entry point with package and version, the broken ones too."""
    rows = json.loads(command(site, "plugins", "--json").stdout)
    found = {(row["name"], row["package"], row["version"]) for row in rows}
    assert {("good", "good-plugin", "2.3"), ("sdk", "missing-sdk", "1.0"), ("double", "one-of-two", "1.1")} <= found
    assert {row["status"] for row in rows} == {"installed"}


def test_checking_tells_each_broken_one(site):
    """`trainyard plugins --check` says of each what is wrong, of good ones kind, hooks and options, and exits with 1."""
    done = command(site, "plugins", "--check", "--json", check=False)
    assert done.returncode == 1, done.stderr
    rows = json.loads(done.stdout)
    status = {row["name"]: row["status"] for row in rows}
    good = next(row for row in rows if row["name"] == "good")
    assert (good["status"], good["kind"]) == ("ok", "tracker")
    assert good["hooks"] == ["log_start", "log_results"]
    assert any("token" in option for option in good["options"])
    assert status["json"] == status["csv"] == status["file"] == "ok"
    for name, word in (
        ("sdk", "an_sdk_that_is_not_there"), ("gone", "no_such_module"), ("classless", "Thing"), ("syntax", "SyntaxError"),
        ("raises", "ZeroDivisionError"), ("exits", "SystemExit"), ("object", "not a class"), ("double", "two-of-two 2.2"),
    ):  # fmt: skip
        assert word in status[name], name


def test_the_check_finds_wrong_hooks(tmp_path):
    """--check tells of a plugin whose hooks or arguments do not exist, without building it."""
    points = {name.lower(): f"odd_module:{name}" for name in ("Unknown", "Argument")}
    install(tmp_path, "odd-plugins", points, {"odd_module": ODD_HOOKS})
    rows = json.loads(command(tmp_path, "plugins", "--check", "--json", check=False).stdout)
    status = {row["name"]: row["status"] for row in rows}
    assert "log_reslts" in status["unknown"]
    assert "reslts" in status["argument"]


def test_two_instances_of_one_plugin(site):
    """One plugin may serve under several names, each with its own options and cursor."""
    code = """
import sys, trainyard as ty
def train(config): ty.report({"a": 1})
trackers = {"one": {"type": "good", "token": "x"}, "two": {"type": "good", "token": "yyy", "where": sys.argv[1]}}
result = ty.run(train, storage="twice", trackers=trackers)
print(result.path)
print([(s.tracker, s.type, s.delivered) for s in result.lanes()])
"""
    (site / "two").mkdir()
    path, states = python(code, site / "two", cwd=site, PYTHONPATH=str(site)).stdout.splitlines()
    assert states == "[('one', 'good', 1), ('two', 'good', 1)]"
    with open(f"{path}/recorded.txt") as one, open(site / "two" / "recorded.txt") as two:
        assert (one.read()[:3], two.read()[:3]) == ("1 1", "1 3")


def test_the_hint_names_only_plugins_of_that_kind(tmp_path):
    """For an unknown tracker the installed trackers are named, not stores."""
    said = said_by(tmp_path, ["jsn"])
    assert said.partition("installed: ")[2].split(", ") == ["csv", "json", "mlflow", "tensorboard"]
