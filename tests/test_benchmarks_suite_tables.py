"""Tables of suites: every figure follows from the integer counts, and stands beside the right published one."""

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from made_results import made, put_halves, put_run, put_score, table_of
from plug_ins import install

from benchmarks import results
from benchmarks.cli import main
from benchmarks.experiment.profiles import PAPER
from benchmarks.results.metrics import Metric
from benchmarks.results.suite_results import SuiteResults
from benchmarks.tables.comparison import comparison_table
from benchmarks.tables.render import SUFFIXES, render, to_dict, write_tables
from benchmarks.tables.runs import run_tables
from benchmarks.tables.table import Column, Row, Table, list_notes
from procap.methods import data_use
from runner import run_folders
from runner.results import read_document

SEEDS = (1, 2, 3)


def counted(results):
    """Every evaluation, from the JSON of its files alone."""
    found = []
    for file in results.rglob("eval/*.json"):
        said, config = json.loads(file.read_text()), json.loads((file.parent.parent / "config.json").read_text())
        dataset, classes, _ = said["target"].split(":")
        found.append({
            **{name: config[name] for name in ("method", "seed", "options", "shots")},
            "epochs": config["recipe"]["epochs"],
            "source": config["dataset"], "target": dataset, "classes": classes,
            "accuracy": 100 * said["correct"] / said["total"],
        })  # fmt: skip
    return found


def values(rows, **wanted):
    """Accuracies of the seeds in order, of the rows that are as wanted; options only as far as they are named."""
    options = wanted.pop("options", {})
    fitting = [
        row
        for row in rows
        if all(row[name] == value for name, value in wanted.items())
        and all(row["options"].get(name) == value for name, value in options.items())
    ]
    found = {row["seed"]: row["accuracy"] for row in fitting}
    assert len(found) == len(fitting), "the test's own look-up is ambiguous"
    return np.array([found[seed] for seed in sorted(found)])


def halves(rows, dataset, **wanted):
    base, novel = (values(rows, source=dataset, target=dataset, classes=half, **wanted) for half in ("base", "novel"))
    return base, novel


def hm(base: float, novel: float) -> float:
    return 1 / ((1 / base + 1 / novel) / 2)


def three(base: np.ndarray, novel: np.ndarray) -> list[tuple[float, float | None, int]]:
    """(mean, sample deviation, n) of base, novel and HM."""
    of_seeds = np.array([hm(b, n) for b, n in zip(base, novel, strict=True)])
    means = (base.mean(), novel.mean(), hm(base.mean(), novel.mean()))
    spreads = [each.std(ddof=1) if len(each) > 1 else None for each in (base, novel, of_seeds)]
    return [(mean, std, len(base)) for mean, std in zip(means, spreads, strict=True)]


def mean_of_hms(rows, datasets, **wanted):
    pairs = [halves(rows, dataset, **wanted) for dataset in datasets]
    return float(np.mean([hm(base.mean(), novel.mean()) for base, novel in pairs]))


def own_rows(table):
    reader = csv.DictReader(io.StringIO(render(table, "csv")))
    return {tuple(row[name] for name in table.labels): row for row in reader if row["source"] == "ours"}


def same(row, column, mean, std=None, n=None):
    assert float(row[column]) == pytest.approx(mean, abs=1e-5)
    if n is not None:
        assert row[f"{column} n"] == str(n)
        assert (float(row[f"{column} std"]) if row[f"{column} std"] else None) == (
            None if std is None else pytest.approx(std, abs=1e-5)
        )


METHODS = {"CLIP (zero-shot)": "zeroshot", "MaPLe": "maple", "ProCAP": "procap"}


def test_base_to_novel_agrees_with_a_recomputation_from_the_files(tmp_path):
    sets = ("shapes", "tiles")
    done = made(tmp_path, "base-to-novel", datasets=sets, methods=tuple(METHODS.values()), quick=True, seeds=(1, 2, 3))
    rows, main = counted(tmp_path), own_rows(table_of(done, "base-to-novel"))
    averages = own_rows(table_of(done, "base-to-novel-average"))
    assert len(main) == 9 and len(averages) == 3
    for title, method in METHODS.items():
        pairs = {dataset: halves(rows, dataset, method=method) for dataset in sets}
        if method == "zeroshot":
            # One run stands for every seed.
            pairs = {dataset: tuple(np.repeat(half, 3) for half in pair) for dataset, pair in pairs.items()}
        pairs["Average"] = tuple(np.mean([pair[half] for pair in pairs.values()], axis=0) for half in (0, 1))
        for dataset, pair in pairs.items():
            for column, (mean, std, n) in zip(("Base", "Novel", "HM"), three(*pair), strict=True):
                same(main[dataset, title], column, mean, std, n)
        for column in ("Base", "Novel", "HM"):
            assert averages[(title,)][column] == main["Average", title][column]
        same(averages[(title,)], "mean of HMs", mean_of_hms(rows, sets, method=method))


