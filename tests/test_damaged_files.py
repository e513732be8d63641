"""Files that are damaged in any way are read as before or refused in one line."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_results import put_run, put_score
from safetensors.torch import save

from benchmarks.experiment.profiles import MINI
from benchmarks.report.sections import read_sections
from benchmarks.results import load
from benchmarks.suites import load_suite
from benchmarks.suites.plans import SuitePlan
from benchmarks.tables.render import render
from cluster.sweep_record import Configuration, SweepFolder, SweepSettings
from procap.errors import UserError
from runner.checkpoint import decode_checkpoint
from runner.config import RunConfig, Target
from runner.results import Progress, ValidationCount, ValidationHistory, write_json
from runner.run_collection import Collection, write_collection
from runner.run_folders import RunFolder
from shards import manifest
from shards.files import replace_at_end, write_file
from shards.raw.description import read_description

Check = Callable[[bytes], None]
TEXTS = ["", "\0", "\ud800", "a\nb", "..", "/etc/passwd", "NaN", "{}", "{", "\x1b[2J", "e" * 300]
NUMBERS = [-1, 0, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, float("nan"), float("inf")]
PLAIN = st.sampled_from([None, True, False, *TEXTS, *NUMBERS]) | st.text(max_size=8) | st.integers() | st.floats()
JUNK = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\xef\xbb\xbf{}", b"", b"null", b"[]", b"{}", b"7", b'"x"']


def parts(document: Any) -> list[tuple[Any, Any]]:
    pairs = list(document.items()) if isinstance(document, dict) else list(enumerate(document))
    inner = [found for _, value in pairs if isinstance(value, dict | list) for found in parts(value)]
    return [(document, key) for key, _ in pairs] + inner


@st.composite
def damaged_documents(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three values replaced, removed, repeated, renamed or added."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        if not (places := parts(document)):
            break
        container, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "repeat", "add"]))
        if kind == "replace":
            container[key] = draw(JUNK)
        elif kind == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(draw(st.integers(0, len(container))), container[key] if kind == "repeat" else draw(JUNK))
        else:
            container[draw(st.text(max_size=5))] = container[key] if kind == "repeat" else draw(JUNK)
    return document


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes cut off, flipped at some places, with a part removed or repeated; or something else."""
    kind = draw(st.sampled_from(["cut", "flip", "remove", "repeat", "other"]))
    first, second = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
    if kind == "flip":
        changed = bytearray(content)
        for place in draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            changed[place] ^= draw(st.integers(1, 255))
        return bytes(changed)
    if kind == "other":
        return draw(st.sampled_from(DEEP) | st.binary(max_size=40))
    return content[:first] + {"cut": b"", "remove": content[second:], "repeat": content[first:] * 2}[kind]


def json_damage(content: bytes) -> st.SearchStrategy[bytes]:
    documents = damaged_documents(json.loads(content)).map(lambda found: json.dumps(found).encode())
    return st.one_of(documents, documents, damaged_bytes(content))


def yaml_damage(content: bytes) -> st.SearchStrategy[bytes]:
    documents = damaged_documents(yaml.safe_load(content)).map(lambda found: yaml.safe_dump(found).encode())
    return st.one_of(documents, documents, damaged_bytes(content))


