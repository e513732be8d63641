"""`procap submit` and `procap jobs`: commands sent to a Ray cluster, and what becomes of them."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cli.flags import Output
from benchmarks.cli.sent_command import read_command
from benchmarks.console.output import columns, note, plural, show, show_json
from cluster.address import dashboard
from cluster.follow import Follower, stopped
from cluster.ray_jobs import RayCluster, RayJob
from cluster.source_archive import SourceArchive, code_digest, pack, working_tree
from cluster.submit import Submission, submission, travelling
from procap import __version__
from runner.stop_signals import StopRequest

MODULE = "benchmarks.cli"


@dataclass(frozen=True)
class Sending:
    """The flags of `procap submit`."""

    address: str = ""
    name: str = ""
    wait: bool = True
    installed: bool = False
    env: tuple[str, ...] = ()
    dry_run: bool = False


def submit(words: Sequence[str], flags: Sending, output: Output) -> int:
    """The exit code of the command on the cluster; see `procap submit --help`."""
    environment = travelling(flags.env, lambda line: note(f"procap: note: {line}"))
    command = read_command(words, environment)
    tree = None if flags.installed else working_tree()
    parcel = pack(tree, command.files)
    facts = {"procap_version": __version__, "procap_code": code_digest(tree), "procap_source": parcel.record}
    job = submission(command.words, MODULE, parcel, name=flags.name, environment=environment, facts=facts)
    where = dashboard(flags.address)
    if flags.dry_run:
        _show_plan(job, str(where), output)
        return 0
    cluster = RayCluster(where)
    if command.alone:
        note(f"procap: note: {' '.join(command.path)} works on the head node alone")
    job.send(cluster)
    note(f"job {job.name} sent to {where.url} ({_what_travels(parcel)})")
    if flags.wait:
        return _follow(cluster, job.name, output)
    note(f"procap jobs follow {job.name}{cluster.flag}")
    show(job.name) if not output.json else show_json(_document(cluster.job(job.name)))
    return 0


def jobs(address: str, output: Output) -> int:
    """See `procap jobs --help`."""
    cluster = RayCluster(dashboard(address))
    listed = cluster.jobs()
    if output.json:
        show_json([_document(job) for job in listed])
    elif listed:
        rows = [(job.id, job.status.lower(), _time(job), _duration(job), _code(job), job.command) for job in listed]
        show(columns(("job", "status", "begun", "took", "exit", "command"), rows))
    else:
        note(f"no job was sent to {cluster.dashboard}")
    return 0


def follow(name: str, address: str, output: Output) -> int:
    """The exit code of the job; see `procap jobs follow --help`."""
    cluster = RayCluster(dashboard(address))
    return _follow(cluster, cluster.job(name).id, output)


def stop(name: str, address: str, output: Output) -> int:
    """See `procap jobs stop --help`."""
    cluster = RayCluster(dashboard(address))
    job = cluster.job(name)
    asked = not job.over
    if asked:
        with StopRequest() as signals:
            cluster.stop(job)
            note(f"job {name} is asked to stop; it has {plural(job.stop_seconds, 'second')} to save its state")
            being = f"job {name} is still being stopped"
            job = stopped(cluster, name, patience=job.stop_seconds + 30, check=lambda: signals.check(being))
    # One that came to its end before the request did is none that was stopped.
    ended = "has stopped" if job.status == "STOPPED" else f"has ended: {job.status.lower()}"
    note(f"job {name} {ended if asked else f'had ended before: {job.status.lower()}'}")
    if output.json:
        show_json({**_document(job), "asked": asked})
    return 0


def _follow(cluster: RayCluster, name: str, output: Output) -> int:
    # With --json stdout is for the one line at the end.
    stream = sys.stderr if output.json else sys.stdout

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    follow_it, stop_it = (f"`procap jobs {verb} {name}{cluster.flag}`" for verb in ("follow", "stop"))
    goes_on = f"job {name} goes on; follow it with {follow_it}, stop it with {stop_it}"
    with StopRequest() as signals:
        follower = Follower(
            cluster, name, write, tell=lambda line: note(f"procap: {line}"), check=lambda: signals.check(goes_on)
        )
        job = follower.to_the_end()
    code = job.exit_code
    assert code is not None
    note(f"job {name} {_outcome(job)}")
    if hint := _hint(job):
        note(f"procap: {hint}")
    if output.json:
        show_json(_document(job))
    return code


def _outcome(job: RayJob) -> str:
    took = f" after {_duration(job)}"
    if job.status == "SUCCEEDED":
        return f"is done{took}"
    if job.status == "STOPPED":
        return f"was stopped{took}; send the command again to go on"
    if job.driver_exit_code is None:
        return f"failed{took}: {job.message[:500]}"
    return f"ended with exit code {job.exit_code}{took}"


def _hint(job: RayJob) -> str:
    """What would help where the command could not even begin."""
    if job.driver_exit_code == 127:
        return "the cluster finds no `python`: start Ray there in the environment that has procap (its bin on PATH)"
    if "No module named" in job.message:
        missing = job.message.partition("No module named")[2].split()[0].strip("'\".:;")
        own = missing.partition(".")[0] in ("benchmarks", "procap")
        mend = "send the working tree without --installed, or install procap-bench" if own else "install procap-bench"
        return f"python on the cluster has no {missing}: {mend} there"
    return ""


def _show_plan(job: Submission, where: str, output: Output) -> None:
    if output.json:
        show_json(
            {
                "address": where,
                "job": job.name,
                "entrypoint": job.entrypoint,
                "environment": job.environment,
                "metadata": job.metadata,
                "files": sorted(job.parcel.files),
                "bytes": job.parcel.size,
            }
        )
        return
    rows = [
        ("to", where),
        ("job", job.name),
        ("runs", job.entrypoint),
        ("travels", _what_travels(job.parcel)),
        ("environment", " ".join(f"{name}={shlex.quote(value)}" for name, value in job.environment.items())),
        ("described by", ", ".join(f"{name} {value}" for name, value in job.metadata.items() if value != "null")),
    ]
    show("\n".join(f"{name:<13}{value}" for name, value in rows))


def _what_travels(parcel: SourceArchive) -> str:
    if not parcel.files:
        return "nothing travels: the cluster's own installation runs"
    return f"{plural(len(parcel.files), 'file')}, {parcel.size / 1e6:.1f} MB"


def _document(job: RayJob) -> dict[str, object]:
    return {
        "job": job.id,
        "status": job.status,
        "command": job.command,
        "begun": job.begun,
        "ended": job.ended,
        "seconds": None if job.seconds is None else round(job.seconds, 3),
        "exit_code": job.exit_code,
    }


def _time(job: RayJob) -> str:
    return "-" if job.begun is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.begun))


def _duration(job: RayJob) -> str:
    if job.seconds is None:
        return "-"
    minutes, seconds = divmod(int(job.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _code(job: RayJob) -> str:
    return "-" if job.exit_code is None else str(job.exit_code)