@pytest.mark.parametrize(("suite", "table", "label"), [
    ("stability", "stability", ("ProCAP",)),
    ("prompt-length", "prompt-length", ("ProCAP", "4")),
    ("ablation", "ablation-halves", ("Full ProCAP",)),
])  # fmt: skip
def test_the_average_of_hms_is_their_mean_outside_table_1_and_durations(tmp_path, suite, table, label):
    done, sets = made(tmp_path, suite, datasets=("shapes", "tiles"), methods=("procap",)), ("shapes", "tiles")
    rows = own_rows(table_of(done, table))
    means = [float(rows[(name, *label)]["HM"]) for name in sets]
    same(rows["Average", *label], "HM", np.mean(means))


def test_stability_agrees_with_a_recomputation_from_the_files(tmp_path):
    done = made(tmp_path, "stability", datasets=("shapes", "tiles"))
    table, rows = table_of(done, "stability"), counted(tmp_path)
    row = own_rows(table)["Average", "ProCAP"]
    same(row, "HM", mean_of_hms(rows, ("shapes", "tiles"), method="procap"))
    pairs = [halves(rows, dataset, method="procap") for dataset in ("shapes", "tiles")]
    for column, (mean, std, n) in zip(("Base", "Novel", "HM"), three(*pairs[0]), strict=True):
        same(own_rows(table)["shapes", "ProCAP"], column, mean, std, n)


def test_a_missing_seed_gives_a_dash_and_takes_hm_and_averages_with_it(tmp_path):
    def skip(entry, target):
        return (entry.variant.method, entry.dataset, entry.seed, target) == ("maple", "tiles", 2, "tiles:novel:test")

    sets = ("shapes", "tiles")
    done = made(tmp_path, "base-to-novel", datasets=sets, methods=("maple", "procap"), skip=skip)
    table = table_of(done, "base-to-novel")
    found = own_rows(table)
    assert found["tiles", "MaPLe"]["Base"] and not found["tiles", "MaPLe"]["Novel"] + found["tiles", "MaPLe"]["HM"]
    assert not found["Average", "MaPLe"]["Novel"] + found["Average", "MaPLe"]["HM"]
    assert found["Average", "ProCAP"]["HM"]
    printed = [line.split("|") for line in render(table, "md").splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in line[4:6]] for line in printed if "MaPLe" in line[2]][1:] == [["-", "-"]] * 2
    [note] = [note for note in table.notes if note.startswith("MISSING")]
    assert "1 of 24 evaluations" in note and "on tiles:novel:test" in note


