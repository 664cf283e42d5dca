"""Writes the generated parts of the reference: config keys, commands and hooks, from the code that defines them.

`python docs/generate.py` rewrites the pages; a test fails when they are out of date.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from trainyard.cli.main import cli
from trainyard.config import FailurePolicy, RunConfig
from trainyard.hookspecs import Hooks
from trainyard.plugins import HOOK_NAMES, load_class, options_of
from trainyard.storage import CheckpointPolicy

REFERENCE = Path(__file__).parent / "reference"


def attributes(kind: type) -> dict[str, str]:
    """The attributes that a class docstring tells of, name to text."""
    return entries(inspect.getdoc(kind).partition("Attributes:\n")[2])


def entries(section: str) -> dict[str, str]:
    """A section of a docstring: name to text."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + section.rstrip())[1:]:
        names, _, text = entry.strip().partition(": ")
        for name in names.split(", "):
            found[name] = " ".join(text.split()).replace("``", "`")
    return found


def config() -> str:
    """The tables of the config keys."""
    out = []
    for heading, kind in (
        ("Keys of a run", RunConfig),
        ("Keys of `checkpoint`", CheckpointPolicy),
        ("Keys of `failures`", FailurePolicy),
    ):
        out += [f"## {heading}", "", "| key | default | meaning |", "|---|---|---|"]
        told = attributes(kind)
        for field in msgspec.structs.fields(kind):
            out.append(f"| `{field.name}` | {default(field)} | {told[field.name].replace('|', '/')} |")
        out.append("")
    return "\n".join(out)


def default(field: msgspec.structs.FieldInfo) -> str:
    """A field's default, as YAML says it."""
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "see below"
    if value is None or value == {}:
        return "-"
    text = str(list(value) if isinstance(value, tuple) else value)
    return f"`{text.lower() if isinstance(value, bool) else text}`"


def commands() -> str:
    """The help of every command."""
    out = []

    def tell(command: click.Command, path: str) -> None:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                tell(command.get_command(click.Context(command), name), f"{path} {name}")
            return
        parent = click.Context(cli, info_name=path.rpartition(" ")[0], **cli.context_settings)
        with click.Context(command, parent=parent, info_name=path.rpartition(" ")[2]) as context:
            context.terminal_width = context.max_content_width = 100
            out.extend([f"## `{path}`", "", "```text", command.get_help(context), "```", ""])

    tell(cli, "trainyard")
    return "\n".join(out)


def hooks() -> str:
    """The introduction and every hook, from the docstrings of hookspecs.py."""
    module = importlib.import_module("trainyard.hookspecs")
    source = inspect.getsource(Hooks)
    out = [markdown(inspect.getdoc(module).partition("\n\n")[2]), ""]
    for name in HOOK_NAMES:
        member = getattr(Hooks, name)
        before = source[: source.index(f"def {name}(")]
        section = re.findall(r"# ---- (.*?) -+\n", before)[-1]
        if f"## {section.capitalize()}" not in out:
            out += [f"## {section.capitalize()}", ""]
        arguments = [argument for argument in inspect.signature(member).parameters if argument != "self"]
        out += [f"### `{name}({', '.join(arguments)})`", "", markdown(inspect.getdoc(member)), ""]
    return "\n".join(out)


def trackers() -> str:
    """Each bundled tracker: what its module and class say, its options, and what it promises."""
    out = []
    for name in ("json", "csv", "tensorboard", "mlflow"):
        kind = load_class(name)
        told = inspect.getdoc(importlib.import_module(kind.__module__))
        out += [f"## `{name}`", "", markdown(told), ""]
        about, _, arguments = inspect.getdoc(kind).partition("Args:\n")
        options = options_of(kind)
        if options:
            out += [markdown(about), "", "| option | default | meaning |", "|---|---|---|"]
            known = entries(arguments)
            for option, parameter in options.items():
                value = "-" if parameter.default is None else f"`{parameter.default}`"
                out.append(f"| `{option}` | {value} | {known[option].replace('|', '/')} |")
            out.append("")
        out += [f"**Promises**: {kind.guarantee}", ""]
    return "\n".join(out)


def markdown(text: str) -> str:
    """A docstring in Markdown: sections in bold, arguments as lists, examples fenced."""
    text = re.sub(r":\w+:`+[~.]?([\w.]+)`+", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    out: list[str] = []
    lines = [*text.splitlines(), ""]
    for number, line in enumerate(lines):
        if out and out[-1] == "CODE":
            continue
        if line.endswith("::"):
            code = inspect.cleandoc("\n".join(lines[number + 1 :]))
            out += [f"**{line.rstrip(':')}**", "", "```python", code, "```", "CODE"]  # an example comes last
        elif line and not line.startswith(" ") and lines[number + 1].startswith("    "):
            out += [f"**{line.rstrip(':')}**", ""]
        elif entry := re.fullmatch(r"    (\w+(?:, \w+)*): (.*)", line):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            out.append(re.sub(r"^ +", "  " if line.startswith("     ") else "", line))
    return "\n".join(line for line in out if line != "CODE").strip()


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "config": ("config.md", config),
    "commands": ("commands.md", commands),
    "hooks": ("hooks.md", hooks),
    "trackers": ("trackers.md", trackers),
}


def page(name: str) -> tuple[Path, str]:
    """A page's path, and its text with the generated part as it should be."""
    file, make = PARTS[name]
    path = REFERENCE / file
    head, rest = path.read_text().split(f"<!-- generated: {name} -->", 1)
    tail = rest.split("<!-- end -->", 1)[1]
    return path, f"{head}<!-- generated: {name} -->\n{make().strip()}\n<!-- end -->{tail}"


if __name__ == "__main__":
    for part in PARTS:
        where, text = page(part)
        where.write_text(text)
        print("wrote", where.relative_to(REFERENCE.parent.parent))
