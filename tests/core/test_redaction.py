"""Which parts of a config are secrets, and how they are resolved."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.errors import ConfigError
from trainyard.redaction import REDACTED, redact, resolve_environment

SECRET = [
    "api_key", "apikey", "apiKey", "APIKey", "API_KEY", "OPENAI_API_KEY", "api-key", "api_keys", "hf_token", "HF_TOKEN",
    "hfToken", "token", "access_token", "access_tokens", "auth_token", "dbPassword", "password", "DB_PASSWORD", "passwd",
    "db.pwd", "passphrase", "access_key", "aws_secret_access_key", "AWS_SECRET_ACCESS_KEY", "secret", "client_secret",
    "secretKey", "private_key", "ssh_key", "account_key", "signing_key", "credentials", "authorization", "bearer",
]  # fmt: skip
PUBLIC = [
    "num_tokens", "use_cls_token", "max_tokens", "max_new_tokens", "tokens", "tokenizer", "tokenizer_name", "pad_token",
    "eos_token_id", "sort_key", "key", "keys", "primary_key", "monkey", "author", "authors", "authority", "secretary",
    "compass", "passes", "pwdless", "lr", "loss", "batch_size", "", "keyboard", "n_keys", "num_keys", "keynote",
]  # fmt: skip


@pytest.mark.parametrize("key", SECRET)
def test_secret_names_are_redacted(key):
    """Strings, numbers and bytes under the name of a secret are never written, nested or in lists either."""
    for value in ("s3cr3t", 12345, 1.5, b"raw"):
        assert redact({key: value}) == {key: REDACTED}
    assert redact({"outer": [{key: ["s3cr3t", {"value": "s3cr3t"}]}]}) == {
        "outer": [{key: [REDACTED, {"value": REDACTED}]}]
    }


@pytest.mark.parametrize("key", PUBLIC)
def test_other_names_are_kept(key):
    """Names that only look like secrets keep their values."""
    for value in ("word", 12345, 1.5, [1, "x"], {"a": 1}):
        assert redact({key: value}) == {key: value}


def test_what_tells_nothing_stays_under_a_secret_name():
    """None, bools and empty strings say only whether there is a secret."""
    config = {"token": None, "password": "", "use_auth": True, "secret": False}
    assert redact(config) == config


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("https://me:pw@host/x", "https://me:<redacted>@host/x"),
        ("postgresql+psycopg2://u:p%40ss@db:5432/x?a=1", "postgresql+psycopg2://u:<redacted>@db:5432/x?a=1"),
        ("postgresql://u:p@ss@db/x", "postgresql://u:<redacted>@db/x"),
        ("https://:pw@host", "https://:<redacted>@host"),
        ("https://ghp_abcdef@github.com/o/r", "https://<redacted>@github.com/o/r"),
        ("git+https://oauth2:tok@gitlab.com/r", "git+https://oauth2:<redacted>@gitlab.com/r"),
        ("see https://me:pw@host and ftp://a:b@c", "see https://me:<redacted>@host and ftp://a:<redacted>@c"),
        ("https://h/x?token=abc&n=1", "https://h/x?token=<redacted>&n=1"),
        ("https://h/x?n=1&api_key=abc", "https://h/x?n=1&api_key=<redacted>"),
        ("https://h/x?sig=abc%3D&se=2026", "https://h/x?sig=<redacted>&se=2026"),
        ("https://h/x?X-Amz-Signature=abc", "https://h/x?X-Amz-Signature=<redacted>"),
    ],
)
def test_secrets_in_urls_are_redacted(url, written):
    """User-info and secret parameters are hidden wherever the URL stands, the rest stays readable."""
    assert redact({"tracking_uri": url, "list": [url]}).get("list") == [written]


@pytest.mark.parametrize(
    "text",
    [
        "ssh://git@github.com/o/r", "https://host/a@b", "s3://bucket/key=1", "https://h/x?n=1&m=2", "sqlite:///mlflow.db",
        "me@example.org", "a:b@c", "https://h/x?page=1&max_tokens=5", "token=abc is how it is written",
    ],
)  # fmt: skip
def test_urls_without_secrets_are_kept(text):
    """Nothing is hidden where there is nothing to hide."""
    assert redact({"where": text}) == {"where": text}


@pytest.mark.parametrize(
    "config",
    [
        {"api_key": "${env:KEY}"},
        {"uri": "https://me:${env:PASSWORD}@host"},
        {"uri": "https://${env:TOKEN}@host"},
        {"uri": "https://${env:USER}:${env:PASSWORD}@host"},
        {"uri": "https://host?token=${env:TOKEN}&n=1"},
        {"plain": "${env:HOME}/x"},
        {"headers": {"password": ["${env:A}", "${env:B}"]}},
    ],
    ids=lambda config: str(next(iter(config.values()))),
)
def test_references_to_the_environment_stay(config):
    """What says where a secret is, and not what it is, is written as it was given."""
    assert redact(config) == config


def test_the_given_config_is_not_changed():
    """Redaction makes a copy of plain JSON values."""
    config = {"a": {"token": "x"}, "b": ({"password": "y"},), "c": Path("data"), 7: {"secret": "z"}, "d": {1}}
    before = copy.copy(config)
    out = redact(config)
    assert config == before
    assert config["a"] == {"token": "x"}
    assert out == {
        "a": {"token": REDACTED},
        "b": [{"password": REDACTED}],
        "c": "data",
        "7": {"secret": REDACTED},
        "d": "{1}",
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("abc:/@?=&${}", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SECRET + PUBLIC), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(SECRET + PUBLIC), VALUES, max_size=4))
@settings(max_examples=150, deadline=None)
def test_redacting_twice_changes_nothing_more(config):
    """What is redacted stays as it is when it is read and written again."""
    once = redact(config)
    assert redact(once) == once


def test_the_environment_is_resolved_everywhere(monkeypatch):
    """Every reference, in lists and inside of longer strings, is replaced; other values are kept."""
    monkeypatch.setenv("TY_HOST", "db")
    monkeypatch.setenv("TY_EMPTY", "")
    config = {"uri": "http://${env:TY_HOST}:${env:TY_EMPTY}1/${env:TY_HOST}", "l": ["${env:TY_HOST}", 3], "n": None}
    assert resolve_environment(config) == {"uri": "http://db:1/db", "l": ["db", 3], "n": None}


def test_a_missing_variable_is_named_with_its_place(monkeypatch):
    """An unset variable is a ConfigError that names it and where it stands."""
    monkeypatch.delenv("TY_NOWHERE", raising=False)
    with pytest.raises(ConfigError, match=r"config\.trackers\[1\]\.key: .*TY_NOWHERE is not set"):
        resolve_environment({"trackers": ["x", {"key": "${env:TY_NOWHERE}"}]})


@pytest.mark.parametrize("text", ["$env:X", "${env:}", "${ENV:X}", "${env:1X}", "${X}", "env:X"])
def test_what_is_no_reference_is_kept(text):
    """Only the exact form is a reference."""
    assert resolve_environment({"a": text}) == {"a": text}
