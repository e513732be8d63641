"""Make the tables of suites that test on base and novel classes: from the main table to the ablation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

from benchmarks.experiment.profiles import PAPER
from benchmarks.experiment.published import AVERAGE, display_name, load_rows
from benchmarks.experiment.suite import Variant
from benchmarks.experiment.titles import choose_reference
from benchmarks.results.detection import MEASURES
from benchmarks.results.metrics import Metric, average, harmonic
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.calibration_means import MEANS_RULE, calibration_tables
from benchmarks.tables.columns import HALVES, NOTE_ON_SPEED, SPEEDS, average_speeds
from benchmarks.tables.comparison import comparison_tables
from benchmarks.tables.notes import suite_notes
from benchmarks.tables.suite_table import Heading, PrintedRow, published_title, suite_table
from benchmarks.tables.table import Column, Table

PAPER_TOKENS = 4
"""Prompt tokens of the paper's ProCAP."""
RULE = "HM: harmonic mean of mean base and mean novel accuracy"
AMONG_ALL = tuple(Column(f"{half.title} of all") for half in HALVES)
OPEN_WORLD = (*HALVES, *AMONG_ALL, Column("AUROC"), Column("FPR95", "low"), Column("OpenworldAUC"))
OPEN_WORLD_RULE = (
    "Base, Novel, HM: among the names of each half; of all: among all names. AUROC, FPR95: base against novel images, "
    "by the highest probability of a base name. OpenworldAUC: pairs in that order, both images right in their half."
)


def base_to_novel_tables(results: SuiteResults) -> list[Table]:
    """Make tables of averages over data sets, each set as in the paper, speeds, calibration, and the comparison."""
    tables = [halves_table(results, results.name, results.suite.heading, printed="base_to_novel")]
    if len(results.options.datasets) > 1:
        tables.insert(0, _average_table(results))
    rows = {title: results.rows(variant) for title, variant in results.by_title.items()}
    calibration = calibration_tables(rows, suite_notes(results, MEANS_RULE), results.name, results.options.seeds)
    return [*tables, *_speed_tables(results), *calibration, *comparison_tables(results)]


def _average_table(results: SuiteResults) -> Table:
    def cells(variant: Variant, _: str) -> Sequence[Metric | None]:
        return *results.halves(variant, AVERAGE), results.hm(variant, AVERAGE)

    def printed(_: str) -> Iterator[PrintedRow]:
        return (row._replace(numbers=[*row.numbers, None]) for row in _printed_rows(results, AVERAGE, "base_to_novel"))

    title = f"{results.suite.heading}, on average over {len(results.options.datasets)} data sets"
    columns, rules = (*HALVES, Column("mean of HMs")), ["HM: of the averages; mean of HMs: of the data sets."]
    heading = Heading(f"{results.name}-average", title, ["Method"], columns, rules)
    return suite_table(results, heading, cells, printed=printed)


def _speed_tables(results: SuiteResults) -> list[Table]:
    """Make the table of training and evaluation speeds over data sets; no table if no method has all of them."""

    def cells(variant: Variant, _: str) -> list[Metric | None]:
        by_dataset = []
        for dataset in results.options.datasets:
            rows = results.rows(variant, dataset)
            # A mean over some of the runs or images would compare methods on different work.
            is_whole = not (rows.limited.any() or rows.fps.isna().any()) and (variant, dataset) not in unfinished
            fps, seconds, fps_model = average_speeds(rows) if is_whole else (None, None, None)
            by_dataset.append((fps, fps_model, seconds))
        return [average(column) for column in zip(*by_dataset, strict=True)]

    missing = {path for path, _ in results.missing}
    unfinished = [(run.variant, run.dataset) for run in results.runs if run.path in missing]
    columns = (SPEEDS[0], Column("FPS of the model", "", digits=0), SPEEDS[1])
    about = (f"{results.name}-speed", f"{results.suite.heading}: speed", ["Method"], columns)
    rules = ["Means over data sets; not measured in the same conditions."]
    table = suite_table(results, Heading(*about, rules, details=[NOTE_ON_SPEED]), cells)
    return [table] if table.metrics else []


def stability_tables(results: SuiteResults) -> list[Table]:
    """Make mean and standard deviation of every data set; the average's HM is the mean of HMs, as in the paper."""
    main = halves_table(results, results.name, "Stability over seeds", printed="seed_stability")
    return [main, *comparison_tables(results)]


def ablation_tables(results: SuiteResults) -> list[Table]:
    """Make harmonic means of every variant by data set, then base and novel accuracies."""
    sets = results.datasets_and_average

    def printed(_: str) -> Iterator[PrintedRow]:
        for row in load_rows("ablation"):
            # The printed average is over all data sets of the paper's table.
            averages = {AVERAGE: row.average} if set(results.options.datasets) == set(row.hm) else {}
            numbers = [(row.hm | averages).get(name) for name in sets]
            if any(numbers):
                yield PrintedRow([published_title(row.variant)], numbers, row.variant)

    def cells(variant: Variant, _: str) -> list[Metric | None]:
        return [results.hm(variant, name) for name in sets]

    columns = [Column(display_name(name)) for name in sets]
    rules = [" ".join(filter(None, [_hm_rule(results, means=True), _describe_gradients(results)]))]
    heading = Heading(results.name, results.suite.heading, ["Variant"], columns, rules)
    main = suite_table(results, heading, cells, printed=printed, twin_of=lambda variant: variant.key.get("variant"))
    title = f"{results.suite.heading}: both halves"
    halves = halves_table(results, f"{results.name}-halves", title, label="Variant")
    return [main, halves, *comparison_tables(results)]


