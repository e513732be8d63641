"""Which accelerations run: the plain path, unless a record of this device has found a faster one equal."""

import os
import sysconfig

import pytest
import torch

from procap.clip import CLIP
from procap.errors import UsageError, UserError
from procap.methods import build_method
from procap.methods.plugins import describe_unexpected
from runner import acceleration, devices
from runner.acceleration import Acceleration
from runner.config import RuntimeConfig
from runner.device_record import DeviceRecord, PartResult, identify, read_record, write_record
from runner.distributed.collectives import ProcessGroup
from runner.distributed.ranks import Ranks
from runner.planning import plan_run
from runner.session import Session
from runner.setup import set_up

GPU, CPU = torch.device("cuda"), torch.device("cpu")
PASSED, FAILED = PartResult(status="passed", seconds=1.0), PartResult(status="failed", seconds=1.0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """What this machine says about a GPU; its records lie in an empty cache."""
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(acceleration, "missing_tool", lambda device: "")


def record(gains, **parts):
    return DeviceRecord(identity=identify(GPU), written="2026-01-31T12:00:00Z", parts=parts, gains=gains)


def test_a_gpu_without_a_record_takes_the_plain_path_and_says_so(gpu):
    with pytest.warns(UserWarning, match="GPU: plain path; `procap check device` tests the faster ones"):
        assert Acceleration.parse("auto", GPU) == Acceleration()
    assert Acceleration.parse("auto", CPU) == Acceleration.parse("off", GPU) == Acceleration()


@pytest.mark.parametrize("name", ["graphs", "images", "fused"])
def test_what_a_cpu_cannot_do_is_refused_there(name):
    """Results would name it as what computed them."""
    with pytest.raises(UsageError, match=f"--accelerate {name} needs a CUDA device, not cpu"):
        Acceleration.parse(f"compile,{name}", CPU)


def test_what_a_record_has_as_equal_and_five_percent_faster_is_used(gpu):
    gains = {"graphs": 2.0, "images": 1.04, "fused": 3.0, "compile": 1.05, "cudnn": 1.3}
    written = record(gains, graphs=PASSED, images=PASSED, fused=FAILED, compile=PASSED, cudnn=PASSED)
    write_record(written)
    chosen = Acceleration.parse("auto", GPU)
    assert chosen == Acceleration(graphs=True, compile=True, cudnn=True, record=written.digest)


@pytest.mark.parametrize("change", ["driver", "torch", "program", "device"])
def test_a_record_of_other_software_or_another_gpu_is_void(gpu, monkeypatch, change):
    write_record(record({"graphs": 2.0}, graphs=PASSED))
    assert read_record(GPU) is not None
    if change == "driver":
        monkeypatch.setattr("runner.device_record.gpu_driver", lambda: "600.1")
    elif change == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99")
    elif change == "program":
        monkeypatch.setattr("runner.device_record.program_version", lambda: "9.9")
    else:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert read_record(GPU) is None and Acceleration.parse("auto", GPU) == Acceleration()


def lacks_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return "a C compiler"


def lacks_headers(monkeypatch, tmp_path):
    paths = sysconfig.get_paths()
    monkeypatch.setenv("CC", "true")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {**paths, "include": str(tmp_path)})
    return "Python's headers"


@pytest.mark.parametrize("take_away", [lacks_compiler, lacks_headers])
def test_without_a_compiler_only_an_explicit_choice_is_refused(monkeypatch, tmp_path, take_away):
    """`auto` goes on without what it cannot compile."""
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    write_record(record({"graphs": 2.0, "compile": 2.0, "fused": 2.0}, graphs=PASSED, compile=PASSED, fused=PASSED))
    tool = take_away(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match=f"GPU: without compile, fused, which need {tool}"):
        assert Acceleration.parse("auto", GPU) == Acceleration(graphs=True, record=read_record(GPU).digest)
    for name in ("compile", "fused"):
        with pytest.raises(UsageError, match=f"--accelerate {name} needs {tool}"):
            Acceleration.parse(name, GPU)


