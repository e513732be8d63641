"""`procap train` and `procap eval` on several processes print once, write one results folder and report errors once."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from command_line import read_files
from rank_processes import SECONDS, Ended, Processes, run_ranks
from toy_shards import toy_source

from benchmarks.cli import main
from benchmarks.console.packing import ensure_packed
from runner import stop_signals as signals
from runner.checkpoint import TrainState
from runner.distributed.process_group import choose_network, init_process_group
from runner.distributed.ranks import ranks_from_environment
from runner.run_folders import find_runs
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
    return {"PROCAP_HOME": str(place / "home"), "PROCAP_DATA": "", "MLFLOW_TRACKING_URI": ""}


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
    assert len(trained) == 2 and printed.out.count("zeroshot/") == 2
    assert printed.err.count("training base/digits/coop") == printed.err.count("preparing base/digits/zeroshot") == 1
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
    assert main(["eval", *chosen, "--no-feature-cache", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])["evaluated"]
    kept = ("run", "target", "correct", "total")
    assert [[one[name] for name in kept] for one in alone] == [[one[name] for name in kept] for one in together]


WRONG = [
    (3, "train --methods coop", 2, "batch of 4 images cannot be dealt out evenly to 3 processes"),
    (2, "train --methods cop", 2, "did you mean coop"),
    (2, "train --methods coop --batchsize 4", 2, "No such option"),
    (2, "train --methods coop --zero-stage 1", 2, "add --engine deepspeed"),
    (2, "train --methods coop --engine deepspeed --zero-stage 3", 2, "use 0, 1 or 2"),
    (2, "train --methods coop --engine deepspeed --deepspeed-config no.json", 2, "cannot read the DeepSpeed"),
    (2, "train --methods coop --device cuda:7", 2, "--device cpu or auto"),
    (2, "train --methods coop --datasets caltech101", 1, "'caltech101' is not packed in"),
    (2, "eval --methods coop", 1, "was not trained; train it first: procap train --methods coop"),
    (2, "eval base/nowhere", 2, "is not the folder of a run"),
    (2, "demo", 2, "without a launcher"),
    (2, "data pack digits", 2, "without a launcher"),
]


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


def test_data_that_one_host_lacks_or_has_otherwise_end_all_with_the_reason(short_checkpoint, tmp_path):
    line = ["train", *QUICK, "--datasets", "toy", "--methods", "coop", "--backbone", short_checkpoint, "--data", "data"]
    pack_source(toy_source(), tmp_path / "host0" / "data")
    first, second = launch(2, tmp_path, *line)
    assert (first.code, second.code) == (1, 2)
    assert "procap: error: rank 1 of 2 failed: unknown data set 'toy'" in first.err, first
    assert second.err.startswith("procap: error: unknown data set 'toy'"), second
    pack_source(toy_source(template="a picture of a {}."), tmp_path / "host1" / "data")
    ends = launch(2, tmp_path, *line)
    printed = "".join(end.err for end in ends)
    assert [end.code for end in ends] == [1, 1], printed
    assert printed.count("procap: error: the content of toy is ") == 1 and "give all hosts the same" in printed


def pack_here(place: str, data: str) -> None:
    here = Path(place) / f"host{ranks_from_environment().rank}"
    here.mkdir(exist_ok=True)
    os.chdir(here)
    ensure_packed(["digits"], Path(data))


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


def procap_until_two_signals(place: str, line: list[str]) -> None:
    """`procap`, whose first step lasts until the process got two signals; it prints how many it has."""
    count, ask = TrainState.count, signals.StopRequest._handle
    signals_got: list[int] = []

    def counted(state: TrainState, *what: object) -> None:
        count(state, *what)
        print("0 signals", flush=True)
        while len(signals_got) < 2:
            time.sleep(0.01)

    def asked(request: signals.StopRequest, signum: int, frame: object) -> None:
        ask(request, signum, frame)
        signals_got.append(signum)
        print(f"{len(signals_got)} signals", flush=True)

    with (
        patch.object(TrainState, "count", counted),
        patch.object(signals.StopRequest, "_handle", asked),
        # However late the second signal is.
        patch.object(signals, "ECHO_SECONDS", SECONDS),
    ):
        procap(place, line)


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_passed_on_twice_saves_the_state_and_the_run_goes_on(few_digits, short_checkpoint, tmp_path, signum):
    """A batch system signals every process of a job, and the launcher among them signals the others again."""
    line = ["train", *QUICK, "--methods", "coop", "--epochs", "2", "--backbone", short_checkpoint]
    line = [str(word) for word in [*line, "--data", few_digits]]
    with Processes(2, procap_until_two_signals, str(tmp_path), line, environ=home(tmp_path)) as processes:
        deadline = time.monotonic() + SECONDS
        for rank in (0, 1):
            for count in (0, 1):
                while f"{count} signals" not in processes.output(rank):
                    assert time.monotonic() < deadline, processes.output(rank) + processes.output(rank, "err")
                    time.sleep(0.01)
                processes.kill(rank, signum)
        ends = processes.wait()
    assert [end.code for end in ends] == [128 + signum] * 2, ends
    assert list(tmp_path.rglob("step-*.safetensors"))
    printed = "".join(end.err for end in ends)
    assert printed.count(f"procap: {signum.name}: stopped base/digits/coop") == 1 and "repeat to go on" in printed


def meet(kinds: list[str]) -> None:
    with init_process_group(ranks_from_environment(), torch.device(kinds[ranks_from_environment().rank]), 10 * SECONDS):
        raise AssertionError("they cannot have met")


def test_hosts_with_and_without_a_gpu_do_not_wait_for_each_other():
    printed = "procap: rank 0 works on cuda and rank 2 on cpu: give all of them --device cpu\n"
    for end in run_ranks(3, meet, ["cuda:0", "cuda:1", "cpu"]):
        assert (end.code, end.err) == (2, printed)


def test_hosts_talk_over_the_network_that_joins_them(monkeypatch):
    """Rank 0 does not know how it is reached; it asks for its way to the others."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
            outward.connect(("192.0.2.1", 9))
            address = outward.getsockname()[0]
    except OSError:
        pytest.skip("this machine has no network")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "by-hand")
    for there, chosen in ((address, None), ("127.0.0.1", ""), ("", "")):
        choose_network(["", there])
        assert os.environ["GLOO_SOCKET_IFNAME"] == "by-hand"
        with monkeypatch.context() as unset:
            unset.delenv("GLOO_SOCKET_IFNAME")
            choose_network(["", there])
            name = os.environ.get("GLOO_SOCKET_IFNAME", "")
            assert name == chosen if chosen is not None else name in dict(map(reversed, socket.if_nameindex())), name
            assert name != "lo"
