"""The jobs of a Ray cluster as its dashboard tells of them; what can go wrong on the way to it is said in one line."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import responses
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cluster.address import Dashboard, settle_auth
from procap.errors import UserError
from runner.environment import library_defaults

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0
BEGIN_SECONDS = 60.0
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
STOPPED_EXIT = 143
"""Of a stopped job, whose own exit code Ray does not keep: that of a command that SIGTERM ended."""

STOP_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""In a job's environment: the seconds it has from the request to stop to the kill."""

COMMAND_KEY = "procap_command"
"""In a job's metadata: the command as it was typed."""

_ERROR_ANSWER = re.compile(r"Request failed with status code (?P<status>\d{3}): (?P<text>.*)", re.DOTALL)
"""As Ray's client tells of one."""


class Unreachable(UserError):
    """The cluster does not answer now; it may later."""


class Refused(UserError):
    """The cluster wants a token."""


@dataclass(frozen=True)
class RayJob:
    """A job; times are seconds since 1970, None where it has not begun or ended."""

    id: str
    status: str
    command: str
    begun: float | None
    ended: float | None
    driver_exit_code: int | None
    message: str = ""
    stop_seconds: int = 3
    """From the request to stop to the kill; 3 is Ray's own patience."""

    @property
    def over(self) -> bool:
        return self.status in ENDED

    @property
    def exit_code(self) -> int | None:
        """Of the command; 143 where the job was stopped, 1 where the command never ran, None before the end."""
        if not self.over:
            return None
        if self.status == "STOPPED":
            return STOPPED_EXIT
        if self.driver_exit_code is None:
            return 0 if self.status == "SUCCEEDED" else 1
        # Ray tells a signal as Python does, a shell adds 128.
        return 128 - self.driver_exit_code if self.driver_exit_code < 0 else self.driver_exit_code

    @property
    def seconds(self) -> float | None:
        """From its begin to its end, or until now."""
        return None if self.begun is None else (self.ended or time.time()) - self.begun


