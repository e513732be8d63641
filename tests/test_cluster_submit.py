"""`procap submit`: what travels to a cluster, what must not, and what is said of commands that would not work there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.cli import main
from benchmarks.cli.sent_command import read_command
from cluster import source_archive as parcels
from cluster.address import dashboard, ray_address, settle_auth
from cluster.source_archive import code_digest, pack, working_tree
from cluster.submit import secret_part, submission, travelling
from procap.errors import UsageError, UserError
from runner.environment import source_state

ROOT = Path(__file__).parent.parent
SHARED = ("--data", "/shared/data", "--results", "s3://lab/results")


@pytest.fixture(autouse=True)
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "PROCAP_DATA", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source tree with a history, something that git ignores, and something new."""
    # Whoever runs the tests may have signatures, hooks and files to ignore of their own.
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    root = tmp_path / "tree"
    for package in parcels.PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text(f"# {package}\n")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / ".gitignore").write_text("*.secret\n__pycache__/\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "1"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    (root / "procap/new.py").write_text("NEW = 1\n")
    (root / "procap/my.secret").write_text("hush")
    for litter in ("results/x", ".venv/x", "procap/__pycache__/a.pyc", "notes.txt"):
        (root / litter).parent.mkdir(parents=True, exist_ok=True)
        (root / litter).write_text("x")
    return root


def test_the_source_travels_without_what_git_ignores_and_what_is_no_source(tree: Path) -> None:
    expected = {f"{package}/__init__.py" for package in parcels.PACKAGES} | {"procap/new.py", "pyproject.toml"}
    assert set(pack(tree).files) == expected
    shutil.rmtree(tree / ".git")
    assert set(pack(tree).files) == expected | {"procap/my.secret"}


def test_this_tree_travels_with_its_data_files_and_weights() -> None:
    sent = pack(working_tree()).files
    assert {
        "pyproject.toml",
        "procap/weights/mini.safetensors",
        "benchmarks/cli/main.py",
        "cluster/source_archive.py",
    } <= set(sent)
    assert {name.split("/")[0] for name in sent} == {*parcels.PACKAGES, "pyproject.toml"}


def test_the_archive_of_the_same_files_is_the_same_and_knows_its_commit(tree: Path, tmp_path: Path) -> None:
    digests = set()
    for name in ("a.zip", "b.zip"):
        pack(tree).write(tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
        os.utime(tree / "procap/new.py", (1, 1))
    assert len(digests) == 1
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path / "there")
    known = source_state(tree)
    assert known is not None and source_state(tmp_path / "there") == known


def test_too_big_a_tree_is_refused_with_its_biggest_file(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "shards/heap.bin").write_bytes(b"0" * 30_000)
    monkeypatch.setattr(parcels, "MOST_BYTES", 20_000)
    with pytest.raises(UserError, match=r"biggest: shards/heap\.bin \(0\.0 MB\), "):
        pack(tree)


def test_the_digest_of_the_code_follows_every_package_and_nothing_else(tree: Path) -> None:
    before = code_digest(tree)
    (tree / "notes.txt").write_text("other")
    assert code_digest(tree) == before
    seen = {before}
    for package in parcels.PACKAGES:
        (tree / package / "__init__.py").write_text("# changed\n")
        seen.add(code_digest(tree))
    assert len(seen) == 1 + len(parcels.PACKAGES)


def test_files_that_a_command_names_travel_under_their_names(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plans").mkdir()
    Path("plans/zero.json").write_text("{}")
    Path("w.safetensors").write_text("w")
    words = [
        "train",
        "--methods",
        "coop",
        "--deepspeed-config",
        "plans/zero.json",
        "--pretrained=w.safetensors",
        *SHARED,
    ]
    command = read_command(words, {})
    assert set(command.files) == {"plans/zero.json", "w.safetensors"}
    assert set(pack(None, command.files).files) == set(command.files) <= set(pack(tree, command.files).files)
    Path("outside.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "plans")
    with pytest.raises(UsageError, match=r"\.\./outside\.json is not below the current folder"):
        pack(None, read_command(["train", "--deepspeed-config", "../outside.json", *SHARED], {}).files)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--methods", "coop"], "--data is missing"),
        (["train", "--data", "/d"], "--results is missing"),
        (["table"], "--results is missing"),
        (["demo"], "--out is missing"),
        (["train", *SHARED, "--results", "results"], "--results results .* relative to a folder of this machine"),
        (["train", *SHARED, "--data=~/data"], "--data ~/data .* relative to a home folder"),
        (["eval", *SHARED, "--data", "file://data"], "another machine"),
        (["train", *SHARED, "--tracking", "sqlite:///mlflow.db"], "--tracking .* sqlite:////FILE would work"),
        (["eval", *SHARED, "tests"], "tests is a folder of this machine.*below --results"),
        (["train", *SHARED, "--deepspeed-config", "zero.json"], "zero.json is not here to be sent along"),
        (["track", "sync"], "--results is missing"),
        (["trian"], "did you mean train"),
        (["ui"], "cannot be sent"),
        (["submit", "--", "ls", "methods"], "cannot be sent"),
        (["data", "pack", "digits"], "--data is missing"),
        (["data", "check", "digits"], "--data is missing"),
        (["data", "show", "digits", "--out", "/shared/sheet.png"], "--data is missing"),
        (["bench"], "which command"),
        (["data", "pakc"], "did you mean pack"),
        ([], "which command"),
    ],
)
def test_what_would_not_work_on_a_cluster_is_refused_in_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(Exception, match=message) as caught:
        read_command(words, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["/shared", "s3://lab/x", "gs://lab/x", "file:///shared/x", "https://host/x"])
def test_places_that_all_nodes_can_mean_are_sent(place: str) -> None:
    words = ("train", "--methods", "coop", "--data", place, "--results", place)
    assert read_command(words, {}).words == words


def test_data_named_by_the_environment_need_not_be_named_again() -> None:
    assert read_command(["train", "--results", "/r"], {"PROCAP_DATA": "/d"}).path == ("train",)


def test_mistakes_in_the_sent_command_end_it_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--address", "http://127.0.0.1:9", "--", "train", "--epohcs", "3"]) == 2
    assert "No such option: --epohcs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "MLFLOW_TRACKING_PASSWORD",
        "PGPASSWORD",
        "DB_PWD",
        "AZURE_STORAGE_CONNECTION_STRING",
        "MY_PAT",
    ],
)
def test_a_variable_that_looks_like_a_secret_is_refused_with_the_way_to_do_it(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} looks like a secret.*set it on the nodes.*Kubernetes secret"):
        travelling([f"{name}=hush-hush"], print)


