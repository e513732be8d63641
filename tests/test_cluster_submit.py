"""`procap submit` on a real head node whose Python has this program's libraries and not this checkout."""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from nodes import Nodes
from ports import free_port

from benchmarks.cli import main
from cluster.ray_cluster import set_auth_mode


@pytest.fixture(autouse=True)
def log_level(caplog):
    """Restore the level of pytest's log handler: it is a handler of Ray's logger too, which `submit` makes quieter."""
    yield
    caplog.handler.setLevel(0)


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


def test_no_cluster_at_an_address_is_one_line(monkeypatch, capsys):
    assert main(["submit", "--address", f"http://127.0.0.1:{free_port()}", "--", "ls", "methods"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("procap: error: ") and "Failed to connect to Ray" in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    # Without `site` the interpreter finds no editable installation: what was not sent is missing.
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    libraries = sysconfig.get_paths()["purelib"]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={libraries} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    with Nodes(folder, environment={"PATH": path}) as nodes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        nodes.start_head(cpus=2, dashboard=True)
        patch.setenv("RAY_API_SERVER_ADDRESS", nodes.dashboard)
        yield nodes.dashboard


@pytest.mark.slow
def test_a_job_runs_what_was_sent_and_its_log_and_exit_code_come_back(dashboard, capfd):
    assert main(["submit", "--", "ls", "datasets"]) == 0
    printed = capfd.readouterr()
    assert "twenty flat shapes" in printed.out and "INFO" not in printed.out + printed.err
    assert main(["submit", "--json", "--", "ls", "two words; $(exit 5)"]) == 2
    printed = capfd.readouterr()
    assert json.loads(printed.out)["exit_code"] == 2 and "two words; $(exit 5)" in printed.err
