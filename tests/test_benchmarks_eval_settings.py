"""Evaluation under other settings than the default, and on cached image features."""

from dataclasses import replace

import numpy as np
import pytest
import sessions
import torch
from made_results import put_config, put_score
from PIL import Image
from small_runs import make_runtime

from benchmarks.cli import main
from benchmarks.cli.flags import SuiteFlags
from benchmarks.cli.run_suites import plan_suites
from benchmarks.experiment.suite import SuiteOptions
from benchmarks.results import load
from benchmarks.results.suite_results import SuiteResults
from procap.errors import UsageError
from runner import progress_bar, results, run_folders, setup
from runner.config import EvalSettings, RunConfig, RuntimeConfig, Target
from runner.planning import plan_run
from shards import image_selection, reader, rng, transforms

TARGET = Target("digits", "novel")
SAMPLED = EvalSettings(samples=3)


def plan(checkpoint: str, **options: object) -> RunConfig:
    """ProCAP with tokens that vary widely, so that its samples differ."""
    options = {"depth": 3, "logvar_init": -2.0, **options}
    quick = {"epochs": 1, "batch_size": 5}
    return plan_run(method="procap", dataset="digits", shots=1, backbone=checkpoint, options=options, overrides=quick)


@pytest.fixture(scope="module")
def runtime(few_digits, short_checkpoint, tmp_path_factory) -> RuntimeConfig:
    """Where a run is finished, and counted under the default settings and with samples."""
    default = make_runtime(few_digits, tmp_path_factory.mktemp("results"))
    sessions.train(plan(str(short_checkpoint)), default)
    for settings in (EvalSettings(), SAMPLED):
        sessions.evaluate(plan(str(short_checkpoint)), TARGET, replace(default, evaluation=settings))
    return default


@pytest.fixture
def config(short_checkpoint) -> RunConfig:
    return plan(str(short_checkpoint))


def test_other_settings_have_their_own_files_and_rows(config, runtime, monkeypatch, capsys):
    monkeypatch.setattr(progress_bar.ProgressDisplay, "PLAIN_SECONDS", 0.0)
    settings = EvalSettings(precision="bf16", resize="squash", samples=1)
    folder, default = run_folders.RunFolder(runtime.results / config.path), runtime
    before = folder.result_file(TARGET).read_bytes()
    result = sessions.evaluate(config, TARGET, replace(default, evaluation=settings, quiet=False))
    # The name of the progress has the shots and the seed.
    assert capsys.readouterr().err.startswith(f"{config.path} on {TARGET}:\n  ")
    file = folder.path / "eval" / "digits-novel-test.bf16-squash-1-sample.json"
    assert results.EvalResult.model_validate_json(file.read_bytes()) == result
    assert (result.precision, result.settings) == ("bf16", settings)
    assert folder.result_file(TARGET).read_bytes() == before and list(load(default.results).evaluation) == [""]
    assert sorted(load(default.results, evaluation=None).evaluation) == ["", "3 samples", "bf16, squash, 1 sample"]
    [row] = load(default.results, evaluation="bf16, squash, 1 sample").itertuples()
    assert row.correct == result.correct


def test_the_precision_of_the_training_is_the_default(config, runtime):
    assert EvalSettings(precision="fp32").for_run(config) == EvalSettings()
    settings = EvalSettings(precision="fp32").for_run(config.model_copy(update={"precision": "fp16"}))
    assert settings.name == "fp32"
    written = run_folders.RunFolder(runtime.results / config.path).result_file(TARGET).stat().st_mtime_ns
    sessions.evaluate(config, TARGET, replace(runtime, evaluation=EvalSettings(precision="fp32")))
    assert run_folders.RunFolder(runtime.results / config.path).result_file(TARGET).stat().st_mtime_ns == written


