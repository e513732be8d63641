"""The command line: fast help, one-line errors, exit codes, plans that write nothing."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import read_files, run
from made_results import put_halves, put_run

from benchmarks.cli import main
from benchmarks.cli.app import DATA_COMMANDS, HEADINGS
from benchmarks.console.output import note_failures
from benchmarks.console.parse import parse_integers, parse_methods
from procap.errors import UsageError
from procap.methods import method_groups
from runner.run_folders import RunFolder
from runner.stop_signals import Interrupted
from shards.manifest import read_manifest

ROOT = Path(__file__).resolve().parents[1]
HEAVIEST = ("torch", "ray", "mlflow", "matplotlib", "deepspeed", "open_clip", "timm", "scipy", "sklearn")
HEAVY = (*HEAVIEST, "numpy", "pydantic")
pytestmark = pytest.mark.usefixtures("at_home")


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    assert main(["data", "pack", "digits", "--data", str(root)]) == 0
    return root


LIGHT = {
    # The time of the help is that of its imports, about a millisecond each.
    "help": "from benchmarks.cli import main; assert main(['--help']) == 0 and len(sys.modules) < 300",
    "help of a command": "from benchmarks.cli import main; main(['bench', 'runtime', '--help'])",
    "usage errors": "from benchmarks.cli import main; assert [main(words.split()) for words in ("
    "'train --methods coop --datasets dtd --backbone x',"
    "'sweep --methods coop --datasets shaps --param lr=1,2', 'export nowhere',"
    "'eval --methods coop --datasets digits --targets digit')] == [2] * 4",
    "class names": "from shards.catalogue import PUBLISHED; from shards.raw.published import published_classnames;"
    "assert len([published_classnames(dataset) for dataset in PUBLISHED]) == 15 and 'PIL' not in sys.modules",
    "check of raw folders": "import shards.raw.published",
}


@pytest.mark.parametrize("name", LIGHT)
def test_what_has_to_be_fast_imports_no_heavy_library(name):
    heavy = HEAVY if name == "help" else HEAVIEST
    program = f"import sys; {LIGHT[name]}; sys.exit(str([name for name in {heavy!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]" and done.stderr.count("unknown backbone 'x'") == (
        name == "usage errors"
    )


GROUPS = ("data", "fetch", "bench", "track", "new", "check")
COMMAND_LINES = [
    *(name for commands in HEADINGS.values() for name in commands if name not in GROUPS),
    *(f"data {name}" for name in DATA_COMMANDS),
    "bench base-to-novel",
    "track sync",
    "new method",
    "check method",
]


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_the_help_of_every_command_has_examples(capsys, command):
    code, out, err = run(capsys, *command.split(), "--help")
    assert code == 0 and not err
    assert "examples:" in out and f"procap {command}" in out.split("examples:")[1]
    assert {"--json", "--verbose"} <= set(out.replace(",", " ").split())
    assert "None" not in out and not re.search(r"<\w+[\[>]", out), "a type of Python"


def test_the_help_names_every_group_of_methods(capsys):
    out = run(capsys, "train", "--help")[1]
    assert {*method_groups()} <= {*re.findall(r"[\w-]+", out.partition("--methods")[2].partition("[default")[0])}


WRONG: list[tuple[str, int, str]] = [
    ("data pack ,", 2, "no data set is named"),
    ("ls runs --results nowhere", 1, "no results folder at nowhere"),
    ("trian", 2, "unknown command 'trian': did you mean train"),
    ("train --methods maple --datasets digit", 2, "did you mean digits"),
    ("train --datasets digits", 2, "--methods is missing"),
    ("train --launcher ray", 2, "No such option: --launcher (see"),
    ("train --methods maple", 2, "--datasets is missing"),
    ("train --methods maple --datasets digits --seeds 1,x", 2, "'x' is not a whole number"),
    ("train --methods maple --datasets digits --shots 5000", 2, "has 92 training images"),
    ("train --methods maple --datasets digits --option dept=3", 2, "did you mean depth?"),
    ("train --methods maple --datasets digits --epochs 0", 2, "epochs = 0 trains nothing"),
    ("train --methods coop,maple --datasets digits --option dept=3", 2, "of coop, maple 'dept': did you mean depth?"),
    ("train --methods maple --datasets digits --option coop.n_ctx=4", 2, "method 'coop' is not among the chosen"),
    ("train --methods maple --datasets digits --backbone vit-b-61", 2, "M-16? list them with `procap ls backbones`"),
    ("train --methods maple --datasets digits --pretrained nowhere.safetensors", 1, "nowhere.safetensors"),
    ("train --methods maple --datasets digits --device cuda:99", 2, "device 'cuda:99' does not exist"),
    ("train --methods maple --datasets digits --device cpu --accelerate graphs", 2, "needs a CUDA device"),
    ("train --methods coprompt --datasets digits", 2, "CoPrompt needs --option sentences="),
    ("train --methods maple --datasets dtd", 1, ": dtd; pack with"),
    ("train --methods maple --datasets digits --recipe-field batches=class --batch-size 64", 2, "has 64 of one"),
    ("train --methods maple --datasets digits --lr 0.1 --recipe-field lr=1", 2, "-field lr=1: lr is given twice"),
    ("train --methods maple --datasets digits --option depth=3 --option depth=4", 2, "depth is given twice"),
    ("eval --methods maple --datasets digits", 1, "holds no finished training: run procap train first"),
    ("eval nowhere", 2, "error: nowhere is not the folder of a run"),
    ("eval --methods maple --datasets digits --targets digits:bse", 2, "did you mean base"),
    ("eval nowhere --methods maple", 2, "not both"),
    ("train --methods coop --datasets digits --seeds 1-999999999", 2, "has more than 10,000 numbers"),
    ("import x --epochs ten", 2, "error: --epochs ten: input should be a valid integer (see `procap import --help`)"),
    ("predict 1a2b x.png --out x.html --html ./x.html", 2, "--html x.html: name another file than that of the rows"),
    ("eval a-file", 2, "error: a-file is not the folder of a run"),
    ("table", 1, "no results folder at results"),
    ("data pack /", 2, "error: / is no folder of images"),
    ("train --methods coop --datasets digits --results ~nobody-here/r", 2, "no such user or home folder"),
    ("data check all", 1, "nothing is packed in"),
    ("data show digits --data nowhere", 1, "procap data pack digits"),
    ("export 1a2b --out s3://lab/models", 2, "s3://lab/models is a URL: name a file or folder of this machine"),
    ("demo --quick --out s3://lab/demo", 2, "s3://lab/demo is a URL"),
    ("predict 1a2b x.png --out hf://datasets/lab/rows.csv", 2, "hf://datasets/lab/rows.csv is a URL"),
    ("track sync --tracking off --results .", 2, "--tracking off names no store: leave it out"),
    ("ui --results nowhere", 1, "no results folder at nowhere"),
    ("train --methods zeroshot --datasets digits --results a-file", 2, "--results a-file: a-file is a file, name"),
    ("bench few-shot --quick --results /dev/null/r", 2, "--results /dev/null/r: /dev/null is a file, name a folder"),
    ("train --methods zeroshot --datasets digits --results a-file/x", 2, "--results a-file/x: a-file is a file, name"),
    ("train --methods zeroshot --datasets digits --save-config /dev/null", 1, "/dev/null: it is no regular file;"),
    ("train --methods zeroshot --datasets digits --save-config a-file/x", 1, "cannot write a-file/x: File exists;"),
    ("train --methods zeroshot --datasets digits --save-config /proc/x", 1, "cannot write /proc/x: No such file or"),
    ("bench few-shot --quick --datasets digits --results /proc/x", 1, "cannot write /proc/x: No such file or"),
    ("sweep --methods coop --datasets digits --param lr=1 --results /proc/x", 1, "cannot write /proc/x: No such file"),
    ("export 1a2b --out a-file", 1, "cannot write a-file: Not a directory;"),
    ("sweep --methods coop --datasets digits --param lr=0.1,0.2 --gpus 99", 2, "--gpus 99: on this machine"),
    ("bench base-to-novel --datasets digits --launcher ray --address 127.0.0.1:9", 1, "no Ray cluster at 127.0.0.1:9"),
]


@pytest.mark.parametrize(("line", "code", "message"), WRONG, ids=[line[:99] for line, _, _ in WRONG])
def test_wrong_input_is_an_error_of_one_line(capsys, tmp_path, shards, line, code, message):
    (tmp_path / "a-file").write_text("")
    trains = line.split()[0] in ("train", "eval", "bench", "sweep")
    returned, out, err = run(capsys, *line.split(), *(["--data", str(shards)] if trains else []))
    lines = [text for text in err.splitlines() if text.startswith("procap: ")]
    assert returned == code, err
    assert len(lines) == 1 and message in lines[0], err
    assert "Traceback" not in err and not out


@pytest.mark.parametrize("line", ["table", "--version", "train --methods zeroshot --datasets digits"])
def test_a_deleted_current_folder_is_named(capsys, tmp_path, monkeypatch, line):
    (folder := tmp_path / "deleted").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    message = "procap: error: the current folder no longer exists: change to another one\n"
    assert run(capsys, *line.split()) == (2, "", message)


def test_a_results_folder_that_cannot_be_written(capsys, shards):
    flags = ["--methods", "zeroshot", "--datasets", "digits", "--data", shards, "--results", "/proc/results"]
    code, _, err = run(capsys, "train", *flags)
    [line] = [text for text in err.splitlines() if text.startswith("procap: ")]
    assert code == 1 and line.startswith("procap: error: cannot write /proc/results/base/digits/zeroshot/mini/16shot/")
    assert line.endswith(": No such file or directory; name another folder")


@pytest.mark.parametrize("words", [
    ["train", "--methods", "zeroshot", "--datasets", "digits", "--results", ""], ["report", "--results="],
    ["predict", "--best", ""], ["predict", "1a2b", ""], ["predict", "1a2b", "--", ""], ["data", "pack", ""],
    ["ls", "runs", "--methods", ""],
])  # fmt: skip
def test_an_empty_argument_does_not_stand_for_the_current_folder(capsys, words):
    code, out, err = run(capsys, *words)
    assert code == 2 and not out and "is empty: is a variable of the shell not set?" in err


@pytest.mark.parametrize("words", [
    "train --methods zeroshot --datasets digits --results {}/results", "data pack {}",
])  # fmt: skip
def test_a_path_that_is_no_text_is_refused_before_the_work(capsys, tmp_path, words):
    folder = tmp_path / "r\udce9"
    folder.mkdir()
    code, _, err = run(capsys, *words.format(folder).split())
    assert code == 2 and "rename this folder, its path must be UTF-8" in err.splitlines()[-1], err
    assert not [*folder.iterdir()]


def test_few_shot_images_are_listed_also_all_of_them(capsys, shards):
    words = ["data", "few-shot", "digits", "--data", shards, "--classes", "base", "--json"]
    few, all_of_them = (json.loads(run(capsys, *words, "--shots", shots)[1]) for shots in ("2", "full"))
    assert (len(few["train"]), few["classes"]) == (10, "base") and all_of_them["shots"] == 0
    assert len(all_of_them["train"]) > 400 and {*map(str, few["train"])} < {*map(str, all_of_them["train"])}


def test_a_broken_shard_is_named(capsys, tmp_path, shards):
    data = tmp_path / "data"
    subprocess.run(["cp", "-r", str(shards), str(data)], check=True)
    shard = data / "digits" / "train" / "0.tar"
    shard.write_bytes(shard.read_bytes()[:-2000])
    code, out, err = run(capsys, "data", "check", "digits", "--data", data, "--json")
    report = json.loads(out.splitlines()[-1])
    assert code == 1 and not report["ok"] and "train/0.tar" in err and "procap data pack digits --force" in err
    flags = ["--methods", "coop", "--datasets", "digits", "--data", data, "--tracking", "off"]
    code, _, err = run(capsys, "train", *flags)
    assert code == 1 and "train/0.tar" in err.splitlines()[-1]


@pytest.mark.parametrize(("error", "code", "message"), [
    (RuntimeError("one\ntwo"), 1, "internal error: RuntimeError: one two (add -v to the command for the traceback)"),
    (KeyboardInterrupt(), 130, "stopped; what was finished is kept"),
    (Interrupted(signal.SIGTERM, "stopped at step 3"), 143, "SIGTERM: stopped at step 3"),
])  # fmt: skip
def test_an_unexpected_error_or_a_signal_is_one_line_with_its_code(capsys, monkeypatch, error, code, message):
    import benchmarks.cli.ls

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(benchmarks.cli.ls, "_methods", fail)
    given, _, err = run(capsys, "ls", "methods")
    assert (given, err) == (code, f"procap: {message}\n")


def test_a_dry_run_lists_the_runs_with_their_state_and_writes_nothing(capsys, tmp_path, shards):
    put_halves(Path("results"), "coop", "digits", (5, 10), (5, 10), overrides={"epochs": 2})
    for file in Path("results").rglob("*.json"):
        file.write_text(file.read_text().replace("d" * 16, read_manifest(shards / "digits").digest))
    before = read_files(tmp_path)
    common = ["--methods", "coop,maple", "--datasets", "digits,tiles", "--epochs", "2", "--data", shards, "--dry-run"]
    for command in ("train", "eval"):
        code, out, err = run(capsys, command, *common, "--json")
        assert code == 0 and "4 runs, 1 finished. Nothing was written." in err
        assert ("targets" in err.splitlines()[0]) == (command == "eval")
    listed = {entry["run"].split("/seed")[0]: entry for entry in json.loads(out)["runs"]}
    assert listed["base/digits/coop/mini/16shot"]["state"] == "finished"
    assert listed["base/digits/coop/mini/16shot"]["targets"] == {"digits:base:test": True, "digits:novel:test": True}
    assert listed["base/tiles/maple/mini/16shot"]["state"] == "new"
    _, out, _ = run(capsys, "eval", *common, "--force", "--json")
    assert json.loads(out.splitlines()[-1])["runs"][0]["state"] == "repeat"
    assert not any(json.loads(out.splitlines()[-1])["runs"][0]["targets"].values())
    assert run(capsys, "train", *common, "--force")[1].count("repeat") == 1
    for command in (["demo"], ["data", "pack", "tiles"], ["bench", "base-to-novel", "--datasets", "digits"]):
        assert run(capsys, *command, "--dry-run")[0] == 0
    assert read_files(tmp_path) == before


def test_a_dry_run_says_what_a_training_needs_that_is_not_here(capsys, tmp_path, shards):
    words = ["--methods", "coop,kdpl", "--datasets", "caltech101,digits", "--shots", "500", "--data", shards]
    weights = ["--backbone", "ViT-B-16-quickgelu", "--pretrained", "dfn2b"]
    code, out, err = run(capsys, "train", *words, *weights, "--dry-run", "--json")
    needs = {entry["run"].split("/ViT")[0]: entry["needs"] for entry in json.loads(out)["runs"]}
    assert code == 0 and "needs" in err.splitlines()[0]
    get = "weights of ViT-B-16: --download, or procap fetch backbone ViT-B-16"
    get += " --pretrained dfn2b"
    assert needs["base/caltech101/coop"] == ["caltech101, not packed: procap data fetch caltech101", get]
    assert needs["base/digits/coop"][0].startswith("--shots 500: the largest base class of 'digits' has")
    assert needs["base/digits/kdpl"][1:] == [get, "--option kdpl.teacher=..."]
    words = ["--datasets", "digits", "--data", shards, "--dry-run", "--json"]

    def needs_of(method: str, *options: str) -> list[str]:
        flags = [word for option in options for word in ("--option", option)]
        return json.loads(run(capsys, "train", "--methods", method, *flags, *words)[1])["runs"][0]["needs"]

    assert needs_of("kdpl", "teacher=mini") == needs_of("ipo", "endpoint=http://localhost/v1", "model=m") == []
    # The teacher of its first stage.
    assert needs_of("caspl", "teacher=ViT-B-16:dfn2b") == [get]
    words = ["--profile", "paper", "--methods", "coop", "--seeds", "1", *weights, "--data", shards, "--dry-run"]
    lines = run(capsys, "bench", "cross-dataset", *words)[1].splitlines()
    assert f"1 run needs {get}" in lines and "1 run needs dtd, not packed: procap data fetch dtd" in lines


def test_flags_are_read_from_a_file_and_written_to_one(capsys, tmp_path, shards):
    file, saved = tmp_path / "flags.yaml", tmp_path / "saved.yaml"
    file.write_text("methods: [maple, coop]\ndatasets: digits\nepochs: 2\noption: {maple.depth: 3}\ntracking: off\n")
    typed = "--methods maple,coop --datasets digits --epochs 3 --option maple.depth=3 --tracking off"
    plan = run(capsys, "train", *typed.split(), "--data", shards, "--dry-run", "--save-config", saved)[1]
    for words in (["--config", file, "--epochs", "3", "--data", shards], ["--config", saved]):
        assert run(capsys, "train", *words, "--dry-run")[:2] == (0, plan)
    file.write_text("profile: mini\nquick: true\nmethods: coop\nlauncher: local\n")
    code, _, err = run(capsys, "bench", "few-shot", "--config", file, "--save-config", saved, "--dry-run")
    assert code == 2 and "the file has different content; delete it or name another one" in err
    saved.unlink()
    assert run(capsys, "bench", "few-shot", "--config", file, "--save-config", saved, "--dry-run")[0] == 0
    assert saved.read_text().splitlines() == ["methods: coop", "profile: mini", "quick: true"]
    saved.unlink()
    tracking = "--tracking", "http://bob:secret@127.0.0.1:1"
    run(capsys, "train", "--methods", "coop", "--init", "1a2b", "--save-config", saved, *tracking)
    assert saved.read_text() == "methods: coop\ntracking: http://127.0.0.1:1\ninit: 1a2b\n"
    file.write_text("epoch: 3\n")
    assert "unknown key of" in (error := run(capsys, "train", "--config", file)[2]) and "mean epochs" in error
    file.write_text("methods: coop\nmethods: maple\n")
    assert "line 2: the key 'methods' stands twice" in run(capsys, "train", "--config", file)[2]
    file.write_text("methods: coop\nmethod: procap\ndatasets: digits\n")
    assert "method stands twice, also as methods" in run(capsys, "train", "--config", file, "--dry-run")[2]


@pytest.mark.parametrize(
    ("in_file", "typed", "merged"),
    [
        ("lr: 0.1", "--recipe-field lr=0.2", "--lr 0.2"),
        ("recipe-field: {lr: 1, flip: false}\nepochs: 2", "--lr 0.2", "--lr 0.2 --epochs 2 --recipe-field flip=false"),
        ("recipe-field: [lr=0.1, epochs=3]", "--recipe-field epochs=2", "--lr 0.1 --epochs 2"),
        ("option: {maple.depth: 3, n_ctx: 3}", "--option depth=2", "--option depth=2 --option n_ctx=3"),
        ("option: {depth: 3}", "--option maple.depth=2", "--option depth=3 --option maple.depth=2"),
    ],
)  # fmt: skip
def test_typed_keys_win_and_others_of_the_file_stay(capsys, tmp_path, shards, in_file, typed, merged):
    (file := tmp_path / "flags.yaml").write_text(f"{in_file}\n")
    chosen = ["--methods", "maple,procap", "--datasets", "digits", "--data", shards, "--dry-run"]
    planned = run(capsys, "train", *chosen, *merged.split())
    assert planned[0] == 0
    assert run(capsys, "train", *chosen, "--config", file, *typed.split()) == planned


def test_train_then_evaluate_then_table(capsys, tmp_path, shards):
    place = ["--data", shards, "--tracking", "off"]
    chosen = ["--methods", "zeroshot,coop", "--datasets", "digits", "--shots", "2", "--epochs", "1", *place]
    code, out, err = run(capsys, "train", *chosen, "--json")
    trained = json.loads(out)
    assert code == 0 and len(trained["trained"]) == 2 and not trained["failed"]
    assert "next: procap eval" in err and "loss (all terms)" in err
    code, out, err = run(capsys, "train", *chosen)
    assert code == 0 and err.count("already finished") == 2
    folders = [Path("results") / entry["run"] for entry in trained["trained"]]
    code, out, err = run(capsys, "eval", folders[1], "--limit", "20", *place, "--json")
    evaluated = json.loads(out)["evaluated"]
    assert code == 0 and [entry["total"] for entry in evaluated] == [20, 20] and "†" in err
    code, out, _ = run(capsys, "eval", *chosen, "--targets", "digits:novel", "--limit", "15", "--json")
    assert code == 0 and {entry["total"] for entry in json.loads(out.splitlines()[-1])["evaluated"]} == {15}
    code, out, _ = run(capsys, "table")
    assert code == 0 and "CoOp" in out and "†" in out and "never averaged" in out
    before = read_files(tmp_path)
    assert run(capsys, "eval", *chosen, "--targets", "digits:novel", "--limit", "15")[0] == 0
    assert read_files(tmp_path) == before


def test_a_data_set_that_is_not_packed_yet_is_packed_for_any_method(capsys, tmp_path):
    flags = ["--datasets", "digits", "--data", tmp_path / "data", "--tracking", "off"]
    code, _, err = run(capsys, "train", "--methods", "zeroshot", *flags)
    assert code == 0 and "packing digits" in err


def test_one_failed_run_of_several_does_not_stop_the_others(capsys, shards):
    blocked = put_run(Path("results"), "coop", "digits", shots=2, overrides={"epochs": 1})
    folder = RunFolder(Path("results") / blocked.path)
    folder.train_file.write_text("{}")
    flags = ["--datasets", "digits", "--shots", "2", "--epochs", "1", "--data", shards, "--tracking", "off"]
    code, out, err = run(capsys, "train", "--methods", "coop,zeroshot", *flags, "--json")
    document = json.loads(out.splitlines()[-1])
    assert code == 3
    assert [entry["run"].split("/")[2] for entry in document["trained"]] == ["zeroshot"]
    assert list(document["failed"]) == [blocked.path]
    assert "1 done, 1 failed" in err and err.splitlines()[-1].strip().startswith(blocked.path)
    assert note_failures(1, {"a on x": "why", "b": "why", "c": "c: other"}) == 3
    assert capsys.readouterr().err.splitlines()[1:] == ["  2, such as a on x: why", "  c: other"]


@pytest.mark.parametrize("file", [".lock", "train.json"])
@pytest.mark.parametrize("words", ["train", "bench few-shot"])
def test_a_run_that_cannot_be_deleted_is_named_with_what_would_work(capsys, shards, words, file):
    chosen = ["--methods", "coop", "--datasets", "digits", "--seeds", "1", "--shots", "2", "--data", shards]
    command = [*words.split(), *chosen, "--epochs", "1", "--tracking", "off", "--force"]
    assert run(capsys, *command)[0] == 0
    for path in Path("results").glob("*/digits/*/*/*/*"):
        (path / file).unlink()
        (path / file).mkdir()
    code, _, err = run(capsys, *command)
    assert code == 1 and str(path) in err and err.endswith("Is a directory; name another folder\n")


@pytest.mark.parametrize(("line", "shown"), [("ls datasets | head -1", "data set"), ("--version | true", "")])
def test_a_pipe_that_closes_early_is_no_error(line, shown):
    # Only what is buffered is written at the end.
    command = f"env -u PYTHONUNBUFFERED {sys.executable} -m benchmarks.cli {line}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith(shown) and not done.stderr


@pytest.mark.parametrize(("words", "line"), [
    ("train --methods coop maple --datasets digits", "--methods coop,maple"),
    ("train --datasets digits, shapes --methods coop", "--datasets digits,shapes"),
    ("bench few-shot --seeds 1 2", "--seeds 1,2"),
])  # fmt: skip
def test_a_list_with_blanks_is_shown_with_commas(words, line, capsys):
    code, _, err = run(capsys, *words.split())
    assert code == 2 and err == f"procap: error: lists have commas: {line}\n"


@pytest.mark.parametrize(("text", "names"), [
    ("CoOp,ProCAP", ["coop", "procap"]), ("LP++,CLIP-LoRA,Tip-Adapter-F", ["lppp", "cliplora", "tipadapterf"]),
    ("MMRL++,2SFS,coop", ["mmrlpp", "2sfs", "coop"]),
])  # fmt: skip
def test_methods_may_be_named_as_papers_do(text, names):
    assert parse_methods(text) == names


def test_seeds_may_be_a_range():
    assert parse_integers("1-3,7,2", "--seeds") == [1, 2, 3, 7]
    for text in ("3-1", "1-", "-1", "1-2-3"):
        with pytest.raises(UsageError, match="for example --seeds 1,2,3 or 1-3"):
            parse_integers(text, "--seeds")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, capsys):
    monkeypatch.delenv("PROCAP_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    code, _, err = run(capsys, "data", "show", "digits")
    assert code == 2 and err.count("\n") == 1 and "PROCAP_HOME" in err


@pytest.mark.parametrize(
    ("words", "offline"),
    [("ls", "1"), ("eval hf://lab/run", "0"), ("push", "0"), ("data show", "0"), ("train --download", "0")],
)
def test_only_a_command_that_names_the_hub_or_a_download_may_download(monkeypatch, capsys, words, offline):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert run(capsys, *words.split(), "--no-such-flag")[0] == 2
    assert os.environ["HF_HUB_OFFLINE"] == offline
