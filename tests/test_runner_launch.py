"""`procap train` and `procap eval` on several processes print once, write one results folder and report errors once.

The slow tests run what a user types: torchrun, the deepspeed launcher, two hosts, Slurm.
"""

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
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from child_process import start_process
from command_line import read_files
from ports import free_port
from rank_processes import SECONDS, Ended, run_ranks
from small_runs import only_run
from toy_shards import toy_source

from benchmarks.cli import main
from benchmarks.console.packing_progress import pack_missing_with_progress
from runner.checkpoint import read_checkpoint
from runner.distributed.ranks import ranks_from_environment
from runner.run_folders import find_runs
from shards.builtin_sources import builtin_source
from shards.pack import pack_source

QUICK = ["--datasets", "digits", "--shots", "2", "--batch-size", "4", "--device", "cpu", "--tracking", "off"]


def procap(place: str, line: list[str]) -> None:
    """The command line of one process, in a folder of its own, as on machines that share none."""
    here = Path(place) / f"host{ranks_from_environment().rank}"
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)
    code = main(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(size: int, place: Path, *line: object) -> list[Ended]:
    return run_ranks(size, procap, str(place), [str(word) for word in line], environ=home(place))


def home(place: Path) -> dict[str, str]:
    # torchrun sets the name of a file for the reason of a failure, of which it prints the first.
    torchrun = {"TORCHELASTIC_ERROR_FILE": str(place / "error.json")}
    return {"PROCAP_HOME": str(place / "home"), "PROCAP_DATA": "", "MLFLOW_TRACKING_URI": "", **torchrun}


def only_the_first_prints(ends: list[Ended]) -> Ended:
    first, *others = ends
    assert [(end.out, end.err) for end in others] == [("", "")] * len(others)
    return first


def test_ranks_train_and_evaluate_together_and_print_once(few_digits, short_checkpoint, tmp_path, monkeypatch, capsys):
    """Only the first host gets a results folder; one process alone counts the same on what was trained there."""
    chosen = [*QUICK, "--methods", "zeroshot,coop", "--epochs", "1"]
    chosen += ["--backbone", str(short_checkpoint), "--data", str(few_digits)]
    ends = launch(2, tmp_path, "train", *chosen, "--json")
    printed = only_the_first_prints(ends)
    assert [end.code for end in ends] == [0, 0], printed.err
    trained = json.loads(printed.out.splitlines()[-1])["trained"]
    assert len(trained) == 2 and printed.out.count("zeroshot/") == 1
    for doing in ("training base/digits/coop", "training base/digits/zeroshot"):
        assert printed.err.count(doing) == 1
    assert len(find_runs(tmp_path / "host0" / "results")) == 2 and not any((tmp_path / "host1").iterdir())

    before = read_files(tmp_path)
    again = launch(2, tmp_path, "train", *chosen)
    assert only_the_first_prints(again).err.count("already finished") == 2 and [end.code for end in again] == [0, 0]
    assert read_files(tmp_path) == before

    ends = launch(2, tmp_path, "eval", *chosen, "--json")
    printed = only_the_first_prints(ends)
    assert [end.code for end in ends] == [0, 0], printed.err
    together = json.loads(printed.out.splitlines()[-1])["evaluated"]
    assert len(together) == 4 and not any((tmp_path / "host1").iterdir())
    monkeypatch.chdir(tmp_path / "host0")
    for folder in Path("results").rglob("eval"):
        shutil.rmtree(folder)
    capsys.readouterr()
    assert main(["eval", *chosen, "--json"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])["evaluated"]
    kept = ("run", "target", "correct", "total")
    assert [[one[name] for name in kept] for one in alone] == [[one[name] for name in kept] for one in together]


WRONG = [
    (3, "train --methods coop", 2, "batch of 4 images cannot be dealt out evenly to 3 processes"),
    (2, "train --methods coop --batchsize 4", 2, "No such option"),
    (2, "train --methods coop --device cuda:7", 2, "--device cpu or auto"),
    (2, "train --methods coop --datasets caltech101", 1, ": caltech101; pack with"),
    (2, "eval base/nowhere", 2, "is not the folder of a run"),
    (2, "demo", 2, "without a launcher"),
]
"""Of the parser, the flags, the plan, the device, the data and the results."""


@pytest.mark.parametrize(("size", "line", "code", "words"), WRONG, ids=[line for _, line, _, _ in WRONG])
def test_an_error_of_all_ranks_is_reported_once(few_digits, short_checkpoint, tmp_path, size, line, code, words):
    command, *given = line.split()
    flags = [*QUICK, "--data", str(few_digits), "--backbone", str(short_checkpoint)] if "--methods" in given else []
    ends = launch(size, tmp_path, command, *flags, *given)
    printed = "".join(end.err for end in ends)
    assert ends[0].code == code and all(end.code in (1, 2) for end in ends), printed
    assert printed.count("procap: error: ") == 1 and words in printed and "Traceback" not in printed, printed
    assert not any(end.out for end in ends) and not list(tmp_path.rglob("train.json"))


def test_other_commands_are_not_repeated_by_every_process_nor_refused_in_a_container_with_a_rank(monkeypatch, capsys):
    """What starts containers may set RANK and WORLD_SIZE; only a launcher of processes sets LOCAL_RANK."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["ls", "methods"]) == 0 and "procap" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["ls", "methods"]) == 2 and not capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["ls", "methods"]) == 2 and "start procap ls without a launcher" in capsys.readouterr().err


def test_hosts_with_different_data_end_with_the_reason(short_checkpoint, tmp_path):
    line = ["train", *QUICK, "--datasets", "toy", "--methods", "coop", "--backbone", short_checkpoint, "--data", "data"]
    pack_source(toy_source(), tmp_path / "host0" / "data")
    pack_source(toy_source(template="a picture of a {}."), tmp_path / "host1" / "data")
    ends = launch(2, tmp_path, *line)
    printed = "".join(end.err for end in ends)
    assert [end.code for end in ends] == [1, 1], printed
    assert printed.count("procap: error: the content of toy is ") == 1 and "give all hosts the same" in printed


def pack_here(place: str, data: str) -> None:
    here = Path(place) / f"host{ranks_from_environment().rank}"
    here.mkdir(exist_ok=True)
    os.chdir(here)
    few = {"counts": {"train": 60}}
    with patch("benchmarks.console.packing_progress.builtin_source", lambda name: replace(builtin_source(name), **few)):
        pack_missing_with_progress(["digits"], Path(data))


@pytest.mark.parametrize("shared", [True, False])
def test_a_data_set_that_is_not_there_is_packed_once_in_every_place(tmp_path, shared):
    """Two processes find nothing: one packs and the other waits, or each packs on its own disk."""
    ends = run_ranks(2, pack_here, str(tmp_path), str(tmp_path / "data" if shared else "data"))
    assert [end.code for end in ends] == [0, 0], ends
    assert only_the_first_prints(ends).err.count("packing digits into") == 1
    packed = sorted(path.parent for path in tmp_path.rglob("manifest.json"))
    assert len(packed) == (1 if shared else 2)
    assert len({(folder / "manifest.json").read_bytes() for folder in packed}) == 1
    assert {path.name for folder in packed for path in folder.parent.iterdir()} == {"digits"}


ROOT = Path(__file__).resolve().parents[1]
SHORT = "--datasets digits --shots 2 --epochs 2 --batch-size 4 --device cpu"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 --no-python procap"


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


@pytest.mark.slow
def test_a_failure_is_the_last_thing_that_torchrun_says(shell, tmp_path):
    line = f"{TORCHRUN} train --methods coop {SHORT} --backbone $TINY --global-batch-size 5 --tracking off"
    code, out, err = typed(line, tmp_path, shell)
    says = "error: a global batch of 5 images cannot be dealt out evenly to 2 processes"
    assert code == 1 and not out
    assert err.count(f"\nprocap: {says}") == 1 and f"traceback : procap: {says}" in err.partition("Root Cause")[2]
    code, _, err = typed(f"{line} -v", tmp_path, shell)
    assert err.count("in select_images_of_run\n") == 1


@pytest.mark.slow
def test_torchrun_sends_each_run_to_mlflow_once(shell, tmp_path):
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    for command in ("train", "eval", "eval --force"):
        line = f"{TORCHRUN} {command} --methods zeroshot,coop {SHORT} --backbone $TINY --tracking {store}"
        code, _, err = typed(line, tmp_path, shell)
        assert code == 0 and "tracking:" not in err, err
    client = MlflowClient(store)
    tracked = client.search_runs([each.experiment_id for each in client.search_experiments()])
    folders = [str(run.path) for run in find_runs(tmp_path / "results")]
    assert sorted(run.data.tags["folder"] for run in tracked) == folders and len(folders) == 2
    assert all(run.info.status == "FINISHED" and "accuracy" in run.data.metrics for run in tracked)


@pytest.mark.slow
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
            if not pressed and list((tmp_path / "results").rglob("step-*.pt")):
                os.write(terminal, b"\x03")
                pressed = True
        os.close(terminal)
        assert program.wait(SECONDS) != 0 and pressed, said
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
    (stopped,) = re.findall(r"procap: SIGINT: stopped base/digits/coop/\S+ at step (\d+) of", plain)
    assert f"step-{int(stopped):08d}-" in " ".join(
        file.name for file in only_run(tmp_path / "results").state_folder.iterdir()
    )
    # A bar hides the cursor when it begins.
    assert said.count("\x1b[?25l") == 1 < plain.count("epoch "), said

    deadline = time.monotonic() + SECONDS
    with begun(f"torchrun --standalone --nproc-per-node 4 --no-python procap {line}", tmp_path, shell) as running:
        while not ((known := only_run(tmp_path / "results").read_progress()) and known.resumed):
            assert running.poll() is None and time.monotonic() < deadline, "it did not go on"
            time.sleep(0.1)
        running.send_signal(signal.SIGTERM)
        code, _, err = end_of(running)
    assert code == 1 and f"from step {stopped} of" in err and err.count("procap: SIGTERM: stopped") == 1, err


@pytest.mark.slow
def test_deepspeed_under_both_launchers_trains_what_ddp_trains(shell, tmp_path):
    line = f"train --methods procap {SHORT} --backbone $TINY --tracking off"
    launcher = "deepspeed --no_local_rank --num_accelerators 2 --no_python procap"
    for name, command in {
        "ddp": f"{TORCHRUN} {line}",
        "zero1": f"{TORCHRUN} {line} --engine deepspeed --zero-stage 1",
        "zero2": f"{TORCHRUN} {line} --engine deepspeed --zero-stage 2",
        "launcher": f"{launcher} {line} --engine deepspeed",
    }.items():
        code, out, err = typed(command, tmp_path / name, shell)
        assert code == 0 and out.count("images/s") == 1, err
        same_weights(tmp_path / name / "results", tmp_path / "ddp" / "results")
        assert (only_run(tmp_path / name / "results").read_training() or 0).processes


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


@pytest.mark.slow
def test_two_hosts_by_their_ranks_need_results_only_on_the_first(shell, tmp_path):
    """Two processes each; the second host keeps nothing, also where runs are evaluated by their folder."""
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    line = f"train --methods coop {SHORT} --backbone $TINY --tracking off"
    (code, out, err), other = on_two_hosts(STATIC, line, hosts, shell, each=2)
    assert code == other[0] == 0, err + other[2]
    assert "images/s" in out and not other[1] and "procap" not in other[2]
    run = only_run(hosts[0] / "results").path.relative_to(hosts[0])
    (code, out, err), other = on_two_hosts(STATIC, f"eval {run} --tracking off --device cpu", hosts, shell, each=2)
    assert code == other[0] == 0, err + other[2]
    assert not list(hosts[1].iterdir()) and len(only_run(hosts[0] / "results").read_evaluations()) == 2
    alone(line, tmp_path / "alone", shell)
    same_weights(hosts[0] / "results", tmp_path / "alone" / "results")


@pytest.mark.slow
def test_two_hosts_with_a_rendezvous_share_a_folder(shell, tmp_path):
    shared = tmp_path / "shared"
    line = f"train --methods coop {SHORT} --backbone $TINY --tracking off"
    ends = on_two_hosts(C10D, line, [shared, shared], shell)
    assert [end[0] for end in ends] == [0, 0], ends
    assert sum(end[1].count("images/s") for end in ends) == 1
    alone(line, tmp_path / "alone", shell)
    same_weights(shared / "results", tmp_path / "alone" / "results")
