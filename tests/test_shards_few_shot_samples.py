"""Few-shot samples as files, CoOp's own cache read safely, and training on imported samples."""

import io
import json
import os
import pickle
import shutil
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import run
from small_runs import make_runtime
from toy_shards import CLASSNAMES, toy_source

from runner.config import RunConfig, RuntimeConfig, plan_run
from runner.distributed.collectives import ProcessGroup
from runner.results import FewShotRecord
from runner.run_folders import RunFolder
from runner.setup import set_up
from runner.train import train
from shards.errors import DataError, DataUsageError
from shards.fewshot import (
    FewShotSamples,
    draw_samples,
    list_split,
    load_few_shot,
    load_samples,
    read_samples,
    store_samples,
    write_samples,
)
from shards.import_samples import CoopRecord, import_samples, read_coop_cache
from shards.manifest import lines_digest
from shards.pack import pack_source
from shards.reader import ShardSet, open_dataset

ELSEWHERE = "/home/someone/data/toy_set/images/"


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> ShardSet:
    root = tmp_path_factory.mktemp("toy")
    pack_source(toy_source(), root)
    return open_dataset(root, "toy")


@pytest.fixture
def datum(monkeypatch) -> Callable[..., object]:
    """Makes records that pickle as Dassl's do."""

    class Datum:
        def __init__(self, impath: str, label: int, domain: int = 0, classname: str = "") -> None:
            self._impath, self._label, self._domain, self._classname = impath, label, domain, classname

    Datum.__module__, Datum.__qualname__ = "dassl.data.datasets.base_dataset", "Datum"
    for name in ("dassl", "dassl.data", "dassl.data.datasets", "dassl.data.datasets.base_dataset"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["dassl.data.datasets.base_dataset"].Datum = Datum  # type: ignore[attr-defined]
    return Datum


def records_of(shards: ShardSet, samples: FewShotSamples, datum: Callable[..., object]) -> dict[str, list[object]]:
    """What CoOp keeps of `samples` on another machine."""
    content: dict[str, list[object]] = {}
    for split, paths in (("train", samples.train), ("val", samples.val)):
        every, numbers = list_split(shards, split)
        labels = dict(zip(every, numbers.tolist(), strict=True))
        content[split] = [datum(ELSEWHERE + p, labels[p], 0, shards.classnames[labels[p]]) for p in paths]
    return content


def samples_of(dataset: str, shots: int, seed: int, train: tuple[str, ...], val: tuple[str, ...]) -> FewShotSamples:
    return FewShotSamples(dataset=dataset, shots=shots, seed=seed, source="imported", train=train, val=val)


def dumped(content: object, protocol: int, pickler: type = pickle.Pickler) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol).dump(content)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [pickle.Pickler, pickle._Pickler])
def test_caches_of_every_protocol_are_read_as_python_would_read_them(tmp_path, datum, protocol, pickler):
    """More records than fit a frame or a batch, names that repeat, long paths, labels of one, two and four bytes."""
    names = ["left-handed teapot", "crane (floating)", "Zürich", "potter's wheel", ""]
    paths = [f"/data/{'x' * (i % 300)}/{i}.jpg" for i in range(2500)]
    train = [datum(path, (i, i * 300, i * 70_000)[i % 3], 0, names[i % 5]) for i, path in enumerate(paths)]
    file = tmp_path / "shot_16-seed_1.pkl"
    file.write_bytes(dumped({"train": train, "val": train[:7]}, protocol, pickler))
    found = read_coop_cache(file)
    assert found["train"] == [CoopRecord(d._impath, d._label, d._classname) for d in train]
    assert found["val"] == found["train"][:7]
    file.write_bytes(dumped({"train": train[:1]}, protocol, pickler))
    assert read_coop_cache(file)["val"] == [], "CoOp draws no validation images of ImageNet"


