"""What `import trainyard` brings: every public name, and next to nothing else."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
from trainables import python

import trainyard as ty
from trainyard import errors

DESIGNED = [
    "hookimpl", "Trainable", "Checkpoint", "Result", "Resources", "Rejected", "run", "start_run", "open_run", "report",
    "get_run", "get_checkpoint", "wrap_function", "with_parameters", "with_resources", "validate_save_restore",
]  # fmt: skip


def imported_by(code):
    """The modules that are there after running code in a fresh interpreter, its own ones aside."""
    before = set(python("import sys; print(*sys.modules)").stdout.split())
    return set(python(f"{code}\nimport sys; print(*sys.modules)").stdout.split()) - before


def test_import_brings_nothing_heavy():
    """`import trainyard` imports neither numpy nor rich, click, pluggy, msgspec or yaml: only its own front door."""
    found = imported_by("import trainyard")
    assert {name for name in found if name.startswith("trainyard")} == {"trainyard", "trainyard.version"}
    assert (
        found & {"numpy", "pandas", "torch", "rich", "click", "pluggy", "msgspec", "yaml", "cloudpickle", "psutil"}
        == set()
    )


def test_a_run_without_extras_imports_no_extra():
    """A whole run with its default trackers needs no numpy, pandas, rich, click, psutil, cloudpickle or plotille."""
    code = """
import os, tempfile
import trainyard as ty
class T(ty.Trainable):
    def step(self): return {"x": 1.0}
    def save_checkpoint(self, checkpoint_dir): return {"x": 1}
with tempfile.TemporaryDirectory() as folder:
    result = ty.run(T, storage=folder, stop={"training_iteration": 2})
    assert result.status == "completed" and len(result.history()) == 2
"""
    heavy = {
        "numpy",
        "pandas",
        "torch",
        "sklearn",
        "rich",
        "click",
        "psutil",
        "cloudpickle",
        "plotille",
        "pynvml",
        "mlflow",
    }
    assert imported_by(code) & heavy == set()


def test_every_public_name_resolves():
    """Each name in __all__ is there, once, and is not private."""
    assert len(ty.__all__) == len(set(ty.__all__))
    for name in ty.__all__:
        assert getattr(ty, name) is not None
        assert not name.startswith("_") or name == "__version__"
    assert dir(ty) == ty.__all__


@pytest.mark.parametrize("name", DESIGNED)
def test_the_designed_names_are_exported(name):
    """The names that users write are at the top level."""
    assert name in ty.__all__


def test_every_exception_is_exported():
    """Each class in errors is at the top level, and is a TrainyardError."""
    for name in errors.__all__:
        assert name in ty.__all__
        assert issubclass(getattr(ty, name), ty.TrainyardError)


def test_no_public_name_is_a_submodules_name():
    """Importing a submodule can never hide a public name, since none is called like one."""
    submodules = {module.name for module in pkgutil.iter_modules(ty.__path__)}
    assert submodules & set(ty.__all__) == set()


def test_names_are_the_same_whatever_was_imported_first():
    """The public names are right also after each submodule was imported by itself."""
    code = """
import importlib, pkgutil, trainyard
for module in pkgutil.walk_packages(trainyard.__path__, "trainyard."):
    importlib.import_module(module.name)
import types
assert not [name for name in trainyard.__all__ if isinstance(getattr(trainyard, name), types.ModuleType)]
assert callable(trainyard.run) and callable(trainyard.report)
"""
    python(code)


@pytest.mark.parametrize("module", sorted(module.name for module in pkgutil.walk_packages(ty.__path__, "trainyard.")))
def test_each_submodule_can_be_imported_first(module):
    """No module depends on another one having been imported before it."""
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    """A wrong name is told like any module's."""
    with pytest.raises(AttributeError, match=r"trainyard.*'runn'"):
        ty.runn  # noqa: B018
    assert not hasattr(ty, "flask")


def test_star_import():
    """`from trainyard import *` brings exactly the public names."""
    scope = {}
    exec("from trainyard import *", scope)
    assert set(scope) - {"__builtins__"} == set(ty.__all__)


def test_type_checkers_see_the_same_names():
    """The names in the TYPE_CHECKING block are those that resolve at run time, from the same modules."""
    import ast

    tree = ast.parse(inspect.getsource(ty))
    seen = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            for statement in node.body:
                if isinstance(statement, ast.ImportFrom):
                    seen |= {alias.asname: statement.module for alias in statement.names}
    assert set(seen) == set(ty.__all__) - {"__version__"}
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(ty, name)


def test_every_public_name_has_a_docstring():
    """Whoever asks help() gets an answer."""
    for name in ty.__all__:
        if callable(getattr(ty, name)):
            assert inspect.getdoc(getattr(ty, name)), name


def test_the_plugins_import_only_public_names():
    """A bundled plugin imports nothing of trainyard but what `trainyard` itself exports."""
    code = """
import ast, pathlib, trainyard, trainyard_plugins
bad = []
for path in pathlib.Path(trainyard_plugins.__file__).parent.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainyard":
            bad += [str(path)] * (node.module != "trainyard")
            bad += [alias.name for alias in node.names if alias.name not in trainyard.__all__]
        if isinstance(node, ast.Import):
            bad += [alias.name for alias in node.names if alias.name.startswith("trainyard.")]
print(bad)
"""
    assert python(code).stdout.strip() == "[]"
