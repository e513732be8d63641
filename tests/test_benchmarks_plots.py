"""Figures show the numbers of the results and nothing else: what is drawn is read back from the axes."""

import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any

import pytest
from made_results import put_config, put_score

from benchmarks.experiment.profiles import PROFILES
from benchmarks.plots import style
from benchmarks.results.suite_results import SuiteResults
from benchmarks.suites import SUITES, load_suite
from procap.methods import METHODS
from runner.results import harmonic_mean

TOTAL = 400
SETS = ("tiles", "petals", "digits")


@dataclass
class Made:
    """Results of a suite, the accuracies by (variant's name, key, data set, class set, seed), and its figures."""

    done: SuiteResults
    percent: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def figure(self, name: str) -> Any:
        return style.draw_styled(self.done.suite.plots(self.done)[name])

    def values(self, variant: Any, dataset: str, half: str) -> list[float]:
        found = [self.percent.get((variant.name, str(variant.key), dataset, half, n)) for n in self.done.options.seeds]
        return [value for value in found if value is not None]

    def hm(self, variant: Any, *datasets: str) -> float:
        """Of the mean base and the mean novel accuracy over these data sets."""
        base, novel = (mean(v for name in datasets for v in self.values(variant, name, h)) for h in ("base", "novel"))
        return harmonic_mean(base, novel)


