"""The boundary of the command line: what it refuses, what it never prints, its demo, and MLflow in a browser."""

import csv
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import pytest
import tracked_runs
from child_process import start_process
from command_line import run
from pydantic import ValidationError

from benchmarks.cli import main
from benchmarks.cli.demo import DATASETS, METHODS
from benchmarks.cli.flags import RuntimeFlags, command_line
from benchmarks.console.output import OutputStream, csv_text, json_alone, note, one_line, safe_output, show, show_json
from benchmarks.console.parse import parse_class_names
from benchmarks.tables.render import render
from benchmarks.tables.table import Row, Table
from procap.errors import UsageError, UserError
from runner.config import RunConfig
from runner.planning import plan_run
from runner.results import describe_failure
from runner.run_collection import Collection, write_collection
from runner.tracking.store import TrackingStore, sync

ROOT = Path(__file__).resolve().parents[1]


def test_credentials_are_masked_in_all_output(monkeypatch, capsys):
    import benchmarks.cli.ls

    def fail(*_: object) -> None:
        print("listed http://me:hush@host/x")
        print("logged torch bearer relay", file=sys.stderr)
        raise RuntimeError("no answer from https://host/x?token=hush")

    monkeypatch.setattr(benchmarks.cli.ls, "_methods", fail)
    assert main(["ls", "methods", "-v"]) == 1
    out, err = capsys.readouterr()
    assert out == "listed http://host/x\n" and "logged torch bearer relay\n" in err
    assert "Traceback" in err and "with -v" not in err and "https://host/x?token=***" in err and "hush" not in err


def test_commands_to_repeat_have_no_credentials():
    store = "postgresql://u:hush@db/x?password=hush"
    flags = RuntimeFlags("https://me:hush@host/d?k=hush", results="a b", tracking=store)
    assert command_line(flags) == "--data https://host/d --results 'a b' --tracking postgresql://db/x"


@pytest.mark.parametrize(("encoding", "shown"), [
    ("ascii", "\\u2191 75 \\xb1 1 \\u4e2d \\udce9\n"), ("latin-1", "\\u2191 75 ± 1 \\u4e2d \\udce9\n"),
    ("utf-8", "↑ 75 ± 1 中 \\udce9\n"),
])  # fmt: skip
def test_a_terminal_gets_what_its_encoding_has(encoding, shown):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print("↑ 75 ± 1 中 \udce9", file=OutputStream(terminal), flush=True)  # type: ignore[arg-type]
    assert terminal.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]


def test_messages_and_results_cannot_control_the_terminal(capsys):
    assert one_line("a\n b \x1b[2J \u202e c") == r"a b \x1b[2J \u202e c"
    show("a\n b \x1b[2J\x9b")
    note("c\r\td")
    assert capsys.readouterr() == ("a\n b \\x1b[2J\\x9b\n", "c\\r\td\n")


@pytest.mark.parametrize("field", ["dataset", "method", "backbone"])
@pytest.mark.parametrize("name", ["..", "../../outside/x/..", "a\x1b[2Jb", ""])
def test_a_configuration_from_outside_cannot_leave_the_results(field, name):
    plain = plan_run(method="coop", dataset="digits").model_dump()
    with pytest.raises(ValidationError, match=f"{field}[\\s\\S]*cannot be the name of a folder"):
        RunConfig.model_validate({**plain, field: name})


