"""Submit a command to a Ray cluster as a job and follow its log: a thin wrapper on Ray's `JobSubmissionClient`.

Every user of the cluster can read a job's command, environment and files, so secrets are
rejected here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from cluster.address import Dashboard, settle_auth
from procap.errors import UsageError, UserError
from runner.environment import SOURCE_VARIABLE, library_defaults, source_state
from shards.urls import is_url, redact

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

MODULE = "benchmarks.cli"
STOPPED_EXIT = 143
"""Exit code of a stopped job, for which Ray keeps none: 128 + SIGTERM."""
STARTUP_SECONDS = 60.0
"""How long a head node that has just started may refuse jobs."""
RETRY_SECONDS = 600.0
"""How long an unreachable cluster is polled for the log of a job."""
RAY_SETTINGS = {
    # From the request to stop to SIGKILL, so that runs can save their state; Ray's default is 3 s.
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
    # The command passes its own env_vars to `ray.init`; without this Ray rejects those that the job sets too.
    "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
}
EXCLUDES = (
    *(".git", ".venv", "venv", "__pycache__", "*.egg-info", ".*_cache", "/tests", "/docs", "/results", "/mlruns"),
    *(".env", ".env.*", ".netrc", ".aws", ".ssh", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*"),
    *("credentials*", "*secret*", "*token.txt", "kubeconfig*"),
)
"""Files that are never packed, in the syntax of .gitignore; Ray also reads .gitignore and .rayignore."""
MEND = "set it on the nodes: in the shell of `ray start`, in a file its library reads, or as a Kubernetes secret"
STORAGE_FLAGS = ("--data", "--results")
NEEDS_RESULTS = ("train", "eval", "bench")

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_SECRET_NAME = re.compile(
    r"SECRET|PASSW|CREDENTIAL|SIGNATURE|CONNECTION_?STRING|(TOKEN|KEY|PASS|AUTH)S?($|_)|(^|_)(SIG|PWD|DSN|PAT)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"(?P<what>AccountKey|SharedAccessKey|SharedAccessSignature|password|passwd|(?<![a-z])pwd)\s*=\s*[^\s;]"
    r"|Authorization\s*[:=]\s*\S|\bBearer(\s|%20)+\S",
    re.IGNORECASE,
)
"""Matches credentials in connection strings and headers."""


def find_secret(text: str) -> str:
    """Describe the credential that `text` contains, without repeating it; empty if there is none."""
    for found in re.finditer(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,;]+", text):
        url = found[0]
        try:
            parts = urlsplit(url)
            if parts.password or (parts.username and parts.scheme in ("http", "https")):
                return f"the password of {redact(url)}"
            if any(_SECRET_NAME.search(key) for key, _ in parse_qsl(parts.query)):
                return f"the signature or password of {redact(url)}"
        except ValueError:
            return "a URL that cannot be parsed"
    if value := _SECRET_VALUE.search(text):
        return f"the {value['what']} of a connection" if value["what"] else "the key of a header"
    return ""


def check_command(words: Sequence[str], working_dir: Path | None) -> None:
    """Raise UsageError for secrets in a command or its files, and for storage that only this machine can reach."""
    for word in words:
        if secret := find_secret(word):
            raise UsageError(f"{secret} in the command would be readable in the job's log and description; {MEND}")
        if Path(word).is_file() and not Path(word).is_absolute():
            if working_dir is not None and not (working_dir / word).is_file():
                raise UsageError(
                    f"{word} is not below {working_dir}, which is sent: name an absolute path on the nodes"
                )
            # Settings are small files; weights are not read.
            small = Path(word).stat().st_size < 2**20
            secret = find_secret(Path(word).read_text(encoding="utf-8", errors="replace")) if small else ""
            if secret:
                raise UsageError(f"{secret} in {word} would be readable on the cluster; {MEND}")
    for flag in STORAGE_FLAGS:
        given = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        given += [words[at + 1] for at, word in enumerate(words[:-1]) if word == flag]
        for value in given:
            if not is_url(value) and not os.path.isabs(value):
                raise UsageError(f"{flag} {value} is a folder of this machine: name one that all nodes see, or a URL")
        if not given and flag == "--results" and words[0] in NEEDS_RESULTS:
            raise UsageError(
                "--results is missing: name a folder that all nodes see, or a URL such as s3://bucket/runs"
            )


def job_environment(asked: Sequence[str]) -> dict[str, str]:
    """Make a job's environment from KEY or KEY=VALUE. Raises UsageError for credentials and unset variables."""
    found: dict[str, str] = {}
    for text in asked:
        name, given, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env '{name}' is no name of a variable; --env KEY or --env KEY=VALUE would work")
        if _SECRET_NAME.search(name):
            raise UsageError(f"--env {name} looks like a secret, and a job's environment is readable by all; {MEND}")
        value = value if given else os.environ.get(name, "")
        if not value and not given:
            raise UsageError(f"--env {name}: it is not set here; --env {name}=VALUE would work")
        if secret := find_secret(value):
            raise UsageError(f"--env {name} holds {secret}, and a job's environment is readable by all; {MEND}")
        found[name] = value
    return found


