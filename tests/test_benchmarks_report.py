"""`procap report`: one page without external resources that begins with the results and names everything missing."""

import base64
import io
import json
import os
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from report_pages import Node, Page, begin, every, put_entry, tables, words_of

from benchmarks.cli import main
from benchmarks.plots import style
from benchmarks.report import report
from benchmarks.report.report import ReportChoices, write_report
from benchmarks.report.sections import read_sections
from benchmarks.results.metrics import Metric
from procap.errors import UsageError, UserError
from runner.config import Target
from runner.results import Progress, write_json
from runner.run_collection import read_collections, write_collection
from runner.run_folders import RunFolder


@pytest.fixture(scope="module", autouse=True)
def coarse_plots():
    """Draw plots with few pixels, which takes less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DPI", 40)
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base-to-novel, of which a run failed, one was never begun and one has a broken file; ablation, all of it."""
    root = tmp_path_factory.mktemp("report") / "results"
    methods = ("zeroshot", "maple", "procap")
    _, entries = begin(root, "base-to-novel", datasets=("shapes", "petals"), methods=methods, seeds=(1,))
    failed, missing, broken = (entries[number].spec.config for number in (3, 4, 5))
    for number, entry in enumerate(entries):
        if entry.spec.config not in (failed, missing):
            put_entry(root, entry, 0.5 + 0.01 * number)
    common = {"step": 3, "steps": 9, "epochs": [], "seconds": 1, "environment": {}}
    progress = Progress(config_hash=failed.hash, status="failed", reason=f"{failed.path}: no room", **common)
    write_json(RunFolder(root / failed.path).config_file, failed)
    write_json(RunFolder(root / failed.path).progress_file, progress)
    (collection,) = read_collections(root)
    write_collection(root, collection.model_copy(update={"failed": {failed.path: "no room"}}))
    RunFolder(root / broken.path).result_file(Target.parse_unchecked(entries[5].spec.targets[1])).write_text("{broken")
    _, parts = begin(root, "ablation", datasets=("tiles",))
    for number, entry in enumerate(parts):
        put_entry(root, entry, 0.8 - 0.01 * number)
    return root


@pytest.fixture(scope="module")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(results, tmp_path_factory.mktemp("page") / "report", ReportChoices(shown="results"))


@pytest.fixture(scope="module")
def tree(page: Path) -> Node:
    return Page(page.read_text()).root


def test_the_page_loads_nothing(tree, page):
    assert not tree.all("link", "iframe", "object", "embed", "base", "form")
    for node in tree.all("script", "img", "a", "source", "video"):
        for name in ("src", "href"):
            value = node.attributes.get(name, "")
            assert not re.match(r"\s*(https?:|//|javascript:|file:)", value), f"<{node.tag}> reaches out: {value[:60]}"
    assert all("src" not in script.attributes for script in tree.all("script"))
    style = "".join(node.text() for node in tree.all("style"))
    assert "@import" not in style and "url(" not in style
    assert not [node for node in every(tree) if any(name.startswith("on") for name in node.attributes)]


def test_ids_are_unique_and_links_resolve(tree, page):
    ids = Counter(node.attributes["id"] for node in every(tree) if "id" in node.attributes)
    assert ids and set(ids.values()) == {1}, [name for name, count in ids.items() if count > 1]
    for link in tree.all("a"):
        place = link.attributes["href"]
        if place.startswith("#"):
            assert place[1:] in ids, place
        else:
            assert (page.parent / place).is_file(), place
    for node in every(tree):
        for name in ("aria-labelledby", "data-copy"):
            assert node.attributes.get(name, next(iter(ids))) in ids


