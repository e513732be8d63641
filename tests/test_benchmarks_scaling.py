"""The scaling study measures the steps of a training in every variant, and its page shows what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.scaling import format_report, main
from procap.weights.mini import load_mini

RECORD = Path(__file__).parents[1] / "docs" / "results" / "scaling.json"


@pytest.mark.slow
def test_every_variant_takes_the_step_of_one_process_and_counts_what_it_sends(tmp_path, capfd):
    flags = "--classes 9 --batch 4 --rounds 1 --budget 0 --methods maple --json --out"
    assert main([*flags.split(), str(tmp_path)]) == 0
    report = json.loads(capfd.readouterr().out)
    assert json.loads((tmp_path / "scaling.json").read_text()) == report
    assert (tmp_path / "scaling.md").read_text() == format_report(report)
    alone, sharded, whole = report["rows"]
    assert [row["variant"]["processes"] for row in report["rows"]] == [1, 2, 2]
    assert alone["sent_bytes"] == alone["messages"] == alone["communication"] == 0
    for row in (sharded, whole):
        assert row["loss"] == pytest.approx(alone["loss"], rel=1e-5) and row["median"] > 0
        assert 0 < row["communication"] < 1
        # Of two processes each sends half of what is gathered (9 classes are padded to 10), and its gradients once.
        features = 2 + (5 if row is sharded else 0)
        assert row["sent_bytes"] == 4 * row["learnables"] + 4 * load_mini().geometry.embed_dim * features
    assert sharded["tensor_bytes"] < whole["tensor_bytes"] < alone["tensor_bytes"]


def test_the_page_shows_the_record():
    assert RECORD.with_suffix(".md").read_text() == format_report(json.loads(RECORD.read_text()))


def test_unusable_flags_are_refused_in_one_line(capsys):
    wrong = (["--batch", "5"], ["--processes", "1"], ["--classes", "1"], ["--methods", "zeroshot"])
    for flags in (*wrong, ["--backbone", "vit-z"]):
        assert main(flags) == 2
        assert capsys.readouterr().err.count("\n") == 1
