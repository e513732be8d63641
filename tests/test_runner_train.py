"""Training and evaluating one run in this process."""

import dataclasses
import os
import re
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import sessions
import torch
from plug_ins import METHOD, install
from sessions import train
from small_runs import make_runtime

from benchmarks.cli import main
from cluster.launcher import launch
from cluster.ray_cluster import Capacity, Resources
from cluster.trial import StoragePaths
from procap import compiled
from procap.errors import UserError
from procap.recipe import epoch_rate
from procap.weights import loading
from procap.weights.files import read_weights
from runner import acceleration, checkpoint, run_folders
from runner.backbones import Backbones
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target
from runner.planning import plan_run
from runner.results import EvalResult, TrainResult, write_json
from runner.run_state import RunSpec, final_score
from runner.train import UNTIMED_PHASES
from shards import builtin_sources, catalogue, pack

BASE, NOVEL = Target("digits", "base"), Target("digits", "novel")


@pytest.fixture(scope="module")
def runtime(few_digits, tmp_path_factory) -> RuntimeConfig:
    results = tmp_path_factory.mktemp("results")
    return make_runtime(few_digits, results)


@pytest.fixture(scope="module")
def plan(short_checkpoint):
    """Plans a run of a few steps; words change it."""

    def make(method: str = "coop", *, overrides: dict | None = None, **more) -> RunConfig:
        quick = {"epochs": 2, "batch_size": 5, **(overrides or {})}
        fields = {"dataset": "digits", "shots": 2, "backbone": str(short_checkpoint), "overrides": quick, **more}
        options = {"depth": 3} if method in ("maple", "rebapl", "procap") else {}
        return plan_run(method=method, options=options, **fields)

    return make


@pytest.fixture(scope="module")
def finished(plan, runtime) -> tuple[RunConfig, TrainResult]:
    config = plan(overrides={"lr": 0.1, "warmup": "none"})
    return config, train(config, runtime)


def seconds_of_training(result: TrainResult) -> float:
    return sum(seconds for name, seconds in result.phases.items() if name not in UNTIMED_PHASES)


def test_train_json_describes_the_training(finished, runtime):
    config, result = finished
    assert (result.steps, result.images) == (4, 20)
    assert [log.lr for log in result.epochs] == [epoch_rate(config.recipe, epoch) for epoch in range(2)]
    assert all(log.terms["ce"] > 0 and log.images_per_second for log in result.epochs)
    assert len(result.fewshot.samples) == 10 and result.trainable_parameters == 4 * 64
    phases = {"load", "compile", "data", "forward", "backward", "optimizer", "state", "tracking", "other"}
    assert phases == result.phases.keys()
    assert seconds_of_training(result) == pytest.approx(result.seconds) and result.images_per_second
    assert result.images_per_second_model and result.images_per_second_model > result.images_per_second
    folder = run_folders.RunFolder(runtime.results / config.path)
    left = {path.name for path in folder.path.iterdir()} - {"eval"}
    assert left == {".lock", "config.json", "train.json", "checkpoint.safetensors"}
    assert folder.read_config() == config


def test_deterministic_algorithms_are_set_and_recorded(finished, runtime, tmp_path, monkeypatch):
    config, plain = finished
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        result = train(config, dataclasses.replace(runtime, results=tmp_path, deterministic=True))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.checkpoint_sha256 == plain.checkpoint_sha256
    assert [each.environment["deterministic"] for each in (plain, result)] == [False, True]
    assert not any(result.environment["accelerations"].values())


def test_a_run_of_other_weights_is_neither_reused_nor_evaluated(runtime, tmp_path):
    """Weights with a name, such as those of a package, can have other content on another machine."""
    there = dataclasses.replace(runtime, results=tmp_path)
    config = plan_run(method="coop", dataset="digits", shots=2, overrides={"epochs": 1, "batch_size": 5})
    result = train(config, there)
    assert result.written.endswith("Z") and result.program.startswith("0.1.0")
    folder, other = run_folders.RunFolder(tmp_path / config.path), "0" * 16
    tensors, card = checkpoint.read_checkpoint(folder.checkpoint_file, result.checkpoint_sha256)
    method = torch.nn.ParameterDict(tensors)
    sha256 = checkpoint.save_checkpoint(
        folder.checkpoint_file, method, card.model_copy(update={"backbone_digest": other})
    )
    changes = {"backbone_digest": other, "checkpoint_sha256": sha256}
    write_json(folder.train_file, result.model_copy(update=changes))
    why = f"was trained on weights {other} of mini, and here they are {result.backbone_digest}"
    for again in (train, lambda *run: sessions.evaluate(run[0], BASE, run[1])):
        with pytest.raises(UserError, match=why):
            again(config, there)


