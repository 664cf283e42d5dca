"""``trainyard plugins``: what is installed."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.markup import escape

from trainyard import plugins as registry
from trainyard.cli.tables import console, table
from trainyard.errors import TrainyardError


@click.command()
@click.option("--check", is_flag=True, help="Import each one, and show its kind, hooks and options.")
@click.option("--json", "as_json", is_flag=True, help="A JSON array, for scripts.")
def plugins(check: bool, as_json: bool) -> int:
    """List the installed plugins. Without --check nothing of them is imported.

    Exits with 1 if --check finds a broken one.
    """
    rows = [_describe(plugin, check) for plugin in registry.installed()]
    broken = any(row["status"] not in ("installed", "ok") for row in rows)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return int(broken)
    columns = ["name", "package", "version", "class"]
    columns += ["kind", "hooks", "options", "status"] if check else []
    out = table(*columns)
    for row in rows:
        cells = [row["name"], row["package"], row["version"], row["class"]]
        if check:
            cells += [row["kind"], ", ".join(row["hooks"]), ", ".join(row["options"]) or "-"]
        styled = [escape(cell) for cell in cells]
        if check:
            styled.append("[green]ok[/]" if row["status"] == "ok" else f"[red]{escape(row['status'])}[/]")
        out.add_row(*styled)
    console().print(out)
    return int(broken)


def _describe(plugin: registry.Installed, check: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": plugin.name,
        "package": plugin.package,
        "version": plugin.version,
        "class": plugin.module,
        "status": "installed",
    }
    if not check:
        return row
    row |= {"kind": "", "hooks": [], "options": [], "status": "ok"}
    try:
        loaded = registry.load_class(plugin.name)
    except TrainyardError as error:
        row["status"] = str(error)
        return row
    hooks = registry.hooks_of(loaded)
    row["status"] = registry.wrong_hook(loaded) or "ok"
    row["kind"], row["hooks"] = registry.kind_of(hooks), hooks
    row["options"] = [str(parameter) for parameter in registry.options_of(loaded).values()]
    return row
