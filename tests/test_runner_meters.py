"""Meters, progress and threads: what is timed, what people see, and how many threads small work gets."""

import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runner import meters, progress_bar
from runner.engine import SMALL_PRODUCT, fitting_threads

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass when a test says so: what a meter says can then be asked for exactly."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("runner.meters.time", clock)
    return clock


def run_steps(meter: meters.Meter, clock: Clock, seconds: list[float], images: int = 10) -> None:
    for length in seconds:
        with meter.phase("model"):
            clock.sleep(length)
        meter.step(images)
    meter.settle()


def test_the_first_steps_are_left_out_of_the_rate_and_counted(clock):
    meter = meters.Meter(CPU, untimed_steps=2)
    run_steps(meter, clock, [0.2, 0.2, 0.01, 0.01])
    assert meter.images_per_second() == pytest.approx(20 / 0.02) and meter.untimed_steps == 2
    assert meter.step_seconds == pytest.approx(0.42) == pytest.approx(meter.phases["model"])


def test_a_run_of_untimed_steps_alone_has_a_rate_all_the_same(clock):
    meter = meters.Meter(CPU, untimed_steps=2)
    run_steps(meter, clock, [0.02, 0.02])
    assert meter.images_per_second() == pytest.approx(20 / 0.04)
    assert meters.Meter(CPU, untimed_steps=2).images_per_second() is None


def test_waiting_for_data_and_other_phases_are_told_apart(clock):
    meter = meters.Meter(CPU, phases=("state",))

    def batches():
        for batch in range(3):
            clock.sleep(0.02)
            yield batch

    seen = []
    for batch in meter.iterate("data", batches()):
        seen.append(batch)
        with meter.phase("model"):
            clock.sleep(0.01)
        meter.step(1)
        clock.sleep(0.005)
    with meter.phase("state", in_step=False):
        clock.sleep(0.1)
    meter.settle()
    assert seen == [0, 1, 2]
    # The tenth of the state of a second is in no rate, nor is what no phase had.
    assert meter.images_per_second() == pytest.approx(3 / 0.09)
    assert meter.images_per_second("model") == pytest.approx(3 / 0.03)
    phases = {"data": 0.06, "model": 0.03, "state": 0.1, "other": 0.015}
    assert meter.phases_with_other() == pytest.approx(phases) and meter.seconds == pytest.approx(sum(phases.values()))


def test_a_meter_goes_on_from_what_an_earlier_process_measured(clock):
    first, second = meters.Meter(CPU, untimed_steps=1), meters.Meter(CPU, untimed_steps=1)
    run_steps(first, clock, [0.01, 0.02, 0.02])
    before = first.state()
    second.resume(before)
    second.settle()
    waited = second.seconds
    run_steps(second, clock, [0.1, 0.02])
    assert second.seconds == pytest.approx(waited + 0.12) and waited >= before.seconds
    assert second.phases["model"] == pytest.approx(0.05 + 0.12)
    assert second.images_per_second() == pytest.approx(30 / 0.06) and second.untimed_steps == 2


def test_phases_of_a_gpu_are_timed_by_events_in_milliseconds(monkeypatch):
    times = iter([1000.0, 1250.0])

    class Event:
        def __init__(self, enable_timing):
            self.time = next(times)

        def elapsed_time(self, end):
            return end.time - self.time

    stream = SimpleNamespace(record_event=lambda event: event)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    meter = meters.Meter(torch.device("cuda"))
    with meter.phase("model"):
        meter.step(5)
    meter.settle()
    assert meter.phases == {"model": 0.25} and meter.images_per_second() == 20.0


def test_features_that_a_resumed_training_reads_again_count_once(clock):
    measured = []
    for _ in range(2):
        measured.append(meter := meters.Meter(CPU))
        with meter.phase("features", in_step=False):
            clock.sleep(0.5)
            meter.add({"features": 20.0}, in_step=False)
        meter.settle()
    first, second = measured
    second.resume(first.state(), repeated="features")
    assert second.phases == {"features": 20.5} and (second.seconds, second.stored_seconds) == (20.5, 20.0)


def test_progress_without_a_terminal_is_a_line_now_and_then_on_stderr(capsys):
    with progress_bar.ProgressDisplay("training", 100, done=1) as display:
        display.PLAIN_SECONDS = math.inf
        display.update(1, loss=1.5)
        display.PLAIN_SECONDS = 0.0
        display.update(2, loss=1.25, epoch="1/5")
        display.update(3)
        display.print("a remark")
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(
        r"training:\n  2/100 steps  0 s elapsed, \d+ s left  loss 1.25  epoch 1/5\n"
        r"  3/100 steps  0 s elapsed, \d+ s left\na remark\n",
        err,
    )


def read_terminal(main):
    """Read what a terminal shows until its other side is closed, which is an error."""
    with suppress(OSError):
        while shown := os.read(main, 65536):
            yield shown.decode()


def test_progress_on_a_terminal_is_a_bar_on_stderr():
    code = (
        "from runner.progress_bar import ProgressDisplay\n"
        "with ProgressDisplay('training', 100, done=40) as display:\n"
        "    display.update(50, loss=1.25); display.print('a remark [5]')"
    )
    main, terminal = os.openpty()
    root = Path(__file__).parent.parent
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        shown = "".join(read_terminal(main))
        assert process.stdout is not None and process.stdout.read() == b""
    os.close(main)
    assert process.returncode == 0 and "50/100" in shown and "loss 1.25" in shown and "a remark [5]" in shown


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("work", ["train", "eval"])
def test_small_work_gets_one_thread_and_large_work_all(two_threads, tiny_clip, work):
    one = tiny_clip.visual.num_tokens * tiny_clip.geometry.vision_width**2
    enough = -(-SMALL_PRODUCT[work] // one)
    for images, threads in ((1, 1), (enough - 1, 1), (enough, 2)):
        with fitting_threads(tiny_clip, images, work):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2


def test_the_users_choice_stays(two_threads, tiny_clip, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with fitting_threads(tiny_clip, 1):
        assert torch.get_num_threads() == 2
