"""The suite `readings`: what it changes, how it judges it, and that the documentation names every option."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from made_results import put_config, put_score, table_of

from benchmarks.cli import main
from benchmarks.results.profiles import MINI, PAPER
from benchmarks.results.suite import SuiteResults
from benchmarks.studies.method_diagram import OUT, diagram
from benchmarks.suites import load_suite
from procap.methods.procap import ProCAPOptions

pytestmark = pytest.mark.usefixtures("at_home")

PAGE = Path(__file__).parents[1] / "docs" / "paper.md"


@pytest.mark.parametrize("profile", [MINI, PAPER], ids=lambda profile: profile.name)
def test_every_reading_changes_one_thing_and_is_validated_on_classes_held_out(profile):
    suite = load_suite("readings")
    runs = suite.plan(suite.options(profile))
    assert {run.spec.config.classes for run in runs} == {"base", "dev-base"}
    [default, *others] = {run.variant.name: run.spec.config for run in runs}.values()
    for other in others:
        options = {name for name, value in other.options.items() if value != default.options[name]}
        fields = {name for name, value in other.recipe if value != getattr(default.recipe, name)}
        assert len(options) + len(fields) + (other.precision != default.precision) == 1, other
    for run in runs:
        name = run.dataset
        held_out = (f"{name}:dev-base:val", f"{name}:dev-novel:val")
        own = (f"{name}:base:val", f"{name}:base:test", f"{name}:novel:test")
        assert run.spec.targets == (held_out if run.spec.config.classes == "dev-base" else own)


def test_an_option_of_the_user_moves_the_default_and_leaves_out_what_it_excludes():
    suite = load_suite("readings")
    options = suite.options(MINI, options={"procap": {"deep_tokens": "independent"}})
    names = {run.variant.name for run in suite.plan(options)}
    assert "deep_tokens=refined" in names and not names & {"deep_tokens=independent", "inject=final"}


# Correct images of 100 of the default, by target; a reading has more of some of them.
COUNTS = {"base:val": 60, "dev-base:val": 50, "dev-novel:val": 50, "base:test": 70, "novel:test": 70}


def write_results(results: Path, gains: dict[str, dict[str, tuple[int, ...]]], without: str = "") -> SuiteResults:
    """gains: more correct images by reading and target, one for each pair of data set and seed in order."""
    suite = load_suite("readings")
    options = suite.options(MINI, datasets=("digits", "petals"), seeds=(1, 2))
    pairs = list(product(options.datasets, options.seeds))
    for run in suite.plan(options):
        put_config(results, run.spec.config)
        for target in run.spec.targets:
            kind = target.partition(":")[2]
            more = gains.get(run.variant.name, {}).get(kind, (0, 0, 0, 0))[pairs.index((run.dataset, run.seed))]
            if run.variant.name != without or kind != "dev-novel:val":
                put_score(results, run.spec.config, target, COUNTS[kind] + more, 100)
    return SuiteResults.read(suite, options, results)


def test_a_reading_is_a_difference_to_the_default_with_the_interval_of_its_pairs(tmp_path):
    gains = {"zero_output=false": {"base:val": (1, 2, 3, 4), "dev-novel:val": (-5, -5, -5, -5)}}
    table = table_of(write_results(tmp_path, gains, without="norm=none"), "readings")
    rows = {row.labels[0]: row.cells for row in table.rows}
    assert [cell.mean for cell in rows["default"]] == [60, 50, 70, 70, 70]
    # The mean of 1 to 4 is 2.5, its standard error 0.6455, and the 97.5 % quantile of t with 3 degrees 3.1824.
    assert rows["zero_output=false"][0] == "+2.50 (0.45 to 4.55)"
    # The harmonic mean of 50 and 45 instead of 50 and 50, in every pair.
    assert rows["zero_output=false"][1] == "-2.63 (-2.63 to -2.63)"
    assert rows["zero_output=false"][2:] == ("+0.00 (0.00 to 0.00)",) * 3
    assert rows["norm=none"][1] is None and rows["norm=none"][0] is not None, "a missing result is no difference"


def test_bench_lists_the_suite_and_all_leaves_it_out(capsys):
    assert main(["bench", "--help"]) == 0 and "readings of the paper" in capsys.readouterr().out
    words = ["--profile", "mini", "--quick", "--dry-run"]
    assert main(["bench", "all", *words]) == 0 and "/dev-base/" not in capsys.readouterr().out
    assert main(["bench", "readings", *words]) == 0 and "dev-base/" in capsys.readouterr().out


def test_the_page_names_every_option_of_procap():
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", PAGE.read_text()))
    assert set(ProCAPOptions.model_fields) <= named, set(ProCAPOptions.model_fields) - named


def test_the_diagram_is_the_one_that_its_program_draws():
    assert OUT.read_text() == diagram()
