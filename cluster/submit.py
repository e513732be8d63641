"""Submit a command to a Ray cluster as a job and follow its log: a thin wrapper on Ray's `JobSubmissionClient`.

Every user of the cluster can read a job's command, environment and files, so secrets are rejected here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.address import set_auth_mode
from procap.errors import UsageError, UserError
from procap.methods.plugins import METHODS_GROUP, SUITES_GROUP, find_plugins, write_package
from runner.environment import SOURCE_VARIABLE, library_defaults, source_state
from shards.credentials import SECRET_NAME, has_secret, is_secret_option
from shards.remote import warn_of_stall
from shards.urls import is_url

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

STOPPED_EXIT = 143
"""Exit code of a stopped job, for which Ray keeps none: 128 + SIGTERM."""
POLL_SECONDS = 1.0
RETRY_SECONDS = 600.0
"""How long an unreachable cluster is polled for the log of a job."""
RAY_SETTINGS = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
"""Seconds from the request to stop to SIGKILL, so that runs can save their state; Ray's default is 3."""
EXCLUDES = (
    *(".git", ".venv", "venv", "__pycache__", "*.egg-info", ".*_cache", "/tests", "/docs", "/results", "/mlruns"),
    *(".env", ".env.*", ".netrc", ".aws", ".ssh", "*.pem", "*.key", "*.p12", "id_rsa*", "id_ed25519*"),
    *("credentials*", "*secret*", "*token.txt", "kubeconfig*"),
)
"""Files that are never packed, in the syntax of .gitignore; Ray also reads .gitignore and .rayignore."""
REMEDY = "set it on the nodes: in the shell of `ray start`, in a file its library reads, or as a Kubernetes secret"
NEEDS_RESULTS = ("train", "eval", "bench", "sweep", "table", "report")


def check_command(words: Sequence[str]) -> None:
    """Raise UsageError for secrets in a command or its files, and for storage that only this machine can reach."""
    if any(is_secret_option(word) for word in words):
        raise UsageError(f"a credential in the command would be readable in the job's description; {REMEDY}")
    for word in _command_files(words):
        # Settings are small files; weights are not read.
        text = Path(word).read_text(encoding="utf-8", errors="replace") if Path(word).stat().st_size < 2**20 else ""
        if has_secret(text):
            raise UsageError(f"a credential in {word} would be readable on the cluster; {REMEDY}")
    for flag in ("--data", "--results"):
        values = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        values += [value for word, value in itertools.pairwise(words) if word == flag]
        if not values and (given := _sweep_settings(words).get(flag[2:])):
            values = [str(given)]
        for value in values:
            if not is_url(value) and not os.path.isabs(value):
                raise UsageError(f"{flag} {value} is a folder of this machine: name one that all nodes see, or a URL")
        if not values and flag == "--results" and words[0] in NEEDS_RESULTS:
            raise UsageError(
                "--results is missing: name a folder that all nodes see, or a URL such as s3://bucket/runs"
            )


