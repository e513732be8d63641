"""Commands with data and results in the places that users name: folders of any name, a home folder, URLs."""

import shutil
from pathlib import Path

import pytest
from command_line import run
from local_server import LocalServer
from PIL import Image

from benchmarks.cli import main
from shards.remote import list_files, upload

pytestmark = pytest.mark.usefixtures("at_home")
RUN = ["--methods", "coop", "--datasets", "digits", "--shots", "2"]


@pytest.fixture
def web(few_digits, monkeypatch):
    """The address of a web server with some digits."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with LocalServer(few_digits) as server:
        yield server.url


@pytest.fixture
def bucket(s3, few_digits, tmp_path) -> str:
    """The address of some digits in an object store."""
    address = f"s3://{s3.bucket}/{tmp_path.name}"
    for file in (file for file in few_digits.rglob("*") if file.is_file()):
        upload(file, f"{address}/data/{file.relative_to(few_digits).as_posix()}")
    return address


def put_photos() -> str:
    Path("photos").mkdir()
    for shade in range(3):
        Image.new("RGB", (8, 8), (80 * shade, 90, 90)).save(f"photos/{shade}.png")
    return "photos"


def test_a_web_server_has_the_data_of_a_suite(web, short_checkpoint, capsys):
    words = [*RUN, "--seeds", "1", "--backbone", short_checkpoint, "--tracking", "off", "--data", web]
    code, out, err = run(capsys, "bench", "base-to-novel", "--profile", "mini", "--quick", *words)
    assert code == 0 and "| CoOp" in out.replace("*", ""), err
    _, out, _ = run(capsys, "bench", "base-to-novel", "--profile", "mini", "--quick", *words, "--dry-run")
    assert "finished" in out


def test_an_object_store_has_data_and_results_of_all_commands(bucket, short_checkpoint, capsys):
    data, results = ["--data", f"{bucket}/data"], ["--results", f"{bucket}/results"]
    places = ["--backbone", short_checkpoint, "--tracking", "off", *data, *results]
    assert run(capsys, "train", *RUN, "--shots", "full", "--epochs", "1", "--no-cache", *places)[0] == 0
    assert not list(Path("home").rglob("*.tar"))
    words = ["base-to-novel", "--profile", "mini", "--quick", "--seeds", "1"]
    code, _, err = run(capsys, "bench", *words, *RUN, *places)
    assert code == 0, err
    [path] = (name.removesuffix("/train.json") for name in list_files(f"{bucket}/results") if is_training(name))
    # A different machine has nothing of it.
    shutil.rmtree("home")
    for words in (["predict", path, put_photos(), *results], ["table", *results]):
        code, out, err = run(capsys, *words)
        assert code == 0 and out.strip(), err


def is_training(name: str) -> bool:
    return "/2shot/" in name and name.endswith("/train.json")


ODD = "my results 100%25 #1?"
"""The name of a folder, which a URL has to quote."""


@pytest.fixture(scope="module")
def lab(few_digits, short_checkpoint, tmp_path_factory) -> Path:
    """A folder with data, a finished run, weights and photos, in folders with odd names."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(few_digits, folder / ODD / "data")
    shutil.copy(short_checkpoint, folder / ODD / "weights.safetensors")
    (folder / ODD / "photos").mkdir()
    Image.new("RGB", (8, 8), (80, 90, 90)).save(folder / ODD / "photos" / "a.png")
    words = [*RUN, "--epochs", "1", "--tracking", "off", "--backbone", str(folder / ODD / "weights.safetensors")]
    places = ["--data", str(folder / ODD / "data"), "--results", str(folder / ODD / "results")]
    assert main(["train", *words, *places]) == 0
    return folder


SPELLINGS = {
    "absolute": lambda lab, name: str(lab / ODD / name),
    "relative": lambda lab, name: f"{ODD}/{name}",
    "home": lambda lab, name: f"~/{ODD}/{name}",
    "url": lambda lab, name: (lab / ODD / name).as_uri(),
}
WITH = "--datasets digits --shots 2 --epochs 1 --backbone {weights} --data {data} --results {results}"
COMMANDS = {
    "--data": "data few-shot digits --shots 2 --data {data}",
    "--results": "ls runs --results {results}",
    "RUN": "eval {run} --data {data} --limit 5 --tracking off",
    "--pretrained": "eval --methods coop {with} --dry-run",
    "--init": "train --methods coop {with} --init {run} --dry-run",
    "teacher": "train --methods kdpl --option teacher={run} --force --tracking off {with}",
    "PATH": "predict {run} {photos}",
    "export": "export {run} --out {results}/exported",
}


@pytest.mark.parametrize("place", COMMANDS)
def test_a_path_may_be_spelled_in_every_way_and_have_any_name(place, lab, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(lab))
    monkeypatch.chdir(lab)
    [configuration] = (lab / ODD / "results").rglob("coop/**/config.json")
    names = {"run": str(configuration.parent.relative_to(lab / ODD)), "weights": "weights.safetensors"}
    answers = set()
    for spelling, spell in SPELLINGS.items():
        if spelling == "url" and place not in ("--data", "--results"):
            continue
        words = COMMANDS[place].replace("{with}", WITH).split()
        paths = {name: spell(lab, names.get(name, name)) for name in ("data", "results", "run", "weights", "photos")}
        # A URL is promised for data and results alone.
        if spelling == "url":
            paths |= {name: SPELLINGS["absolute"](lab, names.get(name, name)) for name in ("run", "weights", "photos")}
        code, out, err = run(capsys, *(word.format(**paths) for word in words))
        assert code == 0, (spelling, err)
        answers.add(out if place in ("--data", "--results", "--pretrained", "--init") else "")
    assert len(answers) == 1
