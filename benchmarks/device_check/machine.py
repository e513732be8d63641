"""Collect the facts of a device, and check that two of its kind work together."""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.device_check.case import DeviceCase, Skipped, largest_difference, make_training, require_close
from runner.device_record import identify
from runner.devices import available_cores, count_gpus
from runner.distributed.collectives import ProcessGroup
from runner.distributed.process_group import init_process_group
from runner.distributed.ranks import Ranks
from runner.engine import Batch, Engine

RANKS, SECONDS = 2, 60.0
REDUCED_BYTES = 2**24


def collect_facts(case: DeviceCase) -> dict[str, Any]:
    """Collect what decides which paths can run."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    compilers = (shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if name)
    facts = {
        **identify(case.device).model_dump(),
        "cores": available_cores(),
        "compiler": next(filter(None, compilers), ""),
        "python headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        "triton": triton,
    }
    if not case.on_gpu:
        return facts
    about = torch.cuda.get_device_properties(case.device)
    return facts | {
        "gpus": count_gpus(),
        "memory GB": round(about.total_memory / 1e9, 1),
        "compute capability": f"{about.major}.{about.minor}",
        "shared memory per block": getattr(about, "shared_memory_per_block_optin", None),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def check_processes(case: DeviceCase) -> dict[str, Any]:
    """Compare a step of two processes, each with a device, with that of one; on a CPU both share it."""
    if case.on_gpu and count_gpus() < RANKS:
        raise Skipped(f"needs {RANKS} GPUs")
    port = get_free_port()
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        (gradients, milliseconds), _ = pool.map(partial(_take_step, case, port), range(RANKS))
    expected, _ = _compute_gradients(case, ProcessGroup())
    difference = require_close({"DDP": largest_difference(gradients, expected)}, 1e-3)
    return {**difference, "all_reduce of 16 MB, ms": round(milliseconds, 2)}


def _take_step(case: DeviceCase, port: int, rank: int) -> tuple[dict[str, Tensor], float]:
    """Take a step as one of two processes; returns its gradients and the milliseconds of a sum over both."""
    ranks = Ranks(rank, RANKS, rank, RANKS)
    os.environ |= ranks.environment("127.0.0.1", port)
    device = torch.device("cuda", rank) if case.on_gpu else case.device
    if not case.on_gpu:
        torch.set_num_threads(1)
    with init_process_group(ranks, device, SECONDS) as group:
        return _compute_gradients(DeviceCase(device, case.backbone, case.pretrained), group)


def _compute_gradients(case: DeviceCase, group: ProcessGroup) -> tuple[dict[str, Tensor], float]:
    training, images, labels = make_training(case, "procap", (40, 8))
    method, seconds = training.method, 0.0
    if group.size > 1:
        method.group = group
        data = torch.ones(REDUCED_BYTES // 4, device=case.device)
        for _ in range(2):
            # The first message sets up the connections.
            began = time.perf_counter()
            dist.all_reduce(data)
            if case.on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
    engine = Engine(method, training.config, group)
    batch = training.batch(images, labels, 0)
    engine.backward(engine.terms(Batch(batch.images[group.rank :: group.size], batch.labels, batch.noise)))
    named = method.named_parameters()
    gradients = {f"gradient of {name}": p.grad.cpu() for name, p in named if p.grad is not None}
    engine.close()
    return gradients, 1e3 * seconds
