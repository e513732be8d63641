"""Suites by name: done once, at a path or a URL; what a failing run costs, and which files are kept."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from fault_cluster import count_tracked, load_outcomes
from made_results import made
from test_runner_train import pack_digits

from benchmarks.cli import main
from benchmarks.cli import run_suites as bench_command
from benchmarks.experiment.profiles import MINI
from benchmarks.suites import load_suite
from benchmarks.suites.plans import SuitePlan, last_options
from cluster.launcher import launch
from procap.errors import UserError
from runner.run_collection import Collection, read_collection, read_collections, write_collection
from runner.stop_signals import Interrupted

pytestmark = pytest.mark.usefixtures("at_home")


@pytest.fixture
def small(few_digits, short_checkpoint) -> tuple[object, ...]:
    chosen = ("--profile", "mini", "--datasets", "digits", "--backbone", short_checkpoint, "--data", few_digits)
    return (*chosen, "--max-concurrent", "1", "--tracking", "off")


@pytest.fixture
def without_plots(monkeypatch):
    """Skip drawing, which takes longer than the runs of a test; other tests check what is drawn."""
    monkeypatch.setattr("benchmarks.suites.outputs.save_plots", lambda folder, plots: [])


SUITE_OF_ONE_EPOCH = ("bench", "base-to-novel", "--epochs", "1")


OWN = """
from benchmarks.tables.base_novel import base_to_novel_tables
from benchmarks.experiment.suite import Variant
from benchmarks.experiment.suite import Suite
def twice(options, method):
    return [Variant(method, key={"recipe": name}, recipe=name) for name in ("published", "procap")]
SUITE = Suite(name="mine", title="what I want to know", methods=("zeroshot",), seeds=(1,), variants=twice,
              tables=base_to_novel_tables)
"""


def test_no_command_runs_a_file_that_results_name(mlflow_database, tmp_path, monkeypatch, capsys):
    """Results can come from other people, and a suite is code."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('PWNED', 'w')")
    recorded = Collection(kind="suite", name="shared").model_dump(by_alias=True, mode="json") | {"file": "evil.py"}
    folder = Path("results/collections/suite/shared")
    folder.mkdir(parents=True)
    shutil.copy(mlflow_database, "results")
    for content in (recorded, {name: value for name, value in recorded.items() if name != "file"}):
        (folder / "collection.json").write_text(json.dumps(content))
        for line in ("ls suites", "table shared", "report shared", "report", "table", "ls runs", "track sync"):
            main(line.split())
            assert not Path("PWNED").exists(), line