def test_results_chosen_by_test_accuracy_are_marked_and_never_bold(tmp_path, capsys):
    for method, correct, options in (("tipadapter", 99, {"selection": "test"}), ("coop", 80, {}), ("maple", 70, {})):
        config = put_run(tmp_path, method, "tiles", classes="all", options=options)
        put_score(tmp_path, config, "tiles:all", correct, 100)
    assert main(["table", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "99.00 ‡" in text and "**99.00" not in text and "**80.00**" in text
    assert text.count("‡ weights or settings chosen by test accuracy") == 1
    variants = {title: rows for title, rows in results.load(tmp_path).groupby("variant")}
    [chosen] = {*variants} - {"CoOp", "MaPLe"}
    assert all(row.cells[0].chosen_on_test for row in comparison_table(variants, chosen).rows)
    compared = comparison_table(variants, "CoOp")
    assert [row.cells[1].chosen_on_test for row in compared.rows] == [False, True] and "‡" in list_notes(compared)[0]
    assert main(["ls", "runs", "--results", str(tmp_path), "--methods", "adapters"]) == 0
    assert "99.00 ‡" in capsys.readouterr().out
    assert main(["table", "--results", str(tmp_path), "--methods", "adapters"]) == 0
    assert "CoOp" not in capsys.readouterr().out


SEEING = """
from procap.methods.coop import CoOp
from procap.methods.data_use import DataUse

class Seeing(CoOp):
    'A method that looks at test images.'
    title = "Seeing"
    uses = DataUse(unlabelled="test", names="all", models=("teacher",))

class Streaming(Seeing):
    title = "Streaming"
"""


def test_methods_that_look_at_unlabelled_images_are_marked_and_ranked_apart(tmp_path, monkeypatch, capsys):
    install(tmp_path / "packages", {"seeing": SEEING}, {"seeing": "seeing:Seeing", "streaming": "seeing:Streaming"})
    monkeypatch.syspath_prepend(tmp_path / "packages")
    accuracies = {"seeing": 99, "streaming": 98, "coop": 80, "kdpl": 75, "maple": 70, "procap": 60}
    for method, base in accuracies.items():
        put_halves(tmp_path, method, "tiles", (base, 100), (base, 100))
    assert main(["table", "--results", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("|", "-"))]
    names = ["CoOp", "MaPLe", "KDPL (CoOp)", "ProCAP", "", "Seeing", "Streaming"]
    assert [line.split("|")[2].strip() for line in lines[2:9]] == names
    # KDPL reads no labels of the few-shot images, and sees no further ones.
    assert ["**80.00**" in lines[2], "**99.00** §" in lines[7], "<u>98.00</u> §" in lines[8]] == [True] * 3
    assert "<u>75.00</u> |" in lines[4]
    seen = "unlabelled test images, names of new classes, teacher"
    note = f"KDPL (CoOp) (unlabelled few-shot images, teacher); Seeing, Streaming ({seen})."
    assert f"Data other than labelled few-shot images and base names: {note}" in " ".join(lines)
    frame = results.load(tmp_path)
    seen = {"seeing": ("few-shot", "test", "all", ("teacher",)), "kdpl": ("none", "few-shot", "base", ("teacher",))}
    for method, values in seen.items():
        row = frame[frame.method == method].iloc[0]
        assert (row.labelled, row.unlabelled, row["names"], row.models) == values
    table = run_tables(frame)[0]
    assert render(table, "latex").count("\\midrule") == 2 and "$^\\S$" in render(table, "latex")
    assert render(table, "csv").splitlines()[0].count("sees_unlabelled") == 3
    assert main(["ls", "methods"]) == 0
    listed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("seeing "))
    assert "names, unlabelled test images, names of new classes, teacher" in listed


def test_limited_results_are_marked_and_neither_averaged_with_whole_ones_nor_ranked(tmp_path):
    done = made(tmp_path, "base-to-novel", datasets=("shapes", "tiles"), methods=("maple", "procap"), seeds=(1,))
    [entry] = [entry for entry in done.runs if (entry.variant.method, entry.dataset) == ("procap", "tiles")]
    for half in ("base", "novel"):
        put_score(tmp_path, entry.spec.config, f"tiles:{half}", 99, 100, of=400)
    done = SuiteResults.read(done.suite, done.options, tmp_path)
    table = table_of(done, "base-to-novel")
    found = own_rows(table)
    assert found["tiles", "ProCAP"]["Base limited"] == "true" and not found["Average", "ProCAP"]["Base"]
    text = render(table, "md")
    assert "99.00 †" in text and "**99.00**" not in text and "† --limit" in text
    assert any(line.startswith("† --limit") for line in to_dict(table)["notes"])
    # LaTeX has no notes, and a sign that its caption does not explain would be a riddle.
    assert r"99.00 $^\dagger$" in render(table, "latex") and r"$^\dagger$ -{}-limit" in render(table, "latex")


def test_a_suite_reads_each_file_once_and_leaves_out_a_run_with_a_broken_one(tmp_path, monkeypatch):
    done = made(tmp_path, "base-to-novel", datasets=("tiles",), methods=("maple", "procap"), seeds=(1,))
    read = []
    with monkeypatch.context() as patch:
        patch.setattr(run_folders, "read_document", lambda path, model: read.append(path) or read_document(path, model))
        assert len(SuiteResults.read(done.suite, done.options, tmp_path).frame) == 4
    files = [path for path in read if path.name != "config.json"]
    assert len(files) == len({*files}) == 6
    [path] = [run.path for run in done.runs if run.variant.method == "maple"]
    (tmp_path / path / "eval/tiles-novel-test.json").write_text("{")
    again = SuiteResults.read(done.suite, done.options, tmp_path)
    assert {*again.frame.method} == {"procap"} and list(again.unreadable) == [path]


def test_published_rows_land_beside_ours_with_the_difference(tmp_path):
    done = made(tmp_path, "base-to-novel", PAPER, datasets=("dtd",), methods=("maple", "procap"), seeds=(1,))
    table = table_of(done, "base-to-novel")
    published = {row.labels[1]: row for row in table.rows if row.source == "published"}
    assert len(published) == 17, "all but DCPL, of which the average alone is printed"
    assert [cell.mean for cell in published["ProCAP (published)"].cells[:3]] == [85.19, 64.13, 73.17]
    row = own_rows(table)["DTD", "ProCAP"]
    assert row["HM published"] == "73.17"
    assert float(row["HM delta"]) == pytest.approx(float(row["HM"]) - 73.17, abs=1e-5)
    assert f"({float(row['HM']) - 73.17:+.2f})" in render(table, "md")
    assert {row.group for row in table.rows} == {"DTD"}, "published and ours are compared"


def test_a_published_average_stands_only_beside_one_over_the_same_data_sets(tmp_path):
    done = made(tmp_path, "base-to-novel", PAPER, datasets=("dtd", "eurosat"), methods=("procap",), seeds=(1,))
    table = table_of(done, "base-to-novel")
    [average] = [row for row in table.rows if row.average]
    assert average.source == "ours" and all(cell.published is None for cell in average.cells[:3])
    whole = made(tmp_path / "whole", "base-to-novel", PAPER, methods=("procap",), seeds=(1,))
    table = table_of(whole, "base-to-novel-average")
    assert [cell.published for cell in table.rows[-1].cells[:3]] == [85.43, 77.61, 81.33]
    assert len([row for row in table.rows if row.source == "published"]) == 18


@pytest.mark.parametrize(("chosen", "why"), [
    ({"backbone": "ViT-B/32"}, "the backbone is ViT-B-32"),
    ({"quick": True}, "short schedules of --quick"),
    ({"overrides": {"epochs": 3}}, "settings differ from the published ones: epochs 3"),
])  # fmt: skip
def test_what_does_not_compare_has_no_difference_and_a_best_of_its_own(tmp_path, chosen, why):
    done = made(tmp_path, "base-to-novel", PAPER, datasets=("dtd",), methods=("maple", "procap"), seeds=(1,), **chosen)
    table = table_of(done, "base-to-novel")
    assert all(cell.published is None for row in table.rows for cell in row.cells)
    groups = [{row.group for row in table.rows if row.source == source} for source in ("ours", "published")]
    assert not groups[0] & groups[1] and any(why in note for note in table.notes)


def test_published_transfer_and_ablation_tables_stand_beside_ours(tmp_path):
    transfer = made(tmp_path, "cross-dataset", PAPER, methods=("procap",), seeds=(1,))
    [row] = [row for row in table_of(transfer, "cross-dataset").rows if row.source == "ours"]
    assert (row.cells[0].published, row.cells[-1].published) == (72.14, 70.02)
    ablation = made(tmp_path, "ablation", PAPER)
    ours = {row.labels[0]: row for row in table_of(ablation, "ablation").rows if row.source == "ours"}
    assert [cell.published for cell in ours["w/o KL"].cells] == [72.88, 90.12, 97.05, 77.55, 84.40]
    assert [cell.published for cell in ours["All off"].cells] == [67.65, 80.15, 96.58, 73.47, 79.46]
    for title in ("MaPLe", "All off, one token set", "w/o Cross-Attn, one token set"):
        assert all(cell.published is None for cell in ours[title].cells)


SAMPLE = Table(
    "sample",
    "100 % of A & B_1",
    ("Word", "Method"),
    (Column("HM"), Column("Seconds", "low", 1), Column("Remark", "")),
    (
        Row(("a|b", "CoOp_2"), (Metric(71.234, 0.5, (1, 2), 70.0), Metric(3.0), "x^2 {y} ~ \\z"), group="g"),
        Row(("$#", "[é] 😀 <p>"), (Metric(72.0, seeds=(1, 2)), None, None), group="g"),
        Row(("a|b", "theirs"), (Metric(70.0), Metric(2.0), None), "published", "g"),
        Row(("all", "x"), (Metric(71.6), None, None), group="h", average=True),
    ),
    ("100 % & more_",),
)


def test_markdown_keeps_its_columns_and_says_the_marks():
    text = render(SAMPLE, "md")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in lines} == {6}
    assert "**72.00**" in text and "<u>71.23</u> ± 0.50 (+1.23)" in text and "*theirs*" in text and "&lt;p>" in text
    assert "Best of each group in bold, second underlined." in text


