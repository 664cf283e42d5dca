"""Names as MLflow takes them, and back again."""

from __future__ import annotations

import hashlib
import re

NAME_LIMIT = 250

_LEGAL = re.compile(r"[/\w.\- :]")
_PATH = re.compile(r"[/A-Za-z0-9_.\-+= ~@,()]")
IMAGE_KEY = re.compile(r"[a-zA-Z0-9_\-./ ]")
_ESCAPE = re.compile(r"_x([0-9A-F]{2,6})_")


def escape(name: str) -> str:
    """A name as MLflow takes it; no two names become one.

    >>> escape("loss@1"), escape("a//b"), escape("val/acc")
    ('loss_x40_1', 'a_x2F_/b', 'val/acc')
    """
    return fitting(escaped(name, _LEGAL))


def fitting(name: str) -> str:
    """A legal name cut to what MLflow takes, with a hash of all of it at its end."""
    if len(name) <= NAME_LIMIT:
        return name
    return f"{name[: NAME_LIMIT - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def unescape(name: str) -> str:
    """The original of an escaped name that was not too long.

    >>> unescape("loss_x40_1")
    'loss@1'
    """
    return "" if name == "_x_" else _ESCAPE.sub(lambda match: chr(int(match[1], 16)), name)


def escaped(name: str, legal: re.Pattern[str]) -> str:
    if name in ("", "_x_"):  # the empty name has to be written somehow
        return "_x5F_x_" if name else "_x_"
    marked = {i for i, char in enumerate(name) if legal.fullmatch(char) is None}
    place = 0
    for segment in name.split("/"):  # what a path would resolve to something else
        if segment in (".", "..") or (place == 0 and segment.startswith("..")):
            marked.add(place)
        elif not segment:
            marked.add(place if place < len(name) else place - 1)
        place += len(segment) + 1
    if not marked and "_x" not in name:
        return name
    for match in re.finditer(r"_x[0-9A-F]{2,6}", name):  # what would read as an escape
        if match.end() in marked or name[match.end() : match.end() + 1] == "_":
            marked.add(match.start())
    return "".join(f"_x{ord(char):02X}_" if i in marked else char for i, char in enumerate(name))


def path_name(name: str) -> str:
    """A path of an artifact that no URL and no file system reads otherwise."""
    return escaped(name, _PATH)