def make(folder, name, world="mini", dropped=lambda entry: False, *, limited=False, **more):
    """Finished runs for all of a suite's plan but what is `dropped`."""
    suite = load_suite(name)
    options = suite.options(PROFILES[world], **more)
    rng = random.Random(name)
    percent = {}
    for entry in suite.plan(options):
        if dropped(entry):
            continue
        config = put_config(folder, entry.spec.config)
        for target in entry.spec.targets:
            correct, half = rng.randint(TOTAL // 3, TOTAL), target.split(":")[1] if ":" in target else "all"
            put_score(folder, config, target, correct, TOTAL, of=2 * TOTAL if limited else None)
            percent[entry.variant.name, str(entry.variant.key), entry.dataset, half, entry.seed] = 100 * correct / TOTAL
    return Made(SuiteResults.read(suite, options, folder), percent)


def lines_of(axes: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}


def near(wanted: Any) -> Any:
    return pytest.approx(wanted, nan_ok=True)


def bars_of(figure: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_xticklabels()]
        for bar in axes.containers:
            for patch in getattr(bar, "patches", ()):
                if patch.get_height():
                    place = round(patch.get_x() + patch.get_width() / 2)
                    found.setdefault(names[place], []).append(patch.get_height())
    return found


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three methods on three data sets and two seeds; MaPLe lacks a seed on digits."""
    return make(
        tmp_path_factory.mktemp("halves"), "base-to-novel",
        dropped=lambda entry: (entry.variant.method, entry.dataset, entry.seed) == ("maple", "digits", 2),
        datasets=SETS, methods=("zeroshot", "maple", "procap"), seeds=(1, 2),
    )  # fmt: skip


def test_matplotlib_says_nothing_of_a_home_that_cannot_be_written():
    program = "import benchmarks.plots.style, matplotlib.figure"
    environment = os.environ | {"MPLCONFIGDIR": "/proc/none"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert not done.stderr


def test_bars_are_the_harmonic_means_and_a_missing_one_is_no_bar(halves):
    zeroshot, maple, procap = halves.done.variants
    figure = halves.figure("hm-bars")
    there = {name: (zeroshot, maple, procap) for name in SETS} | {"digits": (zeroshot, procap)}
    wanted = {name: [halves.hm(variant, name) for variant in variants] for name, variants in there.items()}
    wanted["Average"] = [halves.hm(variant, *SETS) for variant in (zeroshot, procap)]
    assert {name: near(heights) for name, heights in wanted.items()} == bars_of(figure)
    assert "2 seeds);\nresults of MaPLe are missing" in figure.get_suptitle()
    style.image_of(figure, "svg")
    assert figure.texts[0].get_position()[0] == figure.axes[0].get_position().x0 > 0.05


def test_the_radar_breaks_a_line_where_a_value_is_missing(halves):
    lines = lines_of(halves.figure("hm-radar").axes[0])
    zeroshot, maple, procap = halves.done.variants
    for variant in (zeroshot, procap):
        assert lines[variant.name] == near([halves.hm(variant, name) for name in (*SETS, SETS[0])])
    tiles, petals = (halves.hm(maple, name) for name in ("tiles", "petals"))
    assert lines["MaPLe"] == near([tiles, petals, math.nan, tiles])


def test_few_shot_curves_have_the_average_first_and_gaps_where_runs_are_missing(tmp_path):
    made = make(
        tmp_path, "few-shot", quick=True, datasets=SETS, seeds=(1, 2), methods=("zeroshot", "coop", "procap"),
        dropped=lambda entry: (entry.variant.method, entry.variant.shots, entry.dataset) == ("coop", 4, "petals"),
    )  # fmt: skip
    figure = made.figure("few-shot")
    assert figure.get_suptitle().endswith("(mean ± std of 2 seeds, quick run)")
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}
    assert list(panels) == ["Average", *SETS]
    variants = {(variant.method, variant.key["shots"]): variant for variant in made.done.variants}

    def wanted(method: str, shots: int, *names: str) -> float:
        if (method, shots) == ("coop", 4) and "petals" in names:
            return math.nan
        return mean(value for name in names for value in made.values(variants[method, shots], name, "all"))

    for title, axes in panels.items():
        level, coop, procap = (line for line in axes.lines if not line.get_label().startswith("_"))
        names = SETS if title == "Average" else (title,)
        assert list(level.get_ydata()) == near([wanted("zeroshot", 0, *names)] * 2)
        for line, method in ((coop, "coop"), (procap, "procap")):
            assert list(line.get_xdata()) == [1, 4, 16]
            assert list(line.get_ydata()) == near([wanted(method, shots, *names) for shots in (1, 4, 16)])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "16"]
    # An error bar reaches one sample deviation to both sides of the mean.
    middle, values = wanted("procap", 1, "tiles"), made.values(variants["procap", 1], "tiles", "all")
    bar = panels["tiles"].collections[-1].get_segments()[0]
    assert [y for _, y in bar] == near([middle - stdev(values), middle + stdev(values)])


def test_curves_are_averages_on_the_left_and_data_sets_on_the_right(tmp_path):
    two, name, key, last = SETS[:2], "prompt-length", "n_ctx", 16
    made = make(
        tmp_path, name, datasets=two, seeds=(1, 2), methods=("zeroshot", "procap"),
        dropped=lambda entry: (entry.dataset, entry.variant.key.get(key)) == ("petals", last),
    )  # fmt: skip
    zeroshot, *variants = sorted(made.done.variants, key=lambda variant: variant.key.get(key, 0))
    assert variants[-1].key[key] == last
    left, right = made.figure(name).axes
    lines = lines_of(left)
    for half in ("base", "novel"):
        means = [mean(value for at in two for value in made.values(variant, at, half)) for variant in variants[:-1]]
        assert lines[half] == near([*means, math.nan])
    means = near([*(mean(made.hm(variant, at) for at in two) for variant in variants[:-1]), math.nan])
    assert lines["harmonic mean"] == means
    assert lines_of(right) == {
        "tiles": near([made.hm(variant, "tiles") for variant in variants]),
        "petals": near([*(made.hm(variant, "petals") for variant in variants[:-1]), math.nan]),
        "mean": means,
    }
    assert list(left.lines[0].get_xdata()) == [variant.key[key] for variant in variants]
    # Zero-shot CLIP has no tokens: its level is beside those of all lengths.
    level = mean(made.hm(zeroshot, at) for at in two)
    assert lines["CLIP (zero-shot),\nharmonic mean"] == near([level] * 2)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The quick grid; of one pair of weights a data set is missing."""
    return make(
        tmp_path_factory.mktemp("swept"), "sensitivity", quick=True, datasets=("tiles", "petals"),
        dropped=lambda entry: (entry.variant.key["nce_weight"], entry.variant.key["kl_weight"]) == (1.0, 0.0)
        and entry.dataset == "petals",
    )  # fmt: skip


def test_the_heat_map_has_every_mean_in_its_cell_and_the_paper_s_framed(swept):
    axes = swept.figure("sensitivity-weights").axes[0]
    variants = {
        (variant.key["nce_weight"], variant.key["kl_weight"]): variant
        for variant in swept.done.variants
        if variant.key["nce_temperature"] == 0.07
    }
    rows, columns = ([one.get_text() for one in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels()))
    assert (rows, columns) == (["0", "0.01", "1"], ["0", "1e-05", "0.001"])
    places = {(r, c): (weight, beta) for r, weight in enumerate((0, 0.01, 1)) for c, beta in enumerate((0, 1e-5, 1e-3))}
    shown = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    colours = axes.images[0].get_array()
    for place, weights in places.items():
        if weights == (1, 0):
            assert shown[place] == "–" and math.isnan(colours.filled(math.nan)[place])
            continue
        wanted = mean(swept.hm(variants[weights], name) for name in swept.done.options.datasets)
        assert shown[place] == f"{wanted:.2f}" and colours[place] == near(wanted)
    framed = {(patch.get_y() + 0.5, patch.get_x() + 0.5) for patch in axes.patches}
    assert framed == {(1.0, 1.0)}


def test_without_results_there_is_no_figure(tmp_path):
    for name in ("base-to-novel", "few-shot", "prompt-length", "sensitivity"):
        suite = load_suite(name)
        done = SuiteResults.read(suite, suite.options(PROFILES["mini"]), tmp_path / "empty")
        assert suite.plots and style.save_plots(tmp_path / "drawn", suite.plots(done)) == []
    assert not (tmp_path / "drawn").exists()


def test_dollars_in_a_name_are_no_formula(halves):
    name = r"a$\foo$b "
    runs = tuple(replace(run, variant=replace(run.variant, title=name + run.variant.name)) for run in halves.done.runs)
    plots = halves.done.suite.plots(replace(halves.done, runs=runs)).values()
    for figure in filter(None, map(style.draw_styled, plots)):
        figure.draw_without_rendering()
        assert name + "ProCAP" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("form", [*style.FORMATS, "svg"])
def test_the_same_numbers_give_the_same_file_whatever_matplotlib_is_set_to(swept, form):
    import matplotlib

    first = style.image_of(swept.figure("sensitivity-temperature"), form)
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "pdf.fonttype": 3, "svg.fonttype": "none"}):
        assert style.image_of(swept.figure("sensitivity-temperature"), form) == first