UNEVEN = Table(
    "uneven",
    "Different seeds",
    ("Method",),
    (Column("HM"), Column("Speed", "high", 0), Column("Remark", "")),
    (
        Row(("a",), (Metric(70.0, 1.0, (1, 2), 69.0), Metric(500.0), "kept")),
        Row(("b",), (Metric(72.0, seeds=(1,), limited=True), Metric(400.0), None)),
        Row(("c",), (Metric(68.0, 1.0, (1, 2)), None, None)),
        Row(("theirs",), (Metric(71.0), None, None), "published"),
    ),
)


def test_every_number_says_its_n_where_seeds_differ():
    """But for a published one, which names no seeds. What is limited is not ranked, whatever its seeds."""
    for form, plus_minus, dagger in (("md", "±", "†"), ("latex", r"$\pm$", r"$^\dagger$")):
        text = render(UNEVEN, form)
        assert f"{plus_minus} 1.00 (n=2) (+1.00)" in text and f"72.00 (n=1) {dagger}" in text
        assert text.count("(n=") == 3 and "number of seeds" in text
    assert UNEVEN.ranks() == {(3, 0): "best", (0, 0): "second", (0, 1): "best", (1, 1): "second"}
    assert "(n=" not in render(SAMPLE, "md") + render(SAMPLE, "latex")
    whole = replace(UNEVEN.rows[1], cells=(Metric(72.0, seeds=(1,)), None, None))
    uneven = replace(UNEVEN, rows=(UNEVEN.rows[0], whole, *UNEVEN.rows[2:]))
    assert not any(column == 0 for _, column in uneven.ranks()), "neither of ours nor of theirs"


