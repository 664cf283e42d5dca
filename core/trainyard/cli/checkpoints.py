"""``trainyard checkpoints``: list and verify."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.markup import escape

from trainyard.checkpoint import MANIFEST_NAME, Checkpoint
from trainyard.cli.tables import ago, console, metrics_line, size, table
from trainyard.errors import CheckpointError
from trainyard.rundir import open_run
from trainyard.values import strict_json


@click.group()
def checkpoints() -> None:
    """List and verify the checkpoints of a run."""


_storage_option = click.option("--storage", help="Where to look for the run.  [default: TRAINYARD_STORAGE or ./runs]")


@checkpoints.command()
@click.argument("run")
@_storage_option
@click.option("--json", "as_json", is_flag=True, help="A JSON array, for scripts.")
def ls(run: str, storage: str | None, as_json: bool) -> None:
    """List the checkpoints of a run."""
    found = open_run(run, storage).checkpoints
    if as_json:
        rows = [{"path": checkpoint.path, **msgspec.to_builtins(checkpoint.manifest)} for checkpoint in found]
        click.echo(msgspec.json.format(strict_json(rows)).decode())
        return
    if not found:
        console().print("this run has no checkpoints")
        return
    out = table("checkpoint", ">iteration", ">size", ">files", "saved", "pickled", "metrics")
    for checkpoint in found:
        manifest = checkpoint.manifest
        out.add_row(
            Path(checkpoint.path).name,
            str(manifest.iteration),
            size(checkpoint.size),
            str(len(manifest.files)),
            ago(manifest.created),
            escape(", ".join(manifest.pickled)) or "-",
            escape(metrics_line(manifest.metrics)),
        )
    console().print(out)


@checkpoints.command()
@click.argument("place", metavar="RUN|CHECKPOINT")
@_storage_option
def verify(place: str, storage: str | None) -> int:
    """Read every file of a checkpoint, or of all of a run's, and compare it with the manifest.

    Exits with 1 if one is damaged.
    """
    single = (Path(place) / MANIFEST_NAME).exists()
    found = [Checkpoint(place)] if single else open_run(place, storage).checkpoints
    damaged = 0
    out = table("checkpoint", ">size", "verdict")
    for checkpoint in found:
        try:
            checkpoint.verify()
            out.add_row(Path(checkpoint.path).name, size(checkpoint.size), "[green]good[/]")
        except CheckpointError as error:
            damaged += 1
            out.add_row(Path(checkpoint.path).name, "", f"[red]{escape(str(error))}[/]")
    if found:
        console().print(out)
    else:
        console().print("this run has no checkpoints")
    return 1 if damaged else 0
