"""Time MLflow with many runs, whose results are synthetic.

    python -m benchmarks.studies.mlflow_load --runs 10000

Started again with the same folder it exports only what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cli.ui import select_runs, server
from benchmarks.console.output import columns, note, show
from benchmarks.studies.record import describe_machine, describe_run, write_record
from runner.config import RunConfig, Target, plan_run
from runner.results import EpochLog, EvalResult, PeakMemory, PerClass, ResourceUse, TrainResult
from runner.run_collection import Collection, write_collection
from runner.run_folders import RunFolder
from runner.tracking.export import sync
from runner.tracking.store import TrackingStore

METHODS = ("zeroshot", "coop", "cocoop", "maple", "procap")
DATASETS = ("shapes", "petals", "textures", "digits")
EPOCHS = 10
SUITE = "synthetic"
MEASURED: dict[str, Any] = {
    "peak_memory_bytes": PeakMemory(process=700_000_000, gpu=None),
    "use": ResourceUse(cpu_percent=150.0),
    "manifest_digest": "d" * 64,
    "backbone_digest": "b" * 16,
    "environment": {"device": "cpu", "git": {"commit": "0" * 40, "dirty": False}},
}


def make_results(results: Path, count: int) -> list[str]:
    """Write `count` finished runs, each evaluated on base and novel classes, below `results`; returns their paths."""
    plans = [plan_run(method=method, dataset=dataset) for dataset in DATASETS for method in METHODS]
    configs = (plan.model_copy(update={"seed": seed}) for seed in itertools.count(1) for plan in plans)
    paths = []
    for config in itertools.islice(configs, count):
        paths.append(config.path)
        if not RunFolder(results / config.path).train_file.exists():
            _write_run(results, config)
    return paths


def _write_run(results: Path, config: RunConfig) -> None:
    folder = RunFolder(results / config.path)
    epochs = [
        EpochLog(epoch=epoch, lr=0.0035, terms={"ce": 2 / (epoch + 1)}, seconds=1.2, images_per_second=100.0)
        for epoch in range(EPOCHS if config.recipe.epochs else 0)
    ]
    checkpoint = hashlib.sha256(config.hash.encode()).hexdigest()
    documents: dict[Path, Any] = {
        folder.config_file: config,
        folder.train_file: TrainResult(
            config_hash=config.hash, steps=10 * len(epochs), images=160 * len(epochs), epochs=epochs,
            seconds=1.5 * len(epochs) + config.seed / 1000, images_per_second=100.0, images_per_second_model=125.0,
            warmup_steps=0, phases={"data": 1.0, "forward": 4.0, "backward": 5.0}, trainable_parameters=2048,
            fewshot=None, checkpoint_sha256=checkpoint, **MEASURED,
        ),
    }  # fmt: skip
    total, rate = 400, 600.0
    for half, digits in (("base", checkpoint[:8]), ("novel", checkpoint[8:16])):
        target, correct = f"{config.dataset}:{half}:test", int(digits, 16) % total
        documents[folder.eval_file(Target.parse_unchecked(target))] = EvalResult(
            config_hash=config.hash, target=target, correct=correct, total=total,
            per_class=PerClass(correct=[correct], total=[total]), limit=None, dataset_size=total, num_classes=1,
            precision="fp32", batch_size=100, workers=0, device="cpu", seconds=total / rate, images_per_second=rate,
            images_per_second_model=1.5 * rate, warmup_batches=1, checkpoint_sha256=checkpoint, **MEASURED,
        )  # fmt: skip
    (folder.path / "eval").mkdir(parents=True, exist_ok=True)
    # Write without fsync, unlike real results, as it would take most of the time.
    for file, document in documents.items():
        file.write_text(json.dumps(document.model_dump(mode="json", by_alias=True), indent=1))


def measure(results: Path, runs: int, port: int) -> dict[str, Any]:
    """Time each action in a store of `runs` runs; missing runs are made first."""
    seconds: dict[str, float] = {}

    def timed(what: str, action: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = action()
        seconds[what] = time.perf_counter() - start
        note(f"{what}: {seconds[what]:.2f} s")
        return value

    paths = make_results(results, runs)
    write_collection(results, Collection(kind="suite", name=SUITE, runs=tuple(paths), status="finished"))
    store = TrackingStore.choose(results, f"sqlite:///{results / 'mlflow.db'}")
    first = timed("export what is missing", lambda: sync(store))
    timed("procap track sync, nothing to send", lambda: sync(store))
    timed("open the store", lambda: TrackingStore.choose(results, store.uri).open())
    added = make_results(results, runs + 1)[-1]
    timed("export one more run", lambda: sync(store, only=[added]))
    best: dict[str, Any] = {"max_results": 100, "order_by": ["metrics.hm DESC"]}
    where = "tags.method = 'procap'"
    timed("the 100 best of a method", lambda: store.client.search_runs([store.experiment_id], where, **best))
    selected = timed(
        "procap ui, until its server starts",
        lambda: select_runs(results, store, suite=SUITE, methods=("maple", "procap")),
    )
    with server(store, port):
        query = {"experiment_ids": [store.experiment_id], "filter": selected.where, **best}
        timed("the runs of a page, from the server", lambda: _ask(f"http://127.0.0.1:{port}", query))
    size = (results / "mlflow.db").stat().st_size / 1e6
    measured = {"runs": runs, "sent_now": len(first.sent), "seconds": seconds, "database_megabytes": size}
    return describe_run("mlflow_load", None) | measured


def _ask(address: str, query: dict[str, Any]) -> bytes:
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/runs/search", json.dumps(query).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        return answer.read()


def format_report(report: dict[str, Any]) -> str:
    rows = [(what, f"{value:.2f}") for what, value in report["seconds"].items() if what != "export what is missing"]
    sent, sending = report["sent_now"], report["seconds"]["export what is missing"]
    if sent > report["runs"] // 2:
        rows.insert(0, (f"export {sent:,} runs, one process", f"{sending:.0f} ({1000 * sending / sent:.0f} ms each)"))
    return (
        f"# MLflow with {report['runs']:,} runs\n\n"
        f"`{report['command']}` on {describe_machine(report)};\nthe default store, SQLite beside the results: "
        f"{report['database_megabytes']:.0f} MB. One measurement each.\n\n"
        f"```\n{columns(('what', 'seconds'), rows)}\n```\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("mlflow-load"), help="folder of results")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--port", type=int, default=5055)
    parser.add_argument("--out", type=Path, default=Path("docs/results/mlflow"))
    given = parser.parse_args()
    results = given.results.resolve()
    report = measure(results, given.runs, given.port)
    write_record(given.out / "load.json", report, format_report(report))
    show(format_report(report))


if __name__ == "__main__":
    main()
