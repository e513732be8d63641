"""Tables and plots of earlier options are removed from a suite's folder, and other files are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_results import made

from benchmarks.plots.style import Plots
from benchmarks.results.profiles import MINI
from benchmarks.suites import suite_named
from benchmarks.suites.outputs import make_outputs
from runner.config import RuntimeConfig

OTHER_FILES = ("notes.md", "collection.json", "thesis.png", "broken.json")


def write_blank(folder: Path, plots: Plots) -> list[Path]:
    """Write empty files in place of plots, which take seconds to draw."""
    files = [folder / f"{name}.png" for name in plots]
    for file in files:
        file.write_bytes(b"")
    return files


def test_outputs_of_other_options_are_removed_and_other_files_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.suites.outputs.save_plots", write_blank)
    suite = suite_named("base-to-novel")
    chosen = {"datasets": ("tiles", "petals"), "methods": ("maple", "procap"), "seeds": (1,)}
    done = made(tmp_path, suite.name, MINI, **chosen)
    runtime = RuntimeConfig(tmp_path / "data", tmp_path)
    assert not make_outputs(suite, done.options, runtime).failed
    before = {file.name for file in done.folder.iterdir()}
    for name in OTHER_FILES:
        (done.folder / name).write_bytes(b"{broken")
    other = suite.options(MINI, **{**chosen, "methods": ("maple",)})
    make_outputs(suite, other, runtime)
    after = {file.name for file in done.folder.iterdir()}
    assert {*OTHER_FILES, "base-to-novel.md", "base-to-novel.csv"} <= after
    assert {"base-to-novel-comparison.md", "base-to-novel-comparison.tex"} <= before - after
    assert make_outputs(suite, done.options, runtime).tables and before <= {f.name for f in done.folder.iterdir()}