@pytest.mark.usefixtures("blank_figures")
def test_a_suite_of_ones_own_is_a_file(small, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    code, out, err = run(capsys, "bench", file, *small)
    assert code == 0 and "| digits" in out and "what I want to know" in err
    assert out.startswith("**What I want to know")
    assert "CLIP (zero-shot), recipe published" in out and "CLIP (zero-shot), recipe procap" in out
    assert f"next: procap table {file} " in err and "procap ui --suite mine " in err
    assert (tmp_path / "results/collections/suite/mine/collection.json").exists()
    code, printed, _ = run(capsys, "table", file)
    assert code == 0 and "| digits" in printed and run(capsys, "report", file)[::2] == (0, "")
    latex = run(capsys, "table", file, "--format", "latex")[1]
    assert "booktabs" in latex and r"\label{tab:mine" in latex
    code, _, err = run(capsys, "table", "mine")
    assert code == 2 and "unknown suite 'mine'" in err
    other = tmp_path / "other.py"
    other.write_text("SUITE = 3")
    code, _, err = run(capsys, "bench", other)
    assert code == 2 and "no benchmarks.experiment.suite.Suite" in err
    code, _, err = run(capsys, "bench", tmp_path / "none.py")
    assert code == 2 and "no file" in err


@pytest.mark.parametrize(("change", "message"), [
    (('name="mine"', 'name="base-to-novel"'), "like one of ours"),
    (("recipe=name)", "options={'n_ctx': 4})"), "unknown option"),
])  # fmt: skip
def test_a_suite_of_ones_own_that_is_wrong_is_answered_in_one_line(change, message, tmp_path, capsys):
    file = tmp_path / "wrong.py"
    file.write_text(OWN.replace(*change))
    code, _, err = run(capsys, "bench", file, "--profile", "mini", "--dry-run")
    assert code == 2 and message in err and err.count("\n") == 1


BROKEN = """
from dataclasses import replace
from benchmarks.suites.base_to_novel import SUITE as OURS
def plots(done):
    return {"curve": lambda: 1 / 0}
SUITE = replace(OURS, name="mine", methods=("zeroshot",), seeds=(1,), plots=plots)
"""


def test_what_cannot_be_read_or_drawn_takes_nothing_else_with_it(small, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    code, out, err = run(capsys, "bench", file, *small)
    assert code == 3 and "mine: internal error: ZeroDivisionError" in err and "| digits" in out
    assert run(capsys, "report", file)[0] == 0
    [page] = (tmp_path / "results").rglob("index.html")
    head = page.read_text().partition("</header>")[0]
    assert "1 of 1 run finished." in head and "the plot curve: internal error: ZeroDivis" in head
    assert head.count("ZeroDivisionError") == 1, "a failure is named once"
    [result] = (tmp_path / "results/base").rglob("eval/digits-novel-test.json")
    result.write_text("{")
    for _ in range(2):
        code, out, err = run(capsys, "bench", file, *small)
        assert code == 1 and f"  base/digits/zeroshot/tiny/16shot/{result.parts[-3]}: {result}" in err
        [line] = [line for line in out.splitlines() if line.startswith("| digits")]
        assert line.count("- |") == 3, "a run with a broken file is left out"
    code, out, err = run(capsys, "table", file)
    assert code == 1 and "is left out: results/base/digits" in err
    collection = read_collection(tmp_path / "results/collections/suite/mine")
    assert collection.status == "failed" and "digits-novel-test.json" in " ".join(collection.failed.values())
    (tmp_path / "results/collections/suite/mine/collection.json").write_text("{")
    assert run(capsys, "report", file)[0] == 0
    assert "No run could be read." in page.read_text()


@pytest.mark.usefixtures("without_plots")
def test_a_suite_is_done_once_and_its_table_is_printed_and_kept(small, tmp_path, capsys):
    words = (*SUITE_OF_ONE_EPOCH, *small, "--methods", "zeroshot,coop", "--seeds", "1", "--json")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    message = json.loads(out)
    assert len(message["finished"]) == 2 and not message["failed"] and "CLIP (zero-shot)" in err
    reserved = tmp_path / "results/collections/suite/base-to-novel"
    assert (reserved / "base-to-novel.md").read_text().splitlines()[0] in err.splitlines()
    [collection] = read_collections(tmp_path / "results")
    assert collection.status == "finished" and set(collection.runs) == set(message["finished"])
    assert "hm/coop" in collection.metrics
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results/base").rglob("*")}
    code, out, err = run(capsys, *words)
    assert code == 0 and "2 finished already" in err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results/base").rglob("*")} == before


@pytest.mark.usefixtures("without_plots")
def test_force_repeats_what_is_there_and_what_is_of_other_content_of_a_data_set(small, tmp_path, capsys):
    pack_digits(tmp_path, 60)
    words = (*SUITE_OF_ONE_EPOCH, *small, "--methods", "zeroshot,coop", "--seeds", "1")
    words = (*words, "--shots", "2", "--data", tmp_path)
    assert run(capsys, *words)[0] == 0
    pack_digits(tmp_path, 70)
    evaluation = ("eval", "--methods", "zeroshot", *small[2:-4], "--data", tmp_path, "--tracking", "off")
    zeroshot = r"zeroshot/.* other content .* repeat with --force"
    for refused in (words, evaluation):
        code, out, err = run(capsys, *refused)
        assert code == 1 and not out and len(re.findall(zeroshot, err)) == 1 == err.count("zeroshot/"), err
    assert run(capsys, *evaluation, "--force")[0] == 0 == run(capsys, *evaluation)[0]
    code, out, err = run(capsys, *words)
    assert code == 1 and not out and "has results on other content of digits" in err
    assert run(capsys, *words, "--dry-run")[1].count("other data") == 1
    assert run(capsys, *words, "--methods", "zeroshot", "--force")[0] == 0
    [file] = (tmp_path / "results/base").rglob("coop/**/train.json")
    before, prompts = file.stat().st_mtime_ns, (file.parent / "checkpoint.safetensors").read_bytes()
    code, out, err = run(capsys, *words, "--force")
    assert code == 0 and "0 finished already" in err and "CoOp" in out
    assert file.stat().st_mtime_ns > before and (file.parent / "checkpoint.safetensors").read_bytes() != prompts
    assert not json.loads(file.read_text())["resumed"]


@pytest.mark.usefixtures("without_plots")
def test_a_run_that_fails_is_named_and_the_others_are_done(small, tmp_path, capsys):
    words = (*SUITE_OF_ONE_EPOCH, *small, "--seeds", "1")
    blocked = tmp_path / "results/base/digits/coop"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    code, out, err = run(capsys, *words, "--methods", "zeroshot,coop")
    assert code == 3
    assert "1 done, 1 failed" in err and "base/digits/coop" in err.splitlines()[-1] and "Traceback" not in err
    assert "CLIP (zero-shot)" in out
    folder = tmp_path / "results/collections/suite/base-to-novel"
    [(path, why)] = read_collection(folder).failed.items()
    assert path.startswith("base/digits/coop") and "coop" in why
    [lost] = [line for line in out.splitlines() if "CoOp" in line and line.startswith("|")]
    assert not any(char.isdigit() for char in lost), "a run that failed has no figure"
    blocked.unlink()
    code, out, err = run(capsys, *words, "--methods", "zeroshot,coop")
    assert code == 0 and "CoOp" in out and not read_collection(folder).failed


REFUSED = {
    "food101": ("--datasets", "food101,eurosat"),
    "unknown backbone 'vit-z'": ("--backbone", "vit-z"),
    "none.pt": ("--backbone", "ViT-B/16", "--pretrained", "none.pt"),
    "the largest base class of 'digits' has": ("--shots", "99"),
}


@pytest.mark.usefixtures("without_plots")
def test_what_is_refused_is_one_line_and_leaves_the_earlier_results_as_they_are(small, tmp_path, capsys):
    words = (*SUITE_OF_ONE_EPOCH, *small, "--methods", "zeroshot,coop", "--seeds", "1")
    assert run(capsys, *words)[0] == 0
    table = run(capsys, "table", "base-to-novel")[1]
    for named, more in REFUSED.items():
        code, out, err = run(capsys, *words, *more)
        errors = [line for line in err.splitlines() if line.startswith("procap: error")]
        assert code in (1, 2) and not out and len(errors) == 1 and named in errors[0], err
    assert run(capsys, "table", "base-to-novel")[1] == table
    [collection] = read_collections(tmp_path / "results")
    assert collection.status == "finished" and not collection.failed


@pytest.mark.usefixtures("without_plots")
def test_what_is_typed_next_finds_the_data_and_a_table_of_what_was_not_run_is_refused(small, tmp_path, capsys):
    words = (*SUITE_OF_ONE_EPOCH, *small, "--methods", "coop", "--seeds", "1")
    err = run(capsys, *words, "--shots", "1", "--option", "ctx_init=")[2]
    data = small[small.index("--data") + 1]
    assert f"next: procap table base-to-novel --data {data} --results results;" in err
    assert f"; procap report base-to-novel --data {data} --results results\n" in err
    assert run(capsys, *words, "--shots", "2")[0] == 0
    assert run(capsys, "table", "base-to-novel", "--shots", "1", "--option", "ctx_init=")[0] == 0
    code, _, err = run(capsys, "table", "base-to-novel", "--methods", "zeroshot")
    assert code == 1 and "as it is chosen here" in err


@pytest.mark.parametrize(("words", "message"), [
    ("--shots 1,4", "base-to-novel takes one number; few-shot draws curves"),
    ("few-shot --shots full", "a curve is over numbers of shots"),
    ("few-shot --shots 1,0", "1 or more, or full"),
    ("few-shot --shots 1,many", "one number of images per class is needed"),
    ("--launcher cloud", "unknown launcher 'cloud'"),
    ("--address host:1", "add --launcher ray"),
    ("--autoscale", "add --launcher ray"),
    ("--gpus 1.5", "at most 1, or a whole number"),
    ("--cpus inf", "at most 1, or a whole number"),
    ("--max-concurrent 0", "greater than or equal to 1"),
    ("--profile mars", "unknown profile 'mars'"),
    ("--accelerate foo", "known are auto, off,"),
    ("--accelerate foo --dry-run", "known are auto, off,"),
    ("--engine deepspeed --zero-stage 7", "ZeRO stage 7 is not supported"),
])  # fmt: skip
def test_wrong_words_are_answered_in_one_line(words, message, capsys):
    suite = [] if words.startswith("few-shot") else ["base-to-novel"]
    code, out, err = run(capsys, "bench", *suite, *words.split())
    assert code == 2 and message in err and err.count("\n") == 1 and not out


@pytest.mark.usefixtures("without_plots")
def test_a_table_shows_what_the_last_command_named_or_what_its_flags_name(tmp_path, capsys):
    made(tmp_path, "base-to-novel", MINI, datasets=("digits", "tiles"), methods=("zeroshot", "maple"), seeds=(1,))
    results = ["--results", str(tmp_path)]
    bench = ["bench", "base-to-novel", "--profile", "mini", "--tracking", "off"]
    printed = []
    for methods, datasets in (("zeroshot,maple", "digits,tiles"), ("maple", "tiles")):
        chosen = ["--methods", methods, "--datasets", datasets, "--seeds", "1"]
        assert main([*bench, *chosen, *results]) == 0
        assert main(["table", "base-to-novel", *results]) == 0
        # The notes, which follow, are printed once for all tables of a command.
        table = (tmp_path / "collections/suite/base-to-novel/base-to-novel.md").read_text()
        printed.append(table.partition("\n\n- ")[0])
        assert printed[-1] in capsys.readouterr().out
    assert "| digits" in printed[0] and "| digits" not in printed[1]
    named = ["--methods", "zeroshot,maple", "--datasets", "digits,tiles"]
    assert main(["table", "base-to-novel", *named, *results]) == 0
    assert printed[0] in capsys.readouterr().out


@pytest.fixture
def there(tmp_path):
    return tmp_path / "remote"


@pytest.fixture
def at(few_digits, short_checkpoint, there) -> tuple[str, ...]:
    where = ("--data", few_digits, "--results", f"local://{there}", "--backbone", short_checkpoint)
    return tuple(map(str, (*where, "--datasets", "digits", "--max-concurrent", "1", "--tracking", "off")))


SUITE = ("--profile", "mini", "--methods", "zeroshot", "--seeds", "1")


def and_interrupted(work):
    def work_and_stop(*arguments):
        work(*arguments)
        raise Interrupted(15, "stopped; repeat the command to resume")

    return work_and_stop


def test_the_record_of_an_interrupted_suite_is_uploaded(at, there, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.suites.execute.launch", and_interrupted(launch))
    assert main(["bench", "base-to-novel", *SUITE, *at]) == 143
    collection = json.loads((there / "collections/suite/base-to-novel/collection.json").read_text())
    assert collection["status"] == "interrupted" and len(collection["runs"]) == 1


@pytest.mark.usefixtures("without_plots", "blank_figures")
def test_the_report_of_all_suites_is_local_and_names_the_url(at, there, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_command, "PAPER_SUITES", ["base-to-novel"])
    assert main(["bench", "all", *SUITE, *at]) == 0
    page = tmp_path / "report/index.html"
    assert f"the result files in local://{there}" in page.read_text()
    assert f"tables and plots: local://{there}/collections/suite/base-to-novel\n" in capsys.readouterr().err
    page.write_text("<html>my thesis</html>")
    capsys.readouterr()
    assert main(["bench", "all", *SUITE, *at]) == 3
    said = capsys.readouterr()
    assert "1 done, 1 failed:\n  procap report: report is not empty and no report" in said.err and "CLIP" in said.out
    assert page.read_text() == "<html>my thesis</html>"


@pytest.mark.usefixtures("without_plots")
def test_runs_that_a_command_did_not_track_are_in_mlflow_after_the_next(
    few_digits, short_checkpoint, mlflow_database, tmp_path
):
    shutil.copy(mlflow_database, tmp_path)
    words = ["bench", "base-to-novel", "--profile", "paper", "--datasets", "digits", "--methods", "zeroshot"]
    words += ["--seeds", "1,2", "--backbone", str(short_checkpoint), "--data", str(few_digits), "--max-concurrent", "1"]
    words += ["--results", str(tmp_path)]
    assert main([*words, "--tracking", "off"]) == 0 and main(words) == 0
    runs, parents = count_tracked(tmp_path)
    assert runs == dict.fromkeys(load_outcomes(tmp_path), 1) and runs and parents == ["FINISHED"]


def test_tables_of_a_suite_are_refused_for_another_file_or_content_of_its_name(tmp_path, capsys, monkeypatch):
    text = "from dataclasses import replace\nfrom benchmarks.suites.stability import SUITE as S\n"
    files = [tmp_path / f"{name}.py" for name in "ab"]
    for file in files:
        file.write_text(f"{text}SUITE = replace(S, name='mine', title='{file.stem}')\n")
    first, second = (load_suite(str(file)) for file in files)
    options = second.options(MINI)
    write_collection(tmp_path, SuitePlan(second, options, second.plan(options)).collection)
    assert last_options(second, tmp_path).profile == MINI
    code, _, err = run(capsys, "table", files[0], "--results", tmp_path)
    assert code == 1 and f"the results of suite 'mine' are of {second.source}, not of {first.source}: repeat" in err
    edited = replace(second, source=load_suite(str(files[1])).source.replace("(", "(0"))
    with pytest.raises(UserError, match=r"are of b\.py"):
        last_options(edited, tmp_path)