def make_request(
    words: Sequence[str], *, name: str, environment: Mapping[str, str], working_dir: Path | None
) -> dict[str, Any]:
    """Make the arguments of `JobSubmissionClient.submit_job` for a command of this program.

    working_dir: packed by Ray without `EXCLUDES`; None runs the program that is installed on the cluster.
    """
    if name and not _JOB_NAME.fullmatch(name):
        raise UsageError(f"--name '{name}': letters, digits and . _ - are possible, 80 at most, as in bench-1")
    runtime_env: dict[str, Any] = {"env_vars": {**RAY_SETTINGS, **environment}}
    if working_dir is not None:
        runtime_env |= {"working_dir": str(working_dir), "excludes": list(EXCLUDES)}
        # The packed tree has no git history; results record the commit.
        runtime_env["env_vars"][SOURCE_VARIABLE] = json.dumps(source_state(working_dir))
    what = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", word) for word in words[:2] if not word.startswith("-")).strip("-")
    return {
        # `exec`: signals and exit codes are those of the command, not of a shell around it.
        "entrypoint": f"exec python -m {MODULE} {shlex.join(words)}",
        "submission_id": name or f"{what[:40] or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        "runtime_env": runtime_env,
        "metadata": {"procap_command": shlex.join(["procap", *words])},
    }


def connect(dashboard: Dashboard) -> JobSubmissionClient:
    """Connect to `dashboard`. Raises UserError if nothing answers there, or a token is missing."""
    settle_auth()
    library_defaults()
    with explained(dashboard):
        from ray.job_submission import JobSubmissionClient

        # Ray prefers these variables to its argument.
        before = os.environ.get("RAY_API_SERVER_ADDRESS")
        os.environ["RAY_API_SERVER_ADDRESS"] = dashboard.url
        try:
            return JobSubmissionClient(dashboard.url)
        finally:
            os.environ.pop("RAY_API_SERVER_ADDRESS")
            os.environ.update({} if before is None else {"RAY_API_SERVER_ADDRESS": before})


def submit(client: JobSubmissionClient, request: Mapping[str, Any]) -> None:
    """Pack the working folder and submit the job; waits for a head node that has just started."""
    deadline = time.monotonic() + STARTUP_SECONDS
    while True:
        try:
            client.submit_job(**request)
            return
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(1.0)


def follow(client: JobSubmissionClient, name: str, write: Callable[[str], None]) -> JobDetails:
    """Pass a job's log to `write` in order and without repetition until the job ends; reconnects when needed.

    Raises the connection's error once the cluster has been unreachable for `RETRY_SECONDS`.
    """
    written, reached = 0, time.monotonic()

    async def tail() -> None:
        # Each connection sends the log from its beginning.
        nonlocal written
        position = 0
        async for text in client.tail_job_logs(name):
            write(text[max(written - position, 0) :])
            position += len(text)
            written = max(written, position)

    while True:
        try:
            asyncio.run(tail())
            details = client.get_job_info(name)
            if details.status.is_terminal():
                write(client.get_job_logs(name)[written:])
                return details
            reached = time.monotonic()
        # The exceptions have no common base: aiohttp.ClientError, requests.RequestException, RuntimeError for HTTP 5xx.
        except Exception:
            if time.monotonic() - reached > RETRY_SECONDS:
                raise
        time.sleep(1.0)


def exit_code(details: JobDetails) -> int:
    """Return the exit code of a job's command; 143 for a stopped job, 1 if the command never ran."""
    status, code = str(getattr(details.status, "value", details.status)), details.driver_exit_code
    if status == "STOPPED":
        return STOPPED_EXIT
    if code is None:
        return 0 if status == "SUCCEEDED" else 1
    # Ray reports a signal as Python does; a shell adds it to 128.
    return 128 - code if code < 0 else code


@contextmanager
def explained(dashboard: Dashboard) -> Iterator[None]:
    """Convert exceptions of Ray's client to a UserError of one line that says what would work."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise UserError(
            f"{dashboard} wants a token, or another one than is set here; set RAY_AUTH_TOKEN_PATH to a file that holds "
            "the cluster's token (on its head: `ray get-auth-token`)"
        ) from error
    except (ConnectionError, requests.RequestException) as error:
        raise UserError(
            f"no Ray cluster at {dashboard}: name its dashboard with --address http://HOST:8265 (a head without "
            "`ray[default]` has none; from outside: ssh -L 8265:127.0.0.1:8265 HEAD)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "already exists" in str(error):
            raise UsageError("there is a job of this --name already: choose another one (`ray job list`)") from error
        lines = [line.strip(" .") for line in str(error).splitlines() if line.strip(" .")]
        raise UserError(f"{dashboard} did not take the job: {lines[-1][:300] if lines else error!r}") from error