def test_runs_of_a_built_in_method_are_refused_under_other_code(plan, runtime, tmp_path):
    there = dataclasses.replace(runtime, results=tmp_path)
    config = plan("coop")
    result = train(config, there)
    folder = run_folders.RunFolder(tmp_path / config.path)
    other = result.method_source.model_copy(update={"digest": "0" * 16})
    write_json(folder.train_file, result.model_copy(update={"method_source": other}))
    why = r"was trained by procap-bench \(source 0{16}\), and the code that is installed now is procap-bench \(source"
    for again in (train, lambda *run: sessions.evaluate(run[0], BASE, run[1]), sessions.load_trained):
        with pytest.raises(UserError, match=why):
            again(config, there)
    assert sessions.state_of(RunSpec(config=config), there).status == "other code"


def test_a_run_with_the_hash_of_another_one_is_not_taken_for_it(runtime, tmp_path):
    there = dataclasses.replace(runtime, results=tmp_path)
    rates = {"epochs": 2, "lr": 0.0016678}, {"epochs": 2, "lr": 0.0321604}
    one, other = (plan_run(method="coop", dataset="digits", shots=1, overrides=changes) for changes in rates)
    assert one.path == other.path and one.identity() != other.identity()
    assert isinstance(train(one, there), TrainResult)
    sessions.evaluate(one, BASE, there)
    for again in (train, lambda *run: train(*run, force=True), lambda *run: sessions.evaluate(run[0], BASE, run[1])):
        with pytest.raises(UserError, match="has another run, whose hash happens to be the same"):
            again(other, there)
    with pytest.raises(UserError, match="whose hash happens to be the same"):
        sessions.state_of(RunSpec(config=other), there)
    run_folders.RunFolder(tmp_path / one.path).config_file.write_text("{")
    assert isinstance(train(one, there, force=True), TrainResult), "a broken file is no other run"


def test_runs_of_a_plug_in_are_of_its_code_and_refused_under_any_other(plan, runtime, tmp_path, monkeypatch):
    """Other code is neither resumed nor evaluated nor shown as finished, and tables name it."""
    from benchmarks.results.frame import load
    from benchmarks.tables.notes import note_code

    install(tmp_path, {"changed_method": METHOD}, {"theirs": "changed_method:Theirs"})
    monkeypatch.syspath_prepend(tmp_path)
    there = dataclasses.replace(runtime, results=tmp_path / "results")
    config, half_done = plan("theirs"), plan("theirs", seed=2)
    result = train(config, there)
    assert result.method_source and (result.method_source.package, result.method_source.version) == ("theirs", "1.0")
    sessions.evaluate(config, BASE, there)
    with pytest.raises(ValueError, match="until = 0"):
        train(half_done, there, until=0)
    train(half_done, there, until=1)
    assert train(config, there) == result and note_code(load(there.results)) == []

    changed = {"changed_method": f"{METHOD}    other = 1"}
    install(tmp_path, changed, {"theirs": "changed_method:Theirs"}, version="2")
    why = r"was trained by theirs 1.0 \(source .{16}\), and the code that is installed now is theirs 2 .*--force"
    for again in (train, lambda *one: sessions.evaluate(one[0], BASE, one[1]), sessions.load_trained):
        with pytest.raises(UserError, match=why):
            again(config, there)
    with pytest.raises(
        UserError, match=r"its source of theirs is theirs 1.0 .*, here it is theirs 2 .*; start over with --force"
    ):
        train(half_done, there)
    [note] = note_code(load(there.results))
    assert "OTHER CODE of theirs: 1 run by theirs 1.0" in note
    assert "installed: theirs 2" in note
    train(plan("theirs", seed=3), there)
    sessions.evaluate(plan("theirs", seed=3), BASE, there)
    [note] = note_code(load(there.results))
    assert note.count(" by ") == 1
    renewed = train(config, there, force=True)
    assert renewed.checkpoint_sha256 == result.checkpoint_sha256 and renewed.method_source != result.method_source

    install(tmp_path, {"broken_method": "raise OSError('unfinished')"}, {"theirs": "broken_method:Theirs"})
    why = r"and now method 'theirs' is a plug-in that cannot .*: OSError: unfinished .*, line 1, <module>"
    with pytest.raises(UserError, match=rf"was trained by theirs 2 .*, {why}: restore that code"):
        sessions.load_trained(config, there)
    assert re.search(why.removeprefix("and now "), note_code(load(there.results))[0])

    failing = {"failing_method": f"{METHOD}    def loss(self, *given):\n        return 1 / 0"}
    install(tmp_path, failing, {"failing": "failing_method:Theirs"})
    with pytest.raises(ZeroDivisionError):
        train(plan("failing"), there)
    progress = run_folders.RunFolder(there.results / plan("failing").path).read_progress()
    with pytest.raises(UserError, match=r"was trained by theirs 2 .*, which is not installed here"):
        sessions.load_trained(config, there)
    assert progress.status == "failed" and progress.reason.endswith("line 7, loss: ZeroDivisionError: division by zero")


