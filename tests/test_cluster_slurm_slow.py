"""The files for Slurm on a real Slurm, which is started from its packages where they are installed."""

import re
import sys
from pathlib import Path

import pytest
from slurm_cluster import ask, can_start_slurm, start_slurm, wait_for
from small_runs import only_run

from runner.run_folders import find_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_start_slurm(), reason="needs root, and the packages slurm-wlm and munge"),
]
ROOT = Path(__file__).parents[1]
TRAIN = "train --methods coop --datasets digits --shots 2 --batch-size 4 --device cpu --tracking off"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with start_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


class Job:
    """A submitted job, in a folder that has its log and its results."""

    def __init__(self, slurm, folder: Path, file: str, line: str, **variables: str) -> None:
        path = f"{Path(sys.executable).parent}:{slurm['PATH']}"
        self.environment = {**slurm, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
        self.environment |= {"PROCAP_HOME": str(folder / "home"), "SBATCH_CPUS_PER_TASK": "1"}
        self.folder = folder
        words = ["sbatch", "--parsable", "--chdir", str(folder), "--cpus-per-task", "1", "--nodes", "1"]
        self.number = ask(self.environment, *words, str(ROOT / "cluster/slurm" / file), *line.split()).strip()
        assert self.number, "sbatch refused the job"

    def ask(self, *words: str) -> str:
        return ask(self.environment, *words)

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("procap*.log")))

    def facts(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.ask("scontrol", "show", "job", self.number)))

    def wait(self, *states: str) -> dict[str, str]:
        wait_for(lambda: self.facts().get("JobState") in states, self.log)
        return self.facts()

    def wait_for_steps(self) -> None:
        """Wait until a training has begun to take steps."""
        wait_for(lambda: any(run.read_progress() for run in find_runs(self.folder / "results")), self.log)


def test_a_job_out_of_time_saves_queues_itself_again_and_ends_done(slurm, few_digits, tiny_checkpoint, tmp_path):
    line = f"{TRAIN} --epochs 300 --data {few_digits} --backbone {tiny_checkpoint}"
    job = Job(slurm, tmp_path, "train.sbatch", line, PROCAP_REQUEUE="1")
    job.wait_for_steps()
    # What Slurm sends before the time limit (`--signal B:TERM@120`), to the same process.
    job.ask("scancel", "--batch", "--signal", "TERM", job.number)
    wait_for(lambda: job.facts()["Restarts"] == "1", job.log)
    job.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now+10")
    facts = job.wait("COMPLETED", "FAILED", "CANCELLED")
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log
    assert only_run(tmp_path / "results").read_training().resumed == 1


def test_a_cancelled_job_saves_and_stays_cancelled(slurm, few_digits, tiny_checkpoint, tmp_path):
    line = f"{TRAIN} --epochs 3000 --data {few_digits} --backbone {tiny_checkpoint}"
    job = Job(slurm, tmp_path, "train.sbatch", line, PROCAP_REQUEUE="1")
    job.wait_for_steps()
    job.ask("scancel", job.number)
    assert job.wait("CANCELLED")["Restarts"] == "0"
    wait_for(lambda: only_run(tmp_path / "results").read_progress().status == "interrupted", job.log)


def test_ray_on_an_allocation_runs_a_command_and_ends_without_an_error(slurm, few_digits, tiny_checkpoint, tmp_path):
    line = "bench base-to-novel --launcher ray --methods coop --datasets digits --seeds 1,2 --shots 2 --epochs 1"
    line += f" --data {few_digits} --backbone {tiny_checkpoint} --results {tmp_path}/results --tracking off"
    job = Job(slurm, tmp_path, "ray.sbatch", line)
    assert job.wait("COMPLETED", "FAILED")["JobState"] == "COMPLETED", job.log
    assert len(find_runs(tmp_path / "results")) == 2 and "| Method" in job.log
    assert "Exited with exit code" not in job.log and not list(tmp_path.glob(".ray-token*"))