def test_latex_has_as_many_cells_in_every_row_and_no_bare_sign():
    """Every row of every table that the program can print, by a reading of its own."""
    for table in [SAMPLE, UNEVEN]:
        text = render(table, "latex")
        check_latex(text)
    text = render(SAMPLE, "latex")
    assert r"\textbf{72.00}" in text and r"\underline{71.23} $\pm$ 0.50 (+1.23)" in text
    assert r"x\textasciicircum{}2 \{y\} \textasciitilde{} \textbackslash{}z" in text
    assert "[é] 😀 $<$p$>$" in text and r"\textit{theirs}" in text
    assert r"\caption{100 \% of A \& B\_1, mean of 2 seeds. " in text and SAMPLE.notes[0] not in text


def test_a_caption_says_the_seeds_and_that_a_run_was_quick(tmp_path):
    captions = []
    for quick, seeds in ((True, (1,)), (False, (1, 2, 3))):
        done = made(tmp_path, "base-to-novel", datasets=("tiles",), methods=("procap",), quick=quick, seeds=seeds)
        captions += re.findall(r"\\caption\{(.*)\}", render(table_of(done, "base-to-novel"), "latex"))
    title = "Base-to-novel generalisation"
    spread = r"$\pm$: sample standard deviation of the seeds' values."
    assert captions == [f"{title} (quick run), seed 1.", f"{title}, mean of 3 seeds. {spread}"]


