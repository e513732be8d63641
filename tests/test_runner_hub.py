"""Trained runs travel: published on a local server with the routes of the Hub, and back."""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
import torch
from command_line import run
from hub_server import HubServer
from sessions import evaluate, make_run, train
from small_runs import make_runtime, mark_slow, only_run
from test_benchmarks_import import OPTIONS

from procap.errors import UserError
from procap.methods import METHODS, method_class
from runner import hub as shared
from runner.config import RunConfig, Target
from runner.export import export_model
from runner.hub import fetch_run, load_run
from runner.planning import plan_run
from runner.session import Session

pytestmark = pytest.mark.usefixtures("at_home")
SOURCE = "hf://lab/run"


@pytest.fixture(scope="module")
def trained(few_digits, short_checkpoint, tmp_path_factory):
    """Trains a method for an epoch on one image per class, once; returns its configuration and runtime."""

    @cache
    def train_run(method: str) -> tuple[RunConfig, object]:
        cls = method_class(method)
        teacher = {"teacher": str(short_checkpoint)} if cls.required_option == "teacher" else {}
        steps = {} if cls.recipe().epochs == 0 else {"epochs": 1, "batch_size": 5, "warmup": "none"}
        runtime = make_runtime(few_digits, tmp_path_factory.mktemp("results"))
        config = plan_run(
            method=method, dataset="digits", shots=1, backbone=str(short_checkpoint), data=few_digits,
            overrides=steps, options=OPTIONS.get(method, {}) | teacher,
        )  # fmt: skip
        train(config, runtime)
        return config, runtime

    return train_run


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer() as server:
        server.connect(monkeypatch, tmp_path / "cache")
        yield server


@pytest.fixture
def check_private(tmp_path_factory):
    """Compares published files with the folders of this machine: results, weights, home, and source code."""
    folders = (tmp_path_factory.getbasetemp(), Path.home(), Path(shared.__file__).parents[1])

    def check(files: Iterable[bytes]) -> None:
        assert not [folder for folder in folders for content in files if f"{folder}/".encode() in content]

    return check


@pytest.mark.parametrize("method", mark_slow(METHODS))
def test_a_run_of_every_method_arrives_bit_for_bit(
    method, trained, hub, tmp_path, few_digits, short_checkpoint, check_private
):
    config, runtime = trained(method)
    shared.push_files(shared.shared_files(make_run(config, runtime), "lab/run"), "lab/run")
    check_private(list(hub.repositories["lab/run"].values()))
    (tmp_path / short_checkpoint.name).symlink_to(short_checkpoint)
    elsewhere = make_runtime(few_digits, tmp_path / "elsewhere")
    arrived, original = load_run(SOURCE, elsewhere), load_run(runtime.results / config.path)
    assert arrived.config.hash == config.hash and arrived.training == original.training
    for name, tensor in original.method.state_dict().items():
        assert torch.equal(arrived.method.state_dict()[name], tensor), name
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(arrived.method.classifier()(images), original.method.classifier()(images))


def test_a_published_run_is_evaluated_under_its_address(trained, hub, tmp_path, few_digits, short_checkpoint, capsys):
    config, runtime = trained("coop")
    results = [evaluate(config, Target("digits", half), runtime) for half in ("base", "novel")]
    words = ("push", runtime.results / config.path, "--to", "lab/run")
    code, out, err = run(capsys, *words, "--dry-run")
    assert code == 0 and not hub.repositories and "nothing was uploaded" in err
    assert {line.split()[0] for line in out.splitlines()[2:]} == {"run.json", "model.safetensors", "README.md"}
    code, _, err = run(capsys, *words)
    assert code == 0 and hub.commits == 1 and "Bearer hf_test" in hub.tokens, err
    files = hub.repositories["lab/run"]
    data = huggingface_hub.ModelCard(files["README.md"].decode()).data
    assert data.model_name == "CoOp on digits"
    measured = {result.dataset_config: (result.metric_value, result.metric_args) for result in data.eval_results}
    for result in results:
        counts = {"correct": result.correct, "total": result.total}
        assert measured[result.target.split(":")[1]] == (round(result.accuracy, 2), counts)
    document = json.loads(files["run.json"])
    assert document["config"]["method"] == "coop" and str(short_checkpoint.parent) not in files["run.json"].decode()
    (tmp_path / short_checkpoint.name).symlink_to(short_checkpoint)
    code, out, err = run(
        capsys, "eval", SOURCE, "--data", few_digits, "--targets", "digits:base,digits:novel", "--tracking", "off"
    )
    arrived = only_run(tmp_path / "results")
    assert code == 0 and arrived.path.name == Path(config.path).name, err
    assert [arrived.read_evaluation(Target("digits", half)).per_class for half in ("base", "novel")] == [
        result.per_class for result in results
    ]