@pytest.mark.parametrize(
    "value",
    [
        "DefaultEndpointsProtocol=https;AccountName=lab;AccountKey=hush;EndpointSuffix=core.windows.net",
        "Endpoint=sb://lab.net/;SharedAccessKeyName=all;SharedAccessKey=hush",
        "host=db user=me password='hush'",
        "Driver={SQL};UID=me;PWD=hush",
        "Authorization: Bearer hush",
        "authorization=Basic%20hush",
        "x-api: bearer%20hush",
    ],
)
def test_a_secret_in_the_value_of_a_variable_with_a_harmless_name_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"--env SETTING holds the .* readable by all; set it on") as caught:
        travelling([f"SETTING={value}"], print)
    assert "hush" not in str(caught.value)


def test_variables_asked_for_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    sent = travelling(["NCCL_DEBUG", "TOKENIZERS_PARALLELISM=false", "HF_HUB_OFFLINE=0", "MY_PATH=/a b"], print)
    others = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "0", "MY_PATH": "/a b"}
    assert sent == {"NCCL_DEBUG": "INFO", **others}
    with pytest.raises(UsageError, match="it is not set here"):
        travelling(["SURELY_UNSET"], print)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PROCAP_DATA", "data", "relative"),
        ("PROCAP_DATA", "https://me:hush-hush@host/data", "password"),
        ("MLFLOW_TRACKING_URI", "sqlite:////home/me/x.db", "place on this machine"),
        ("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000", "this machine's own address"),
        ("MLFLOW_TRACKING_URI", "postgresql://me:hush-hush@db/mlflow", "password"),
    ],
)
def test_variables_that_mean_nothing_there_stay_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    said: list[str] = []
    monkeypatch.setenv(name, value)
    assert name not in travelling([], said.append)
    assert len(said) == 1 and reason in said[0] and "hush" not in said[0]


@pytest.mark.parametrize(
    "word",
    [
        "postgresql://me:hush@db/mlflow",
        "--tracking=mysql+pymysql://me:hush@db/mlflow",
        "https://hush@host/data",
        "https://host/data?X-Amz-Signature=hush",
        "https://host/data?sv=1&sig=hush",
        "postgresql://db/mlflow?user=me&password=hush",
    ],
)
def test_secrets_in_the_command_are_refused_and_not_repeated(word: str) -> None:
    with pytest.raises(UsageError, match="would be readable") as caught:
        submission(["ls", word], "m", pack(None), name="", environment={}, facts={})
    assert "hush" not in str(caught.value)


