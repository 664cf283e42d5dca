"""Secrets in a config: kept out of everything that is written, and resolved from the environment only at use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.errors import ConfigError

__all__ = ["REDACTED", "hide", "redact", "resolve_environment", "secret_values"]

REDACTED = "<redacted>"
_SHORTEST_SECRET = 4  # replacing shorter ones in a message would hide the message

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = {
    "apikey", "auth", "authorization", "bearer", "credential", "credentials", "passphrase", "passwd", "password",
    "passwords", "pwd", "secret", "secrets",
}  # fmt: skip
_SECRET_KEYS = {
    "access",
    "account",
    "api",
    "auth",
    "encryption",
    "master",
    "private",
    "sas",
    "secret",
    "shared",
    "signing",
    "ssh",
}
# what stands before "token" where text is tokenized, rather than somebody let in
_TEXT_TOKENS = {
    "additional", "audio", "bos", "class", "cls", "dist", "eos", "end", "eot", "extra", "first", "image", "img", "last",
    "mask", "max", "memory", "min", "new", "next", "null", "num", "pad", "padding", "per", "prefix", "prompt", "register",
    "sep", "special", "start", "stop", "text", "total", "unk", "use", "vision",
}  # fmt: skip
_USER_INFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<info>[^/\s]*)@")
_QUERY = re.compile(
    r"(?P<name>[?&;][\w.-]*(?:token|key|secret|signature|sig|password|credential)=)(?P<value>[^&;\s]+)", re.IGNORECASE
)
_ENVIRONMENT = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def is_secret(key: str) -> bool:
    """Whether a config key names a secret: ``api_key``, ``hf_token``, ``dbPassword``; not ``num_tokens``, ``use_cls_token``."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words:
        return False
    if _SECRET_WORDS.intersection(words):
        return True
    *before, last = words
    if last in ("key", "keys"):
        return bool(before) and before[-1] in _SECRET_KEYS
    if last == "token":
        return not _TEXT_TOKENS.intersection(before)
    return last == "tokens" and bool({"access", "api", "auth"}.intersection(before))


def redact(value: Any, key: str = "") -> Any:
    """A copy of a config as it may be written: plain JSON values, without its secrets.

    Strings and numbers under a key that names a secret, and the user-info and secret parameters of URLs, become
    ``<redacted>``. What is written as ``${env:NAME}`` stays: it says where the secret is, not what. Numpy scalars and
    arrays become numbers and lists, paths become strings, and what JSON cannot hold is told by its ``repr``.
    """
    if isinstance(value, Mapping):
        hidden = is_secret(key)
        return {str(k): redact(v, key if hidden and not is_secret(str(k)) else str(k)) for k, v in value.items()}
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy and its like
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if is_secret(key) and value != "" and not (isinstance(value, str) and _ENVIRONMENT.fullmatch(value)):
        return REDACTED
    if isinstance(value, str):
        return _without_url_secrets(str.__str__(value)) if "://" in value else str.__str__(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 64 else str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    return repr(value)


def _without_url_secrets(text: str) -> str:
    references: list[str] = []

    def hold(found: re.Match[str]) -> str:
        references.append(found[0])
        return f"\0{len(references) - 1}\0"

    def hide(part: str) -> str:
        return part if re.fullmatch(r"(\0\d+\0)*", part) else REDACTED

    def hide_user_info(found: re.Match[str]) -> str:
        user, colon, password = found["info"].partition(":")
        if not colon:  # a lone user may itself be a token, unless it is an ordinary login
            return found[0] if user in ("git", "hdfs", "root") else f"{found['scheme']}{hide(user)}@"
        return f"{found['scheme']}{user}:{hide(password)}@"

    text = _ENVIRONMENT.sub(hold, text)
    text = _USER_INFO.sub(hide_user_info, text)
    text = _QUERY.sub(lambda found: found["name"] + hide(found["value"]), text)
    return re.sub(r"\0(\d+)\0", lambda found: references[int(found[1])], text)


def secret_values(value: Any, key: str = "") -> frozenset[str]:
    """The secrets of a config themselves, environment variables included, to keep them out of messages."""
    if isinstance(value, Mapping):
        parts = [secret_values(v, str(k) if is_secret(str(k)) or not is_secret(key) else key) for k, v in value.items()]
        return frozenset().union(*parts)
    if isinstance(value, list | tuple):
        return frozenset().union(*(secret_values(item, key) for item in value))
    if not isinstance(value, str):
        hidden = is_secret(key) and isinstance(value, int | float) and not isinstance(value, bool)
        return frozenset({str(value)}) if hidden and len(str(value)) >= _SHORTEST_SECRET else frozenset()
    found = {os.environ.get(name, "") for name in _ENVIRONMENT.findall(value)}
    if is_secret(key) and not _ENVIRONMENT.search(value):
        found.add(value)
    if "://" in value:
        found |= {info["info"].partition(":")[2] or info["info"] for info in _USER_INFO.finditer(value)}
        found |= {query["value"] for query in _QUERY.finditer(value)}
    return frozenset(secret for secret in found if len(secret) >= _SHORTEST_SECRET)


def hide(text: str, secrets: Iterable[str]) -> str:
    """A message without these strings."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may begin with another
        text = text.replace(secret, REDACTED)
    return text


def resolve_environment(value: Any, where: str = "config") -> Any:
    """A copy with every ``${env:NAME}`` replaced by that environment variable.

    Raises:
        ConfigError: a variable is not set; the message names it and the place.
    """
    if isinstance(value, Mapping):
        return {k: resolve_environment(v, f"{where}.{k}") for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resolve_environment(item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, str) or "${env:" not in value:
        return value

    def lookup(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(
                f"{where}: the environment variable {found[1]} is not set; set it, or write the value instead"
            )
        return os.environ[found[1]]

    return _ENVIRONMENT.sub(lookup, value)