def test_what_does_not_belong_together_is_refused(trained, hub, tmp_path, few_digits, short_checkpoint, capsys):
    config, runtime = trained("coop")
    files = shared.shared_files(make_run(config, runtime), "lab/run")
    elsewhere = make_runtime(few_digits, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no repository lab/run"):
        fetch_run(SOURCE, Session(elsewhere))
    hub.repositories["lab/run"] = files | {"model.safetensors": files["model.safetensors"][:-4] + b"\0\0\1\0"}
    with pytest.raises(UserError, match="do not belong together"):
        fetch_run(SOURCE, Session(elsewhere))
    hub.repositories["lab/run"] = files | {"run.json": files["run.json"].replace(b'"seed": 1', b'"seed": 2')}
    with pytest.raises(UserError, match="do not belong together"):
        fetch_run(SOURCE, Session(elsewhere))
    assert not (tmp_path / "elsewhere").exists()
    hub.repositories["lab/run"] = files
    fetch_run(SOURCE, Session(elsewhere))
    fetch_run(SOURCE, Session(elsewhere))
    other = json.loads(files["run.json"])
    weights = files["model.safetensors"].replace(b"digits", b"digitz", 1)
    other["training"]["checkpoint_sha256"] = hashlib.sha256(weights).hexdigest()
    hub.repositories["lab/run"] = {"run.json": json.dumps(other).encode(), "model.safetensors": weights}
    with pytest.raises(UserError, match="has a different training than hf://lab/run"):
        fetch_run(SOURCE, Session(elsewhere))


def test_a_run_on_different_weights_of_its_backbone_is_refused(trained, hub, tmp_path, few_digits, tiny_checkpoint):
    config, runtime = trained("coop")
    hub.repositories["lab/run"] = shared.shared_files(make_run(config, runtime), "lab/run")
    (tmp_path / tiny_checkpoint.name).symlink_to(tiny_checkpoint)
    with pytest.raises(UserError, match="was trained on weights"):
        load_run(SOURCE, make_runtime(few_digits, tmp_path / "elsewhere"))


def compare(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", mark_slow(METHODS, ("maple",)))
def test_an_onnx_graph_has_equal_logits_at_any_batch_size(name, trained, tmp_path, check_private):
    onnxruntime = pytest.importorskip("onnxruntime")
    config, runtime = trained(name)
    if name in ("cocoop", "aapl", "tda", "tpt", "tpt-coop"):
        with pytest.raises(UserError, match="adapts to the test images" if name == "tda" else "for each image"):
            export_model(make_run(config, runtime), tmp_path)
        return
    file = export_model(make_run(config, runtime), tmp_path)
    check_private([path.read_bytes() for path in file.parent.iterdir()])
    session = onnxruntime.InferenceSession(file)
    method = load_run(runtime.results / config.path).method
    images = torch.randn(5, 3, 32, 32)
    [logits] = session.run(None, {"images": images.numpy()})
    compare(torch.from_numpy(logits), method.classifier()(images))
    inputs = json.loads(session.get_modelmeta().custom_metadata_map["procap"])
    assert inputs["classnames"] == list(method.space.names()) and inputs["image_size"] == 32
