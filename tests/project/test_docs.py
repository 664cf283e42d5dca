"""The documentation does what it says: every code block is run, and the generated pages are up to date."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trainyard as ty
from trainyard.config import parse_config
from trainyard.plugins import HOOK_NAMES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Page:
    """Runs the blocks of one page, in order, in a directory of its own."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.names = {"__name__": "__docs__", "hookimpl": ty.hookimpl}

    def run(self, language: str, options: dict[str, str], text: str) -> None:
        title = options.get("title")
        if title:
            (self.directory / title).write_text(text)
        if language == "python" and not title:
            exec(compile(text, "docs", "exec"), self.names)
        elif language == "yaml":
            data = yaml.safe_load(text)
            data["config"] = {k: v for k, v in data.get("config", {}).items() if "env:" not in str(v)}
            parse_config(data)
        elif language == "toml":
            assert "entry-points" in tomllib.loads(text)["project"]
        elif language == "console":
            self.type(text, int(options.get("exit", 0)))
        else:
            assert language in ("text", "python"), f"a block of {language or 'no language'} that nobody runs"

    def type(self, text: str, code: int) -> None:
        """Type each line that begins with a dollar; what stands below it is part of what is to be seen."""
        for command, seen in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
            command = command.partition("  # ")[0].split(" #")[0]
            if command.startswith("make "):
                command = (
                    f"make --no-print-directory -n -C '{ROOT}' {command.removeprefix('make ')}"  # not a test in a test
                )
            elif command.startswith("pip install"):
                extra = re.search(r"\[(\w+)\]", command)[1]
                assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                continue
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=self.directory,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=60,
            )
            shown = done.stdout + done.stderr
            assert (command, code) == (command, done.returncode), shown
            assert seen.strip() in shown


def blocks(page: Path):
    for found in BLOCK.finditer(page.read_text()):
        options = dict(re.findall(r'(\w+)="?([^"\s]+)"?', found["options"]))
        yield found["language"], options, found["text"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
@pytest.mark.filterwarnings("ignore")  # those of the libraries that a page uses are not ours
def test_every_block_runs(page, tmp_path, monkeypatch):
    """A reader who types what a page says sees what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    before = set(sys.modules)
    try:
        runner = Page(tmp_path)
        for language, options, text in blocks(page):
            runner.run(language, options, text)
    finally:
        for name in set(sys.modules) - before:
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("part", ["config", "commands", "hooks", "trackers"])
def test_generated_reference_is_up_to_date(part):
    """The reference is what `python docs/generate.py` writes."""
    path, text = generator().page(part)
    assert text == path.read_text(), "run: python docs/generate.py"


def test_every_hook_is_documented():
    """Each hook has its heading in the reference."""
    text = (ROOT / "docs" / "reference" / "hooks.md").read_text()
    assert list(HOOK_NAMES) == re.findall(r"^### `(\w+)\(", text, re.MULTILINE)


def test_links_lead_somewhere():
    """Every relative link and image of every page names a file."""
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
