"""The ``trainyard`` command: finds the verb, and turns mistakes into one line and an exit code.

Exit codes: 0; 1, the run failed; 2, a mistake of the user's; 130, interrupted; 143, preempted.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys

import click

from trainyard.errors import TrainyardError, unknown
from trainyard.version import __version__

_VERBS = {
    "run": "running",
    "resume": "running",
    "runs": "looking",
    "show": "looking",
    "sync": "syncing",
    "replay": "syncing",
    "doctor": "doctor",
    "checkpoints": "checkpoints",
    "plugins": "plugins",
}


class _LazyGroup(click.Group):
    """Imports a verb's file only when that verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command = getattr(importlib.import_module(f"trainyard.cli.{_VERBS[name]}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _VERBS:
            raise click.UsageError(unknown("command", args[0], _VERBS, label="commands"), ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trainyard", message="%(prog)s %(version)s")
def cli() -> None:
    """Run training, and never lose what it found out."""


class _StderrHandler(logging.Handler):
    """Writes to what is standard error at that moment: the live line and the copies of ``log_to_file`` stand in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            print(self.format(record), file=sys.stderr)


def main() -> None:
    """The entry point of the console script."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, handlers=[_StderrHandler()])
    sys.exit(call(sys.argv[1:]))


def call(arguments: list[str]) -> int:
    """Run one command line. Returns its exit code."""
    try:
        code = cli.main(arguments, prog_name="trainyard", standalone_mode=False)
        sys.stdout.flush()
    except TrainyardError as error:
        click.echo(f"error: {error}", err=True)
        return 2
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