def test_words_without_secrets_pass() -> None:
    urls = ("s3://bucket/key", "postgresql://db/mlflow", "https://host/data?versionId=3")
    for word in (*urls, "a=b", "infonce=false", "password=", "the bearer"):
        assert secret_part(word) == ""


def test_a_command_is_sent_word_by_word(tmp_path: Path) -> None:
    words = ["train", "--option", "name=two words; $(touch x) 'quoted'", "--results", "/shared/my results"]
    job = submission(words, "printer", pack(None), name="", environment={}, facts={})
    (tmp_path / "printer.py").write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = subprocess.run(
        job.entrypoint, shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, check=True
    )
    assert json.loads(printed.stdout) == words


@pytest.mark.parametrize("name", ["a b", "../x", "-x", "x" * 81, "a/b"])
def test_an_id_that_cannot_be_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        submission(["ls"], "m", pack(None), name=name, environment={}, facts={})


@pytest.mark.parametrize(
    ("given", "variables", "url"),
    [
        ("", {}, "http://127.0.0.1:8265"),
        ("head", {}, "http://head:8265"),
        ("head:9000", {}, "http://head:9000"),
        ("https://ray.lab.org/", {"RAY_ADDRESS": "x:1"}, "https://ray.lab.org"),
        ("", {"RAY_ADDRESS": "head:6379"}, "http://head:8265"),
        ("", {"RAY_ADDRESS": "ray://head:10001"}, "http://head:8265"),
        ("", {"RAY_ADDRESS": "auto"}, "http://127.0.0.1:8265"),
        ("", {"RAY_ADDRESS": "head:6379", "RAY_API_SERVER_ADDRESS": "http://api:1"}, "http://api:1"),
    ],
)
def test_the_dashboard_is_found_as_ray_finds_it(
    monkeypatch: pytest.MonkeyPatch, given: str, variables: dict[str, str], url: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dashboard(given).url == url


@pytest.mark.parametrize("address", ["ftp://head", "http://", "a b", "http://head:99999", "http://me:hush@head:8265"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError) as caught:
        dashboard(address)
    assert "hush" not in str(caught.value)


def test_a_driver_connects_to_a_node_and_not_to_a_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        ray_address() == "local" and ray_address("auto") == "auto" and ray_address("10.0.0.1:6379") == "10.0.0.1:6379"
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert ray_address() == "10.0.0.2:6379" and ray_address("local") == "local"
    for wrong, hint in (("http://head:8265", "procap submit"), ("head", "HOST:6379"), ("ray://head:1", "HOST:6379")):
        with pytest.raises(UsageError, match=hint):
            ray_address(wrong)


def test_a_token_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def settled(**how: bool) -> tuple[str, str]:
        monkeypatch.setenv("RAY_AUTH_MODE", "")
        monkeypatch.delitem(sys.modules, "ray", raising=False)
        settle_auth(**how)
        return os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_AUTH_TOKEN", "")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    assert settled() == ("disabled", "")
    mode, token = settled(private=True)
    assert mode == "token" and len(token) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("abc")
    assert settled() == ("token", "") and settled(private=True) == ("token", "")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    settle_auth(private=True)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_settling_too_late_is_no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    with pytest.raises(AssertionError, match="before it was settled"):
        settle_auth(private=True)


def test_no_cluster_at_an_address_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        for words in (
            ["submit", "--address", f"127.0.0.1:{port}", "--", "ls", "methods"],
            ["jobs", "--address", f"127.0.0.1:{port}"],
        ):
            assert main(words) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"procap: error: no Ray cluster at http://127.0.0.1:{port}: connection refused")
            assert said.count("\n") == 1 and "ray[default]" in said


def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--address", "127.0.0.1:9", "--name", "n1", "--dry-run", "--json", "--", "train", *SHARED]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["entrypoint"] == f"exec python -m benchmarks.cli train {' '.join(SHARED)}"
    assert plan["job"] == "n1" and "procap/weights/mini.safetensors" in plan["files"] and plan["bytes"] > 6e6
    assert plan["metadata"]["procap_code"] == code_digest(ROOT)
    assert main([*words[:5], "--installed", *words[5:]]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == []


def test_a_command_that_is_not_set_apart_is_told_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "bench", "base-to-novel", "--on", "ray"]) == 2
    said = capsys.readouterr().err
    assert "put -- before the command" in said and said.count("\n") == 1