def test_headings_images_and_tables_are_accessible(tree):
    assert tree.all("html")[0].attributes["lang"] == "en"
    assert tree.all("img") and all(len(image.attributes["alt"]) > 10 for image in tree.all("img"))
    levels = [int(node.tag[1]) for node in tree.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    for table in tree.all("table"):
        assert table.attributes["aria-labelledby"] and table.all("th")
        widths = {sum(int(one.attributes.get("colspan", 1)) for one in row.all("th", "td")) for row in table.all("tr")}
        assert len(widths) == 1, widths


def test_every_cell_of_every_table_is_in_the_page_with_its_mark(tree, results):
    shown = tables(tree)
    sections, _ = read_sections(results)
    every_table = [table for section in sections for table in section.make_tables()]
    assert {table.name for table in every_table} >= {"base-to-novel", "ablation"}
    ranks: Counter[str | None] = Counter()
    for table in every_table:
        rows = [row.all("td")[len(table.labels) :] for row in shown[table.title].all("tr") if row.all("td")]
        assert len(rows) == len(table.rows)
        for number, (row, cells) in enumerate(zip(table.rows, rows, strict=True)):
            for place, (item, cell) in enumerate(zip(row.cells, cells, strict=True)):
                text = words_of(cell)
                if isinstance(item, Metric):
                    assert text.startswith(f"{item.mean:.{table.columns[place].digits}f}".replace("-", "−"))
                else:
                    assert text == (item or "-")
                rank = table.ranks().get((number, place))
                tags = {node.tag for node in cell.all("strong", "u")}
                assert tags == ({{"best": "strong", "second": "u"}[rank]} if rank else set())
                ranks[rank] += 1
    assert ranks["best"] and ranks["second"]


def section(text: str, name: str) -> str:
    [node] = [node for node in every(Page(text).root) if node.attributes.get("id") == name]
    return words_of(node)


def test_the_page_begins_with_its_results(page, tree):
    ids = [node.attributes["id"] for node in tree.all("section")]
    assert ids == ["suite-base-to-novel", "suite-ablation", "missing", "method"]
    about = section(page.read_text(), "suite-base-to-novel")
    assert "Table 1. Base-to-novel generalisation, on average over 2 data sets" in about
    linked = [link.attributes["href"][1:] for link in tree.all("nav")[0].all("a")]
    assert linked == ids


def test_what_failed_or_is_missing_is_summed_up_at_the_top_and_listed_by_run(page, results, capsys):
    text = page.read_text()
    notice = words_of(Page(text).root.all("header")[0])
    # Once for base-to-novel, and with the runs of ablation for all.
    assert "3 of 6 runs finished: 1 failed, 1 broken, 1 new" in text
    assert re.search(r"[\d]+ of [\d]+ runs finished: 1 failed, 1 broken, 1 new\. Details", notice), notice
    runs = read_sections(results)[0][0].suite_results.runs
    for number, reason in ((3, "failed: no room"), (4, "new"), (5, "cannot be read")):
        row = next(line for line in text.splitlines() if f"<li>{runs[number].path} " in line)
        assert reason in row
    assert main(["ls", "runs", "--results", str(results), "--json"]) == 1, "a run is broken"
    document, listed = capsys.readouterr()
    config = runs[3].spec.config
    [row] = [row for row in json.loads(document) if row["state"] == "failed"]
    assert f"failed: {config.path}: no room" in listed.splitlines() and row["reason"] == "no room"
    assert (row["lr"], row["epochs"], row["options"]) == (config.recipe.lr, config.recipe.epochs, dict(config.options))
    assert "ablation" not in section(text, "missing")


def test_the_same_files_give_the_same_page(page, results, tmp_path):
    again = write_report(results, tmp_path / "again", ReportChoices(shown="results"))
    files = sorted(path.relative_to(page.parent) for path in page.parent.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again.parent) for path in again.parent.rglob("*") if path.is_file())
    assert any(file.suffix == ".tex" for file in files) and any(file.suffix == ".pdf" for file in files)
    differing = [file for file in files if (page.parent / file).read_bytes() != (again.parent / file).read_bytes()]
    assert not differing


HOSTILE = "<script>alert('x')</script>"
OWN = f"""
from benchmarks.results.metrics import Metric
from benchmarks.tables.table import Column, Row, Table
from benchmarks.experiment.suite import Suite
def tables(done):
    name = {HOSTILE!r} + '" onload="x'
    line = Row((name, "&amp;"), (Metric(12.5), name))
    return [Table("own/../" + name, name, ("A", name), (Column("B"), Column(name, "")), (line,), (name,))]
def broken(done):
    raise RuntimeError(name_of_nothing)
SUITE = Suite(name="own", title="my own", methods=("zeroshot",), seeds=(1,), datasets={{"mini": ("digits",)}},
              tables=tables, plots=broken)
"""


def test_hostile_names_stay_text_and_a_suite_of_ones_own_has_its_place(tmp_path):
    file, root = tmp_path / "own.py", tmp_path / "results"
    file.write_text(OWN)
    _, entries = begin(root, str(file))
    put_entry(root, entries[0])
    text = write_report(root, choices=ReportChoices([str(file)])).read_text()
    tree = Page(text).root
    assert len(tree.all("script")) == 1 and HOSTILE not in text
    assert not [node for node in every(tree) if "onload" in node.attributes]
    row = next(row for row in tree.all("tr") if "12.50" in row.text())
    assert row.all("td")[0].text() == f'{HOSTILE}" onload="x' and row.all("td")[1].text() == "&amp;"
    written = [path.resolve().relative_to((root / "report").resolve()) for path in (root / "report").rglob("*.tex")]
    assert written and all(path.parent == Path("tables") for path in written)
    problems = section(text, "missing")
    assert "its plots" in problems and "NameError" in problems
    assert "own: its plots: internal error: NameError" in words_of(tree.all("header")[0])
    assert "procap report FILE.py" in section(write_report(root, tmp_path / "unnamed").read_text(), "missing")


def test_an_old_report_is_replaced_and_nothing_else_ever(tmp_path):
    root = tmp_path / "results"
    _, entries = begin(root, "ablation", datasets=("tiles",), methods=("maple",))
    put_entry(root, entries[0])
    first = write_report(root)
    assert first == root / "report" / "index.html"
    (first.parent / "tables" / "stale.md").write_text("old")
    first.write_text(f'{first.read_text()}<a href="tables/stale.md">')
    for mine in ("notes.txt", "tables/mine.csv"):
        (first.parent / mine).write_text("mine")
    write_report(root)
    assert not (first.parent / "tables" / "stale.md").exists() and (first.parent / "notes.txt").exists()
    assert (first.parent / "tables" / "mine.csv").exists() and not [*root.rglob(".report*")]
    first.unlink()
    (first.parent / "notes.txt").unlink()
    assert write_report(root) == first, "an interrupted report has no page"
    own = tmp_path / "thesis"
    own.mkdir()
    (own / "index.html").write_text("<html>my thesis</html>")
    with pytest.raises(UsageError, match="no report"):
        write_report(root, own)
    assert (own / "index.html").read_text() == "<html>my thesis</html>"
    with pytest.raises(UserError, match=r"index\.html: Not a directory"):
        write_report(root, own / "index.html")


