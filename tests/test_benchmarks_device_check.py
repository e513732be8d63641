"""`procap check device`: wrong, hanging and crashing paths fail alone, and the record has what was measured."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.cli import main
from benchmarks.device_check import numbers, paths, speed
from benchmarks.device_check.case import DeviceCase, Skipped, largest_difference
from benchmarks.device_check.parts import PARTS, run_in_process, run_parts
from procap.compiled import compiled_level
from procap.errors import UserError

CPU = DeviceCase(torch.device("cpu"))


def test_a_part_that_hangs_or_crashes_fails_alone(monkeypatch):
    hanging = run_in_process("plain", CPU, seconds=0.05)
    assert (hanging.status, hanging.reason) == ("failed", "no end after 0.05 s")
    [(name, crashed)] = run_parts(DeviceCase(torch.device("cuda:7")), ["facts"])
    assert (name, crashed.status) == ("facts", "failed") and crashed.reason and "\n" not in crashed.reason


def test_the_command_prints_and_returns_what_a_part_found(monkeypatch, tmp_path, capsys):
    """A subset of the parts writes no record, which would hide the others from `auto`."""
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path))
    assert main(["check", "device", "--device", "cpu", "--only", "facts,graphs", "--json"]) == 0
    out = capsys.readouterr().out
    parts = json.loads(out.splitlines()[-1])["parts"]
    assert parts["facts"]["values"]["torch"] == torch.__version__
    assert (parts["graphs"]["status"], parts["graphs"]["reason"]) == ("skipped", "needs a CUDA device")
    assert not (tmp_path / "devices").exists()
    assert main(["check", "device", "--only", "speeed"]) == 2


@pytest.mark.slow
def test_the_whole_check_runs_on_a_cpu_and_writes_its_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path))
    assert main(["check", "device", "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    skipped = {name for name, part in record["parts"].items() if part["status"] == "skipped"}
    assert list(record["parts"]) == list(PARTS) and skipped == {"cudnn", "graphs", "fused", "compile"}
    [file] = (tmp_path / "devices").iterdir()
    assert json.loads(file.read_text())["parts"].keys() == PARTS.keys()


def test_numbers_that_are_wrong_or_not_finite_are_found():
    exact = {"gradient of a": torch.ones(2), "logits": torch.ones(2)}
    assert largest_difference({**exact, "logits": torch.tensor([1.0, 1.5])}, exact) == 0.5
    with pytest.raises(UserError, match="not finite: gradient of a"):
        largest_difference({**exact, "gradient of a": torch.tensor([1.0, torch.nan])}, exact)
    with pytest.raises(UserError, match="other tensors: logits"):
        largest_difference({"gradient of a": torch.ones(2)}, exact)


def test_attention_that_gives_nan_is_found(monkeypatch):
    """As cuDNN's gradient of queries under some masks."""
    plain = F.scaled_dot_product_attention

    def wrong(q, k, v, mask=None, is_causal=False):
        mixed = plain(q, k, v, mask, is_causal=is_causal)
        return (
            mixed * torch.nan if mask is not None and mask.shape[-1] % 128 == 64 and q.dtype != torch.float32 else mixed
        )

    # The slow test takes all shapes.
    monkeypatch.setattr(numbers, "ATTENTION", {"64 masked keys": numbers.ATTENTION["64 masked keys"]})
    numbers.check_attention(CPU)
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    with pytest.raises(UserError, match="not finite: values"):
        numbers.check_attention(CPU)
    with pytest.raises(Skipped):
        numbers.check_cudnn(CPU)


def test_images_that_are_not_those_of_pillow_are_found(monkeypatch):
    class Shifted(paths.DeviceResize):
        def make_centres(self, images):
            return super().make_centres([image.roll(1, 0) for image in images])

    monkeypatch.setattr(paths, "BATCHES", 1)
    assert paths.check_images(CPU) == {"equal images": 8}
    monkeypatch.setattr(paths, "DeviceResize", Shifted)
    with pytest.raises(UserError, match="resized images of batch 0 are not Pillow's"):
        paths.check_images(CPU)


