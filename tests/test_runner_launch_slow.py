"""What a person types for several processes, word by word: torchrun, the deepspeed launcher, two hosts, Slurm."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from child_process import start_process

from benchmarks.studies.chaos.ports import free_port
from runner.checkpoint import read_checkpoint
from runner.run_folders import RunFolder, find_runs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SHORT = "--datasets digits --shots 2 --epochs 2 --batch-size 4 --device cpu"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 --no-python procap"
SECONDS = 240


@pytest.fixture
def shell(few_digits, tiny_checkpoint, tmp_path) -> dict[str, str]:
    """The environment of an activated installation: its programs by name, its data, a small CLIP as $TINY."""
    programs = {
        "procap": "-m benchmarks.cli",
        "torchrun": "-m torch.distributed.run",
        "deepspeed": "-c 'from deepspeed.launcher.runner import main; main()'",
    }
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, module in programs.items():
        (bin / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        (bin / name).chmod(0o755)
    own = {"HOME": str(tmp_path), "PROCAP_HOME": str(tmp_path / "home"), "PROCAP_DATA": str(few_digits)}
    own |= {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TINY": str(tiny_checkpoint)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "GLOO_", "NCCL_"))}
    return kept | own | {"OMP_NUM_THREADS": "1"}


def begun(line, place, shell, prefix=()):
    place.mkdir(parents=True, exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return start_process([*prefix, "bash", "-c", f"exec {line}"], cwd=place, env=dict(shell), text=True, **pipes)


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def typed(line, place, shell):
    with begun(line, place, shell) as process:
        return end_of(process)


def same_weights(one: Path, other: Path) -> None:
    """Every run below two folders of results, within rounding.

    AdamW makes whole steps of gradients that are nearly zero, so of what another order of sums changes there as well;
    how exact gradients and trainings with SGD are is the matter of the fast tests.
    """
    ours, theirs = find_runs(one), find_runs(other)
    assert [run.path.relative_to(one) for run in ours] == [run.path.relative_to(other) for run in theirs] != []
    for mine, its in zip(ours, theirs, strict=True):
        weights, expected = read_checkpoint(mine.checkpoint_file)[0], read_checkpoint(its.checkpoint_file)[0]
        for name, weight in weights.items():
            assert (weight - expected[name]).norm() <= 3e-2 * expected[name].norm(), name


def the_run(place: Path) -> RunFolder:
    (folder,) = find_runs(place / "results")
    return folder


def test_one_machine_as_the_readme_has_it(shell, tmp_path):
    """Several runs, JSON, MLflow and evaluations: said, written and tracked once, with the numbers of one process."""
    runs = f"--methods coop,procap --seeds 1,2 {SHORT} --backbone $TINY --recipe procap"
    code, out, err = typed(f"{TORCHRUN} train {runs} --json", tmp_path, shell)
    assert code == 0, err
    assert len(json.loads(out.splitlines()[-1])["trained"]) == 4 and out.count("seed2-") == 2 * 2
    assert err.count("training base/digits/") == 4 and err.count("next: procap eval") == 1
    code, out, err = typed(f"{TORCHRUN} eval {runs} --json", tmp_path, shell)
    assert code == 0, err
    together = json.loads(out.splitlines()[-1])["evaluated"]
    assert typed(f"{TORCHRUN} train {runs}", tmp_path, shell)[2].count("already finished") == 4

    code, out, err = typed(f"procap train {runs} --tracking off --results alone", tmp_path, shell)
    assert code == 0, err
    same_weights(tmp_path / "results", tmp_path / "alone")
    code, out, err = typed(f"procap eval {runs} --tracking off --results alone --json", tmp_path, shell)
    alone = json.loads(out.splitlines()[-1])["evaluated"]
    kept = ("run", "target", "correct", "total")
    assert [[one[name] for name in kept] for one in together] == [[one[name] for name in kept] for one in alone]

    assert typed("procap track sync", tmp_path, shell)[0] == 0
    count = "import mlflow; print(len(mlflow.search_runs(search_all_experiments=True)))"
    store = f"sqlite:///{tmp_path}/results/mlflow.db"
    tracked = subprocess.run(
        [sys.executable, "-c", count], env=shell | {"MLFLOW_TRACKING_URI": store}, capture_output=True, text=True
    )
    assert tracked.stdout.split() == ["4"], tracked


def test_a_failure_is_the_last_thing_that_torchrun_says(shell, tmp_path):
    line = f"{TORCHRUN} train --methods coop {SHORT} --backbone $TINY --global-batch-size 5 --tracking off"
    code, out, err = typed(line, tmp_path, shell)
    says = "error: a global batch of 5 images cannot be dealt out evenly to 2 processes"
    assert code == 1 and not out
    assert err.count(f"\nprocap: {says}") == 1 and f"traceback : procap: {says}" in err.partition("Root Cause")[2]
    code, _, err = typed(f"{line} -v", tmp_path, shell)
    assert err.count("in train_stream\n") == 1


@pytest.mark.parametrize("launcher", [TORCHRUN, "deepspeed --no_local_rank --num_accelerators 2 --no_python procap"])
def test_control_c_in_a_terminal_saves_the_state_and_four_processes_go_on(shell, tmp_path, launcher):
    line = f"train --methods coop {SHORT} --backbone $TINY --tracking off --epochs 40000"
    terminal, inner = pty.openpty()
    said, pressed, deadline = "", False, time.monotonic() + SECONDS
    command = ["setsid", "--ctty", "--wait", "bash", "-c", f"exec {launcher} {line}"]
    streams = {"stdin": inner, "stdout": inner, "stderr": inner}
    with start_process(command, cwd=tmp_path, env=shell | {"TERM": "xterm", "COLUMNS": "160"}, **streams) as program:
        os.close(inner)
        while time.monotonic() < deadline:
            try:
                said += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                break
            if not pressed and list((tmp_path / "results").rglob("step-*.safetensors")):
                os.write(terminal, b"\x03")
                pressed = True
        os.close(terminal)
        assert program.wait(SECONDS) != 0 and pressed, said
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    (stopped,) = re.findall(r"procap: SIGINT: stopped base/digits/coop/\S+ at step (\d+) of", plain)
    assert f"step-{int(stopped):08d}-" in " ".join(file.name for file in the_run(tmp_path).state.iterdir())
    # A bar hides the cursor when it begins.
    assert said.count("\x1b[?25l") == 1 < plain.count("epoch "), said

    deadline = time.monotonic() + SECONDS
    with begun(f"torchrun --standalone --nproc-per-node 4 --no-python procap {line}", tmp_path, shell) as running:
        while not ((known := the_run(tmp_path).progress()) and known.resumed):
            assert running.poll() is None and time.monotonic() < deadline, "it did not go on"
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        code, _, err = end_of(running)
    assert code == 1 and f"from step {stopped} of" in err and err.count("procap: SIGTERM: stopped") == 1, err


def test_deepspeed_under_both_launchers_trains_what_ddp_trains(shell, tmp_path):
    (tmp_path / "deepspeed.json").write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}')
    line = f"train --methods procap {SHORT} --backbone $TINY --tracking off"
    launcher = "deepspeed --no_local_rank --num_accelerators 2 --no_python procap"
    for name, command in {
        "ddp": f"{TORCHRUN} {line}",
        "zero1": f"{TORCHRUN} {line} --engine deepspeed --zero-stage 1",
        "json": f"{TORCHRUN} {line} --engine deepspeed --deepspeed-config ../deepspeed.json",
        "launcher": f"{launcher} {line} --engine deepspeed --zero-stage 0",
    }.items():
        code, out, err = typed(command, tmp_path / name, shell)
        assert code == 0 and out.count("images/s") == 1, err
        same_weights(tmp_path / name / "results", tmp_path / "ddp" / "results")
        assert (the_run(tmp_path / name).train() or 0).ranks


NODES = "torchrun --nnodes 2 --nproc-per-node {each}"
STATIC = f"{NODES} --node-rank {{host}} --master-addr {{address}} --master-port {{port}}"
C10D = f"{NODES} --rdzv-backend c10d --rdzv-endpoint {{address}}:{{port}} --rdzv-id procap"


def on_two_hosts(launcher, line, places, shell, **more):
    prefixes = more.pop("prefixes", [(), ()])
    values = {"address": "127.0.0.1", "port": free_port(), "each": 1} | more
    with ExitStack() as stack:
        hosts = [
            begun(f"{launcher.format(host=host, **values)} --no-python procap {line}", place, shell, prefix)
            for host, (place, prefix) in enumerate(zip(places, prefixes, strict=True))
        ]
        return [end_of(process) for process in [stack.enter_context(host) for host in hosts]]


def alone(line, place, shell):
    code, _, err = typed(f"procap {line}", place, shell)
    assert code == 0, err


def test_two_hosts_by_their_ranks_need_results_only_on_the_first(shell, tmp_path):
    """Two processes each; the second host keeps nothing, also where runs are evaluated by their folder."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    line = f"train --methods coop {SHORT} --backbone $TINY --tracking off"
    (code, out, err), other = on_two_hosts(STATIC, line, hosts, shell, each=2)
    assert code == other[0] == 0, err + other[2]
    assert "images/s" in out and not other[1] and "procap" not in other[2]
    run = the_run(hosts[0]).path.relative_to(hosts[0])
    (code, out, err), other = on_two_hosts(STATIC, f"eval {run} --tracking off --device cpu", hosts, shell, each=2)
    assert code == other[0] == 0, err + other[2]
    assert not list(hosts[1].iterdir()) and len(the_run(hosts[0]).evaluations()) == 2
    alone(line, tmp_path / "alone", shell)
    same_weights(hosts[0] / "results", tmp_path / "alone" / "results")