def test_one_warning_names_trainings_whose_epochs_are_all_warm_up(few_digits, tmp_path, capsys):
    words = ["--methods", "maple,procap", "--datasets", "digits", "--seeds", "1,2", "--epochs", "1", "--shots", "2"]
    words = ["train", *words, "--data", str(few_digits), "--results", str(tmp_path)]
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "4 runs, such as" in err and "may hardly learn: 1 of 1 epochs warm up" in err
    for folder in run_folders.find_runs(tmp_path):
        result = folder.read_training()
        if "procap" in folder.path.parts:
            assert {"sigma of vision", "sigma of text", "tokens of text", "tau_p"} <= {*result.statistics}
            norms = result.epochs[0].gradient_norms
            assert [*norms] == ["ce", "nce", "kl", "l2"]
            assert norms["kl"] < norms["nce"] < norms["ce"]
        else:
            assert not result.statistics and not result.epochs[0].gradient_norms


def test_compiled_trainings_measure_and_combine_the_gradients_of_single_terms(plan, runtime, monkeypatch):
    """With the tracing of torch.compile but torch's own kernels; both methods run the same compiled parts."""
    monkeypatch.setattr(compiled, "compile_blocks", partial(compiled.compile_blocks, backend="aot_eager"))
    for method in ("procap", "prograd"):
        epochs = [
            train(plan(method), dataclasses.replace(runtime, accelerate=accelerate), force=True).epochs[-1]
            for accelerate in ("off", "compile")
        ]
        plain, fast = ({**epoch.terms, **epoch.gradient_norms} for epoch in epochs)
        assert fast == pytest.approx(plain, rel=1e-4)


def test_the_runs_of_a_command_load_their_backbone_once_and_learn_what_they_learn_alone(
    few_digits, tmp_path, monkeypatch
):
    loads, together, listener = [], tmp_path / "together", MagicMock()
    monkeypatch.setattr(loading, "read_weights", lambda file: loads.append(file) or read_weights(file))
    words = ["--methods", "coop,2sfs", "--datasets", "digits", "--seeds", "1,2", "--epochs", "1", "--shots", "2"]
    for command in ("train", "eval"):
        assert main([command, *words, "--data", str(few_digits), "--results", str(together)]) == 0
        assert len(loads) == 1
        loads.clear()
    again = make_runtime(few_digits, tmp_path / "again")
    configs = [folder.read_config() for folder in run_folders.find_runs(together)]
    runs = [RunSpec(config=config, targets=("digits:base",)) for config in configs]
    paths = StoragePaths(str(again.data), str(again.results), again)
    launch(runs, paths, Capacity(Resources(), 1, ray=False), listener)
    assert len(runs) == 4 and len(loads) == 1
    assert [call.args[2].state for call in listener.ended.mock_calls] == ["finished"] * 4
    for run in runs:
        kept, alone = run_folders.RunFolder(together / run.path).read_training(), tmp_path / "alone"
        assert train(run.config, dataclasses.replace(again, results=alone)).checkpoint_sha256 == kept.checkpoint_sha256
        counts = sessions.evaluate(run.config, BASE, dataclasses.replace(again, results=alone))
        assert counts.predicted == sessions.evaluate(run.config, BASE, again).predicted


def test_force_trains_again_to_the_same_bits_and_forgets_evaluations(plan, runtime):
    config = plan(seed=5)
    folder = run_folders.RunFolder(runtime.results / config.path)
    first = train(config, runtime)
    sessions.evaluate(config, BASE, runtime)
    written = folder.train_file.stat().st_mtime_ns
    with pytest.raises(UserError):
        train(config, dataclasses.replace(runtime, data=runtime.results / "nothing"), force=True)
    assert train(config, runtime) == first, "a set-up that fails deletes nothing"
    again = train(config, runtime, force=True)
    assert folder.train_file.stat().st_mtime_ns != written and folder.read_training() == again
    assert again.checkpoint_sha256 == first.checkpoint_sha256 and not folder.result_files()