def test_a_method_looks_the_same_everywhere_and_like_no_other():
    own: Mapping[str, Any] = style.assign_looks({"MaPLe": "maple", "ProCAP": "procap"})
    assert own == {"MaPLe": style.LOOKS["maple"], "ProCAP": style.LOOKS["procap"]}
    assert own == style.assign_looks({"ProCAP": "procap", "MaPLe": "maple"})
    # A grey printout has markers and dashes left.
    for one, other in itertools.permutations(style.LOOKS.values(), 2):
        assert (one.marker, one.dashes) != (other.marker, other.dashes)
    # Every method has a look of its own, in whatever plot it is.
    assert {*style.LOOKS} == {*METHODS}
    assert len(set(style.LOOKS.values())) == len(METHODS)
    for method, look in style.LOOKS.items():
        assert style.assign_looks({"CoOp": "coop", "title": method})["title"] == look or method == "coop"


@pytest.mark.parametrize("name", SUITES)
def test_the_default_methods_of_a_suite_have_different_colours(name):
    methods = load_suite(name).methods
    assert len({style.LOOKS[method].colour for method in methods}) == len(methods)


def test_of_many_methods_the_best_ten_the_last_and_zero_shot_have_colours(tmp_path):
    methods = [name for name in METHODS if name not in ("probe", "ncm", "lppp")][:14]
    made = make(tmp_path, "base-to-novel", datasets=SETS, methods=(*methods, "procap"), seeds=(1,))
    hms = {variant.name: mean(made.hm(variant, name) for name in (*SETS,)) for variant in made.done.variants}
    best = {*sorted(hms, key=hms.get)[-10:], "CLIP (zero-shot)", "ProCAP"}
    lines = {line.get_label(): line.get_color() for line in made.figure("hm-radar").axes[0].lines}
    assert {title for title, colour in lines.items() if colour != style.GREY} == best and len(lines) == 15
    widths = {line.get_label(): line.get_linewidth() for line in made.figure("hm-radar").axes[0].lines}
    assert max(widths, key=widths.get) == "ProCAP" and sorted(widths.values())[-2] < widths["ProCAP"]
    heights = bars_of(made.figure("hm-bars"))
    assert [*heights] == [*SETS, "Average"] and heights["tiles"] == near(
        [made.hm(v, "tiles") for v in made.done.variants]
    )