def tensor_damage(content: bytes) -> st.SearchStrategy[bytes]:
    """Of a safetensors file: bytes, the header, or the description in it."""
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])

    def join(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[length:]

    own = damaged_documents(json.loads(header["__metadata__"]["procap"])).map(
        lambda plain: join({**header, "__metadata__": {"procap": json.dumps(plain)}})
    )
    return st.one_of(own, own, damaged_documents(header).map(join), damaged_bytes(content))


@pytest.fixture(scope="module")
def files(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Check]]:
    """Of a kind of file: the strategy of its damages, and what reads it."""
    folder = tmp_path_factory.mktemp("damaged")
    results, packed = folder / "results", folder / "data" / "digits"
    shutil.copytree(few_digits / "digits", packed)
    config = put_run(results, "coop", "digits", shots=4, overrides={"epochs": 2})
    evaluation = put_score(results, config, "digits:base", 30, 60)
    run, target = RunFolder(results / config.path), Target.parse("digits:base")
    card = {"checkpoint_schema": 1, "config": config.model_dump(mode="json"), "classnames": ["a"], "template": "a {}."}
    card |= {"templates": ["a {}."], "backbone_digest": "b", "manifest_digest": "d"}
    tensors = {"one": torch.ones(2, 3), "two": torch.zeros(1)}
    progress = Progress(config_hash=config.hash, step=1, steps=9, epochs=[], seconds=1.0, environment={})
    write_json(run.progress_file, progress)
    count = ValidationCount(epoch=0, target="digits:base:val", correct=3, total=4)
    write_json(run.validation_file, ValidationHistory(config_hash=config.hash, counts=[count]))
    own = "name: my-pets\ntemplate: a photo of a {}.\nfolder: images\nclasses: {1: cat, b: dog}\n"
    own += "split: {train: 0.5, val: 0.2, test: 0.3, seed: 2}\n"
    sweep, collection = put_sweep(results, config), put_suite(results)

    def read_evaluation() -> None:
        result = run.read_evaluation(target)
        assert 0 <= result.correct <= result.total and 0 <= result.accuracy <= 100
        result.correct_images()
        load(results)

    def of(file: Path, read: Callable[[], object]) -> Check:
        def check(content: bytes) -> None:
            before = file.read_bytes()
            file.write_bytes(content)
            try:
                read()
            finally:
                file.write_bytes(before)

        return check

    def of_text(name: str, text: str) -> Path:
        write_file(folder / name, text)
        return folder / name

    kinds: dict[str, tuple[Path, Any, Callable[[], object]]] = {
        "manifest": (packed / manifest.MANIFEST_FILE, json_damage, lambda: manifest.read_manifest(packed)),
        "config": (run.config_file, json_damage, lambda: (run.read_config(), load(results))),
        "train": (run.train_file, json_damage, lambda: (run.read_training(), load(results))),
        "evaluation": (evaluation, json_damage, read_evaluation),
        "progress": (run.progress_file, json_damage, run.read_progress),
        "validation": (run.validation_file, json_damage, run.read_validation),
        "collection": (collection, json_damage, lambda: read_suite(results)),
        "sweep": (sweep, json_damage, lambda: read_sweep(results)),
        "own data set": (of_text("pets.yaml", own), yaml_damage, lambda: read_description(folder / "pets.yaml")),
    }

    def find(kind: str) -> tuple[Any, Check]:
        if kind == "checkpoint":
            content = save(tensors, {"procap": json.dumps(card)})
            return tensor_damage(content), lambda damaged: decode_checkpoint(damaged, folder)
        file, damage, read = kinds[kind]
        return damage(file.read_bytes()), of(file, read)

    return find


KINDS = (
    "manifest", "config", "train", "evaluation", "progress", "validation", "checkpoint", "collection",
    "own data set", "sweep",
)  # fmt: skip


def put_suite(results: Path) -> Path:
    """Record a suite, and return its file."""
    suite = load_suite("base-to-novel")
    options = suite.options(MINI, datasets=("digits",), methods=("coop",), seeds=(1,))
    collection = write_collection(results, SuitePlan(suite, options, suite.plan(options)).collection)
    return results / collection.path / "collection.json"


def read_suite(results: Path) -> None:
    _, problems = read_sections(results)
    if problems:
        raise UserError(problems[0][1])


def put_sweep(results: Path, config: RunConfig) -> Path:
    """Record a sweep of one configuration, and return its file."""
    settings = SweepSettings(
        name="rates", space={"recipe.lr": [0.1, 0.2], "n_ctx": {"uniform": [1.0, 9.0]}}, methods=("coop",),
        datasets=("digits",), seeds=(1,), search="random", trials=2,
    )  # fmt: skip
    folder = SweepFolder(results / "sweeps/rates")
    tried = Configuration(
        values={"recipe.lr": 0.1, "n_ctx": 2.5}, runs=(config.path,), state="finished",
        scores={config.path: 50.0}, curve={1: 40.0}, epochs=2,
    )  # fmt: skip
    folder.save(settings, [tried])
    write_collection(results, Collection(kind="sweep", name="rates", runs=(config.path,)))
    return folder.path / "sweep.json"


def read_sweep(results: Path) -> None:
    sections, problems = read_sections(results)
    if problems:
        raise UserError(problems[0][1])
    for section in sections:
        for table in section.make_tables():
            render(table, "md")


@pytest.mark.parametrize("examples", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_one_line(kind, examples, files):
    damage, read = files(kind)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(damage)
    def check(content: bytes) -> None:
        try:
            read(content)
        except UserError as error:
            text = str(error)
            assert text and "\n" not in text and "internal error" not in text, text

    check()


def test_a_header_nested_too_deeply_is_no_checkpoint(tmp_path):
    header = b"[" * 100_000
    with pytest.raises(UserError, match="is not a checkpoint of this program"):
        decode_checkpoint(len(header).to_bytes(8, "little") + header, tmp_path)


def test_a_suite_without_seeds_is_refused_in_one_line(tmp_path):
    file = put_suite(tmp_path)
    document = json.loads(file.read_text())
    document["settings"]["seeds"] = []
    file.write_text(json.dumps(document))
    with pytest.raises(UserError, match="seeds"):
        read_suite(tmp_path)


def test_the_text_of_an_error_without_a_number_survives_and_no_file_is_left(tmp_path):
    with pytest.raises(OSError, match=r"^encoder failed$"), replace_at_end(tmp_path / "picture.png"):
        raise OSError("encoder failed")
    assert not list(tmp_path.iterdir())