def _describe_gradients(results: SuiteResults) -> str:
    """Give the terms' gradients as shares of the cross-entropy's: a term without weight can neither help nor harm."""
    norms = [norms for norms in results.frame.gradient_norms if "ce" in norms]
    names = dict.fromkeys(name for terms in norms for name in terms if name != "ce")
    shares = {name: [terms[name] / terms["ce"] for terms in norms if name in terms and terms["ce"]] for name in names}
    listed = ", ".join(f"{name} {median(values):.1g}" for name, values in shares.items() if values)
    return f"Median gradient norm of a term at the end, as a share of the cross-entropy's: {listed}." if listed else ""


def prompt_length_tables(results: SuiteResults) -> list[Table]:
    """Make base, novel and HM by the number of tokens, for every data set and on average."""
    main = halves_table(results, results.name, "Number of prompt tokens", varied=("n_ctx", "Tokens"))
    reference = choose_reference((variant.method for variant in results.variants), results.options.reference)
    unchanged = {
        variant.method: title for title, variant in results.by_title.items() if variant.key.get("n_ctx") == PAPER_TOKENS
    }
    return [main, *comparison_tables(results, reference=unchanged.get(reference))]


def duration_tables(results: SuiteResults) -> list[Table]:
    """Make results by the number of epochs: on average, as in the paper, and for every data set."""
    title, name, count = results.suite.heading, results.name, len(results.options.datasets)
    tables = []
    if count > 1:
        average_title = f"{title}, on average over {count} data sets"
        table = suite_table(
            results,
            Heading(name, average_title, ["Method", "Epochs"], HALVES, [_hm_rule(results)], varied="epochs"),
            lambda variant, _: results.halves(variant, AVERAGE),
            printed=lambda _: _printed_rows(results, AVERAGE, "training_duration"),
            # A shorter training changes the recipe, but is published for its epochs.
            twin_of=lambda variant: (variant.method, variant.key.get("epochs")),
        )
        tables, name = [table], f"{name}-datasets"
    tables.append(halves_table(results, name, title, varied=("epochs", "Epochs")))
    return [*tables, *comparison_tables(results)]


def halves_table(
    results: SuiteResults,
    name: str,
    title: str,
    *,
    printed: str = "",
    label: str = "Method",
    varied: tuple[str, str] = ("", ""),
) -> Table:
    """Make base, novel and HM of every variant, for every data set and on average.

    printed: the paper's table whose rows are next to ours. varied: as in `Heading`, and the label of its column.
    """
    # Table 1 and the durations print the HM of the averages, the paper's other tables the mean of the data sets' HMs.
    means = printed != "base_to_novel" and varied[0] != "epochs"

    def cells(variant: Variant, dataset: str) -> Sequence[Metric | None]:
        base, novel, hm = results.halves(variant, dataset)
        return base, novel, results.hm(variant, dataset) if means else hm

    labels, rules = ["Data set", label, *filter(None, varied[1:])], [_hm_rule(results, means=means)]
    return suite_table(
        results,
        Heading(name, title, labels, HALVES, rules, varied=varied[0]),
        cells,
        datasets=results.datasets_and_average,
        printed=lambda dataset: _printed_rows(results, dataset, printed),
    )


def _hm_rule(results: SuiteResults, *, means: bool = False) -> str:
    """Say what HM is. means: of the average it is the mean of the data sets' HMs."""
    average_rule = "mean of the data sets' HMs" if means else "of the averages"
    return f"{RULE}; of the average: {average_rule}." if len(results.options.datasets) > 1 else f"{RULE}."


def _printed_rows(results: SuiteResults, dataset: str, table: str) -> Iterator[PrintedRow]:
    """List the rows of the paper's `table` on a data set, or on average over the same ones."""
    covers_paper = {*results.options.datasets} == {*PAPER.datasets}
    for row in load_rows(table) if dataset != AVERAGE or covers_paper else ():
        if row.dataset == dataset:
            deviations = (getattr(row, f"{half}_std", None) for half in ("base", "novel", "hm"))
            numbers = map(Metric, (row.base, row.novel, row.hm), deviations)
            title = published_title(row.method, row.venue)
            labels, twin = ([title, str(row.epochs)], (row.key, row.epochs)) if row.epochs else ([title], row.key)
            yield PrintedRow(labels, list(numbers), twin)


def open_world_tables(results: SuiteResults) -> list[Table]:
    """Make OPEN_WORLD of every variant on each data set and on average."""
    heading = Heading(results.name, results.suite.heading, ["Data set", "Method"], OPEN_WORLD, [OPEN_WORLD_RULE])
    return [suite_table(results, heading, partial(open_world_cells, results), datasets=results.datasets_and_average)]


def open_world_cells(results: SuiteResults, variant: Variant, dataset: str) -> Sequence[Metric | None]:
    """Return the metrics of OPEN_WORLD; for AVERAGE the means over data sets, of which the harmonic means are taken."""
    base, novel, *detection = (results.on_classes(variant, dataset, column=column) for column in MEASURES)
    return [*results.halves(variant, dataset), base, novel, harmonic(base, novel), *detection]