class RayCluster:
    """A cluster's dashboard. Methods raise `Unreachable` where it does not answer and `Refused` without a token."""

    def __init__(self, dashboard: Dashboard) -> None:
        settle_auth()
        library_defaults()
        self.dashboard = dashboard
        self._knock()
        with self._answered():
            self.client = _client(dashboard.url)

    @property
    def flag(self) -> str:
        """What a command for this cluster needs behind it: what the environment says need not be typed."""
        return f" --address {shlex.quote(self.dashboard.url)}" if self.dashboard.origin == "--address" else ""

    def job(self, name: str) -> RayJob:
        """The job of that id. Raises UserError for an unknown one, naming the nearest."""
        found = self.find(name)
        if found is None:
            near = difflib.get_close_matches(name, [job.id for job in self.jobs()], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "a cluster that was started anew has forgotten its jobs"
            raise UserError(f"no job {name} at {self.dashboard}: {hint} (`procap jobs{self.flag}` lists them)")
        return found

    def find(self, name: str) -> RayJob | None:
        """The job of that id, None where there is none."""
        with self._answered():
            try:
                return _job(self.client.get_job_info(name))
            except RuntimeError as error:
                if _status(error) != 404:
                    raise
                return None

    def jobs(self) -> list[RayJob]:
        """All jobs that were sent to this cluster, the oldest first; not drivers that were started by hand."""
        with self._answered():
            listed = [_job(each) for each in self.client.list_jobs() if each.submission_id]
        return sorted(listed, key=lambda job: job.begun or 0.0)

    def log(self, name: str) -> str:
        """What the job has printed so far. Raises RuntimeError where nobody has it, now or any more."""
        with self._told():
            return str(self.client.get_job_logs(name))

    def stop(self, job: RayJob) -> None:
        """Ask the job to end, which takes a while."""
        with self._answered():
            self.client.stop_job(job.id)

    def submit(self, **request: Any) -> str:
        """Send a job and give its id. Raises UserError for an id that is taken."""
        until = time.monotonic() + BEGIN_SECONDS
        while True:
            try:
                with self._told():
                    return str(self.client.submit_job(**request))
            except RuntimeError as error:
                name = request.get("submission_id")
                if name and "already exists" in str(error):
                    raise UserError(taken(name, flag=self.flag)) from error
                if _status(error) > 500:
                    # A gateway's word: Ray's own errors are 500.
                    raise Unreachable(
                        f"{self.dashboard} did not say whether it took the job ({_answer(error)}): see "
                        f"`procap jobs{self.flag}` before it is sent again"
                    ) from error
                # The dashboard of a head that has just started answers before its nodes do.
                if "No available agent" not in str(error):
                    raise UserError(f"{self.dashboard} did not take the job: {_answer(error)}") from error
                if time.monotonic() > until:
                    raise UserError(
                        f"the head node behind {self.dashboard} takes no jobs: its agent does not answer; "
                        "clusters on one machine need a --dashboard-agent-listen-port each in `ray start`"
                    ) from error
            time.sleep(1.0)

    def _knock(self) -> None:
        """Find out within seconds whether anything listens; Ray's client has no such limit."""
        parts = urlsplit(self.dashboard.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if any(name in os.environ for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
            return
        try:
            socket.create_connection((parts.hostname or "", port), CONNECT_SECONDS).close()
        except OSError as error:
            why = "no such host" if isinstance(error, socket.gaierror) else error.strerror or "no answer"
            raise Unreachable(
                f"no Ray cluster at {self.dashboard}: {why.lower()}; name its dashboard with "
                "--address http://HOST:8265 (a head without `ray[default]` has none; from outside: "
                "ssh -L 8265:127.0.0.1:8265 HEAD)"
            ) from error

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """As `_told`, with answers that are errors: `Unreachable` for those that another try may not get (5xx)."""
        try:
            with self._told():
                yield
        except RuntimeError as error:
            why = f"{self.dashboard} answered: {_answer(error)}"
            if _status(error) >= 500:
                raise Unreachable(f"{why}; try again") from error
            raise UserError(why) from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What Ray's client raises, in one line that says what would work."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            had = "the token here is not that of the cluster" if "failed" in str(error)[:30] else "it wants a token"
            raise Refused(
                f"{self.dashboard} refused: {had}; set RAY_AUTH_TOKEN_PATH to a file that holds the cluster's token "
                "(on its head: `ray get-auth-token`)"
            ) from error
        except (requests.exceptions.HTTPError, requests.exceptions.JSONDecodeError, KeyError) as error:
            raise UserError(self._no_dashboard(_last_line(str(error)) or type(error).__name__)) from error
        except (requests.exceptions.RequestException, ConnectionError) as error:
            timed_out = isinstance(error, requests.exceptions.Timeout)
            why = (
                f"no answer within {ANSWER_SECONDS:.0f} s" if timed_out else "it does not speak HTTP, or is going down"
            )
            raise Unreachable(self._no_dashboard(why)) from error
        except RuntimeError as error:
            if "Version check" not in str(error):
                raise
            raise UserError(self._no_dashboard("it is not Ray's")) from error

    def _no_dashboard(self, why: str) -> str:
        return (
            f"{self.dashboard} does not answer as the dashboard of Ray does ({why}); its usual port is 8265, not 6379"
        )


def taken(name: str, status: str = "", flag: str = "") -> str:
    """What is said of an id that a job has already; flag: as of the cluster."""
    return (
        f"there is a job {name} already{f' ({status})' if status else ''}: follow it with "
        f"`procap jobs follow {name}{flag}`, or choose another --name"
    )


def _client(url: str) -> JobSubmissionClient:
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """With a limit on how long an answer may take."""

        def _do_request(self, *what: Any, **how: Any) -> Any:
            return super()._do_request(*what, timeout=(CONNECT_SECONDS, ANSWER_SECONDS), **how)

    for name in ("sdk", "dashboard_sdk"):
        # They tell of every upload and closed connection.
        for prefix in ("ray.dashboard.modules.job.", "ray.dashboard.modules."):
            logging.getLogger(prefix + name).setLevel(logging.ERROR)
    before = {name: os.environ.get(name) for name in ("RAY_API_SERVER_ADDRESS",)}
    # Ray prefers the environment to what it is given.
    os.environ["RAY_API_SERVER_ADDRESS"] = url
    try:
        return Client(url)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _job(details: JobDetails) -> RayJob:
    environment = (details.runtime_env or {}).get("env_vars") or {}
    return RayJob(
        id=str(details.submission_id),
        status=str(getattr(details.status, "value", details.status)),
        command=(details.metadata or {}).get(COMMAND_KEY) or details.entrypoint,
        begun=None if details.start_time is None else details.start_time / 1000,
        ended=None if not details.end_time else details.end_time / 1000,
        driver_exit_code=details.driver_exit_code,
        message=" ".join((details.message or "").split()),
        stop_seconds=int(environment[STOP_VARIABLE]) if environment.get(STOP_VARIABLE, "").isdecimal() else 3,
    )


def _status(error: RuntimeError) -> int:
    """Of an answer that Ray's client raised, 0 where it was none; what the server says may hold other numbers."""
    found = _ERROR_ANSWER.match(str(error))
    return int(found["status"]) if found else 0


def _answer(error: RuntimeError) -> str:
    """What the server said, in one line. A page, which gateways send, says no more than its status does."""
    found = _ERROR_ANSWER.match(str(error))
    if found is None:
        return _last_line(str(error)) or type(error).__name__
    status = f"{found['status']} {responses.get(int(found['status']), '')}".strip()
    said = "" if found["text"].lstrip().startswith("<") else _last_line(found["text"])
    return f"{status}: {said}" if said else status


def _last_line(text: str) -> str:
    """Of a traceback that the server sent along what it came to."""
    lines = [line.strip(" .\n") for line in text.splitlines() if line.strip(" .\n")]
    return lines[-1][:300] if lines else ""