class Runs:
    """Unpickling it would run a command."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def bomb() -> bytes:
    """Thirty lists of which each holds the one before it ten times: small as a file, endless when it is followed."""
    first = b"]q\x00a"
    levels = b"".join(b"]q%c(" % (i + 1) + b"h%c" % i * 10 + b"ea" for i in range(30))
    return b"\x80\x02}X\x05\x00\x00\x00train]" + first + levels + b"s."


HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "os.system": (lambda mark: dumped(Runs(os.system, f"touch {mark}"), 4), "it names"),
    "hidden in a list": (
        lambda mark: dumped({"train": [1, [Runs(os.system, f"touch {mark}")]], "val": []}, 4), "it names"),
    "another class of that module": (
        lambda _: b"\x80\x02cdassl.data.datasets.base_dataset\nDatasetBase\n.", "it names"),
    "a dotted name": (
        lambda _: b"\x80\x02cdassl.data.datasets.base_dataset\nDatum.__init__.__globals__\n.", "it names"),
    "a class named by a nest of lists": (lambda _: b"\x80\x04" + b"]" + b"]a" * 5 + b"]\x93.", "damaged"),
    "extension registry": (lambda _: b"\x80\x02\x82\x01.", "damaged"),
    "persistent id": (lambda _: b"\x80\x02K\x01Q.", "damaged"),
    "instance of protocol 0": (lambda _: b"\x80\x02(ios\nsystem\n.", "damaged"),
    "protocol 0": (lambda _: dumped({"train": [], "val": []}, 0), "damaged"),
    "protocol 9": (lambda _: b"\x80\x09}.", "unsupported"),
    "deep nesting": (lambda _: b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".", "no dict of 'train'"),
    "a list inside itself": (lambda _: b"\x80\x04}\x8c\x05train]\x94h\x00as.", "entry 1 of 'train' is no record"),
    "memo bomb": (lambda _: bomb(), "'train'"),
    "a text of an exabyte": (lambda _: b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.", "damaged"),
    "a number of a gigabyte": (lambda _: b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"x.", "damaged"),
    "an empty file": (lambda _: b"", "damaged"),
    "a list": (lambda _: dumped([], 4), "no dict of 'train'"),
    "rows of text": (lambda _: dumped({"train": ["a"], "val": []}, 4), "entry 1 of 'train' is no record"),
    "a memo of sixteen gigabytes": (lambda _: b"\x80\x02}r\xff\xff\xff\x7f.", "no dict of|damaged"),
    "large": (lambda _: b"\x80\x04" + b"]" * 2**24, "larger than 16 MB"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle_is_refused_in_one_line_and_runs_nothing(tmp_path, kind):
    build, words = HOSTILE[kind]
    mark, file = tmp_path / "it-ran", tmp_path / "samples.pkl"
    file.write_bytes(build(mark))
    with pytest.raises(DataError, match=words) as caught:
        read_coop_cache(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not mark.exists()


@pytest.mark.parametrize(("state", "words"), [
    ({"_impath": "/a.jpg", "_label": 1, "_domain": 0}, "is no record of an image"),
    ({"_impath": "/a.jpg", "_label": 1, "_domain": 0, "_classname": "a", "_order": 1}, "is no record of an image"),
    ({"_impath": 3, "_label": 1, "_domain": 0, "_classname": "a"}, "_impath of entry 1 of 'train' is no str"),
    ({"_impath": "/a.jpg", "_label": "1", "_domain": 0, "_classname": "a"}, "_label of entry 1 .* is no int"),
    ({"_impath": "/a.jpg", "_label": [1], "_domain": 0, "_classname": "a"}, "_label of entry 1 .* is no int"),
])  # fmt: skip
def test_records_with_other_fields_are_refused(tmp_path, datum, state, words):
    record = datum("", 0)
    record.__dict__ = state
    file = tmp_path / "samples.pkl"
    file.write_bytes(dumped({"train": [record], "val": []}, 4))
    with pytest.raises(DataError, match=words):
        read_coop_cache(file)


def test_samples_are_read_as_written_and_have_the_digest_of_a_run(toy, tmp_path):
    samples = draw_samples(toy, 2, 1)
    write_samples(tmp_path / "samples.json", samples)
    assert read_samples(tmp_path / "samples.json") == samples
    run = load_few_shot(toy, 2, 1)
    assert (samples.digest, list(samples.train)) == (run.digest, run.train.paths)
    assert samples.digest == lines_digest(samples.train) and samples.val == tuple(run.val.paths)


@pytest.mark.parametrize(("change", "words"), [
    ({"train": ["a.png", "b.png"]}, "was altered"),
    ({"train": ["a.png", "a.png"]}, "named twice"),
    ({"train": ["a\nb.png"]}, "line breaks"),
    ({"train": []}, "train"),
    ({"shots": 0}, "shots"),
    ({"source": "me"}, "source"),
    ({"few_shot_schema": 2}, "few_shot_schema"),
    ({"more": 1}, "more"),
])  # fmt: skip
def test_other_json_is_refused(toy, tmp_path, change, words):
    file = tmp_path / "samples.json"
    write_samples(file, draw_samples(toy, 2, 1))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match=words) as caught:
        read_samples(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_broken_json_is_refused(tmp_path, text):
    (tmp_path / "samples.json").write_text(text)
    with pytest.raises(DataError, match="holds no few-shot samples"):
        read_samples(tmp_path / "samples.json")


def test_coops_cache_of_the_same_draw_is_the_rules_draw(toy, tmp_path, datum):
    file = tmp_path / "shot_2-seed_1.pkl"
    file.write_bytes(dumped(records_of(toy, draw_samples(toy, 2, 1), datum), 4))
    found = import_samples(toy, file, 2, 1)
    assert found.source == "imported" and found.has_images_of(draw_samples(toy, 2, 1))
    assert not found.has_images_of(draw_samples(toy, 2, 2))


MISFITS: dict[str, tuple[int, Callable[[dict], object], str]] = {
    "label": (2, lambda it: setattr(it["train"][0], "_label", (it["train"][0]._label + 1) % 5),
              r"train: 1 of 10 images have another label or class name than in the packed set: .*png. is"),
    "name": (2, lambda it: setattr(it["train"][0], "_classname", it["train"][0]._classname.upper()),
             r"train: 1 of 10 images have another label or class name"),
    "path": (2, lambda it: setattr(it["train"][0], "_impath", it["train"][0]._impath + ".bak"),
             r"train: 1 of 10 images are not in the packed split: .*/11\.png\.bak"),
    "twice": (2, lambda it: it["train"][1].__dict__.update(it["train"][0].__dict__),
              r"train: 1 of 10 images are listed more than once"),
    "class": (2, lambda it: it.update(train=[record for record in it["train"] if record._label]),
              r"train: class 'red_ball' has 0 of 5 images: these are not 2 shots"),
    "split": (2, lambda it: it.update(train=it["val"], val=it["train"]),
              r"train: 10 of 10 images are not in the packed split: .* and 7 more; are they samples of another"),
    "no val": (2, lambda it: it.pop("val"), r"validation images are not in .*, and only in the packed 'toy'"),
    "shots": (3, lambda it: None, r"class .* has 3 of .* images: these are not 2 shots"),
    "fewer": (1, lambda it: None, r"class .* has 1 of .* images: these are not 2 shots"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_cache_that_does_not_fit_the_packed_set_is_refused_with_counts(toy, tmp_path, datum, name):
    shots, change, words = MISFITS[name]
    content = records_of(toy, draw_samples(toy, shots, 1), datum)
    change(content)
    file = tmp_path / "samples.pkl"
    file.write_bytes(dumped(content, 4))
    with pytest.raises(DataError, match=words) as caught:
        import_samples(toy, file, 2, 1)
    assert "\n" not in str(caught.value)


def test_a_cache_named_for_another_draw_is_refused(toy, tmp_path, datum):
    file = tmp_path / "shot_2-seed_3.pkl"
    file.write_bytes(dumped(records_of(toy, draw_samples(toy, 2, 1), datum), 4))
    with pytest.raises(DataUsageError, match="give --shots 2 --seed 3"):
        import_samples(toy, file, 2, 1)


def test_one_record_named_many_times_is_refused(tmp_path, datum):
    record = datum("/x/1.png", 0, 0, "red ball")
    (tmp_path / "samples.pkl").write_bytes(dumped({"train": [record] * 1000, "val": []}, 4))
    with pytest.raises(DataError, match="'train' holds the same record more than once"):
        read_coop_cache(tmp_path / "samples.pkl")


def test_stored_samples_are_found_by_their_digest_and_stay_when_a_set_is_packed_again(tmp_path):
    manifest = pack_source(toy_source(), tmp_path)
    toy = open_dataset(tmp_path, "toy")
    other = samples_of("toy", 2, 1, draw_samples(toy, 2, 9).train, draw_samples(toy, 2, 9).val)
    file = store_samples(toy.folder, other)
    assert file == tmp_path / "toy" / "few-shot" / f"{other.digest}.json" and store_samples(toy.folder, other) == file
    assert load_samples(toy.folder, other.digest) == other
    assert open_dataset(tmp_path, "toy").manifest == manifest
    pack_source(toy_source(), tmp_path, force=True)
    assert load_samples(toy.folder, other.digest) == other
    with pytest.raises(DataError, match=rf"no few-shot samples {'0' * 16} of 'toy' .*it holds: {other.digest}"):
        load_samples(toy.folder, "0" * 16)
    file.rename(file.with_name(f"{'1' * 16}.json"))
    with pytest.raises(DataError, match="was renamed"):
        load_samples(toy.folder, "1" * 16)
    with pytest.raises(DataError, match="other validation images"):
        store_samples(toy.folder, other)
        store_samples(toy.folder, samples_of("toy", 2, 1, other.train, draw_samples(toy, 2, 1).val))


def test_imported_samples_replace_the_draw_and_halves_are_taken_from_them(toy):
    other = draw_samples(toy, 2, 9)
    chosen = samples_of("toy", 2, 4, other.train[::-1], other.val)
    run, base = load_few_shot(toy, 2, 1, "all", chosen), load_few_shot(toy, 2, 1, "base", chosen)
    assert run.train.paths == list(other.train[::-1]) and run.digest == chosen.digest
    assert (run.source, run.seed) == ("imported", 4)
    assert base.train.paths == [path for path in run.train.paths if CLASSNAMES.index(path.split("/")[1]) < 3]
    with pytest.raises(DataUsageError, match="of 2 shots: give --shots 2"):
        load_few_shot(toy, 4, 1, "all", chosen)
    foreign = samples_of("toy", 2, 4, ("nowhere/1.png", *other.train[1:]), other.val)
    with pytest.raises(DataError, match=r"1 of 10 images that are not in the packed set, first 'nowhere/1\.png'"):
        load_few_shot(toy, 2, 1, "all", foreign)


@pytest.fixture
def packed(few_digits, tmp_path) -> tuple[Path, FewShotSamples]:
    """The packed digits in a folder of their own, and samples that the rule does not draw."""
    shutil.copytree(few_digits / "digits", tmp_path / "data" / "digits")
    other = draw_samples(open_dataset(tmp_path / "data", "digits"), 2, 9)
    return tmp_path / "data", samples_of("digits", 2, 1, other.train, other.val)


def plan(samples: str, short_checkpoint: Path) -> RunConfig:
    fields = {"overrides": {"epochs": 1, "batch_size": 5}, "picks": samples}
    return plan_run(method="coop", dataset="digits", shots=2, backbone=str(short_checkpoint), **fields)


def test_a_run_on_imported_samples_is_another_run_and_records_them(packed, tmp_path, short_checkpoint):
    data, samples = packed
    store_samples(data / "digits", samples)
    place = make_runtime(data, tmp_path / "results")
    config, usual = plan(samples.digest, short_checkpoint), plan("", short_checkpoint)
    assert config.hash != usual.hash and config.identity() == usual.identity() | {"picks": samples.digest}
    train(config, place)
    record = RunFolder(place.results / config.path).train().fewshot
    base = [path for path in samples.train if path.split("/")[1] in ("zero", "one", "two", "three", "four")]
    assert record == FewShotRecord(shots=2, seed=1, source="imported", digest=lines_digest(base), picks=base)
    store_samples(data / "digits", samples).unlink()
    assert train(config, place).fewshot == record


def test_absent_samples_stop_a_run_in_one_line(packed, short_checkpoint):
    import torch

    place = RuntimeConfig(data=packed[0], results=Path("unused"))
    with pytest.raises(DataError, match=r"no few-shot samples 0123456789abcdef of 'digits' .*few-shot digits --import"):
        set_up(plan("0123456789abcdef", short_checkpoint), place, torch.device("cpu"), ProcessGroup())


def test_the_command_lists_what_a_run_will_train_on(packed, capsys):
    data, _ = packed
    shards = open_dataset(data, "digits")
    code, out, _ = run(capsys, "data", "few-shot", "digits", "--data", data, "--shots", 2, "--json")
    assert code == 0
    found, expected = json.loads(out.splitlines()[-1]), load_few_shot(shards, 2, 1)
    assert found["digest"] == expected.digest and [row["path"] for row in found["train"]] == expected.train.paths
    for path in expected.train.paths:
        [line] = [line for line in out.splitlines() if line.endswith(f" {path}")]
        assert path.split("/")[1] in line


def test_import_then_train_by_digest(packed, tmp_path, datum, capsys, short_checkpoint):
    data, other = packed
    shards = open_dataset(data, "digits")
    cache = tmp_path / "shot_2-seed_1.pkl"
    cache.write_bytes(dumped(records_of(shards, other, datum), 5))
    written = tmp_path / "other.json"
    common = ("--data", data, "--shots", 2)
    code, out, err = run(capsys, "data", "few-shot", "digits", "--import", cache, "--out", written, *common, "--json")
    assert code == 0 and f"--few-shot-samples {other.digest}" in err and "rule draws others" in err
    assert json.loads(out.splitlines()[-1])["equals_rule"] is False and read_samples(written) == other
    flags = ("--methods", "coop", "--datasets", "digits", "--backbone", short_checkpoint, "--epochs", 1, *common)
    where = ("--results", tmp_path / "results", "--tracking", "off")
    _, by_digest, _ = run(capsys, "train", *flags, *where, "--few-shot-samples", other.digest, "--dry-run", "--json")
    code, out, _ = run(capsys, "train", *flags, *where, "--few-shot-samples", other.digest, "--json")
    assert code == 0
    [trained] = json.loads(out.splitlines()[-1])["trained"]
    assert trained["run"] == json.loads(by_digest.splitlines()[-1])["runs"][0]["run"]


@pytest.mark.parametrize(("flags", "words"), [
    ("train --datasets digits --few-shot-samples {json}", "picks = "),
    ("data few-shot digits --shots 999", "the largest class of 'digits' has"),
    ("data few-shot digits --shots 4 --import {json}", "give --shots 2 --seed 1"),
    ("data few-shot digits --shots 2 --import x.txt", "CoOp's .pkl cache or from .json"),
    ("data few-shot digit", "did you mean digits"),
])  # fmt: skip
def test_wrong_requests_for_samples_are_answered_in_one_line(packed, tmp_path, capsys, flags, words):
    data, samples = packed
    write_samples(tmp_path / "samples.json", samples)
    words_of = flags.format(json=tmp_path / "samples.json").replace("train ", "train --methods coop ").split()
    code, _, err = run(capsys, *words_of, "--data", data)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1
