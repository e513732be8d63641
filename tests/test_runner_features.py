"""Image features of a test split are computed once for all methods that read them, and change no answer."""

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_runs import make_runtime

from procap.classifier import Classifier
from procap.clip import CLIP
from procap.plan import Plan
from runner.config import RunConfig, RuntimeConfig, Target, plan_run
from runner.evaluate import evaluate
from runner.features import FeatureStore, reads_plain_features
from runner.inference import Predictions
from runner.run_folders import RunFolder
from runner.train import train
from shards.reader import Split

ALL, BASE, NOVEL = (Target("digits", half) for half in ("all", "base", "novel"))
TEXT_ONLY = ("zeroshot", "coop", "cocoop")
PROMPTED = ("maple", "procap")
KEY = {
    "dataset": "digits", "classes": "all", "split": "test", "manifest": "m" * 16, "backbone": "b" * 16,
    "transform": "resize", "precision": "fp32", "device": "cpu", "torch_version": "2.11", "pillow_version": "12",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(short_checkpoint):
    def make(method: str, **more) -> RunConfig:
        quick = {"epochs": 1, "batch_size": 5, "lr": 0.1, "warmup": "none", "test_batch_size": 8}
        fields = {"dataset": "digits", "shots": 1, "backbone": str(short_checkpoint), "overrides": quick, **more}
        return plan_run(method=method, options={"depth": 3} if method in PROMPTED else {}, **fields)

    return make


@pytest.fixture(scope="module")
def without(few_digits, plan, tmp_path_factory) -> RuntimeConfig:
    """Every method, trained; evaluations there use no features of each other."""
    runtime = make_runtime(few_digits, tmp_path_factory.mktemp("results"))
    for method in (*TEXT_ONLY, *PROMPTED):
        train(plan(method), runtime)
    return runtime


@pytest.fixture
def runtime(without, tmp_path) -> RuntimeConfig:
    return dataclasses.replace(without, features=tmp_path / "features")


@pytest.fixture
def answer(monkeypatch):
    """Evaluates, whatever was counted before; gives the result and the logits in the order of the target."""

    def evaluated(config, target, runtime, **how):
        RunFolder(runtime.results / config.path).eval_file(target).unlink(missing_ok=True)
        seen: list[tuple[np.ndarray, torch.Tensor]] = []
        add = Predictions.add
        with monkeypatch.context() as patch:
            patch.setattr(
                Predictions, "add", lambda self, logits, at: (seen.append((at, logits)), add(self, logits, at))[1]
            )
            result = evaluate(config, target, runtime, **how)
        places = np.concatenate([at for at, _ in seen])
        logits = torch.cat([batch for _, batch in seen])[torch.from_numpy(places >= 0)]
        return result, logits[torch.from_numpy(np.argsort(places[places >= 0]))]

    return evaluated


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    found: list[int] = []
    image = Split.image
    monkeypatch.setattr(Split, "image", lambda split, i: (found.append(int(split.positions[i])), image(split, i))[1])
    return found


def files(runtime):
    assert runtime.features
    return sorted(runtime.features.glob("*.safetensors"))


@pytest.mark.parametrize(("method", "precision"), [*((method, "fp32") for method in TEXT_ONLY), ("coop", "bf16")])
def test_not_a_bit_of_any_logit_changes(plan, without, runtime, answer, decoded, method, precision):
    config = plan(method, precision=precision)
    train(config, without)
    plain, wanted = answer(config, NOVEL, without)
    assert plain.features == "computed"
    first, computed = answer(config, NOVEL, runtime)
    assert first.features == "computed" and first.images_per_second and first.images_per_second_model
    decoded.clear()
    again, cached = answer(config, NOVEL, runtime)
    assert again.features == "cached" and not decoded
    assert torch.equal(computed, wanted) and torch.equal(cached, wanted)
    assert plain.per_class == first.per_class == again.per_class


def test_one_computation_serves_all_methods_that_prompt_the_text_alone(plan, without, runtime, answer, monkeypatch):
    wanted = {method: answer(plan(method), ALL, without) for method in TEXT_ONLY}
    answer(plan("zeroshot"), ALL, runtime)
    monkeypatch.setattr(CLIP, "encode_image", None)
    monkeypatch.setattr(Split, "image", None)
    for method in TEXT_ONLY:
        result, logits = answer(plan(method), ALL, runtime)
        assert result.features == "cached"
        assert result.per_class == wanted[method][0].per_class and torch.equal(logits, wanted[method][1])
    assert len(files(runtime)) == 1


@pytest.mark.parametrize("method", PROMPTED)
def test_methods_with_prompts_in_the_image_tower_use_no_stored_features(plan, runtime, answer, decoded, method):
    answer(plan("zeroshot"), ALL, runtime)
    [file] = files(runtime)
    before = file.read_bytes()
    decoded.clear()
    result, _ = answer(plan(method), ALL, runtime)
    assert result.features == "computed" and result.images_per_second and "features" not in result.phases
    assert len(decoded) == result.total and file.read_bytes() == before


def test_the_classifier_decides_and_a_plug_in_that_looks_at_images_itself_is_left_alone(tiny_clip, tiny_geometry):
    class Looks(Classifier):
        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return super().__call__(images.flip(-1))

    class Adapts(Classifier):
        def logits(self, features: torch.Tensor) -> torch.Tensor:
            return super().logits(2 * features)

    class_features, scale = torch.eye(5, tiny_geometry.embed_dim), torch.tensor(100.0)
    plain, looks, adapts = (kind(tiny_clip, Plan(), class_features, scale) for kind in (Classifier, Looks, Adapts))
    assert reads_plain_features(plain, tiny_clip) and reads_plain_features(adapts, tiny_clip)
    assert not reads_plain_features(looks, tiny_clip)
    assert not reads_plain_features(plain, CLIP.random(tiny_geometry, seed=0))
    assert not reads_plain_features(lambda images: images, tiny_clip)
    plain.encode = lambda images: tiny_clip.encode_image(images.flip(-1))
    assert not reads_plain_features(plain, tiny_clip)


def test_a_limit_reads_stored_features_and_other_classes_have_their_own(plan, without, runtime, answer, decoded):
    config, few = plan("coop"), dataclasses.replace(runtime, limit=20)
    assert answer(config, ALL, few)[0].features == "computed"
    result, _ = answer(config, ALL, runtime)
    assert result.features == "computed" and result.images_per_second
    decoded.clear()
    limited, logits = answer(config, ALL, few)
    assert limited.features == "cached" and limited.images_per_second is limited.images_per_second_model is None
    assert torch.equal(logits, answer(config, ALL, dataclasses.replace(without, limit=20))[1]) and len(decoded) == 20
    assert answer(config, BASE, runtime)[0].features == "computed" and len(files(runtime)) == 2


def test_force_computes_again_and_replaces_stored_features(plan, without, runtime, answer, decoded, tiny_geometry):
    config, wide = plan("zeroshot"), tiny_geometry.embed_dim
    answer(config, BASE, runtime)
    [file] = files(runtime)
    sound = file.read_bytes()
    plain, wanted = answer(config, BASE, without)
    FeatureStore(file.parent, read_key(file)).save(torch.ones(plain.total, wide))
    misled, wrong = answer(config, BASE, runtime)
    assert misled.features == "cached" and not torch.equal(wrong, wanted)
    decoded.clear()
    forced, right = answer(config, BASE, runtime, force=True)
    assert forced.features == "computed" and forced.images_per_second and len(decoded) == forced.total
    assert torch.equal(right, wanted) and file.read_bytes() == sound


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_kept_features_give_the_same_answers(plan, without, runtime, answer, precision):
    config = plan("coop", precision=precision)
    train(config, without)
    answer(config, ALL, runtime)
    there = dataclasses.replace(runtime, device="cuda")
    first, computed = answer(config, ALL, there)
    again, cached = answer(config, ALL, there)
    assert (first.features, again.features) == ("computed", "cached") and len(files(runtime)) == 2
    assert torch.allclose(computed, cached, rtol=0, atol=1e-4) and first.per_class == again.per_class


@pytest.mark.parametrize("field", KEY)
def test_everything_that_changes_features_has_a_file_of_its_own(field, tmp_path):
    own = FeatureStore(tmp_path, KEY).path
    assert FeatureStore(tmp_path, {**KEY, field: "other"}).path != own == FeatureStore(tmp_path, dict(KEY)).path


def read_key(file):
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["procap"])["key"]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit of a feature": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "cut short": lambda data: data[: len(data) // 2],
    "nothing": lambda data: b"",
    "another file": lambda data: b"not a tensor in sight" * 99,
    "no description": lambda data: data.replace(b'"procap"', b'"capper"'),
    "of other weights": lambda data: data.replace(b"backbone", b"backbame"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_replaced_with_a_warning(tmp_path, damage):
    store, features = FeatureStore(tmp_path, KEY), torch.arange(12.0).view(3, 4)
    store.save(features)
    sound = store.path.read_bytes()
    store.path.write_bytes(damage(sound))
    assert store.path.read_bytes() != sound
    with pytest.warns(UserWarning, match=r"cannot be used .*computed again") as notes:
        assert store.load(2) is None
    [said] = own(notes)
    assert "\n" not in said
    store.save(features)
    assert store.path.read_bytes() == sound and torch.equal(store.load(2), features[:2]) and store.load(4) is None


def test_features_that_are_not_finite_are_never_kept(tmp_path):
    FeatureStore(tmp_path, KEY).save(torch.tensor([[1.0, 2.0], [0.0, float("inf")]]))
    assert FeatureStore(tmp_path, KEY).load(1) is None


def test_a_read_only_folder_is_a_warning(plan, runtime, answer):
    assert runtime.features
    runtime.features.write_text("a file in its runtime")
    with pytest.warns(UserWarning, match="cannot be stored") as notes:
        result, _ = answer(plan("zeroshot"), BASE, runtime)
    assert len(own(notes)) == 1 and result.features == "computed"


def own(notes):
    """What the project warns of; what is thrown away just then may have a warning as well."""
    return [str(note.message) for note in notes if note.category is UserWarning]