def test_ui_uploads_what_is_missing_and_serves_on_this_machine_also_beside_a_foreign_run(
    mlflow_database, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    shutil.copy(mlflow_database, tmp_path)
    run = tracked_runs.evaluated(tmp_path, 1)
    store = TrackingStore.choose(tmp_path)
    # Of an earlier command; MLflow keeps its metric.
    other = write_collection(tmp_path, Collection(kind="suite", name="base-to-novel", metrics={"hm/coop": 90.0}))
    sync(store, print, only=[other.path])
    write_collection(tmp_path, Collection(kind="suite", name="base-to-novel", runs=(run,), metrics={"hm/maple": 60.0}))
    store.client.create_run(store.experiment_id, tags={"method": "theirs"})
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    for name in ("MLFLOW_BACKEND_STORE_URI", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "PYTHONWARNINGS"):
        monkeypatch.setenv(name, "")
    # The command does not return where the server replaces this process.
    main(["ui", "--suite", "base-to-novel", "--results", str(tmp_path), "--port", "5001", "--json"])
    links, text = capsys.readouterr()
    lines = [f"{name}: {link}" for name, link in json.loads(links).items()]
    assert "\n".join(lines) in text
    table, compared, listed, report = map(unquote, lines)
    [exported] = store.client.search_runs([store.experiment_id], "params.method = 'maple'")
    page, number = "http://127.0.0.1:5001/#", store.experiment_id
    pages = "workflowType=machine_learning"
    [suite] = store.client.search_runs([number], "tags.suite = 'base-to-novel'")
    assert table == f"table: {page}/experiments/{number}/runs/{suite.info.run_id}/artifacts/methods.html?{pages}"
    [artifact] = (tmp_path / "mlartifacts" / suite.info.run_id).rglob("methods.html")
    assert re.findall("<td>(.*)</td>", artifact.read_text()) == ["MaPLe", "60.00", "300", "10.5"]
    assert (
        compared
        == f'side by side: {page}/compare-runs?runs=["{exported.info.run_id}"]&experiments=["{number}"]&{pages}'
    )
    search = "tags.`suite.base-to-novel` = 'yes' AND params.method LIKE '%'"
    order = "orderByKey=metrics.`accuracy`&orderByAsc=false"
    assert listed == f"all runs: {page}/experiments/{number}/runs?searchFilter={search}&{order}&{pages}"
    assert report == f"report: procap report base-to-novel --results {tmp_path}"
    [words] = started
    assert words[words.index("--host") + 1] == "127.0.0.1" and not any("sqlite:" in word for word in words)
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == store.uri and not sync(TrackingStore.choose(tmp_path), print)
    assert main(["ui", "--suite", "base-to-old", "--results", str(tmp_path)]) == 2
    assert "unknown suite 'base-to-old': did you mean base-to-novel" in capsys.readouterr().err


QUICK = ["demo", "--quick", "--limit", "16"]
PROGRAM = (
    "import signal, sys; from benchmarks.cli import main;"
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
)
"""Ctrl-C counts also where the tests run in the background of a shell, which ignores it."""
COMMAND = [sys.executable, "-c", PROGRAM, *QUICK, "--tracking", "off", "--out"]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.json"))}


def accuracies(out: Path) -> list[tuple]:
    table = json.loads((out / "results/collections/suite/base-to-novel/base-to-novel.json").read_text())
    return [(row["labels"], row["cells"][:3]) for row in table["rows"]]


def test_quick_demo_is_a_suite_and_repeats_nothing(tmp_path, monkeypatch, capsys):
    out = tmp_path / "demo"
    assert main([*QUICK, "--out", str(out), "--tracking", "off", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["suite"] == "base-to-novel" and not document["failed"]
    titles = [row["labels"][-1] for row in document["tables"][0]["rows"]]
    assert titles == ["CLIP (zero-shot)", "CoOp", "MaPLe", "ProCAP"]
    assert "†" in captured.err and "(quick run)" in captured.err
    results = out / "results"
    assert f"procap table base-to-novel --data {out / 'data'} --results {results}" in captured.err
    made = results / "collections/suite/base-to-novel"
    assert {"base-to-novel.md", "base-to-novel.csv", "hm-bars.png", "hm-bars.pdf"} <= {f.name for f in made.iterdir()}
    before = files(results)
    # Figures are drawn anew by every command.
    monkeypatch.setattr("benchmarks.suites.outputs.save_plots", lambda folder, plots: [])
    assert main([*QUICK, "--out", str(out), "--tracking", "off"]) == 0
    assert "4 runs, 4 finished already" in capsys.readouterr().err
    trained = {name for name in before if name.endswith("train.json") or "/eval/" in name}
    assert len(trained) == 12 and all(files(results)[name] == before[name] for name in trained)


def test_the_demo_compares_methods_under_one_recipe(tmp_path, capsys):
    assert main(["demo", "--out", str(tmp_path), "--dry-run", "--json"]) == 0
    runs = [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]]
    names = {(dataset, method) for _, dataset, method, *_ in (run.split("/") for run in runs)}
    assert names == set(itertools.product(DATASETS, METHODS)) and len(runs) == len(names)
    # These configurations gave the accuracies in the README.
    assert "base/shapes/coop/mini/16shot/seed1-f02c6820" in runs
    assert "base/shapes/procap/mini/16shot/seed1-2135ad41" in runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "demo"
    subprocess.run([*COMMAND, str(out)], cwd=ROOT, check=True, env=ONE_THREAD, capture_output=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "sign"), [
    (signal.SIGKILL, "data/.digits.partial"),
    (signal.SIGKILL, "results/base/digits/coop/mini/16shot/*/config.json"),
    (signal.SIGKILL, "results/base/digits/maple/mini/16shot/*/eval"),
    (signal.SIGTERM, "results/base/digits/procap/mini/16shot/*/config.json"),
    (signal.SIGINT, "results/base/digits/maple/mini/16shot/*/config.json"),
])  # fmt: skip
def test_stopped_anywhere_the_demo_goes_on_and_ends_the_same(tmp_path, undisturbed, stop, sign):
    out = tmp_path / "demo"
    command = [*COMMAND, str(out)]
    deadline = time.monotonic() + 600
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with start_process(command, cwd=ROOT, env=ONE_THREAD, **silent) as process:
        while not any(out.glob(sign)):
            assert process.poll() is None and time.monotonic() < deadline, f"the demo ended before {sign} was seen"
            time.sleep(0.001)
        process.send_signal(stop)
        assert process.wait(timeout=900) in (-stop, 128 + stop)
    done = {path: path.read_bytes() for path in out.rglob("train.json")}
    subprocess.run([*COMMAND, str(out)], cwd=ROOT, check=True, env=ONE_THREAD, capture_output=True)
    assert accuracies(out) == accuracies(undisturbed)
    assert all(path.read_bytes() == content for path, content in done.items())
    for path in undisturbed.rglob("checkpoint.safetensors"):
        assert (out / path.relative_to(undisturbed)).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_the_demo_records_its_runs_in_mlflow(tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "benchmarks.cli"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    subprocess.run([*command, *QUICK, "--out", str(out)], cwd=ROOT, check=True, env=environment, capture_output=True)
    assert (out / "results" / "mlflow.db").exists()
    sync = [*command, "track", "sync", "--results", str(out / "results")]
    printed = subprocess.run(sync, cwd=ROOT, check=True, env=environment, capture_output=True, text=True).stdout
    assert printed.startswith("0 runs and 0 collections sent to")


@pytest.mark.parametrize("words", ["ls datasets", "ls words", "--help", "data show --help"])
def test_a_closed_output_is_no_error(monkeypatch, capfd, words):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(words.split()) == 0
    assert capfd.readouterr() == ("", "")


def test_cells_that_spreadsheets_would_compute_are_quoted_in_csv():
    formulas = ['=HYPERLINK("http://x","y")', "@SUM(1)", "+cmd", "-cmd", "-2+3|cmd", "+1+cmd|x!A0", "=1"]
    plain = ["-5.5", "+5", "-.5", "-40 degrees", "+3 %", "- none", "a=b", "x@y", "7", ""]
    rows = [*csv.reader(io.StringIO(csv_text([formulas, plain])))]
    assert rows == [[f"'{cell}" for cell in formulas], plain]
    table = Table("t", "title", ("class",), (), (Row(("=1+1",), ()),))
    assert "'=1+1" in render(table, "csv")


ANCHORS = "\n".join(["  a: &a0 [x, x]", *(f"  b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10))])


@pytest.mark.parametrize("text", [f"option:\n{ANCHORS}", "option: [[a]]", "option: [{a: b}]", "option: " + "[" * 5000])
def test_a_configuration_of_nested_values_is_one_line(tmp_path, capsys, text):
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    assert main(["train", "--config", str(file)]) == 2
    assert "\n" not in (err := capsys.readouterr().err.strip()) and str(file) in err


def test_a_configuration_is_not_read_from_a_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "flags.yaml")
    assert main(["train", "--config", str(tmp_path / "flags.yaml")]) == 1
    assert "it is no regular file" in capsys.readouterr().err


def test_class_names_are_read_as_csv_or_from_a_file(tmp_path):
    assert parse_class_names('"crane, bird", red rose,') == ["crane, bird", "red rose"]
    (tmp_path / "names.txt").write_text("crane, bird\nred rose\n\n")
    assert parse_class_names(str(tmp_path / "names.txt")) == ["crane, bird", "red rose"]


def test_a_port_of_another_program_is_refused_and_no_link_leads_there(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["ui", "--results", str(tmp_path), "--port", str(port)]) == 1
    captured = capsys.readouterr()
    assert not captured.out and f"port {port} of 127.0.0.1" in captured.err and "--port" in captured.err


@pytest.mark.parametrize(("content", "message"), [
    (None, "two names or more"),
    (b"\n\n", "two names or more"),
    ("Kéa\nemu\n".encode("latin-1"), "cannot be read .* save it in UTF-8"),
])  # fmt: skip
def test_a_file_of_class_names_that_is_absent_empty_or_no_utf_8_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "names.txt").write_bytes(content)
    with pytest.raises(UsageError, match=f"--names .*names.txt.*{message}"):
        parse_class_names(str(tmp_path / "names.txt"))


def test_results_have_their_names_and_no_users_of_urls_and_messages_have_no_secret_values(monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "base-to-novel")
    texts = {"class": "torch bearer relay", "note": "https://me:pw@host/x", "name": "base-to-novel"}
    with safe_output(), json_alone():
        show_json([texts, 1, None])
        note("cannot read base-to-novel at https://me:pw@host/x")
    [line], [message] = (text.splitlines() for text in capsys.readouterr())
    assert json.loads(line) == [{**texts, "note": "https://host/x"}, 1, None]
    assert message == "cannot read *** at https://host/x"
    assert describe_failure(UserError("no access with base-to-novel")) == "no access with ***"


def test_the_names_of_suites_do_not_depend_on_the_shell(monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "base-to-novel")
    assert json.loads(run(capsys, "ls", "suites", "--json")[1].splitlines()[-1])[0]["name"] == "base-to-novel"