def _sweep_settings(words: Sequence[str]) -> dict[str, Any]:
    """Read the file of a sweep, whose keys are flags; a file that is not YAML is refused by the sweep itself."""
    import yaml

    if words[0] != "sweep" or len(words) < 2 or not Path(words[1]).is_file():
        return {}
    try:
        document = yaml.safe_load(Path(words[1]).read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        return {}
    return document if isinstance(document, dict) else {}


def _command_files(words: Sequence[str]) -> list[str]:
    """List the files of this machine in a command; of absolute paths, which may be the nodes', suites or the sweep."""
    named = itertools.takewhile(lambda word: not word.startswith("-"), words[1:])
    own = [*named] if words[0] in ("bench", "sweep", "table", "report") else ()
    return [word for word in words if Path(word).is_file() and (word in own or not Path(word).is_absolute())]


def job_environment(variables: Sequence[str]) -> dict[str, str]:
    """Make a job's environment from KEY or KEY=VALUE. Raises UsageError for credentials and unset variables."""
    found: dict[str, str] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals and not (value := os.environ.get(name, "")):
            raise UsageError(f"--env {name}: it is not set here; --env {name}=VALUE would work")
        if SECRET_NAME.search(name) or has_secret(value):
            raise UsageError(f"--env {name} looks like a secret, and a job's environment is readable by all; {REMEDY}")
        found[name] = value
    return found


class JobSources(NamedTuple):
    """What a job runs. command: with the names that its files have in the job. folder: to send; None: nothing.

    files: sent beside the source tree, by their names in the job. methods, suites: names of the plug-ins sent.
    """

    command: list[str]
    folder: Path | None
    files: dict[str, str]
    methods: list[str]
    suites: list[str]


@contextmanager
def collect_sources(words: Sequence[str], tree: Path | None) -> Iterator[JobSources]:
    """Collect what a job runs: `tree` (None: what is installed), the files of the command, and installed plug-ins.

    The folder to send is deleted afterwards unless it is `tree`.
    """
    own = {
        word: Path(word).resolve()
        for word in _command_files(words)
        if tree is None or Path(word).is_absolute() or Path(word).resolve() != (tree / word).resolve()
    }
    methods, suites = find_plugins(METHODS_GROUP), find_plugins(SUITES_GROUP)
    if not own and not methods and not suites:
        yield JobSources([*words], tree, {}, [], [])
        return
    with tempfile.TemporaryDirectory(prefix="procap-submit-") as temporary:
        folder = Path(temporary)
        for entry in tree.iterdir() if tree else ():
            # Ray follows the links when it packs the folder.
            (folder / entry.name).symlink_to(entry)
        renamed = {}
        for number, (word, file) in enumerate(own.items(), 1):
            renamed[word] = f"submitted-{number}/{file.name}"
            (folder / renamed[word]).parent.mkdir()
            (folder / renamed[word]).symlink_to(file)
        for point in (*methods.values(), *suites.values()):
            write_package(point, folder)
        sent = {renamed[word]: str(file) for word, file in own.items()}
        yield JobSources([renamed.get(word, word) for word in words], folder, sent, sorted(methods), sorted(suites))


def make_request(
    words: Sequence[str],
    *,
    name: str,
    environment: Mapping[str, str],
    working_dir: Path | None,
    tree: Path | None = None,
) -> dict[str, Any]:
    """Make the arguments of `JobSubmissionClient.submit_job` for a command of this program.

    working_dir: packed by Ray without `EXCLUDES`; None sends nothing. tree: the source tree of the program in it; None
    runs the program that is installed on the cluster.
    """
    if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise UsageError(f"--name '{name}': letters, digits and . _ - are possible, 80 at most, as in bench-1")
    runtime_env: dict[str, Any] = {"env_vars": {**RAY_SETTINGS, **environment}}
    if working_dir is not None:
        runtime_env |= {"working_dir": str(working_dir), "excludes": list(EXCLUDES)}
    if tree is not None:
        # The packed tree has no git history; results record the commit.
        runtime_env["env_vars"][SOURCE_VARIABLE] = json.dumps(source_state(tree))
    request: dict[str, Any] = {"runtime_env": runtime_env, "metadata": {"command": shlex.join(["procap", *words])}}
    # `exec`: signals and exit codes are those of the command, not of a shell around it.
    request["entrypoint"] = f"exec python -m benchmarks.cli {shlex.join(words)}"
    return request | ({"submission_id": name} if name else {})


def connect(url: str) -> JobSubmissionClient:
    """Connect to a dashboard. Raises UserError if nothing answers there, or a token is missing."""
    set_auth_mode()
    library_defaults()
    from ray.job_submission import JobSubmissionClient

    # Ray prefers this variable to its argument.
    os.environ["RAY_API_SERVER_ADDRESS"] = url
    with warn_of_stall(url), translate_errors(url):
        return JobSubmissionClient(url)


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
        except BrokenPipeError:
            raise
        # The exceptions have no common base: aiohttp.ClientError, requests.RequestException, RuntimeError for HTTP 5xx.
        except Exception:
            if time.monotonic() - reached > RETRY_SECONDS:
                raise
        time.sleep(POLL_SECONDS)


def exit_code(details: JobDetails) -> int:
    """Return the exit code of a job's command; 143 for a stopped job, 1 if the command never ran."""
    if details.status.value == "STOPPED":
        return STOPPED_EXIT
    code = details.driver_exit_code
    if code is None:
        return 0 if details.status.value == "SUCCEEDED" else 1
    # Ray reports a signal as Python does; a shell adds it to 128.
    return 128 - code if code < 0 else code


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Convert exceptions of Ray's client to a UserError of one line that says what would work."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        reason = "set RAY_AUTH_TOKEN_PATH to a file with the cluster's token (on its head: `ray get-auth-token`)"
        raise UserError(f"{url} needs another token than is set here; {reason}") from error
    except BrokenPipeError:
        # The reader of the log has closed it.
        raise
    except (ConnectionError, requests.RequestException) as error:
        raise UserError(
            f"no Ray cluster at {url}: name its dashboard with --address http://HOST:8265 (a head without "
            "`ray[default]` has none; from outside: ssh -L 8265:127.0.0.1:8265 HEAD)"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "already exists" in str(error):
            raise UsageError("there is a job of this --name already: choose another one (`ray job list`)") from error
        lines = [line.strip(" .") for line in str(error).splitlines() if line.strip(" .")]
        raise UserError(f"{url} did not take the job: {lines[-1][:300] if lines else error!r}") from error
