"""`procap submit`: the request that is sent, the secrets that are not, and a job on a real head node."""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
from child_process import start_process
from plug_ins import METHOD, install

from benchmarks.cli import main
from benchmarks.studies.chaos.nodes import Nodes
from benchmarks.studies.chaos.ports import free_port
from cluster import submit as submission
from cluster.address import dashboard_url, ray_address, set_auth_mode
from procap.errors import UsageError
from procap.methods import method_source
from runner.environment import SOURCE_VARIABLE, source_state
from runner.run_collection import SUITE_FILE_VARIABLE, Collection, write_collection
from runner.run_folders import RunFolder, find_runs

ROOT = Path(__file__).parent.parent
SHARED = ["--data", "/shared/data", "--results", "/shared/results"]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
SUITE = """
from benchmarks.suites.suite import Suite
from benchmarks.tables.base_novel import base_to_novel_tables
SUITE = Suite(name="sent", title="sent", methods=("theirs",), seeds=(1,), datasets={"mini": ("digits",)},
              tables=base_to_novel_tables)
"""
HUSH = "hush-hush-hush"


@pytest.mark.parametrize(("words", "message"), [
    (["train", "--data", "/d"], "--results is missing"),
    (["bench", "all", "--data", "/d"], "--results is missing"),
    (["report", "mine"], "--results is missing"),
    (["sweep", "rates.yaml", "--data", "/d"], "--results is missing"),
    (["sweep", "here.yaml", "--data", "/d"], "--results mine is a folder of this machine"),
    (["train", *SHARED, "--results", "results"], "--results results is a folder of this machine"),
    (["train", *SHARED, "--data=~/data"], "--data ~/data is a folder of this machine"),
    (["sweep", "mine.yaml", *SHARED], "a credential in mine.yaml would be readable"),
    (["ls", "postgresql://me:hush@db/mlflow"], "would be readable"),
    (["ls", "--tracking=mysql+pymysql://me:hush@db/mlflow"], "would be readable"),
    (["ls", "https://hush@host/data"], "would be readable"),
    (["ls", "https://host/data?X-Amz-Signature=hush"], "would be readable"),
    (["ls", "postgresql://db/mlflow?user=me&password=hush"], "would be readable"),
    (["train", *SHARED, "--option", "maple.token=hush"], "would be readable"),
    (["train", *SHARED, "--option=client_secret=hush"], "would be readable"),
])  # fmt: skip
def test_secrets_and_storage_of_this_machine_are_refused_in_one_line(words, message, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("tracking: http://me:hush@mlflow.example:5000")
    (tmp_path / "rates.yaml").write_text("param: {lr: [0.1, 0.2]}")
    (tmp_path / "here.yaml").write_text("param: {lr: [0.1, 0.2]}\nresults: mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as caught:
        submission.check_command(words)
    assert "\n" not in str(caught.value) and "hush" not in str(caught.value)


def test_shared_storage_and_plain_words_are_accepted():
    for place in ("/shared", "s3://lab/x", "file:///shared/x", "https://host/x?versionId=3"):
        submission.check_command(["train", "--methods", "coop", "--data", place, "--results", place])
    words = ["postgresql://db/mlflow", "a=b", "infonce=false", "password=", "the bearer", "deep_tokens=independent"]
    submission.check_command(["ls", *words, "token=4"])


@pytest.mark.parametrize("asked", [
    "HF_TOKEN=hush", "AWS_ACCESS_KEY_ID=hush", "AWS_SECRET_ACCESS_KEY=hush", "PGPASSWORD=hush", "DB_PWD=hush",
    "AZURE_STORAGE_CONNECTION_STRING=hush", "MY_PAT=hush",
    "SETTING=DefaultEndpointsProtocol=https;AccountName=lab;AccountKey=hush;EndpointSuffix=core.windows.net",
    "SETTING=host=db user=me password='hush'", "SETTING=Driver={SQL};UID=me;PWD=hush",
    "SETTING=Authorization: Bearer hush", "SETTING=x-api: bearer%20hush", "SETTING=postgresql://me:hush@db/mlflow",
])  # fmt: skip
def test_a_variable_that_holds_a_secret_is_refused(asked):
    with pytest.raises(UsageError, match=r"readable by all; set it on the nodes.*Kubernetes secret") as caught:
        submission.job_environment([asked])
    assert "hush" not in str(caught.value)


def test_variables_that_are_named_are_sent(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert submission.job_environment(["NCCL_DEBUG", "MY_PATH=/a b"]) == {"NCCL_DEBUG": "INFO", "MY_PATH": "/a b"}
    with pytest.raises(UsageError, match="it is not set here"):
        submission.job_environment(["SURELY_UNSET"])


def test_ray_packs_the_source_and_its_data_files_and_no_keys(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    tree = tmp_path / "tree"
    names = ["procap/a.py", "procap/mini.safetensors", "benchmarks/results/b.py", "pyproject.toml"]
    for name in [*names, ".env", "id_rsa", "lab.pem", "my-secret.txt", "results/c.json", "tests/d.py", ".git/x"]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    create_package(str(tree), tmp_path / "sent.zip", include_gitignore=True, excludes=list(submission.EXCLUDES))
    with zipfile.ZipFile(tmp_path / "sent.zip") as archive:
        assert sorted(name for name in archive.namelist() if not name.endswith("/")) == sorted(names)


def test_files_of_the_command_and_plug_ins_travel_with_it(tmp_path, monkeypatch, capsys):
    """From any folder; the code has the same digest where it is unpacked."""
    from ray._private.runtime_env.packaging import create_package

    install(tmp_path / "lib", {"sent_method": METHOD}, {"theirs": "sent_method:Theirs"})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    source = method_source("theirs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_suite.py").write_text(SUITE)
    record = Collection(kind="suite", name="sent", file=str(tmp_path / "my_suite.py"))
    write_collection(tmp_path / "results", record)
    given = ["bench", "my_suite.py", "--results", "/r"]
    with submission.collect_sources(given, ROOT) as (words, folder, _, methods, _):
        assert words == ["bench", "submitted-1/my_suite.py", "--results", "/r"] and folder and "theirs" in methods
        create_package(str(folder), tmp_path / "sent.zip", include_gitignore=True, excludes=list(submission.EXCLUDES))
    with zipfile.ZipFile(tmp_path / "sent.zip") as archive:
        archive.extractall(tmp_path / "there")
    there = {path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*")}
    assert {"submitted-1/my_suite.py", "sent_method.py", "procap/plan.py", "pyproject.toml"} <= there
    assert not folder.exists() and not any(name.startswith(("tests/", ".git/")) for name in there)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "there"), *sys.path[1:]])
    assert method_source("theirs") == source is not None
    assert main(["submit", "--dry-run", "--json", "--", "bench", "my_suite.py", *SHARED]) == 0
    plan = json.loads(capsys.readouterr().out)
    shown = [[command, "sent", f"--results={tmp_path}/results"] for command in ("table", "report")]
    for same in (["bench", str(tmp_path / "my_suite.py"), *SHARED], *shown):
        assert main(["submit", "--dry-run", "--json", "--", *same]) == 0
        assert json.loads(capsys.readouterr().out)["sent"] == plan["sent"]
    assert main(["submit", "--dry-run", "--", "bench", "sent", *SHARED]) == 2
    assert "unknown suite 'sent': known: ablation" in capsys.readouterr().err
    (tmp_path / "there/sent_method.py").write_text("raise OSError('unfinished')")
    monkeypatch.delitem(sys.modules, "sent_method", raising=False)
    for flags, code in ((["--methods=coop,theirs"], 2), ([], 2), (["--methods", "coop"], 0)):
        assert main(["submit", "--dry-run", "--", "bench", "my_suite.py", *flags, *SHARED]) == code
        why = "'theirs' is a plug-in that cannot be loaded from sent_method:Theirs: OSError"
        assert (why in capsys.readouterr().err) == bool(code)
    assert plan["sent"]["files"] == {"submitted-1/my_suite.py": str(tmp_path / "my_suite.py")}
    assert plan["sent"]["methods"] == ["theirs"] and plan["sent"]["tree"] == str(ROOT)
    environment = plan["runtime_env"]["env_vars"]
    assert environment[SUITE_FILE_VARIABLE] == str(tmp_path / "my_suite.py")
    assert json.loads(environment[SOURCE_VARIABLE]) == source_state()


def test_a_command_is_sent_word_by_word(tmp_path):
    words = ["train", "--option", "name=two words; $(touch x) 'quoted'", "--results", "/shared/my results"]
    request = submission.make_request(words, name="", environment={}, working_dir=None)
    (tmp_path / "benchmarks/cli").mkdir(parents=True)
    (tmp_path / "benchmarks/cli/__main__.py").write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    printed = subprocess.run(
        request["entrypoint"], shell=True, cwd=tmp_path, env={**os.environ, "PATH": PATH}, capture_output=True,
        check=True,
    )  # fmt: skip
    assert json.loads(printed.stdout) == words
    for wrong in ("a b", "../x", "-x", "x" * 81):
        with pytest.raises(UsageError, match="--name"):
            submission.make_request(["ls"], name=wrong, environment={}, working_dir=None)


@pytest.mark.parametrize(("given", "variables", "url"), [
    ("", {}, "http://127.0.0.1:8265"),
    ("head:9000", {}, "http://head:9000"),
    ("https://ray.lab.org/", {"RAY_ADDRESS": "x:1"}, "https://ray.lab.org"),
    ("", {"RAY_ADDRESS": "head:6379"}, "http://head:8265"),
    ("", {"RAY_ADDRESS": "ray://head:10001"}, "http://head:8265"),
    ("", {"RAY_ADDRESS": "auto"}, "http://127.0.0.1:8265"),
    ("", {"RAY_ADDRESS": "head:6379", "RAY_API_SERVER_ADDRESS": "http://api:1"}, "http://api:1"),
])  # fmt: skip
def test_the_dashboard_is_found_as_ray_finds_it(monkeypatch, given, variables, url):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert dashboard_url(given) == url


@pytest.mark.parametrize("address", ["ftp://head", "http://", "a b", "http://me:hush@head:8265"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UsageError) as caught:
        dashboard_url(address)
    assert "hush" not in str(caught.value)


def test_a_driver_connects_to_a_node_and_not_to_a_dashboard(monkeypatch):
    assert [ray_address(), ray_address("auto"), ray_address("10.0.0.1:6379")] == ["auto", "auto", "10.0.0.1:6379"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert ray_address() == "10.0.0.2:6379"
    hints = {"http://head:8265": "procap submit", **dict.fromkeys(("head", "local", "ray://head:1"), "HOST:6379")}
    for wrong, hint in hints.items():
        with pytest.raises(UsageError, match=hint):
            ray_address(wrong)


def test_a_token_is_used_where_there_is_one(monkeypatch, tmp_path):
    def auth(**how: bool) -> tuple[str, str]:
        monkeypatch.setenv("RAY_AUTH_MODE", "")
        monkeypatch.delitem(sys.modules, "ray", raising=False)
        set_auth_mode(**how)
        return os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_AUTH_TOKEN", "")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    assert auth() == ("disabled", "")
    mode, token = auth(private=True)
    assert mode == "token" and len(token) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("abc")
    assert auth() == ("token", "") and auth(private=True) == ("token", "")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    set_auth_mode(private=True)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_dry_run_prints_the_request_and_sends_nothing(capsys):
    words = ["submit", "--address", "127.0.0.1:9", "--name", "n1", "--dry-run", "--json", "--", "train", *SHARED]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["entrypoint"] == f"exec python -m benchmarks.cli train {' '.join(SHARED)}"
    assert plan["submission_id"] == "n1" and plan["runtime_env"]["working_dir"] == str(ROOT)
    assert json.loads(plan["runtime_env"]["env_vars"][SOURCE_VARIABLE]) == source_state()
    assert main([*words[:5], "--installed", *words[5:]]) == 0
    assert "working_dir" not in json.loads(capsys.readouterr().out)["runtime_env"]


def test_a_log_whose_reader_is_gone_is_not_followed():
    async def tail(name: str):
        yield "one line"

    def write(text: str) -> None:
        raise BrokenPipeError

    client: Any = SimpleNamespace(tail_job_logs=tail)
    with pytest.raises(BrokenPipeError), submission.translate_errors("http://head:8265"):
        submission.follow(client, "job", write)


def test_no_cluster_at_an_address_is_one_line(capsys):
    for words in ([], ["submit", "ls"]):
        assert main(["submit", "--", "procap", *words]) == 2
        assert "name the command to run on the cluster" in capsys.readouterr().err
    port = free_port()
    assert main(["submit", "--address", f"127.0.0.1:{port}", "ls", "methods", "--json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"procap: error: no Ray cluster at http://127.0.0.1:{port}: name its dashboard")
    assert error.count("\n") == 1


def test_a_dashboard_that_does_not_answer_is_named(monkeypatch, capsys):
    monkeypatch.setattr("shards.remote.STALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = silent.accept()
            time.sleep(1.0)
            connection.close()
            silent.close()

        threading.Thread(target=hang_up).start()
        with pytest.warns(UserWarning, match=f"waiting for http://{address}"):
            assert main(["submit", "--installed", "--address", address, "--", "ls", "methods"]) == 1
    assert "no Ray cluster at" in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    running = Nodes(tmp_path_factory.mktemp("nodes"), environment={"PATH": PATH})
    with running as nodes, pytest.MonkeyPatch.context() as p:
        p.setenv("RAY_AUTH_MODE", "disabled")
        p.delenv("RAY_ADDRESS", raising=False)
        nodes.start_head(cpus=2, dashboard=True)
        p.setenv("RAY_API_SERVER_ADDRESS", nodes.dashboard)
        yield nodes.dashboard


def test_a_job_runs_this_tree_without_secrets_and_a_broken_connection_repeats_no_line(cluster, monkeypatch, capsys):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "SOME_SETTING"):
        monkeypatch.setenv(name, HUSH)
    assert main(["submit", "--name", "listing", "--env", "NCCL_DEBUG=INFO", "--", "ls", "datasets"]) == 0
    assert "twenty flat shapes" in capsys.readouterr().out
    client = submission.connect(cluster)
    details = client.get_job_info("listing")
    assert HUSH not in f"{details} {client.get_job_logs('listing')}"
    assert set(details.runtime_env["env_vars"]) == {*submission.RAY_SETTINGS, "NCCL_DEBUG", SOURCE_VARIABLE}
    assert main(["submit", "--name", "listing", "--", "ls", "datasets"]) == 2
    assert "there is a job of this --name already" in capsys.readouterr().err
    connections = itertools.count()

    async def breaking(name):
        text = client.get_job_logs(name)
        yield text[:100]
        if next(connections) < 2:
            raise ConnectionError("reset by peer")
        yield text[100:]

    monkeypatch.setattr(client, "tail_job_logs", breaking)
    written: list[str] = []
    assert submission.follow(client, "listing", written.append).driver_exit_code == 0
    assert "".join(written) == client.get_job_logs("listing") and next(connections) == 3


@pytest.mark.slow
def test_sigterm_ends_the_wait_for_a_job_which_goes_on(cluster, few_digits, tmp_path):
    words = ["submit", "--name", "long", "--installed", "--", "train", "--methods", "coop", "--datasets", "digits"]
    words += ["--data", str(few_digits), "--results", str(tmp_path), "--tracking", "off", "--epochs", "20000"]
    with start_process([sys.executable, "-m", "benchmarks.cli", *words], stdout=PIPE, stderr=PIPE, text=True) as sender:
        assert any("training base/digits/coop" in line for line in sender.stdout)
        began = time.monotonic()
        sender.terminate()
        error = sender.communicate(timeout=60)[1].splitlines()[-1]
    assert sender.returncode == 143 and time.monotonic() - began < 5
    assert error.startswith("procap: SIGTERM: job long keeps running: `ray job logs -f") and "`ray job stop" in error
    client = submission.connect(cluster)
    assert client.get_job_status("long") == "RUNNING" and client.stop_job("long")


@pytest.mark.slow
def test_a_suite_of_a_plug_in_runs_on_a_cluster_that_has_neither(cluster, few_digits, tmp_path, monkeypatch, capsys):
    install(tmp_path / "lib", {"sent_there": METHOD}, {"theirs": "sent_there:Theirs"})
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_suite.py").write_text(SUITE)
    places = ["--data", str(few_digits), "--results", str(tmp_path / "results")]
    words = ["--quick", "--profile", "mini", "--launcher", "ray", "--device", "cpu", "--tracking", "off"]
    assert main(["submit", "--", "bench", "my_suite.py", *words, *places]) == 0, capsys.readouterr()
    monkeypatch.chdir("/")
    assert main(["table", "sent", *places]) == 0
    assert "| theirs" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_of_a_job_equal_local_ones_and_a_failed_one_is_exit_code_3(cluster, few_digits, tmp_path, capsys):
    words = ["train", "--methods", "coop", "--datasets", "digits", "--shots", "2", "--epochs", "1", "--seeds", "1,2"]
    words += ["--data", str(few_digits), "--tracking", "off", "--device", "cpu"]
    assert main([*words, "--results", str(tmp_path / "here")]) == 0
    first, second = sorted(run.path for run in find_runs(tmp_path / "here"))
    there = tmp_path / "there"
    spoilt = there / second.relative_to(tmp_path / "here")
    spoilt.mkdir(parents=True)
    for name, text in (("config.json", (second / "config.json").read_text()), ("train.json", "{}")):
        (spoilt / name).write_text(text)
    capsys.readouterr()
    assert main(["submit", "--", *words, "--results", str(there)]) == 3
    assert "1 done, 1 failed" in capsys.readouterr().out
    results = [RunFolder(run).train() for run in (first, there / first.relative_to(tmp_path / "here"))]
    assert results[0] is not None and results[1] is not None
    assert results[0].checkpoint_sha256 == results[1].checkpoint_sha256
    assert results[1].environment["git"] == source_state()