def test_squashing_resizes_the_whole_image_and_cropping_its_centre():
    """Stripes of equal width, black, grey, white, six by two pixels."""
    pixels = np.repeat(np.array([[0, 0, 128, 128, 255, 255]], np.uint8), 2, axis=0)
    image = Image.fromarray(pixels).convert("RGB")
    crop, squash = (transforms.EvalTransform(2, (0.0,) * 3, (1.0,) * 3, squash) for squash in (False, True))
    assert np.asarray(crop.crop(image))[:, :, 0].tolist() == [[128, 128]] * 2
    left, right = np.asarray(squash.crop(image))[0, :, 0].tolist()
    assert left < 64 and right > 191 and squash(image).shape == (3, 2, 2)


def probabilities(config: RunConfig, runtime: RuntimeConfig, samples: int) -> torch.Tensor:
    """Average probabilities [N, C] of an image at a time, with the noise of the seed's stream."""
    trained, dataset = sessions.load_trained(config, runtime), reader.open_dataset(runtime.data, "digits")
    selection = image_selection.select_target_images(dataset, TARGET.classes)
    transform = transforms.EvalTransform(32, trained.clip.preparation.mean, trained.clip.preparation.std)
    prompts = trained.method.prompts_of(setup.label_space(dataset.manifest, selection.classnames))
    found = []
    for number in range(samples):
        noise = trained.method.draw(rng.generator(config.seed, "samples", number))
        with torch.no_grad():
            image_plan, text_plan = trained.method.plans(prompts, noise)
            text = trained.clip.encode_text(prompts.tokenized, text_plan)
            images = torch.stack([transform(selection.images.image(i)) for i in range(len(selection.images))])
            image = trained.clip.encode_image(images, image_plan)
            cosines = torch.cosine_similarity(image[:, None].double(), text[None].double(), dim=-1)
            found.append((trained.clip.logit_scale.double().exp() * cosines).softmax(dim=1))
    assert not torch.allclose(found[0], found[-1], rtol=0.01) or samples == 1
    return torch.stack(found).mean(dim=0)


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_give_the_mean_of_their_probabilities(config, runtime, samples):
    selection = image_selection.select_target_images(reader.open_dataset(runtime.data, "digits"), TARGET.classes)
    expected = probabilities(config, runtime, samples)
    result = sessions.evaluate(config, TARGET, replace(runtime, evaluation=EvalSettings(samples=samples)))
    right = (expected.argmax(dim=1) == torch.from_numpy(selection.images.labels)).tolist()
    assert result.correct_images().tolist() == right
    true_class = expected[torch.arange(len(expected)), torch.from_numpy(selection.images.labels)]
    assert result.calibration.nll == pytest.approx(-true_class.log().mean().item(), rel=1e-5)
    trained = sessions.load_trained(config, runtime)
    noises = [trained.method.draw(rng.generator(config.seed, "samples", number)) for number in range(samples)]
    space = setup.label_space(reader.open_dataset(runtime.data, "digits").manifest, selection.classnames)
    classify = trained.method.sampled_classifier(noises, space)
    transform = transforms.EvalTransform(32, trained.clip.preparation.mean, trained.clip.preparation.std)
    logits = classify(torch.stack([transform(selection.images.image(i)) for i in range(4)]))
    torch.testing.assert_close(logits.softmax(dim=1).double(), expected[:4], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("method", "options"), [("maple", {}), ("procap", {"gaussian": False})])
def test_samples_of_a_method_without_gaussians_are_refused(method, options):
    config = plan_run(method=method, dataset="digits", options=options)
    with pytest.raises(UsageError, match=rf"--samples 3: {method} has no Gaussian tokens"):
        SAMPLED.for_run(config)


