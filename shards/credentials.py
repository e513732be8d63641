"""Find credentials in text and mask them: what is printed, logged or sent to MLflow passes through `mask`."""

from __future__ import annotations

import os
import re

MASK = "***"
MIN_LENGTH = 8
"""Shortest value of an environment variable that is searched in texts: shorter ones are also words."""
SECRET_NAME = re.compile(
    r"SECRET|PASSW|CREDENTIAL|SIGNATURE|CONNECTION_?STRING|(TOKEN|KEY|PASS|AUTH)S?($|_)|(^|_)(SIG|PWD|DSN|PAT)$",
    re.IGNORECASE,
)
"""Matches environment variables and parameters of URLs whose values are secret."""

# In other text `key = lambda` and `deep_tokens=independent` are no credentials: require a qualifier such as API_.
_ASSIGNED_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|CONNECTION_?STRING|SIGNATURE\b|(\b|_)(PWD|DSN)\b"
    r"|(API|ACCESS|ACCOUNT|PRIVATE|AUTH|SESSION|REFRESH|CLIENT|SAS|HF|GITHUB|GITLAB|AWS|AZURE|RAY|MLFLOW)[_-]?(KEY|TOKEN)",
    re.IGNORECASE,
)
_PASSWORD = re.compile("SECRET|PASSW|PWD", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[\d.]+(?:e-?\d+)?", re.IGNORECASE)
_OPTION = re.compile(r"(?:^|[=.])(?:token|key|pass|auth|pat)=(?!(?:[\d.+-]+|true|false|null)$)\S", re.IGNORECASE)
_USER = re.compile(
    r"(?<=://)[^/\s:@\[]{0,200}:(?!\d{1,5}[/?#])[^\s@\"']{1,500}@(?:[^/\s@\"']{1,500}@)?"
    r"|(?:(?<=http://)|(?<=https://))[^/\s@\"']{1,500}@"
)
_PARAMETER = re.compile(r"(?<=[?&])([^=&\s?]{1,100})=[^&\s'\"#<>]+")
_ASSIGNMENT = re.compile(
    r"(?<![\w-])([A-Za-z_][\w-]{1,80})([\"']?\s{0,3}[:=]\s{0,3}[\"']?)"
    r"(?!(?:true|false|null|none)\b|os\.|getenv|getpass|\*\*\*)([^\s\"',;&<>{}\[\]()$]+)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"((?:Authorization[\"']?\s*[:=]\s*[\"']?(?:Basic |Token |Digest )?)|\bBearer(?:\s|%20)+)(?!Bearer)[^\s\"']+",
    re.IGNORECASE,
)
_SHAPE = re.compile(
    r"\b(?:gh[opsur]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z]{20,}|glpat-[\w-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|sk-[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|$)"
)
"""Matches tokens by the prefixes that their services give them, and private keys in PEM."""


def mask(text: str) -> str:
    """Leave out users and passwords of URLs, and replace other credentials by `***`.

    Values of environment variables that look like credentials by their names are replaced wherever they are.
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_LENGTH and value in text and SECRET_NAME.search(name) and not value.startswith("/"):
            text = text.replace(value, MASK)
    text = _HEADER.sub(rf"\g<1>{MASK}", _SHAPE.sub(MASK, _USER.sub("", text)))
    text = _PARAMETER.sub(lambda found: f"{found[1]}={MASK}" if SECRET_NAME.search(found[1]) else found[0], text)
    # Most text has no such name, and a long table is searched several times as fast for names alone.
    return _mask_assignments(text) if _ASSIGNED_NAME.search(text) else text


def has_secret(text: str) -> bool:
    """Whether `text` contains a credential."""
    return mask(text) != text


def is_secret_option(text: str) -> bool:
    """Whether `name=value`, an option of a method or a word of a command, looks like a credential."""
    return bool(_OPTION.search(text)) or has_secret(text)


def _mask_assignments(text: str) -> str:
    masked, position = "", 0
    while found := _ASSIGNMENT.search(text, position):
        name, value = found[1], found[3]
        # A number may be a count of tokens or keys.
        is_count = _NUMBER.fullmatch(value) and not _PASSWORD.search(name)
        is_secret = _ASSIGNED_NAME.search(name) and not is_count
        masked += text[position : found.start(3)] + (MASK if is_secret else "")
        # The text behind another name may be an assignment itself, as in `error: api_key=...`.
        position = found.end() if is_secret else found.start(3)
    return masked + text[position:]
