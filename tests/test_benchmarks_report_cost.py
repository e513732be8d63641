"""Time and cost in a report: every job is in every sum, and none twice."""

from __future__ import annotations

import json
from pathlib import Path

from made_results import put_config, put_score
from report_pages import Page, begin, put_entry, tables, words_of

from benchmarks.report.report import write_report
from benchmarks.report.started_suites import find_started_suites, merge_unfinished
from benchmarks.results.runtime import SCHEMA
from runner.results import RankUse, ResourceUse, write_json
from runner.run_folders import RunFolder


def test_time_and_cost_count_a_shared_run_once(tmp_path: Path) -> None:
    root = tmp_path / "results"
    chosen = {"datasets": ("tiles",), "methods": ("procap",), "seeds": (1,)}
    for name in ("base-to-novel", "stability"):
        _, entries = begin(root, name, **chosen)
    put_entry(root, entries[0])
    text = write_report(root, price=3600.0).read_text()
    # 12.5 s of training and two evaluations of a second each, see made_results.
    assert "At 3600 an hour, of a GPU or a machine, that is 14.50." in text
    table = tables(Page(text).root)["Suites, their runs, and how long they took"]
    last = [words_of(cell) for cell in table.all("tr")[-1].all("td")]
    assert last == ["1", "1", "2", "12.5", "2.0", "-"]


def test_the_runtime_benchmark_and_pictures_are_in_every_sum(tmp_path: Path) -> None:
    """Neither is a run."""
    root, machine = tmp_path / "results", {"gpu": None, "cpu": {"name": "EPYC", "cores": 16}, "python": "3.12.1"}
    options, _ = begin(root, "runtime", datasets=("tiles",), methods=("procap",))
    row = {"dataset": "tiles", "method": "procap"}
    measured = {"schema": SCHEMA, "backbone": {"name": options.profile.backbone}, "rows": [row], "seconds": 51.0}
    measured["settings"] = {"classes": "base", "options": {}}
    write_json(root / "runtime" / "x" / "runtime.json", {**measured, "environment": machine})
    _, entries = begin(root, "qualitative", datasets=("tiles",), methods=("procap",))
    put_entry(root, entries[0])
    record = {"runs": [entries[0].path], "pictures": {}, "seconds": 9.0, "environment": machine}
    (root / "collections/suite/qualitative/pictures.json").write_text(json.dumps(record))
    text = write_report(root, price=3600.0).read_text()
    # 12.5 s of training and an evaluation of a second, see made_results.
    assert "At 3600 an hour, of a GPU or a machine, that is 73.50." in text
    shown = tables(Page(text).root)
    rows = [row for row in shown["Suites, their runs, and how long they took"].all("tr") if row.all("td")]
    assert [words_of(row.all("td")[5]) for row in rows] == ["51.0", "9.0", "60.0"]
    (busy,) = [row for row in shown["Machines"].all("tr") if "EPYC" in row.text()]
    assert words_of(busy.all("td")[-1]) == "60.0" and "Python 3.12.1" in text


def test_a_run_of_several_suites_is_counted_as_the_worst_that_it_is(tmp_path: Path) -> None:
    """Tested on all other sets but not on the shifted ones, it is finished for one suite alone."""
    root, chosen = tmp_path / "results", {"methods": ("procap",), "seeds": (1,)}
    _, entries = begin(root, "cross-dataset", **chosen)
    _, shifted = begin(root, "domain-generalization", **chosen)
    assert entries[0].path == shifted[0].path
    config = put_config(root, entries[0].spec.config)
    for target in entries[0].spec.targets:
        put_score(root, config, target, 150, 200)
    found, _ = find_started_suites(root)
    assert [[run.state for run in one.unfinished] for one in found] == [[], ["not evaluated"]]
    assert merge_unfinished(found) == merge_unfinished(found[::-1]) == list(found[1].unfinished)
    text = write_report(root).read_text()
    assert "1 of 1 run unfinished: 1 trained, with evaluations missing." in text
    rows = tables(Page(text).root)["Suites, their runs, and how long they took"].all("tr")
    evaluations = len(entries[0].spec.targets)
    assert [words_of(row.all("td")[2]) for row in rows[1:]] == [str(evaluations), "1", str(evaluations)]


def test_gpus_count_with_every_process_and_draw_power(tmp_path: Path) -> None:
    root = tmp_path / "results"
    _, entries = begin(root, "ablation", datasets=("tiles",), methods=("maple",))
    folder = RunFolder(root / put_entry(root, entries[0]).path)
    training = folder.train()
    assert training is not None
    rank = RankUse(
        host="a", device="cuda:0", data_share=0, communication_share=0, peak_memory_bytes=training.peak_memory_bytes
    )
    changes = {
        "seconds": 7200.0,
        "ranks": [rank, rank],
        "environment": {"gpu": "NVIDIA H200", "cpu": {"name": "EPYC", "cores": 16}, "python": "3.12.1"},
        "use": ResourceUse(cpu_percent=90, gpu_watts=500),
    }
    write_json(folder.train_file, training.model_copy(update=changes))
    text = write_report(root).read_text()
    assert "4.00 GPU-hours and 0.00 machine-hours without a GPU" in text and "drew 2.00 kWh." in text
    machine = next(row for row in Page(text).root.all("tr") if row.text().strip().startswith("NVIDIA"))
    assert [words_of(cell) for cell in machine.all("th", "td")][:5] == [
        "NVIDIA H200, EPYC (16 cores)",
        "1",
        "2",
        "0",
        "120.0",
    ]
    assert "Python 3.12.1" in text