@pytest.fixture
def procap(runtime, capsys):
    """Run a command on the results; gives its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words, "--results", str(runtime.results)])
        return (code, *capsys.readouterr())

    return run


def test_eval_shows_what_other_settings_change(procap, config, runtime):
    flags = "--targets", str(TARGET), "--data", str(runtime.data), "--device", "cpu", "--tracking", "off"
    folder = str(runtime.results / config.path)
    code, out, _ = procap("eval", folder, *flags, "--samples", "2", "--eval-resize", "squash")
    assert code == 0
    heads, sampled = (line for line in out.splitlines() if "run" in line or config.path in line)
    assert all(name in heads for name in ("settings", "accuracy", "NLL", "ECE", "images/s"))
    assert " squash, 2 samples " in sampled
    code, _, err = procap("eval", folder, *flags, "--eval-precision", "fp8")
    assert code == 2 and "precision = 'fp8'" in err and "fp16" in err
    code, _, err = procap("eval", folder, *flags, "--samples", "-1")
    assert code == 2 and "samples = -1" in err


def test_tables_name_the_settings_of_each_row(procap, config, runtime):
    code, out, _ = procap("table")
    assert code == 0 and "ProCAP, evaluation default" in out and "ProCAP, evaluation 3 samples" in out


def test_a_suite_has_a_run_without_training_for_the_shots_and_each_seed_of_a_temperature(tmp_path):
    def plan_zeroshot(name: str, shots: str):
        flags = SuiteFlags(methods="zeroshot", datasets="digits", seeds="1,2", shots=shots)
        [planned] = plan_suites([name], flags, RuntimeConfig(tmp_path, tmp_path, evaluation=settings))
        return planned.suite, planned.options, planned.suite.plan(planned.options)

    settings = EvalSettings()
    assert [run.path.split("/")[-2] for run in plan_zeroshot("base-to-novel", "4")[2]] == ["16shot"]
    settings = EvalSettings(temperature="shots")
    runs = plan_zeroshot("few-shot", "2,4")[2]
    assert [(run.seed, run.spec.config.shots) for run in runs] == [(1, 4), (2, 4)]
    suite, options, runs = plan_zeroshot("base-to-novel", "4")
    assert [(run.seed, run.spec.config.shots) for run in runs] == [(1, 4), (2, 4)]
    for run in runs:
        file = put_score(tmp_path, put_config(tmp_path, run.spec.config), "digits:base", 50 + run.seed, 100)
        result = results.EvalResult.model_validate_json(file.read_bytes())
        result = result.model_copy(update={"settings": settings, "temperature": 2.0})
        results.write_json(
            run_folders.RunFolder(tmp_path / run.path).result_file(Target("digits", "base"), settings), result
        )
    metric = SuiteResults.read(suite, options, tmp_path).halves(runs[0].variant, "digits")[0]
    assert dict(zip(metric.seeds, metric.values, strict=True)) == {1: 51, 2: 52}


def test_a_suite_reads_the_results_of_its_own_settings(tmp_path):
    flags = SuiteFlags(methods="procap", datasets="digits", seeds="1", quick=True)
    evaluation = EvalSettings(precision="bf16", samples=2)
    [planned] = plan_suites(["base-to-novel"], flags, RuntimeConfig(tmp_path, tmp_path, evaluation=evaluation))
    suite, options = planned.suite, planned.options
    assert options.eval_settings == evaluation
    assert SuiteOptions.from_json(options.to_json(), tmp_path) == options
    [run] = suite.plan(options)
    target = Target.parse_unchecked(run.spec.targets[0])
    put_score(tmp_path, put_config(tmp_path, run.spec.config), str(target), 5, 10)
    assert SuiteResults.read(suite, options, tmp_path).frame.empty
    folder = run_folders.RunFolder(tmp_path / run.path)
    default, settings = folder.read_evaluation(target), options.eval_settings
    results.write_json(
        folder.result_file(target, settings), default.model_copy(update={"settings": settings, "precision": "bf16"})
    )
    done = SuiteResults.read(suite, options, tmp_path)
    assert list(done.frame.evaluation) == ["bf16, 2 samples"]
    [table, *_] = suite.tables(done)
    assert any("Evaluation: bf16, 2 samples." in note for note in table.notes)