def test_global_randomness_is_neither_read_nor_moved(finished, runtime, tmp_path):
    config, result = finished
    torch.manual_seed(123)
    before = torch.get_rng_state()
    there = dataclasses.replace(runtime, results=tmp_path)
    assert train(config, there).checkpoint_sha256 == result.checkpoint_sha256
    sessions.evaluate(config, NOVEL, there)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_is_read_and_not_repeated_and_a_limit_is_marked(finished, runtime, tmp_path):
    config, _ = finished
    target = Target("digits", "all")
    runtime = dataclasses.replace(runtime, results=tmp_path)
    train(config, runtime)
    part = sessions.evaluate(config, target, dataclasses.replace(runtime, limit=7))
    assert (part.total, part.limit, part.limited) == (7, 7, True)
    # A limit that leaves no image out is none.
    full = sessions.evaluate(config, target, dataclasses.replace(runtime, limit=10_000))
    assert sessions.evaluate(config, target, runtime) == full
    assert full.total == full.dataset_size > 7 and full.per_class.total[0] > 0 and not full.limited
    assert full.images_per_second_model > full.images_per_second > 0
    assert (full.batch_size, full.workers) == (config.recipe.test_batch_size, 0)
    file = run_folders.RunFolder(tmp_path / config.path).result_file(target)
    written = file.stat().st_mtime_ns
    assert sessions.evaluate(config, target, dataclasses.replace(runtime, limit=7)) == full
    assert file.stat().st_mtime_ns == written
    sessions.evaluate(config, target, runtime, force=True)
    assert file.stat().st_mtime_ns != written


@pytest.mark.parametrize("method", ["maple", "cocoop", "procap"])
def test_every_method_runs_in_bfloat16_and_keeps_float32_prompts(plan, runtime, method):
    config = plan(method, shots=1, precision="bf16")
    result = train(config, runtime)
    assert all(log.terms["ce"] > 0 for log in result.epochs)
    trained = sessions.load_trained(config, runtime)
    assert {parameter.dtype for parameter in trained.method.parameters()} == {torch.float32}
    counts: EvalResult = sessions.evaluate(config, NOVEL, runtime, trained=trained)
    assert counts.precision == "bf16"
    full = dataclasses.replace(runtime, evaluation=EvalSettings(precision="fp32"))
    exact = sessions.evaluate(config, NOVEL, full, trained=trained)
    assert counts.per_class.total == exact.per_class.total
    # Rounding can turn a tie.
    assert counts.correct == pytest.approx(exact.correct, abs=2)


def test_a_cycle_of_rebapl_starts_at_its_sample_in_bfloat16_too(plan, runtime):
    """Features in another precision would repel its first step by their rounding, stronger than the images by far."""
    first_step = train(plan("rebapl", shots=1, precision="bf16"), runtime).epochs[1]
    assert first_step.terms["repulsion"] == pytest.approx(0.001 / 1e-6, rel=1e-3)


def test_a_training_at_half_precision_resumes_with_its_loss_scale_to_the_same_bits(plan, runtime, tmp_path):
    """Gradients of so large a term overflow at the initial scale, so that steps are skipped and counted."""
    config = plan("procap", precision="fp16")
    config = config.model_copy(update={"options": {**config.options, "nce_weight": 1e3}})
    straight, paused = (dataclasses.replace(runtime, results=tmp_path / name) for name in ("straight", "paused"))
    whole = train(config, straight)
    assert whole.epochs[0].skipped == 2
    train(config, paused, until=1)
    [file] = (paused.results / config.path / "state").glob("step-*")
    assert torch.load(file, weights_only=True)["scaler"]["scale"] < 2.0**16
    resumed = train(config, paused)
    assert resumed.checkpoint_sha256 == whole.checkpoint_sha256
    assert [(log.terms, log.skipped) for log in resumed.epochs] == [(log.terms, log.skipped) for log in whole.epochs]


def test_a_step_that_half_precision_skips_does_not_count_towards_a_number_of_iterations(plan, runtime):
    overrides = {"iterations": 3, "epochs": 1, "warmup": "none"}
    config = plan("procap", precision="fp16", overrides=overrides)
    config = config.model_copy(update={"options": {**config.options, "nce_weight": 1e3}})
    result = train(config, runtime)
    assert result.steps == 3 and [log.skipped for log in result.epochs] == [0]


