"""Sending a command to a Ray cluster as a job. Whoever reaches the cluster can read it: nothing secret goes in."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from cluster.ray_jobs import COMMAND_KEY, STOP_VARIABLE, RayCluster, taken
from cluster.source_archive import SourceArchive
from procap.errors import UsageError
from shards.urls import is_url, local_path, scheme, shown

RAY_SETTINGS = {
    # How long a job that is asked to stop may take to save its state; Ray's own patience is 3 s.
    STOP_VARIABLE: "60",
    # What the command itself sets for its workers is no conflict with what was sent along.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_SECRET_NAME = re.compile(
    r"SECRET|PASSW|CREDENTIAL|SIGNATURE|CONNECTION_?STRING|(TOKEN|KEY|PASS|AUTH)S?($|_)|(^|_)(SIG|PWD|DSN|PAT)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(?P<what>AccountKey|SharedAccessKey|SharedAccessSignature|password|passwd|(?<![a-z])pwd)\s*=\s*[^\s;]"
    r"|Authorization\s*[:=]\s*\S|\bBearer(\s|%20)+\S",
    re.IGNORECASE,
)
"""In connection strings and headers, which are no URLs."""


@dataclass(frozen=True)
class Submission:
    """A job as it will be sent."""

    name: str
    entrypoint: str
    environment: dict[str, str]
    metadata: dict[str, str]
    parcel: SourceArchive = field(repr=False)

    def send(self, cluster: RayCluster) -> str:
        """Give the job to `cluster`. Raises UserError where it has one of that name."""
        there = cluster.find(self.name)
        if there is not None:
            raise UsageError(taken(self.name, there.status, cluster.flag))
        runtime_env: dict[str, Any] = {"env_vars": self.environment}
        with tempfile.TemporaryDirectory(prefix="procap-") as folder:
            if self.parcel.files:
                archive = Path(folder) / "parcel.zip"
                self.parcel.write(archive)
                runtime_env["working_dir"] = str(archive)
            return cluster.submit(
                entrypoint=self.entrypoint,
                submission_id=self.name,
                runtime_env=runtime_env,
                metadata=self.metadata,
            )


def submission(
    words: Sequence[str],
    module: str,
    parcel: SourceArchive,
    *,
    name: str,
    environment: Mapping[str, str],
    facts: dict[str, str],
) -> Submission:
    """The job that runs Python's `module` with `words`. Raises UsageError for a wrong name and secrets in `words`."""
    for word in words:
        if secret := secret_part(word):
            raise UsageError(f"{secret} in the command would be readable in the job's log and description; {MEND}")
    if name and not _NAME.fullmatch(name):
        raise UsageError(f"--name '{name}': letters, digits and . _ - are possible, 80 at most, as in bench-1")
    command = shlex.join(["procap", *words])
    return Submission(
        name=name or _made_up(words),
        # `exec`: signals and the exit code are those of the command, not of a shell around it.
        entrypoint=f"exec python -m {module} {shlex.join(words)}",
        environment={**RAY_SETTINGS, **environment},
        metadata={COMMAND_KEY: command, **facts},
        parcel=parcel,
    )


MEND = "set it on the nodes: in the shell of `ray start`, in a file its library reads, or as a Kubernetes secret"


def travelling(asked: Sequence[str], tell: Callable[[str], None]) -> dict[str, str]:
    """The variables of this environment that the job gets: a few harmless ones, and those `asked` for as KEY[=VALUE].

    tell: gets a line for each of the few that is set here and means nothing there. Raises UsageError for what looks
    like a secret.
    """
    sent: dict[str, str] = {}
    for name, use in _HARMLESS.items():
        value = os.environ.get(name, "")
        if value and (why := use(value)):
            tell(f"{name} is not sent: {why}")
        elif value:
            sent[name] = value
    for text in asked:
        name, given, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env '{name}' is no name of a variable; --env KEY or --env KEY=VALUE would work")
        if _SECRET_NAME.search(name):
            raise UsageError(f"--env {name} looks like a secret, and a job's environment is readable by all; {MEND}")
        value = value if given else os.environ.get(name, "")
        if not value and not given:
            raise UsageError(f"--env {name}: it is not set here; --env {name}=VALUE would work")
        if secret := secret_part(value):
            raise UsageError(f"--env {name} holds {secret}, and a job's environment is readable by all; {MEND}")
        sent[name] = value
    return sent


def secret_part(text: str) -> str:
    """What is secret in a word of a command or a value, without telling it: a phrase, "" where there is nothing."""
    for found in re.finditer(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,;]+", text):
        url = found[0]
        try:
            parts = urlsplit(url)
            if parts.password or (parts.username and parts.scheme in ("http", "https")):
                return f"the password of {shown(url)}"
            if any(_SECRET_NAME.search(key) for key, _ in parse_qsl(parts.query)):
                return f"the signature or password of {shown(url)}"
        except ValueError:
            return f"an unreadable {scheme(url)}:// URL"
    if value := _SECRET_VALUE.search(text):
        return f"the {value['what']} of a connection" if value["what"] else "the key of a header"
    return ""


def only_here(place: str) -> str:
    """Why the nodes of a cluster cannot mean the same place by this name as this machine, "" where they may."""
    if is_url(place):
        named = local_path(place)
        return "" if named is None or named.is_absolute() else "it is relative to a folder of this machine"
    if place.startswith("~"):
        return "it is relative to a home folder"
    return "" if PurePosixPath(place).is_absolute() else "it is relative to a folder of this machine"


def _tracking_only_here(uri: str) -> str:
    if scheme(uri).partition("+")[0] not in ("http", "https", "postgresql", "mysql"):
        return "it is a place on this machine; name one for all nodes with --tracking"
    host = urlsplit(uri).hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return "it names this machine's own address; name a server that the nodes reach with --tracking"
    return "it holds a password; set it on the nodes" if secret_part(uri) else ""


def _place_only_here(place: str) -> str:
    return only_here(place) or ("it holds a password; set it on the nodes" if secret_part(place) else "")


def _no_reason(value: str) -> str:
    return "it holds a password" if secret_part(value) else ""


_HARMLESS: dict[str, Callable[[str], str]] = {
    "PROCAP_DATA": _place_only_here,
    "MLFLOW_TRACKING_URI": _tracking_only_here,
    "MLFLOW_EXPERIMENT_NAME": _no_reason,
    "HF_HUB_OFFLINE": _no_reason,
}


def _made_up(words: Sequence[str]) -> str:
    """An id that says what and when, in order of time."""
    what = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", word) for word in words[:2] if not word.startswith("-")).strip("-")
    return f"{what[:40] or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