def test_two_hosts_with_a_rendezvous_share_a_folder(shell, tmp_path):
    shared = tmp_path / "shared"
    line = f"train --methods coop {SHORT} --backbone $TINY --tracking off"
    ends = on_two_hosts(C10D, line, [shared, shared], shell)
    assert [end[0] for end in ends] == [0, 0], ends
    assert sum(end[1].count("images/s") for end in ends) == 1
    alone(line, tmp_path / "alone", shell)
    same_weights(shared / "results", tmp_path / "alone" / "results")


def test_the_slurm_file_starts_one_torchrun_a_node(shell, tmp_path):
    """With srun and scontrol of our own, which run both nodes here."""
    bin = tmp_path / "bin"
    shutil.copy(ROOT / "tests" / "slurm" / "srun_two_nodes", bin / "srun")
    (bin / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && echo 127.0.0.1 && echo node2\n')
    for name in ("srun", "scontrol"):
        (bin / name).chmod(0o755)
    job = shell | {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
    file = tmp_path / "spool" / "slurm_script"
    file.parent.mkdir()
    shutil.copy(ROOT / "cluster" / "slurm" / "train.sbatch", file)
    line = f"train --methods coop {SHORT} --backbone $TINY --tracking off"
    code, out, err = typed(f"bash {file} {line} --option 'ctx_init=a photo of one'", tmp_path, job)
    assert code == 0 and out.count("images/s") == 1, err
    result = the_run(tmp_path).train()
    assert result and len(result.ranks) == 2
    said = (tmp_path / "srun.log").read_text()
    assert said.startswith("srun --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 bash")
    code, _, err = typed(f"bash {file}", tmp_path, job)
    assert code == 2 and err.startswith("One run on all GPUs of a job: sbatch --nodes 2")
