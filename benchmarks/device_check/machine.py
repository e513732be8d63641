"""Collect the facts of a device, and check that two of its kind work together."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.device_check.case import (
    DeviceCase,
    Skipped,
    gradients_of,
    largest_difference,
    make_training,
    require_close,
)
from runner.acceleration import missing_tool
from runner.device_record import identify
from runner.devices import count_gpus
from runner.distributed.collectives import ProcessGroup
from runner.distributed.connect import init_process_group
from runner.distributed.ranks import Ranks
from runner.engine import Batch, Engine
from runner.provenance import describe_environment

RANKS, SECONDS = 2, 60.0


def collect_facts(case: DeviceCase) -> dict[str, Any]:
    """Collect what decides which paths can run."""
    facts = (
        describe_environment(case.device) | identify(case.device).model_dump() | {"missing": missing_tool(case.device)}
    )
    if not case.on_gpu:
        return facts
    about = torch.cuda.get_device_properties(case.device)
    return facts | {
        "gpus": count_gpus(),
        "memory GB": round(about.total_memory / 1e9, 1),
        "compute capability": f"{about.major}.{about.minor}",
        "shared memory per block": getattr(about, "shared_memory_per_block_optin", None),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def check_processes(case: DeviceCase) -> dict[str, Any]:
    """Compare a step of two processes, each with a device, with that of one; on a CPU both share it."""
    if case.on_gpu and count_gpus() < RANKS:
        raise Skipped(f"needs {RANKS} GPUs")
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        gradients, _ = pool.map(partial(_take_step, case, get_free_port()), range(RANKS))
    return require_close({"DDP": largest_difference(gradients, _compute_gradients(case, ProcessGroup()))}, 1e-3)


def _take_step(case: DeviceCase, port: int, rank: int) -> dict[str, Tensor]:
    """Take a step as one of two processes; returns its gradients."""
    ranks = Ranks(rank, RANKS, rank, RANKS)
    os.environ |= ranks.environment("127.0.0.1", port)
    device = torch.device("cuda", rank) if case.on_gpu else case.device
    if not case.on_gpu:
        torch.set_num_threads(1)
    with init_process_group(ranks, device, SECONDS) as group:
        return _compute_gradients(DeviceCase(device, case.backbone, case.pretrained), group)


def _compute_gradients(case: DeviceCase, group: ProcessGroup) -> dict[str, Tensor]:
    training, images, labels = make_training(case, "procap", (40, 8))
    training.method.group = group if group.size > 1 else None
    engine = Engine(training.method, training.config, group)
    batch = training.batch(images, labels, 0)
    engine.backward(engine.terms(Batch(batch.images[group.rank :: group.size], batch.labels, batch.noise)))
    engine.close()
    return gradients_of(training.method)
