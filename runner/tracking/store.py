"""Connect to the MLflow store that runs are exported to."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from procap.errors import UserError
from runner.environment import library_defaults
from shards.credentials import mask
from shards.urls import redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "procap"
SQLITE = "sqlite:///"
DEFAULT_FILE = "mlflow.db"
# By default MLflow tries seven times for 120 s.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


@dataclass(frozen=True)
class TrackingStore:
    """An MLflow store for the runs of `results`; the first access to `client` or `experiment_id` connects."""

    uri: str
    experiment: str
    results: Path

    @classmethod
    def choose(cls, results: Path, uri: str | None = None) -> TrackingStore:
        """Choose `uri`, else MLFLOW_TRACKING_URI, else mlflow.db in `results`; experiment: MLFLOW_EXPERIMENT_NAME."""
        results = results.resolve()
        chosen = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{results / DEFAULT_FILE}"
        return cls(chosen, os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT, results)

    @property
    def exists(self) -> bool:
        """Whether runs can be exported without creating the default store."""
        default = self.results / DEFAULT_FILE
        return default.exists() or self.uri != f"{SQLITE}{default}"

    @property
    def address(self) -> str:
        """The URI without credentials, for messages and pages."""
        return redact(self.uri)

    @property
    def is_server(self) -> bool:
        return self.uri.startswith(("http://", "https://"))

    @cached_property
    def client(self) -> MlflowClient:
        """A client of the store."""
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        # Before the import, which reads some of the variables.
        library_defaults()
        from mlflow.tracking import MlflowClient

        # These loggers write a line per table and retry; the caller reports a failure on one line.
        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return MlflowClient(self.uri)

    @cached_property
    def experiment_id(self) -> str:
        """The ID of the experiment, which is created if needed. Raises UserError if the store does not answer."""
        try:
            experiment = self.client.get_experiment_by_name(self.experiment)
            return experiment.experiment_id if experiment else self.client.create_experiment(self.experiment)
        except Exception as error:
            raise UserError(f"cannot open {self.address}: {format_error(error)}") from error


def report(text: str) -> None:
    """Print a line about tracking to stderr."""
    print(f"tracking: {text}", file=sys.stderr, flush=True)


def format_error(error: BaseException) -> str:
    """Format the message of `error` on one line of at most 200 characters."""
    return shorten(mask((str(error).strip() or type(error).__name__).splitlines()[0]), 200, placeholder="...")
