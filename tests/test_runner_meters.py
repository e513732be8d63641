"""Meters and progress: what is timed is what was asked for, and people see it on stderr only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranked import run_ranks

from runner.config import RunConfig, Workplace, plan_run
from runner.joining import joined
from runner.meters import Machine, Meter
from runner.progress import ProgressDisplay
from runner.ranks import announced_ranks
from runner.results import RunFolder
from runner.track_record import read_record
from runner.train import train
from shards.stream import TrainStream

CPU = torch.device("cpu")


def run_steps(meter: Meter, seconds: list[float], images: int = 10) -> None:
    for duration in seconds:
        with meter.phase("model"):
            time.sleep(duration)
        meter.step(images)
    meter.settle()


def test_warm_up_is_left_out_of_the_rate_and_counted():
    meter = Meter(CPU, warmup=2)
    run_steps(meter, [0.2, 0.2, 0.01, 0.01])
    rate = meter.images_per_second()
    assert rate is not None
    assert 20 / 0.1 < rate <= 20 / 0.02
    assert meter.warmup_steps == 2
    assert meter.step_seconds == pytest.approx(meter.phases["model"])
    assert meter.step_seconds >= 0.42


def test_a_run_no_longer_than_its_warm_up_has_a_rate_all_the_same():
    meter = Meter(CPU, warmup=2)
    run_steps(meter, [0.02, 0.02])
    rate = meter.images_per_second()
    assert rate is not None
    assert 20 / 0.2 < rate <= 20 / 0.04
    assert meter.warmup_steps == 0
    assert Meter(CPU, warmup=2).images_per_second() is None


def test_waiting_for_data_and_other_phases_are_told_apart():
    meter = Meter(CPU, warmup=0, phases=("checkpoint",))

    def batches():
        for batch in range(3):
            time.sleep(0.02)
            yield batch

    seen = []
    for batch in meter.each("data", batches()):
        seen.append(batch)
        with meter.phase("model"):
            time.sleep(0.01)
        meter.step(1)
    with meter.phase("checkpoint", rated=False):
        time.sleep(0.1)
    meter.settle()
    assert seen == [0, 1, 2]
    assert meter.phases["data"] >= 0.06
    assert meter.phases["model"] >= 0.03
    whole, model = meter.images_per_second(), meter.images_per_second("model")
    assert whole is not None
    assert model is not None
    # The checkpoint's tenth of a second is in no rate.
    assert 3 / 0.15 < whole <= 3 / 0.09
    assert whole < model <= 3 / 0.03
    phases = meter.with_other()
    assert sum(phases.values()) == pytest.approx(meter.seconds)
    assert 0 <= phases["other"] < 0.1


def test_a_meter_goes_on_from_what_an_earlier_process_measured():
    first, second = Meter(CPU, warmup=1), Meter(CPU, warmup=1)
    run_steps(first, [0.01, 0.02, 0.02])
    second.go_on(first.state())
    run_steps(second, [0.1, 0.02])
    assert second.seconds >= first.seconds + 0.12
    assert second.phases["model"] >= first.phases["model"] + 0.12
    rate = second.images_per_second()
    assert rate is not None
    assert 30 / 0.12 < rate <= 30 / 0.06
    assert second.warmup_steps == 2


LATE_SECONDS = 0.1


def runs(checkpoint: str) -> list[RunConfig]:
    overrides = {"epochs": 3, "batch_size": 4, "warmup": "none"}
    return [
        plan_run(method="coop", dataset="digits", shots=4, seed=seed, backbone=checkpoint, overrides=overrides)
        for seed in (1, 2)
    ]


def train_beside_a_slow_one(data: str, results: str, checkpoint: str) -> None:
    """The last rank waits for its images in the first run; all are equally fast in the second."""
    ranks, epoch = announced_ranks(), TrainStream.epoch

    def late(self, *arguments, **more):
        for batch in epoch(self, *arguments, **more):
            time.sleep(LATE_SECONDS)
            yield batch

    place = Workplace(Path(data), Path(results), device="cpu", tracking_uri="off", quiet=True)
    with joined(ranks, CPU) as crew:
        slow, fast = runs(checkpoint)
        TrainStream.epoch = late if ranks.rank == ranks.size - 1 else epoch  # type: ignore[method-assign]
        train(slow, place, crew=crew)
        TrainStream.epoch = epoch  # type: ignore[method-assign]
        train(fast, place, crew=crew)


@pytest.mark.parametrize("size", (2, 4))
def test_a_slow_process_is_seen_where_it_is_slow_and_as_waiting_of_all_others(
    few_digits, tiny_checkpoint, tmp_path, size
):
    ends = run_ranks(size, train_beside_a_slow_one, str(few_digits), str(tmp_path), str(tiny_checkpoint))
    assert [end.code for end in ends] == [0] * size, ends[0].err
    first, second = [RunFolder(tmp_path / config.path) for config in runs(str(tiny_checkpoint))]
    result, quick = first.train(), second.train()
    assert result and quick
    *others, late = result.ranks
    assert len(others) == size - 1
    assert late.data_share > 0.6 and late.communication_share < 0.3
    for use in others:
        assert use.data_share < 0.2 and 0.6 < use.communication_share < 1
    # All are held up: a global batch of 4 takes at least the time that the late images take.
    assert result.images_per_second < 4 / LATE_SECONDS
    assert sum(use.images_per_second for use in result.ranks) == pytest.approx(result.images_per_second, rel=0.3)
    # What was waited in an earlier run of the same processes is not this run's.
    for use in quick.ranks:
        assert 0 < use.communication_share < 1 and use.data_share + use.communication_share < 1
        assert use.host and use.device == "cpu" and use.peak_memory_bytes.process > 1e7
    record = read_record(first)
    assert record
    sent = {point.key: point.value for point in record.points["train.json"]}
    assert sent["world_size"] == size and sent["train_images_per_second"] == result.images_per_second
    for rank, use in enumerate(result.ranks):
        for name in ("images_per_second", "data_share", "communication_share"):
            assert sent[f"rank/{rank}/{name}"] == getattr(use, name)


def test_shares_of_a_process_leave_out_what_another_had_measured():
    first, second = Meter(CPU, warmup=1, phases=("model",)), Meter(CPU, warmup=1, phases=("model",))
    run_steps(first, [0.05, 0.05])
    second.go_on(first.state())
    run_steps(second, [0.01])
    assert 0.01 <= second.own_seconds() < 0.05 < first.step_seconds < second.step_seconds
    assert second.own_seconds("model") == pytest.approx(second.own_seconds())


def test_a_busy_process_is_seen_to_be_busy_and_memory_to_be_used():
    machine = Machine(CPU)
    before = machine.peak_memory().process
    block = bytearray(os.urandom(1)) * 60_000_000
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    use = machine.use()
    assert use.cpu_percent is not None
    assert 10 < use.cpu_percent < 100 * (os.cpu_count() or 1) + 50
    assert (use.gpu_percent, use.gpu_watts, machine.peak_memory().gpu) == (None, None, None)
    assert machine.peak_memory().process >= before
    assert machine.peak_memory().process > len(block)


def test_peak_memory_is_of_the_run_and_not_of_what_came_before():
    size = 300_000_000
    block = bytearray(os.urandom(1)) * size
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system keeps one mark for the whole process")
    before = Machine(CPU).peak_memory().process
    del block
    assert Machine(CPU).peak_memory().process < before - size / 2


def test_progress_without_a_terminal_is_a_line_now_and_then_on_stderr(capsys):
    with ProgressDisplay("training", 100) as display:
        display.update(1, loss=1.5)
        display.PLAIN_SECONDS = 0.0
        display.update(2, loss=1.25, epoch="1/5")
        display.say("a remark")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "training: 2/100 steps  loss 1.25  epoch 1/5\na remark\n"


def test_quiet_progress_says_nothing(capsys):
    with ProgressDisplay("training", 100, quiet=True) as display:
        display.PLAIN_SECONDS = 0.0
        display.update(1)
        display.say("a remark")
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_a_bar_on_stderr():
    code = (
        "from runner.progress import ProgressDisplay\n"
        "with ProgressDisplay('training', 100, done=40) as display:\n"
        "    display.update(50, loss=1.25); display.say('a remark [5]')"
    )
    main, terminal = os.openpty()
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=terminal, check=True
    )
    os.close(terminal)
    shown = os.read(main, 65536).decode()
    os.close(main)
    assert done.stdout == b""
    assert "50/100" in shown
    assert "loss 1.25" in shown
    assert "a remark [5]" in shown