def test_off_is_off_for_the_kernels_of_procap_too(gpu, tiny_clip, tiny_space, monkeypatch):
    method = build_method("procap", tiny_clip, tiny_space, {}, torch.Generator().manual_seed(1))
    for choice, kernels in (("fused", "fused"), ("off", "eager")):
        Acceleration.parse(choice, GPU).prepare(tiny_clip)
        assert method.kernels() == kernels


def test_attention_of_cudnn_is_off_unless_a_record_allows_it(tiny_geometry, monkeypatch):
    class OnGpu(CLIP):
        device = GPU

    clip = OnGpu.random(tiny_geometry)
    for allowed in (True, False):
        Acceleration(cudnn=allowed).prepare(clip)
        assert torch.backends.cuda.cudnn_sdp_enabled() is allowed


def test_the_gpu_with_the_number_that_the_user_gave_becomes_the_current_one(monkeypatch, tiny_geometry):
    """Triton launches its kernels on the current device; convolutions are in float32 there."""

    class OnGpu(CLIP):
        device = GPU

    chosen, clip = [], OnGpu.random(tiny_geometry)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for name in ("cuda", "cuda:1"):
        monkeypatch.setattr(OnGpu, "device", torch.device(name))
        Acceleration().prepare(clip)
    assert chosen == [torch.device("cuda:1")] and not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("gpus", "visible", "ranks", "threads"), [(1, 1, 1, 12), (8, 8, 8, 4), (8, 1, 1, 4), (2, 2, 1, 12)]
)
def test_decoding_threads_are_divided_among_ranks_and_among_runs_on_other_gpus(
    monkeypatch, gpus, visible, ranks, threads
):
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: gpus)
    monkeypatch.setattr(devices, "count_gpus", lambda: visible)
    monkeypatch.setattr(devices, "available_cores", lambda: 32)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert devices.num_decoders(None, GPU) == threads
    assert devices.num_decoders(None, CPU) == 0 and devices.num_decoders(3, GPU) == 3


def test_processes_of_a_run_on_gpus_capture_no_step_and_say_what_is_faster(few_digits, monkeypatch):
    session, loaded_with = Session(RuntimeConfig(few_digits), ProcessGroup(Ranks(0, 2, 0, 2))), []
    session.device, session.acceleration = GPU, Acceleration(graphs=True, compile=True)

    def load(config, device, acceleration):
        loaded_with.append(acceleration)
        raise UserError("no weights")

    monkeypatch.setattr(session.backbones, "load", load)
    with pytest.warns(UserWarning, match="one run per GPU, .* is faster"), pytest.raises(UserError, match="no weights"):
        set_up(session.get_run(plan_run(method="coop", dataset="digits", shots=2)))
    assert loaded_with == [Acceleration(compile=True)]


def test_a_process_has_the_gpu_of_its_local_rank():
    second = Ranks(3, 4, 1, 2)
    assert devices.own_device(GPU, second) == torch.device("cuda:1") and devices.own_device(CPU, second) == CPU
    assert devices.own_device(torch.device("cuda:1"), Ranks()) == torch.device("cuda:1")
    with pytest.raises(UsageError, match="--device cuda:1 would be shared by 2 processes"):
        devices.own_device(torch.device("cuda:1"), second)


def test_an_error_of_a_compiler_is_one_line_with_a_remedy():
    with pytest.raises(Exception) as raised:
        import subprocess

        subprocess.run([os.path.realpath("/bin/false"), "launcher.c"], check=True)
    text = describe_unexpected(raised.value)
    assert "\n" not in text and text.startswith("a kernel cannot be compiled: ") and "--accelerate off" in text


def test_compiled_blocks_are_compiled_once_and_the_limit_is_set_in_every_thread(tiny_geometry):
    from threading import Thread

    from procap.compiled import MAX_PROGRAMS

    clip, limits, parts = CLIP.random(tiny_geometry), [], []

    def prepare():
        Acceleration(compile=True).prepare(clip)
        limits.append(torch._dynamo.config.recompile_limit)
        parts.append(clip.visual.transformer.resblocks[0].before_attention)

    for _ in range(2):
        thread = Thread(target=prepare)
        thread.start()
        thread.join()
    assert limits == [MAX_PROGRAMS, MAX_PROGRAMS] and parts[0] is parts[1]