def check_latex(text: str) -> None:
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    environments: list[str] = []
    for word, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", body):
        if word == "begin":
            environments.append(name)
        else:
            assert environments.pop() == name
    assert not environments
    depth = 0
    for sign in re.sub(r"\\[\\{}]", "", body):
        depth += (sign == "{") - (sign == "}")
        assert depth >= 0
    assert depth == 0 and re.sub(r"\\\$", "", body).count("$") % 2 == 0
    plain = re.sub(r"\$[^$]*\$", "", body.replace(r"\$", ""))
    assert not re.search(r"(?<!\\)[#~]", plain) and not re.search(r"(?<!\\)_", plain)
    assert not re.search(r"(?<!\\)%", plain) and not re.search(r"(?<!\\)\^", plain)
    for tabular in re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", body, re.DOTALL):
        columns = len(re.match(r"\{@\{\}([lr]+)@\{\}\}", tabular).group(1))
        rows = [line for line in tabular.splitlines() if line.endswith(r"\\")]
        assert rows and {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {columns}


@pytest.mark.slow
def test_latex_is_taken_by_pdflatex_as_it_is(tmp_path):
    """Every table of the paper, one of ours beside it, and the sample with its odd signs, in one document."""
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("pdflatex is not installed")
    done = made(tmp_path / "results", "base-to-novel", PAPER, datasets=("dtd",), seeds=(1,))
    tables = [SAMPLE, *done.suite.tables(done)]
    body = "\n\\clearpage\n".join(render(table, "latex") for table in tables)
    file = tmp_path / "tables.tex"
    head = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    file.write_text(f"{head}{body}\n\\end{{document}}\n")
    said = subprocess.run(
        [program, "-interaction=nonstopmode", "-halt-on-error", file.name], cwd=tmp_path, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stdout[-2000:]
    assert (tmp_path / "tables.pdf").stat().st_size


def test_json_has_full_precision_and_the_values_of_seeds(tmp_path):
    done = made(tmp_path, "stability", datasets=("shapes",))
    table = table_of(done, "stability")
    [row] = json.loads(render(table, "json"))["rows"]
    base, _ = halves(counted(tmp_path), "shapes", method="procap")
    assert row["cells"][0]["seeds"] == {str(seed): value for seed, value in zip(SEEDS, base, strict=True)}
    assert to_dict(table)["columns"][0] == {"title": "Base", "better": "high", "digits": 2}


def test_files_are_written_in_every_format(tmp_path):
    written = write_tables([SAMPLE], tmp_path)
    assert [file.name for file in written] == ["sample.md", "sample.csv", "sample.tex", "sample.json"]
    for file, form in zip(written, SUFFIXES, strict=True):
        if form != "json":
            assert file.read_text() == render(SAMPLE, form) + "\n"
    assert json.loads(written[-1].read_text()) == to_dict(SAMPLE)


@pytest.mark.parametrize(("reference", "expected"), [("", "ProCAP, n_ctx 4"), ("coop", "CoOp, n_ctx 4")])
def test_prompt_lengths_are_compared_with_four_tokens_of_the_reference(tmp_path, reference, expected):
    methods = ("coop", "procap")
    done = made(tmp_path, "prompt-length", datasets=("tiles",), methods=methods, reference=reference)
    assert table_of(done, "prompt-length-comparison").title.startswith(f"{expected} compared with")


def test_a_seed_with_a_limited_result_is_left_out_by_name(tmp_path):
    done = made(tmp_path, "base-to-novel", datasets=("tiles",), methods=("coop", "maple"), seeds=(1, 2))
    limited = next(run for run in done.runs if run.variant.method == "coop" and run.seed == 2)
    put_score(tmp_path, limited.spec.config, "tiles:novel", 5, 8, of=300)
    notes = " ".join(SuiteResults.read(done.suite, done.options, tmp_path).make_tables()[0].notes)
    assert f"LEFT OUT: {limited.path}: tiles:novel:test is limited to 8 images, other seeds are whole: " in notes


def test_a_note_names_methods_that_choose_settings_on_validation_images(tmp_path):
    for method, options in (("coop", {}), ("probe", {}), ("tipadapterf", {}), ("promptkd", {"teacher": "mini"})):
        put_halves(tmp_path, method, "tiles", (60, 100), (60, 100), options=options)
    frame = results.load(tmp_path)
    expected = "Linear probe, Tip-Adapter-F (validation images); PromptKD (unlabelled few-shot images, teacher)."
    assert f"base names: {expected}" in " ".join(list_notes(run_tables(frame)[0]))
    labelled = {"coop": "few-shot", "probe": "validation", "tipadapterf": "validation", "promptkd": "none"}
    assert dict(zip(frame.method, frame.labelled, strict=True)) == labelled
    assert str(data_use("tipadapterf")) == "few-shot images, class names, validation images"
