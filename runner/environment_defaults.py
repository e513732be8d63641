"""Set defaults of libraries that read them from environment variables."""

from __future__ import annotations

import os

ENVIRONMENT_DEFAULTS = {
    # By default OpenMP's threads spin while they wait for each other, which is very slow if another program uses a
    # core: with one busy loop on two cores a step of mini took 2.8 s instead of 0.18 s. Passive waiting costs nothing.
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # MLflow reads the word alone, not the usual 1.
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # By default MLflow tries seven times for 120 s.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise torch prints a page of C++ frames when another process of the run dies.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Triton 3.9 warns that its default will change, and with it the numbers.
    "TRITON_DEFAULT_FP_FUSION": "1",
    # The profiler would print further messages.
    "KINETO_LOG_LEVEL": "99",
}


def set_environment_defaults(*, online: bool = False) -> None:
    """Set environment variables, unless the user has set them, before the libraries that read them are imported.

    online: allow downloads from the Hub.
    """
    # Otherwise weights that are not there cost most of a minute of retries; users decide about downloads.
    os.environ.setdefault("HF_HUB_OFFLINE", str(int(not online)))
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
