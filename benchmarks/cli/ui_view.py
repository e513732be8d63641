"""What MLflow's page of an experiment shows first: a saved view with parallel coordinates and accuracy against speed.

MLflow keeps saved views as tags of the experiment, and its page takes the name of one from the address.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runner.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

VIEW_TAG = "mlflow.sharedViewState."
SECTION = "procap"
ACCURACY = ("hm", "val_hm", "novel", "base", "all", "val_base", "val_dev-base", "val_all")
"""Figures that runs are ordered by: the first one that they all have."""
PARALLEL = (
    "train_seconds", "val_fps", "fps",
    "val_dev-base", "val_dev-novel", "val_base", "val_hm", "base", "novel", "hm", "all",
)  # fmt: skip
SPEED = ("fps", "val_fps", "train_seconds")
"""Figures that the accuracy is shown against: the first one that all runs have."""
LEADING = ("method", "dataset")
AXES = 7
SHOWN = 100
"""Runs that the page loads at once."""


def save_view(store: Store, name: str, state: Mapping[str, Any]) -> str:
    """Keep the view in the experiment, unless it is there, and give its key."""
    plain = json.dumps(state, sort_keys=True)
    key = f"procap-{hashlib.sha256(f'{name} {plain}'.encode()).hexdigest()[:10]}"
    if f"{VIEW_TAG}{key}" not in store.client.get_experiment(store.experiment_id).tags:
        now = time.time_ns() // 1_000_000
        packed = f"deflate;{base64.b64encode(zlib.compress(plain.encode())).decode()}"
        envelope = {"name": name, "createdAt": now, "updatedAt": now, "state": packed}
        store.client.set_experiment_tag(store.experiment_id, f"{VIEW_TAG}{key}", json.dumps(envelope))
    return key


def view_state(where: str, runs: Sequence[Run]) -> dict[str, Any]:
    """The state of the page: the runs that match `where`, with axes that fit `runs`, which are some of them."""
    # One that still goes on, or was killed, has no figures yet and takes none from the others.
    finished = [run for run in runs if run.info.status == "FINISHED"] or runs
    figures = _shared([run.data.metrics for run in finished])
    accuracy = next((name for name in ACCURACY if name in figures), "base")
    speed = next((name for name in SPEED if name in figures), SPEED[-1])
    known = [name for name in PARALLEL if name in figures and name != accuracy]
    params = _differing([run.data.params for run in runs])
    # Colours follow the last axis.
    metrics = [*known[-(AXES - 1 - min(len(params), 3)) :], accuracy]
    columns = [f"metrics.`{name}`" for name in dict.fromkeys([accuracy, *reversed(known)])]
    columns += [f"tags.`{name}`" for name in ("method", "dataset", "seed", "gpus", "commit")]
    return {
        "searchFilter": where,
        "orderByKey": f"metrics.`{accuracy}`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": columns,
        "isAccordionReordered": True,
        "compareRunSections": [
            {"uuid": SECTION, "name": "Accuracy and speed", "display": True, "isReordered": True, "deleted": False,
             "isGenerated": False, "columns": 2, "cardHeight": 440},
        ],
        "compareRunCharts": [
            _card("PARALLEL", "Parallel coordinates", selectedParams=params[: AXES - len(metrics)],
                  selectedMetrics=metrics, showAllRuns=True),
            _card("SCATTER", f"{accuracy} against {speed}", xaxis=_axis(speed), yaxis=_axis(accuracy)),
        ],
    }  # fmt: skip


def condition(chosen: Iterable[str], known: Iterable[str], tag: str) -> list[str]:
    """The terms of a search that find `chosen` among the values of a tag; the language of the search knows no OR."""
    chosen, known = set(chosen), set(known)
    if len(chosen) == 1:
        return [f"tags.{tag} = '{next(iter(chosen))}'"]
    return [f"tags.{tag} != '{other}'" for other in sorted(known - chosen)]


def _card(kind: str, title: str, **more: Any) -> dict[str, Any]:
    fixed = {"uuid": f"{SECTION}-{kind.lower()}", "type": kind, "displayName": title, "metricSectionId": SECTION}
    return {**fixed, "deleted": False, "isGenerated": False, "runsCountToCompare": SHOWN, **more}


def _axis(metric: str) -> dict[str, str]:
    return {"key": metric, "type": "METRIC"}


def _shared(metrics: Sequence[Mapping[str, float]]) -> set[str]:
    return set.intersection(*map(set, metrics)) if metrics else set()


def _differing(params: Sequence[Mapping[str, str]]) -> list[str]:
    """Parameters that all runs have and not all have the same of; what the runs are called by comes first.

    What differs from method to method alone is told by the method.
    """
    shared = set.intersection(*map(set, params)) if params else set()
    found = sorted(name for name in shared if len({one[name] for one in params}) > 1)
    first = [name for name in LEADING if name in found]
    values = {name: {(one.get("method"), one[name]) for one in params} for name in found}
    methods = len({one.get("method") for one in params})
    rest = [name for name in found if name not in (*LEADING, "seed") and len(values[name]) > methods]
    return [*first, *rest, *(["seed"] if "seed" in found else [])]
