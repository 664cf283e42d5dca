"""Secrets in a config: kept out of everything that is written, and resolved from the environment only at use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from trainyard.errors import ConfigError

__all__ = ["REDACTED", "redact", "resolve_environment"]

REDACTED = "<redacted>"

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
_USER_INFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)(?P<user>[^/@\s:]*)(?P<password>:[^/@\s]*)?@")
_QUERY = re.compile(
    r"(?P<name>[?&;][\w.-]*(?:token|key|secret|signature|sig|password|credential)=)[^&;\s]+", re.IGNORECASE
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
    if last == "key":
        return bool(before) and before[-1] in _SECRET_KEYS
    if last == "token":
        return not _TEXT_TOKENS.intersection(before)
    return last == "tokens" and bool({"access", "api", "auth"}.intersection(before))


def redact(value: Any, key: str = "") -> Any:
    """A copy of a config without its secrets.

    Strings and numbers under a key that names a secret, and the user-info and secret parameters of URLs, become
    ``<redacted>``. What is written as ``${env:NAME}`` stays: it says where the secret is, not what.
    """
    if isinstance(value, Mapping):
        hidden = is_secret(key)
        return {k: redact(v, key if hidden and not is_secret(str(k)) else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        if value and is_secret(key):
            return value if _ENVIRONMENT.fullmatch(value) else REDACTED
        if "://" in value:
            value = _USER_INFO.sub(_hide_user_info, value)
            value = _QUERY.sub(rf"\g<name>{REDACTED}", value)
        return value
    return REDACTED if is_secret(key) and isinstance(value, int | float | bytes) else value


def _hide_user_info(found: re.Match[str]) -> str:
    # user:password@ hides the password; a lone user@ may itself be a token, unless it is an ordinary login
    user, password = found["user"], found["password"]
    if password is None:
        return f"{found['scheme']}{user}@" if user in ("git", "hdfs", "root") else f"{found['scheme']}{REDACTED}@"
    if _ENVIRONMENT.fullmatch(password[1:]):
        return found[0]
    return f"{found['scheme']}{user}:{REDACTED}@"


def resolve_environment(value: Any, where: str = "config") -> Any:
    """A copy with every ``${env:NAME}`` replaced by that environment variable.

    Raises:
        ConfigError: a variable is not set; the message names it and the place.
    """
    if isinstance(value, Mapping):
        return {k: resolve_environment(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [resolve_environment(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, str) or "${env:" not in value:
        return value

    def lookup(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(
                f"{where}: the environment variable {found[1]} is not set; set it, or write the value instead"
            )
        return os.environ[found[1]]

    return _ENVIRONMENT.sub(lookup, value)