def test_a_loss_that_is_not_finite_stops_with_its_step_and_keeps_the_last_state(plan, runtime):
    config = plan("maple", overrides={"lr": 1e30, "warmup": "none", "epochs": 3})
    eager = dataclasses.replace(runtime, state_seconds=0.0)
    with pytest.raises(UserError, match=r"step 2 of 6 .* not finite") as caught:
        train(config, eager)
    assert "\n" not in str(caught.value)
    folder = run_folders.RunFolder(runtime.results / config.path)
    progress = folder.read_progress()
    assert progress.status == "failed" and progress.reason == str(caught.value)
    assert folder.read_training() is None and not folder.checkpoint_file.exists()
    assert [path.name[:13] for path in folder.state_folder.glob("*.pt")] == ["step-00000001"]


def test_an_altered_checkpoint_is_refused(plan, runtime, tmp_path):
    config, runtime = plan(seed=6), dataclasses.replace(runtime, results=tmp_path)
    train(config, runtime)
    file = run_folders.RunFolder(tmp_path / config.path).checkpoint_file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for use in (lambda: sessions.evaluate(config, BASE, runtime), lambda: train(config, runtime)):
        with pytest.raises(UserError, match=r"SHA-256.*train again with --force"):
            use()
    file.unlink()
    with pytest.raises(UserError, match="train again with --force"):
        train(config, runtime)


def pack_digits(data: Path, seen: int, name: str = "digits") -> None:
    """The first digit scans: `seen` to train on, 40 for val, 60 for test."""
    source, counts = builtin_sources.builtin_source(catalogue.find("digits")), {"train": seen, "val": 40, "test": 60}
    part = dataclasses.replace(source, name=name, counts=counts)
    pack.pack_source(part, data, force=True)


def test_other_content_under_the_same_data_set_name_is_refused(finished, runtime, tmp_path):
    config, result = finished
    counts = sessions.evaluate(config, BASE, runtime)
    elsewhere = dataclasses.replace(runtime, data=tmp_path)
    assert (train(config, elsewhere), sessions.evaluate(config, BASE, elsewhere)) == (result, counts)
    pack_digits(tmp_path, 60)
    score = partial(final_score, sessions.make_run(config, elsewhere), ())
    for again in (lambda: train(config, elsewhere), lambda: sessions.evaluate(config, BASE, elsewhere), score):
        with pytest.raises(UserError, match=r"other content of digits .* repeat with --force"):
            again()
    assert train(config, runtime) == result


def test_other_content_of_another_target_is_counted_again_only_with_force(finished, runtime, few_digits, tmp_path):
    config, _ = finished
    (tmp_path / "digits").symlink_to(few_digits / "digits")
    there, target = dataclasses.replace(runtime, data=tmp_path), Target("scans")
    pack_digits(tmp_path, 60, "scans")
    first = sessions.evaluate(config, target, there)
    assert sessions.evaluate(config, target, there) == first
    pack_digits(tmp_path, 70, "scans")
    with pytest.raises(UserError, match=r"other content of scans .* repeat with --force"):
        sessions.evaluate(config, target, there)
    again = sessions.evaluate(config, target, there, force=True)
    assert again.manifest_digest != first.manifest_digest
    assert sessions.evaluate(config, target, there) == again


def test_missing_data_is_reported_in_one_line_and_leaves_no_run_behind(plan, runtime, tmp_path):
    with pytest.raises(UserError, match="procap data pack digits"):
        train(plan(), make_runtime(tmp_path / "none", tmp_path))
    assert not list(Path(tmp_path).rglob("*.json"))


@pytest.mark.gpu
def test_fp32_on_a_gpu_convolves_in_float32(plan):
    Backbones().load(plan(), torch.device("cuda"), acceleration.Acceleration())
    draw = torch.Generator().manual_seed(0)
    images, kernels = (torch.randn(4, 3, side, side, generator=draw) for side in (32, 16))
    exact = torch.nn.functional.conv2d(images.double(), kernels.double(), stride=16)
    ours = torch.nn.functional.conv2d(images.cuda(), kernels.cuda(), stride=16).cpu()
    # Sums of 768 products: TF32 is off by about a hundredth.
    assert (ours - exact).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_the_same_run_is_metered_by_the_device(plan, runtime, tmp_path, precision):
    config = plan("procap", precision=precision)
    there = dataclasses.replace(runtime, results=tmp_path, device="cuda", state_seconds=0.0)
    result = train(config, there)
    assert result.peak_memory_bytes
    assert all(result.phases[name] > 0 for name in ("load", "forward", "backward", "optimizer", "state"))
    assert seconds_of_training(result) == pytest.approx(result.seconds, rel=0.1)
    counts = sessions.evaluate(config, BASE, there)
    assert counts.total == counts.dataset_size and counts.images_per_second_model
