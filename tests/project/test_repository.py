"""The repository speaks of the project alone, and its examples do what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trainyard as ty

ROOT = Path(__file__).parents[2]


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name]


def test_no_machine_paths_and_no_registries():
    """No file names a path of one machine or the host of a package registry."""
    wrong = re.compile(r"(?<![\w.])/(?:work|farm|root|home)/|files\.pythonhosted|registry\.npmjs|index-url|//pypi\.org")
    for path in tracked_files():
        if path != Path(__file__) and path.suffix not in {".png", ".ico"}:
            found = wrong.search(path.read_text(errors="replace"))
            assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


def test_constraints_name_versions_only():
    """constraints.txt pins by plain name and version."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[\w.+!]+", line), line


def test_the_wheel_holds_core_and_plugins(tmp_path):
    """One wheel brings both packages, typed, with the entry points, and nothing else."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("trainyard-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert {"trainyard", "trainyard_plugins"} == {name.split("/")[0] for name in names if ".dist-info" not in name}
    for name in (
        "trainyard/py.typed",
        "trainyard/cli/main.py",
        "trainyard_plugins/py.typed",
        "trainyard_plugins/stores/file.py",
    ):
        assert name in names
    assert "csv = trainyard_plugins.trackers.csv:CsvTracker" in points
    assert "trainyard = trainyard.cli.main:main" in points


@pytest.mark.parametrize("style", ["class", "function"])
def test_digits_learn(style, tmp_path, monkeypatch):
    """The example ends with a validation accuracy above 0.9."""
    result = digits(style, tmp_path, monkeypatch)
    assert result.metrics["accuracy"] > 0.9
    assert result.checkpoint.iteration == 30


def test_both_styles_end_at_the_same_result(tmp_path, monkeypatch):
    """For one seed, class and function come to the same loss in every epoch."""
    curves = [[r["loss"] for r in digits(style, tmp_path, monkeypatch).history()] for style in ("class", "function")]
    assert curves[0] == curves[1]


def digits(style, storage, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    trainable = {"class": "digits.py:Digits", "function": "digits_function.py:train"}[style]
    return ty.run(
        f"{ROOT}/docs/examples/{trainable}",
        {"lr": 0.1, "hidden": 64, "batch": 32, "seed": 0},
        stop={"training_iteration": 30},
        storage=storage,
        checkpoint={"keep": 1},
    )
