"""Tables and plots of a suite: those of earlier options are removed, and those of its finished runs are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_results import made

from benchmarks.cli import main
from benchmarks.plots.style import Plots
from benchmarks.results.profiles import MINI
from benchmarks.suites import load_suite
from benchmarks.suites.outputs import make_outputs
from benchmarks.suites.planning import SuitePlan, join_recorded
from runner.config import RuntimeConfig
from runner.run_collection import write_collection

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
    suite = load_suite("base-to-novel")
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


def test_a_narrower_command_keeps_the_rows_of_earlier_ones(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("benchmarks.suites.outputs.save_plots", write_blank)
    made(tmp_path, "base-to-novel", MINI, datasets=("digits", "tiles"), methods=("zeroshot", "maple"), seeds=(1,))
    place = ["--profile", "mini", "--seeds", "1", "--results", str(tmp_path)]
    printed = []
    for methods, datasets in (("zeroshot,maple", "digits,tiles"), ("maple", "tiles")):
        assert main(["bench", "base-to-novel", "--methods", methods, "--datasets", datasets, *place]) == 0
        assert main(["table", "base-to-novel", "--results", str(tmp_path)]) == 0
        printed.append((tmp_path / "collections/suite/base-to-novel/base-to-novel.md").read_text())
        assert printed[0] in capsys.readouterr().out
    assert printed[0] == printed[1] and "| digits" in printed[0] and "CLIP (zero-shot)" in printed[0]


@pytest.mark.parametrize(
    ("name", "earlier", "now", "together"),
    [
        ("base-to-novel", {"methods": ("maple",)}, {"methods": ("coop",)}, {"methods": ("maple", "coop")}),
        ("base-to-novel", {"seeds": (1, 2)}, {"seeds": (3,)}, {"seeds": (1, 2, 3)}),
        ("base-to-novel", {"methods": ("maple",)}, {"methods": ("coop", "maple")}, {"methods": ("coop", "maple")}),
        ("base-to-novel", {"methods": ("maple",)}, {"methods": ("coop",), "overrides": {"epochs": 3}}, {}),
        ("base-to-novel", {"methods": ("maple",), "shots": (4,)}, {"methods": ("coop",)}, {}),
        ("few-shot", {"methods": ("maple",), "shots": (1, 4)}, {"methods": ("maple",), "shots": (2,)},
         {"shots": (1, 2, 4)}),
    ],
)  # fmt: skip
def test_commands_with_the_same_settings_share_their_tables(tmp_path, name, earlier, now, together) -> None:
    shared = {"datasets": ("tiles",), "seeds": (1,)}
    before = made(tmp_path, name, MINI, **shared | earlier)
    unfinished = before.suite.options(MINI, **shared | earlier | {"datasets": ("tiles", "petals")})
    write_collection(tmp_path, SuitePlan.make(before.suite, unfinished).collection)
    options = before.suite.options(MINI, **shared | now)
    joined = join_recorded(SuitePlan.make(before.suite, options), tmp_path)
    # The data set without a finished run is left out.
    assert joined.options == before.suite.options(MINI, **shared | now | together)
