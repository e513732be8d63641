"""Run one part of the check in this process, for `benchmarks.device_check.parts.run_in_process`."""

import sys
from pathlib import Path

import torch

from benchmarks.device_check.case import DeviceCase
from benchmarks.device_check.parts import run_here
from runner.environment import library_defaults

if __name__ == "__main__":
    library_defaults()
    name, file, device, backbone, pretrained, passed, full = sys.argv[1:]
    paths = tuple(filter(None, passed.split(",")))
    run_here(name, DeviceCase(torch.device(device), backbone, pretrained or None, paths, bool(full)), Path(file))
