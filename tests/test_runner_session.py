"""A session opens what its runs share once, and is the way into the program from Python."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import run
from local_server import LocalServer
from PIL import Image

import procap
from procap.errors import UserError
from runner import session as sessions
from runner.config import RuntimeConfig, Target
from runner.evaluate import evaluate
from runner.planning import plan_run
from runner.results import TrainResult
from runner.train import train

FIELDS = {"method": "coop", "dataset": "digits", "shots": 2, "overrides": {"epochs": 1}}


@pytest.fixture
def web(few_digits, monkeypatch, tmp_path):
    """A web server with some digits; mirrors of it lie in an empty home."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PROCAP_HOME", str(tmp_path / "home"))
    with LocalServer(few_digits) as server:
        yield server


def test_a_command_fetches_each_manifest_once(web, short_checkpoint, tmp_path, capsys):
    places = ["--data", web.url, "--results", tmp_path / "results", "--tracking", "off", "--backbone", short_checkpoint]
    words = ["--methods", "coop", "--datasets", "digits", "--shots", "2", "--epochs", "1", *places]
    for command in ("train", "eval", "eval", "train"):
        web.asked.clear()
        code, _, err = run(capsys, command, *words)
        assert code == 0, err
        assert web.asked.count("/digits/manifest.json") == 1, web.asked


def test_a_session_opens_a_data_set_once_for_all_runs(few_digits, short_checkpoint, tmp_path, monkeypatch):
    opened = []
    open_dataset = sessions.open_dataset
    monkeypatch.setattr(
        sessions, "open_dataset", lambda *words, **more: opened.append(words[1]) or open_dataset(*words, **more)
    )
    session = procap.Session(data=few_digits, results=tmp_path, device="cpu", tracking_uri="off", quiet=True)
    for seed in (1, 2):
        started = session.get_run(seed=seed, backbone=str(short_checkpoint), **FIELDS)
        started.train()
        for classes in ("base", "novel"):
            started.evaluate(f"digits:{classes}")
    assert opened == ["digits"]


def test_one_configuration_is_trained_and_evaluated_in_a_thread_which_gets_no_signals(
    few_digits, short_checkpoint, tmp_path
):
    # Scripts of users import these two functions.
    runtime = RuntimeConfig(data=few_digits, results=tmp_path, device="cpu", tracking_uri="off", quiet=True)
    config = plan_run(data=few_digits, backbone=str(short_checkpoint), **FIELDS)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, config, runtime).result().config_hash == config.hash
        result = pool.submit(evaluate, config, Target("digits", "base"), runtime).result()
    assert 0 < result.total == result.dataset_size


def test_a_run_is_trained_evaluated_and_used_from_python(few_digits, short_checkpoint, tmp_path):
    session = procap.Session(data=few_digits, results=tmp_path, device="cpu", tracking_uri="off", quiet=True)
    started = session.get_run(backbone=str(short_checkpoint), **FIELDS)
    assert started.state().status == "new"
    assert started.train(until=1) == started.train()
    assert isinstance(started.train(), TrainResult) and started.state("digits:base:test").open == ("digits:base:test",)
    result = started.evaluate("digits:base")
    assert started.state("digits:base:test").is_finished and result == started.evaluate("digits:base")
    probabilities = started.classifier()([Image.new("L", (20, 30))])
    assert probabilities.shape == (1, len(session.dataset("digits").classnames) // 2)
    again = session.find(started.folder)
    assert again.config == started.config and again.method.space == started.method.space


def test_a_run_elsewhere_is_found_with_its_results(few_digits, short_checkpoint, tmp_path):
    here, there = (
        sessions.Session(RuntimeConfig(few_digits, tmp_path / name, device="cpu", tracking_uri="off", quiet=True))
        for name in ("here", "there")
    )
    front = procap.Session(data=few_digits, results=tmp_path / "there", device="cpu", tracking_uri="off", quiet=True)
    started = front.get_run(backbone=str(short_checkpoint), **FIELDS)
    started.train()
    located = here.locate(started.folder.path)
    assert (
        located.session.runtime.results == (tmp_path / "there").resolve()
        and located.session.backbones is here.backbones
    )
    assert there.locate(started.folder.path).session is there
    shutil.rmtree(tmp_path / "there")
    with pytest.raises(UserError, match="not the folder of a run"):
        here.locate(started.folder.path)
