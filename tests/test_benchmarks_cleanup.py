"""Tables and plots of earlier options are removed from a suite's folder, and other files are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_results import put_config, put_score

from benchmarks.plots.style import save_plots
from benchmarks.results.profiles import MINI
from benchmarks.results.suite import SuiteResults
from benchmarks.suites import suite_named
from benchmarks.suites.outputs import remove_other_plots, remove_other_tables
from benchmarks.tables.render import SUFFIXES, write_tables

OTHER_FILES = ("notes.md", "collection.json", "tracking.json", "thesis.png", "thesis.pdf", "broken.json", "list.json")


@pytest.fixture
def done(tmp_path: Path) -> SuiteResults:
    """Base-to-novel on two data sets, all of it there."""
    suite = suite_named("base-to-novel")
    options = suite.options(MINI, quick=True, datasets=("tiles", "petals"), methods=("maple", "procap"), seeds=(1,))
    for entry in suite.plan(options):
        put_config(tmp_path, entry.spec.config)
        for number, target in enumerate(entry.spec.targets):
            put_score(tmp_path, entry.spec.config, target, 150 - number, 200)
    return SuiteResults.read(suite, options, tmp_path)


def test_outputs_of_other_options_are_removed_and_other_files_kept(done: SuiteResults) -> None:
    folder = done.results / "collections/suite/base-to-novel"
    first = done.suite.tables(done)
    write_tables(first, folder)
    assert done.suite.plots is not None
    drawings = done.suite.plots(done)
    save_plots(folder, {name: drawings[name] for name in ("hm-bars", "accuracy-speed")})
    for name in OTHER_FILES:
        (folder / name).write_bytes(b"{broken" if name == "broken.json" else b"[]")
    (folder / "collection.json").write_text(json.dumps({"name": "collection", "lines": 3}))
    before = {file.name for file in folder.iterdir()}
    current, outdated = first[:1], first[1:]
    assert outdated and remove_other_tables(done, first) == []
    removed = {file.name for file in remove_other_tables(done, current)}
    assert removed == {f"{table.name}.{suffix}" for table in outdated for suffix in SUFFIXES.values()}
    drawn = [folder / "hm-bars.png"]
    assert {file.name for file in remove_other_plots(done, drawn)} == {"accuracy-speed.png", "accuracy-speed.pdf"}
    assert {file.name for file in folder.iterdir()} == before - removed - {"accuracy-speed.png", "accuracy-speed.pdf"}
    assert before >= {*OTHER_FILES, "hm-bars.png"}
    # Only the JSON of a table is fetched from a store.
    write_tables(outdated[:1], folder)
    for suffix in ("md", "csv", "tex"):
        (folder / f"{outdated[0].name}.{suffix}").unlink()
    assert [file.name for file in remove_other_tables(done, current)] == [f"{outdated[0].name}.json"]


def test_nothing_is_removed_without_a_folder(done: SuiteResults) -> None:
    assert remove_other_tables(done, ()) == remove_other_plots(done, ()) == []