class OnGpu(DeviceCase):
    """A CPU that passes for a GPU, where CUDA graphs are emulated."""

    on_gpu = True


@pytest.mark.parametrize("error", ["", "wrong", pytest.param("growing", marks=pytest.mark.slow)])
def test_replays_are_compared_with_eager_steps(emulated_graphs, monkeypatch, error):
    sizes = iter(range(0, 10**9, 2**21 if error == "growing" else 1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(sizes))
    monkeypatch.setattr(paths, "MEMORY_STEPS", 2)
    monkeypatch.setattr(paths, "METHODS", ("coop",))
    monkeypatch.setattr("benchmarks.runtime.workload.count_flops", lambda *_: 0.0)
    if error == "wrong":
        replay = torch.cuda.CUDAGraph.replay

        def wrong(graph):
            with torch.no_grad():
                replay(graph)
                *_, (_, _, _, fresh) = graph.tape._records
                fresh[0][1].mul_(1.1)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", wrong)
    check = OnGpu(torch.device("cpu"))
    if not error:
        assert [*paths.check_graphs(check)] == ["coop"]
        return
    with pytest.raises(UserError, match="differs by" if error == "wrong" else "2 replayed steps keep 2 MB"):
        paths.check_graphs(check)


@pytest.mark.slow
def test_compiled_levels_are_compared_with_float64(monkeypatch):
    """With the tracing of torch.compile but torch's own kernels."""
    monkeypatch.setattr(paths, "compiled_level", lambda: compiled_level("aot_eager"))
    assert [*paths.check_fused(OnGpu(torch.device("cpu")))] == ["1 tokens", "4 tokens", "16 tokens"]


def test_compiled_paths_are_skipped_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for check in (paths.check_fused, paths.check_compile):
        with pytest.raises(Skipped, match=r"needs a C\+\+ compiler"):
            check(OnGpu(torch.device("cpu"), full=True))


def test_gains_are_those_of_the_work_that_a_path_changes(monkeypatch):
    plain = {"procap train 51 x 4": 4.0, "maple train 51 x 4": 2.0, "maple eval 100": 100.0}
    half = {work: ms / 2 if "train" in work else ms for work, ms in plain.items()}
    monkeypatch.setattr(speed, "_measure_steps", lambda case, path: plain if path == "plain" else half)
    monkeypatch.setattr(speed, "_measure_images", lambda case: {})
    case = DeviceCase(torch.device("cpu"), passed=("graphs", "fused", "compile"))
    assert speed.measure_speed(case)["gains"] == {"graphs": 2.0, "fused": 2.0, "compile": round(106 / 103, 3)}


def test_cublas_is_deterministic_before_its_first_product(monkeypatch):
    """Torch reads the variable there once, and refuses all later products under deterministic algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seen = []

    def train(case):
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()))
        return {"learned": torch.ones(1)}

    monkeypatch.setattr(numbers, "_train", train)
    assert numbers.check_deterministic(CPU)["equal tensors"] == 1
    assert seen == [(":4096:8", True)] * 2 + [(":4096:8", False)] * 2


def test_the_attention_of_cudnn_is_compared_or_skipped(monkeypatch):
    """In the place of cuDNN's kernels stand those of torch, whose numbers are right."""
    monkeypatch.setattr(numbers, "SDPBackend", SimpleNamespace(MATH=SDPBackend.MATH, CUDNN_ATTENTION=SDPBackend.MATH))
    monkeypatch.setattr(numbers, "ATTENTION", {name: numbers.ATTENTION[name] for name in ("text", "64 masked keys")})
    case = OnGpu(torch.device("cpu"))
    values = numbers.check_cudnn(case)
    differences = [value for name, value in values.items() if not name.endswith("first call, ms")]
    assert len(values) == 8 and len(differences) == 4 and max(differences) < 0.03
    monkeypatch.setattr(numbers.SDPBackend, "CUDNN_ATTENTION", SDPBackend.CUDNN_ATTENTION)
    with pytest.raises(Skipped, match="not supported"):
        numbers.check_cudnn(case)