def test_two_commands_write_one_report_after_the_other_also_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    folder, begun = tmp_path / "page", threading.Event()
    folder.symlink_to("disk")

    def write_slowly(contents: object, folder: Path) -> list[Path]:
        (folder / "index.html").write_text(f'content="{report.GENERATOR}"')
        begun.set()
        time.sleep(0.3)
        assert (folder / "index.html").exists(), "the second command has deleted it"
        return []

    monkeypatch.setattr(report, "build_report", lambda *_: {"problems": [], "sections": []})
    monkeypatch.setattr(report, "write_page", write_slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(write_report, tmp_path, folder)
        assert begun.wait(60)
        pool.submit(write_report, tmp_path, tmp_path / "disk").result()
        first.result()
    assert folder.is_symlink() and sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "index.html", "page"]


def test_pictures_of_a_suite_are_in_the_page_as_they_are(tmp_path):
    root = tmp_path / "results"
    _, entries = begin(root, "qualitative", datasets=("tiles",), methods=("procap",))
    put_entry(root, entries[0])
    folder = root / "collections/suite/qualitative"
    Image.new("RGB", (3200, 900), "white").save(folder / "predictions.png")
    texts = {"caption": "Predictions", "alt": "Test images of red <tile> with the answers of ProCAP"}
    record = {"runs": [entries[0].path], "pictures": {"predictions": texts}}
    (folder / "pictures.json").write_text(json.dumps(record))
    page = write_report(root)
    (image,) = Page(page.read_text()).root.all("img")
    assert image.attributes["alt"] == "Test images of red <tile> with the answers of ProCAP"
    shown = Image.open(io.BytesIO(base64.b64decode(image.attributes["src"].partition("base64,")[2])))
    assert shown.size == (3200, 900)
    assert (page.parent / "figures/predictions.png").read_bytes() == (folder / "predictions.png").read_bytes()
    (folder / "predictions.png").write_bytes(b"no picture")
    assert "the picture predictions.png" in section(write_report(root).read_text(), "missing")


@pytest.mark.parametrize("planted", ["link", "fifo", "folder"])
def test_pictures_are_regular_files_inside_the_results_or_not_read(tmp_path, planted):
    root, secret = tmp_path / "results", tmp_path / "id_rsa"
    secret.write_text("a private key")
    _, entries = begin(root, "qualitative", datasets=("tiles",), methods=("procap",))
    put_entry(root, entries[0])
    folder = root / "collections/suite/qualitative"
    record = {"runs": [entries[0].path], "pictures": {"predictions": {"caption": "C", "alt": "A"}}}
    (folder / "pictures.json").write_text(json.dumps(record))
    Image.new("RGB", (32, 9), "white").save(folder / "predictions.png")
    if planted == "link":
        (folder / "predictions.pdf").symlink_to(secret)
    elif planted == "fifo":
        os.mkfifo(folder / "predictions.pdf")
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    page = write_report(root)
    assert "is no regular file inside the results" in section(page.read_text(), "missing")
    assert not [file for file in page.parent.rglob("predictions*")]


def test_pipes_in_place_of_documents_are_named_and_not_read(tmp_path):
    _, entries = begin(tmp_path, "base-to-novel", datasets=("tiles",), methods=("zeroshot", "maple"), seeds=(1,))
    for entry in entries:
        put_entry(tmp_path, entry)
    folder = tmp_path / "collections/suite/base-to-novel"
    first, second = (RunFolder(tmp_path / entry.path) for entry in entries)
    for file in (folder / "plan.json", folder / "pictures.json", first.train_file, second.result_files()[0]):
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    missing = section(write_report(tmp_path).read_text(), "missing")
    assert missing.count("it is no regular file") == 2


def test_suites_without_results_are_on_the_page_and_none_at_all_is_an_error(tmp_path, capsys):
    root = tmp_path / "results"
    root.mkdir()
    with pytest.raises(UserError, match="no run below"):
        write_report(root)
    with pytest.raises(UsageError, match="did you mean ablation"):
        write_report(root, choices=ReportChoices(["abalation"]))
    begin(root, "few-shot")
    (root / "collections/suite/duration").mkdir(parents=True)
    (root / "collections/suite/duration/collection.json").write_text("[]")
    assert main(["report", "--results", str(root)]) == 0
    text = Path(capsys.readouterr().out.strip()).read_text()
    assert "0 of 16 runs finished: 16 new." in text
    assert "duration" in section(text, "missing") and "collection.json cannot be read" in section(text, "missing")
