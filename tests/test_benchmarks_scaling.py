"""The scaling benchmark: its model is arithmetic that can be checked by hand, its steps are those of a training."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from benchmarks.studies.scaling.benchmark import Measured, estimates, list_parallelisms, main, split
from benchmarks.studies.scaling.model import ETHERNET, H200, Links, Parts, counted_parts, pays_up_to, speedup, step_cost
from benchmarks.studies.scaling.ranks import Group, Parallelism, Steps, StepSpec, ping
from benchmarks.studies.scaling.report import draw, table
from procap import parallel
from procap.errors import UsageError, UserError
from procap.weights.mini import load_mini
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import ranks_from_environment

CPU = torch.device("cpu")

AT_ONCE = Links(rate=float("inf"), latency=0.0)
PARTS = Parts(classes=100, image=6.0, text=3.0, every=1.0, features=40.0, class_features=80.0, gradients=200.0)


def test_without_messages_the_model_is_amdahls_law():
    assert step_cost(PARTS, AT_ONCE, 1).total == 10.0
    for ranks in (2, 4, 10):
        assert step_cost(PARTS, AT_ONCE, ranks).total == pytest.approx(9.0 / ranks + 1.0)
        assert step_cost(PARTS, AT_ONCE, ranks, sharded=False).total == pytest.approx(6.0 / ranks + 3.0 + 1.0)
    # The largest of shares that are not equal is what all wait for; fewer classes than processes are not sharded.
    assert step_cost(PARTS, AT_ONCE, 3).text == pytest.approx(3.0 * 34 / 100)
    assert step_cost(PARTS, AT_ONCE, 128).text == 3.0


def test_messages_cost_what_rings_send_and_hops_take():
    links = Links(rate=10.0, latency=0.01, start=0.1, per_host=4, host_rate=5.0, host_latency=0.5)
    near = step_cost(PARTS, links, 4)
    assert near.gather == pytest.approx(2 * (0.1 + 2 * 0.01) + 0.75 * (40 + 80) / 10)
    assert near.all_reduce == pytest.approx(0.1 + 2 * 2 * 0.01 + 2 * 0.75 * 200 / 10)
    whole = step_cost(PARTS, links, 4, sharded=False)
    assert whole.gather == pytest.approx(0.1 + 2 * 0.01 + 0.75 * 40 / 10)
    far = step_cost(PARTS, links, 16)
    assert far.all_reduce == pytest.approx(0.1 + 2 * (2 * 0.01 + 2 * 0.5) + 2 * 15 / 16 * 200 / 5)
    alone = step_cost(PARTS, links, 1)
    assert alone.gather == alone.all_reduce == alone.communication_share == 0.0
    assert far.communication_share == pytest.approx((far.gather + far.all_reduce) / far.total)


def test_launching_is_a_floor_under_steps_of_several_and_says_where_more_stop_paying():
    held = replace(PARTS, launched=4.0, replayed=2.5)
    assert step_cost(held, AT_ONCE, 1).total == 10.0
    assert step_cost(held, AT_ONCE, 2).total == pytest.approx(5.5)
    assert step_cost(held, AT_ONCE, 16).total == pytest.approx(4.0)
    assert step_cost(held, AT_ONCE, 16, recorded=True).total == pytest.approx(2.5)
    assert step_cost(replace(PARTS, replayed=12.0), AT_ONCE, 1).total == 12.0
    counts = (1, 2, 4, 8, 16)
    assert pays_up_to(held, AT_ONCE, counts) == 4
    assert pays_up_to(PARTS, AT_ONCE, counts) == 8
    assert [speedup(held, AT_ONCE, ranks) for ranks in counts] == sorted(speedup(held, AT_ONCE, n) for n in counts)


def test_parts_are_found_from_halves():
    found = split(StepSpec("procap", 51, 32), [10.0, 20.0, 12.0], [7.0, 16.0, 9.0], [9.0, 18.0, 11.0], 1000)
    assert (found.image, found.classes, found.gradients) == (6.0, 51, 4000.0)
    assert found.text == pytest.approx(51 / 26)
    assert found.image + found.text + found.every == pytest.approx(12.0)


def test_parts_on_a_gpu_are_counted_from_the_method():
    few, many = (counted_parts("procap", 51, batch, H200, launches=1000) for batch in (32, 256))
    assert many.image == pytest.approx(8 * few.image) and many.text == few.text > 0
    assert (few.features, few.class_features) == (4 * 32 * 512, 4 * 51 * 512) and few.gradients > 80e6
    assert (few.launched, few.replayed) == pytest.approx((5e-3, 2e-3))


JOB = StepSpec("procap", 9, 4)


def take_steps(folder: str) -> None:
    """What a process of a group does, with classes sharded and with all of them on each."""
    ranks, found = ranks_from_environment(), {}
    with init_process_group(ranks, CPU) as group:
        for sharded in (True, False):
            parallel.SHARED_FROM = 1 if sharded else 1000
            steps = Steps(JOB, Parallelism("", ranks.size, sharded=sharded), group, load_mini())
            found[f"sharded {sharded}"] = steps.look() | steps.take(2)
            del steps
        found["ping"] = ping(group, 10)
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_processes_take_the_step_of_one_and_say_what_they_send(tmp_path):
    ends = run_ranks(2, take_steps, str(tmp_path))
    assert [end.code for end in ends] == [0, 0], ends[0].err
    steps = Steps(JOB, Parallelism("alone"), ProcessGroup(), load_mini())
    alone = steps.look() | steps.take(1)
    assert alone["sent_bytes"] == alone["messages"] == alone["waited"] == 0
    width, learnables = load_mini().geometry.embed_dim, alone["learnables"]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["ping"] > 0
        for sharded in (True, False):
            look = found[f"sharded {sharded}"]
            assert look["loss"] == pytest.approx(alone["loss"], rel=1e-5)
            assert 0 < look["waited"] < look["seconds"]
            # Of two processes each sends half of what is gathered (9 classes are padded to 10), and its gradients once.
            rows = JOB.batch // 2 + (5 if sharded else 0)
            assert look["sent_bytes"] == 4 * learnables + 4 * width * rows
        assert found["sharded True"]["tensor_bytes"] < found["sharded False"]["tensor_bytes"] < alone["tensor_bytes"]


def test_a_process_that_is_gone_is_named_with_its_reason():
    with ExitStack() as stack:
        group = Group(Parallelism("one process"), "mini", "no-such-weights")
        stack.callback(group.close)
        with pytest.raises(UserError, match=r"process 0 of one process is gone: .*no-such-weights"):
            group.ask("clear")


@pytest.fixture(scope="module")
def expected():
    """Of MaPLe alone, which has fewest operations to count."""
    return estimates(["maple"], (H200, ETHERNET))


def test_estimates_are_those_of_evenly_dealt_batches(expected):
    assert {(one["gpu"], one["batch"], one["parts"]["classes"]) for one in expected} == {
        (gpu.name, batch, classes) for gpu in (H200, ETHERNET) for batch in (32, 256) for classes in (51, 500, 1000)
    }
    for one in expected:
        assert [cost["ranks"] for cost in one["ranks"]] == [1, 2, 4, 8, 16, 32, 64][: 6 if one["batch"] == 32 else 7]
        for cost in one["ranks"]:
            assert cost["recorded_seconds"] <= cost["seconds"]
            assert cost["seconds"] == pytest.approx(
                sum(cost[part] for part in ("image", "text", "every", "idle", "gather", "all_reduce"))
            )
    # ViT-B/16 has 35 billion operations an image forward, and about as many backward where the weights are frozen.
    (image,) = {one["parts"]["image"] for one in expected if one["batch"] == 32}
    assert image * H200.flops * H200.reached / 32 == pytest.approx(68e9, rel=0.05)


def test_tables_and_figures_are_made_of_what_was_found(expected, tmp_path):
    job, parts = StepSpec("maple", 51, 32), replace(PARTS, classes=51)
    looks = {"communication": 0.25, "sent_bytes": 5e6, "messages": 3, "tensor_bytes": 8e6, "process_bytes": 9e8}
    rows = [
        Measured(job, variant, [each, 2 * each], [each], speed, **looks, loss=1.0, expected=2.0)
        for variant, each, speed in zip(
            list_parallelisms([2], ["ddp"]), (0.4, 0.25, 0.3), (1.0, 1.6, 1.33), strict=True
        )
    ]
    report = {
        "command": "python -m benchmarks.studies.scaling",
        "note": "",
        "environment": {"cpu": {"name": "a CPU"}, "packages": {"torch": "2"}},
        "cores": 2,
        "load_average": [0.5, 1.0],
        "backbone": "mini",
        "rows": [row.as_json() for row in rows],
        "parts": [{"job": asdict(job), **asdict(parts)}],
        "links": {"rate": 1e9, "start": 1e-4},
        "gpus": [asdict(gpu) for gpu in (H200, ETHERNET)],
        "estimates": expected,
    }
    text = re.sub(" +", " ", table(json.loads(json.dumps(report))))
    assert "| MaPLe-style | 2 processes | 51 | 375 | 250-500 | 250 | 1.60 | 80% | 1.00 | 25% | 5.00 | 3 | 8 |" in text
    assert "## Up to 64 GPUs: a model, not a measurement" in text
    assert text.count("| MaPLe-style | 32 |") == 3 and "2.19 GB/s between hosts" in text
    (figure,) = draw(report, tmp_path)
    assert figure.stat().st_size > 20_000 and figure.with_suffix(".pdf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ("ddp", "ddp,deepspeed,deepspeed:2"))
def test_the_command_measures_and_writes(tmp_path, capsys, engine):
    flags = f"--classes 6 --batch 4 --rounds 1 --budget 0 --methods maple --engine {engine} --json --out"
    assert main([*flags.split(), str(tmp_path)]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert [row["variant"]["processes"] for row in report["rows"]] == [1, 2, 2, *[2] * engine.count("deepspeed")]
    for row in report["rows"]:
        assert row["loss"] == pytest.approx(report["rows"][0]["loss"], rel=1e-5)
        assert (row["communication"] is None) == (row["variant"]["engine"] == "deepspeed")
    assert out.startswith((tmp_path / "scaling.md").read_text())
    assert json.loads((tmp_path / "scaling.json").read_text()) == report


def test_flags_that_cannot_be_are_refused_in_one_line(capsys):
    assert [variant.name for variant in list_parallelisms([2], ["ddp", "deepspeed:2"])] == [
        "one process",
        "2 processes",
        "2 processes, all classes on each",
        "2 processes, DeepSpeed, ZeRO 2",
    ]
    for engine in ("horovod", "ddp:1", "deepspeed:3"):
        with pytest.raises(UsageError, match="--engine"):
            list_parallelisms([2], [engine])
    for flags in (["--batch", "5"], ["--processes", "1"], ["--classes", "1"], ["--methods", "zeroshot"]):
        assert main(flags) == 2
        assert capsys.readouterr().err.count("\n") == 1
