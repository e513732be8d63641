"""Loading a CLIP: every format gives its weights with the right activation, and nothing in a file is ever run."""

import functools
import json
import os
import pickle
import re
import shutil
import socket
import warnings
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import HubServer
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_geometry import open_clip_config

from benchmarks.cli import main
from procap.clip import CLIP, ImagePreparation
from procap.errors import UsageError, UserError
from procap.methods import build_method
from procap.text import LabelSpace
from procap.weights import architectures
from procap.weights.architectures import canonical_name
from procap.weights.files import VOCABULARY, read_tensors
from procap.weights.loading import EMBEDDED, load_clip, weights_digest
from runner.setup import warn_of_names

BOOKKEEPING = {"input_resolution": 32, "context_length": 77, "vocab_size": 49408}


@pytest.fixture(scope="module", autouse=True)
def tiny_architecture(tmp_path_factory, tiny_geometry):
    """Add the geometry of `tiny_clip` to open_clip's architectures under the names tiny-vit and tiny-vit-quickgelu."""
    # Imported in functions, because every test worker imports all files, and this takes seconds.
    import open_clip

    folder = tmp_path_factory.mktemp("architectures")
    config = open_clip_config(tiny_geometry)
    own = {"tiny-vit": {**config, "quick_gelu": False}, "tiny-vit-quickgelu": config}
    for name, each in own.items():
        (folder / f"{name}.json").write_text(json.dumps(each))
    with pytest.MonkeyPatch.context() as patch:
        # Other tests of this process know open_clip as it is installed.
        for registry in ("_MODEL_CONFIG_PATHS", "_MODEL_CONFIGS"):
            patch.setattr(open_clip.factory, registry, getattr(open_clip.factory, registry).copy())
        open_clip.add_model_config(folder)
        for name, each in own.items():
            patch.setitem(architectures.model_configs(), name, each)
        yield


def openai_names(clip: CLIP) -> dict[str, torch.Tensor]:
    return {name.removeprefix("text."): weight for name, weight in clip.state_dict().items()}


def torchscript_archive(clip: CLIP, path: Path) -> None:
    """What OpenAI published: a traced model in half precision with its bookkeeping entries."""
    import open_clip

    model = open_clip.create_model("tiny-vit-quickgelu", pretrained_image=False)
    model.load_state_dict(openai_names(clip))
    for name, value in BOOKKEEPING.items():
        if hasattr(model, name):
            delattr(model, name)
        model.register_buffer(name, torch.tensor(value))
    model = model.eval().half()
    images = torch.zeros(1, 3, 32, 32, dtype=torch.float16)
    torch.jit.trace_module(model, {"encode_image": images}, check_trace=False).save(str(path))


class Scheduler:
    """A live object, such as public trainers save beside the weights."""


FORMATS = {
    "custom-text.safetensors": lambda clip, path: save_file(clip.state_dict(), path),
    "open-clip.pt": lambda clip, path: torch.save(openai_names(clip), path),
    "training.pt": lambda clip, path: torch.save({"epoch": 3, "state_dict": openai_names(clip)}, path),
    "distributed.bin": lambda clip, path: torch.save({f"module.{k}": v for k, v in openai_names(clip).items()}, path),
    "compiled.pt": lambda clip, path: torch.save(
        {"state_dict": {f"module._orig_mod.{k}": v for k, v in openai_names(clip).items()}}, path
    ),
    "half.pt": lambda clip, path: torch.save({k: v.half() for k, v in openai_names(clip).items()}, path),
    "openai.pt": lambda clip, path: torch.save(
        openai_names(clip) | {k: torch.tensor(v) for k, v in BOOKKEEPING.items()}, path
    ),
    "before-1.6.pt": lambda clip, path: torch.save(
        {"state_dict": openai_names(clip), "scheduler": Scheduler()}, path, _use_new_zipfile_serialization=False
    ),
    "torchscript.pt": torchscript_archive,
}
HALF = {"half.pt", "torchscript.pt"}
OPENAI = {"openai.pt", "torchscript.pt"}


@pytest.fixture(scope="module")
def written(tiny_clip, tmp_path_factory) -> Callable[[str], Path]:
    """`tiny_clip` in one of the formats, written once: tracing a model takes its time."""
    folder = tmp_path_factory.mktemp("formats")

    @functools.cache
    def write(file: str) -> Path:
        FORMATS[file](tiny_clip, folder / file)
        return folder / file

    return write


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", FORMATS)
def test_every_format_gives_the_same_frozen_float32_model(tiny_clip, written, file):
    path = written(file)
    loaded = load_clip("tiny-vit-quickgelu", str(path))
    weights = {k: v.half() for k, v in tiny_clip.state_dict().items()} if file in HALF else tiny_clip.state_dict()
    assert loaded.digest() == CLIP.from_state(weights, tiny_clip.geometry).digest()
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in loaded.parameters())
    assert (loaded.name, loaded.pretrained) == ("tiny-vit-quickgelu", str(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", sorted(OPENAI))
def test_openais_files_need_quickgelu_under_any_name(tiny_clip, written, file):
    loaded = load_clip("tiny-vit", str(written(file)))
    assert loaded.geometry == tiny_clip.geometry and loaded.geometry.quick_gelu


def put_config(folder: Path, quick_gelu: bool, **images: object) -> None:
    config = {"model_cfg": {"quick_gelu": quick_gelu}, "preprocess_cfg": images}
    (folder / "open_clip_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("config", ["not json", "[1]", '{"lr": 0.1}'])
def test_metadata_of_a_different_program_does_not_tell_the_activation(tiny_clip, tmp_path, config):
    save_file(tiny_clip.state_dict(), tmp_path / "a.safetensors", metadata={"config": config})
    with pytest.raises(UsageError, match="does not tell its activation"):
        load_clip("tiny-vit", str(tmp_path / "a.safetensors"))


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_file_that_tells_its_activation_does_not_get_that_of_a_tag(monkeypatch, tiny_clip, tmp_path, is_quick):
    import open_clip

    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-vit", {"openai": {"url": "", "quick_gelu": True}})
    config = json.dumps({"quick_gelu": is_quick})
    save_file(tiny_clip.state_dict(), tmp_path / "a.safetensors", metadata={"config": config})
    assert load_clip("tiny-vit", str(tmp_path / "a.safetensors")).geometry.quick_gelu is is_quick


@pytest.mark.parametrize("file", ["open-clip.pt", "distributed.bin", "half.pt", "custom-text.safetensors"])
def test_the_activation_of_a_bare_file_has_to_be_told_if_its_architecture_has_two(written, tmp_path, file):
    path = tmp_path / file
    shutil.copy(written(file), path)
    message = r"activation \(GELU or QuickGELU\).* open_clip_config.json in the same .* --backbone tiny-vit-quickgelu"
    with pytest.raises(UsageError, match=message):
        load_clip("tiny-vit", str(path))
    assert load_clip("tiny-vit-quickgelu", str(path)).geometry.quick_gelu
    with pytest.raises(UsageError, match="name the architecture"):
        load_clip(str(path))
    for is_quick in (False, True):
        put_config(tmp_path, is_quick)
        assert load_clip("tiny-vit", str(path)).geometry.quick_gelu is is_quick


def test_a_file_with_the_configuration_of_its_tag_beside_it_is_prepared_for_as_the_tag_says(written, tmp_path):
    path = Path(shutil.copy(written("half.pt"), tmp_path))
    put_config(
        tmp_path, True, mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.1], resize_mode="squash", interpolation="bilinear"
    )
    loaded = load_clip("tiny-vit", str(path))
    assert loaded.preparation == ImagePreparation((0.5, 0.4, 0.3), (0.2, 0.2, 0.1), "bilinear", True)
    (tmp_path / "open_clip_config.json").write_text("{")
    with pytest.raises(UserError, match=r"open_clip_config\.json is no configuration of open_clip"):
        load_clip("tiny-vit", str(path))


def test_the_preparation_of_a_bare_file_has_to_be_told_if_its_tags_differ_in_it(monkeypatch, written):
    import open_clip

    tags = {"one": {"url": "", "mean": (0.5,) * 3}, "two": {"url": "", "mean": (0.4,) * 3}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-vit-quickgelu", tags)
    with pytest.raises(UsageError, match="does not tell its mean, deviation and resize mode"):
        load_clip("tiny-vit-quickgelu", str(written("half.pt")))


def test_open_clips_own_loader_agrees(written, tmp_path):
    import open_clip

    path = Path(shutil.copy(written("open-clip.pt"), tmp_path))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in ("tiny-vit", "tiny-vit-quickgelu"):
        put_config(tmp_path, name != "tiny-vit")
        theirs = open_clip.create_model(name, pretrained=str(path)).train()
        ours = load_clip(name, str(path)).without_optimizations()
        assert torch.equal(ours.encode_image(images), theirs.encode_image(images).detach())


def test_a_file_or_folder_with_its_configuration_needs_no_name(tiny_clip, tiny_checkpoint, tmp_path):
    assert load_clip(str(tiny_checkpoint)).digest() == tiny_clip.digest()
    save_file(tiny_clip.state_dict(), tmp_path / "open_clip_model.safetensors")
    images = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1), "resize_mode": "squash", "interpolation": "bilinear"}
    config = {"model_cfg": open_clip_config(tiny_clip.geometry), "preprocess_cfg": images}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    loaded = load_clip(str(tmp_path))
    assert torch.equal(loaded.text.token_embedding.weight, tiny_clip.text.token_embedding.weight)
    # Two files of equal weights whose images are prepared differently are two backbones.
    assert loaded.digest() != tiny_clip.digest()
    assert loaded.preparation == ImagePreparation((0.5, 0.4, 0.3), (0.2, 0.2, 0.1), "bilinear", True)


def test_a_file_that_is_replaced_gets_a_new_digest(short_clip, short_checkpoint, tmp_path):
    path = tmp_path / "weights.safetensors"
    shutil.copy(short_checkpoint, path)
    before = weights_digest(str(path))
    assert before == short_clip.digest()
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)
    assert weights_digest(str(path)) == load_clip(str(path)).digest() != before


def test_random_weights_come_by_name_and_are_always_the_same(tiny_geometry):
    first, again = (load_clip("tiny-vit-quickgelu", "random") for _ in range(2))
    assert first.digest() == again.digest() == CLIP.random(tiny_geometry).digest()
    assert CLIP.random(tiny_geometry, seed=1).digest() != first.digest()
    assert (first.pretrained, first.geometry) == ("random", tiny_geometry)


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def code_in_torchscript(path: Path, marker: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(marker), protocol=2))


@pytest.mark.parametrize(
    "write",
    [
        lambda path, marker: path.write_bytes(pickle.dumps({"visual.proj": Bomb(marker)}, protocol=2)),
        lambda path, marker: torch.save({"visual.proj": Bomb(marker)}, path),
        lambda path, marker: torch.save({"p": Bomb(marker)}, path, _use_new_zipfile_serialization=False),
        code_in_torchscript,
    ],
)
def test_code_in_a_file_is_refused_and_never_run(tmp_path, write):
    path, marker = tmp_path / "bomb.pt", tmp_path / "exploded"
    write(path, marker)
    with pytest.raises(UserError, match="refused") as caught:
        load_clip("tiny-vit", str(path))
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def cut(path: Path, file: str, clip: CLIP) -> None:
    FORMATS[file](clip, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage(path: Path, file: str, clip: CLIP) -> None:
    FORMATS[file](clip, path)
    data = path.read_bytes()
    path.write_bytes(data[:40] + b"?" * 100 + data[140:])


def put_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("read me.txt", "text")


BROKEN: dict[str, tuple[Callable[[Path, CLIP], object], str]] = {
    "folder": (lambda path, clip: path.mkdir(), "no weights file at .*folder, a folder: name the file in it"),
    "missing.pt": (lambda path, clip: None, "no weights file at"),
    "empty.pt": (lambda path, clip: path.write_bytes(b""), "it begins with b''"),
    "text.pt": (lambda path, clip: path.write_text("not a checkpoint\n"), "it begins with b'not a checkpoint"),
    "cut.pt": (lambda path, clip: cut(path, "open-clip.pt", clip), "is refused: "),
    "cut-before-1.6.pt": (lambda path, clip: cut(path, "before-1.6.pt", clip), "is refused: "),
    "cut.safetensors": (lambda path, clip: cut(path, "custom-text.safetensors", clip), "is refused: "),
    "damaged.pt": (lambda path, clip: damage(path, "open-clip.pt", clip), "is refused: "),
    "pointer.pt": (
        lambda path, clip: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "it begins with b'version https://git-lfs"),
    "pickle.pt": (lambda path, clip: path.write_bytes(pickle.dumps([1])), "safetensors and files of torch.save are"),
    "archive.pt": (lambda path, clip: put_zip(path), "is refused: .*archive"),
    "large.safetensors": (lambda path, clip: os.truncate(path.touch() or path, 30 * 10**9), "it has 30 GB; the limit"),
    "nested.pt": (lambda path, clip: torch.save({"model": clip.state_dict(), "epoch": 3}, path), "but 'model', 'ep"),
    "list.pt": (lambda path, clip: torch.save([torch.zeros(2)], path), "holds no state dict"),
    "transformers.pt": (
        lambda path, clip: torch.save({"vision_model.embeddings.class_embedding": torch.zeros(2)}, path),
        "does not fit tiny-vit-quickgelu: it lacks"),
    "prompts-only.pt": (
        lambda path, clip: torch.save({"context": torch.zeros(4, 64)}, path), "has unknown context"),
    "one-missing.pt": (
        lambda path, clip: torch.save({k: v for k, v in openai_names(clip).items() if k != "ln_final.bias"}, path),
        r"does not fit tiny-vit-quickgelu: it lacks text\.ln_final\.bias"),
    "not-a-number.pt": (
        lambda path, clip: torch.save(openai_names(clip) | {"logit_scale": torch.tensor(torch.nan)}, path),
        "it has values in logit_scale that are not finite"),
    "one-extra.pt": (
        lambda path, clip: torch.save(openai_names(clip) | {"adapter.weight": torch.zeros(2)}, path),
        r"does not fit tiny-vit-quickgelu: it has unknown adapter\.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_clip_is_refused_in_one_line_by_name(tiny_clip, tmp_path, name):
    path, (write, message) = tmp_path / name, BROKEN[name]
    write(path, tiny_clip)
    with pytest.raises(UserError, match=message) as caught:
        load_clip("tiny-vit-quickgelu", str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="is refused: it is no regular file"):
            read_tensors(path)
        (tmp_path / "open_clip_config.json").unlink(missing_ok=True)
        (tmp_path / "open_clip_config.json").symlink_to(path)
        with pytest.raises(UserError, match=r"is no configuration of open_clip \(it is no regular file\)"):
            load_clip(str(tmp_path))


@pytest.mark.parametrize(("name", "pretrained", "message"), [
    ("ViT-B-61", None, "unknown backbone .ViT-B-61.: did you mean ViT-B-16 .*procap ls backbones"),
    ("ViT-B/16", "opnai", "did you mean openai"),
    ("ViT-B-16", "siglip", "unknown weights of ViT-B-16 .siglip"),
    ("ViT-H-14", None, "unknown weights of ViT-H-14 .openai.: known: laion2b_s32b_b79k"),
    ("mini", "openai", "weights of mini 'openai'"),
    ("weights.safetensors", "openai", "has weights already"),
])  # fmt: skip
def test_names_that_cannot_work_are_answered_with_what_would(name, pretrained, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_clip(name, pretrained)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("offline", ["1", None])
@pytest.mark.parametrize(("name", "missing"), [
    ("ViT-B/16", "no open_clip_model.safetensors of timm/vit_base_patch16_clip_224.openai"),
    ("hf-hub:timm/ViT-B-16-SigLIP", "no open_clip_config.json of timm/ViT-B-16-SigLIP"),
])  # fmt: skip
def test_absent_weights_say_what_works_and_nothing_is_fetched(monkeypatch, tmp_path, offline, name, missing):
    def no_network(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE") if offline is None else monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(UserError) as caught:
        load_clip(name)
    message = str(caught.value)
    for part in (missing, "--pretrained FILE", "--download"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "answer", "reason"), [
    ("hf-hub:lab/clp", {}, "no repository lab/clp (404)"),
    ("hf-hub:lab/clip", {"lab/clip": {"a": b""}}, "lab/clip has no file open_clip_config.json (404)"),
    ("ViT-B/16", {"timm/vit_base_patch16_clip_224.openai": 401}, "not open to this user (401)"),
    ("ViT-B/16", {"timm/vit_base_patch16_clip_224.openai": 403}, "hf auth login"),
    ("ViT-B/16", None, "cannot be reached"),
])  # fmt: skip
def test_a_download_that_fails_says_why_and_what_else_works(name, answer, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with ExitStack() as stack:
        stack.enter_context(hub := HubServer(repositories=answer or {}))
        hub.connect(monkeypatch, tmp_path)
        if answer is None:
            stack.close()
        with pytest.raises(UserError, match=re.escape(reason)) as caught:
            load_clip(name)
    message = str(caught.value)
    assert "--pretrained FILE" in message and "HF_HUB_OFFLINE" not in message and "\n" not in message
    # `procap fetch backbone` has no such flag.
    assert "--backbone" not in message


@pytest.mark.parametrize("spelling", ["tiny-vit", "hf-hub:us/tiny"])
def test_weights_in_the_hubs_cache_are_found_with_their_settings(monkeypatch, tmp_path, tiny_clip, spelling):
    import open_clip

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--us--tiny" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (tmp_path / "models--us--tiny" / "refs").mkdir()
    (tmp_path / "models--us--tiny" / "refs" / "main").write_text("0" * 40)
    save_file(tiny_clip.state_dict(), folder / "open_clip_model.safetensors")
    images = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1), "resize_mode": "shortest", "interpolation": "bicubic"}
    config = {"model_cfg": open_clip_config(tiny_clip.geometry), "preprocess_cfg": images}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    tag = {"url": "", "hf_hub": "us/tiny/", **images, "quick_gelu": True}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-vit", {"openai": tag})
    loaded = load_clip(spelling)
    assert torch.equal(loaded.text.token_embedding.weight, tiny_clip.text.token_embedding.weight)
    assert loaded.preparation == ImagePreparation((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))


def test_a_backbone_is_fetched_once_for_machines_without_a_network(monkeypatch, tmp_path, tiny_clip, capsys):
    save_file(tiny_clip.state_dict(), weights := tmp_path / "weights")
    config = json.dumps({"model_cfg": open_clip_config(tiny_clip.geometry), "preprocess_cfg": {}}).encode()
    files = {"open_clip_config.json": config, "open_clip_model.safetensors": weights.read_bytes()}
    with HubServer(repositories={"us/tiny": files}) as hub:
        hub.connect(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        assert main(["fetch", "backbone", "hf-hub:us/tiny", "--json"]) == 0
    [fetched] = json.loads(capsys.readouterr().out)
    assert (fetched["digest"], fetched["bytes"]) == (tiny_clip.digest(), weights.stat().st_size)
    assert Path(fetched["file"]).is_relative_to(tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_clip("hf-hub:us/tiny").digest() == fetched["digest"]


@pytest.mark.parametrize(("name", "pretrained", "spelling"), [
    ("mini", "random", ("mini", "random")),
    ("ViT-B/16", "openai", ("ViT-B-16", None)),
    ("ViT-B-16-quickgelu", "metaclip_400m", ("ViT-B-16", "metaclip_400m")),
    ("ViT-B-16-quickgelu", "random", ("ViT-B-16-quickgelu", "random")),
    ("ViT-L/14@336px", None, ("ViT-L-14-336", None)),
    ("ViT-H-14-quickgelu", None, ("ViT-H-14", None)),
    ("here.pt", None, ("{cwd}/here.pt", None)),
    ("./sub/../here.pt", None, ("{cwd}/here.pt", None)),
    ("ViT-B/16", "link.pt", ("ViT-B-16", "{cwd}/link.pt")),
    ("ViT-B/16", "here.pt", ("ViT-B-16", "{cwd}/here.pt")),
    ("ViT-B/61", "openai", ("ViT-B/61", "openai")),
])  # fmt: skip
def test_names_for_the_same_weights_have_one_spelling(monkeypatch, tmp_path, name, pretrained, spelling):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.pt").write_bytes(b"weights")
    (tmp_path / "link.pt").symlink_to("here.pt")
    (tmp_path / "random").mkdir()
    backbone, weights = spelling
    expected = (backbone.format(cwd=tmp_path), weights and weights.format(cwd=tmp_path))
    assert canonical_name(name, pretrained) == expected == canonical_name(*expected)


def test_mini_lists_names_of_words_that_it_was_not_trained_on():
    mini = load_clip("mini")
    assert mini.unknown_names(["robin", "red circle", "wren"]) == ["robin", "wren"]
    assert mini.unknown_names(["owl"]) == ["owl"] and not mini.unknown_names(["blue square"])
    names = ("owl", "red circle", "wren")
    methods = ("zeroshot", "probe")
    zeroshot, probe = (build_method(name, mini, LabelSpace(names), {}, torch.Generator()) for name in methods)
    with pytest.warns(UserWarning, match=r"cannot tell 2 of 3 classes \('owl', 'wren'\) .*--methods probe"):
        warn_of_names(zeroshot, LabelSpace(names))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_names(probe, LabelSpace(names))


@pytest.fixture
def mini_file(tiny_clip, tmp_path) -> Path:
    """A file in mini's format: half precision, OpenAI's names, three vocabulary rows."""
    rows = torch.tensor([5, 49406, 49407])
    state = {name: weight.half().clone() for name, weight in openai_names(tiny_clip).items()}
    state["token_embedding.weight"] = state["token_embedding.weight"][rows].clone()
    path = tmp_path / "small.safetensors"
    save_file(state | {"token_rows": rows}, path, metadata={"config": json.dumps(open_clip_config(tiny_clip.geometry))})
    return path


def test_minis_stored_rows_expand_to_the_whole_vocabulary(mini_file, tiny_clip):
    loaded = load_clip("mini", str(mini_file))
    table, source = loaded.text.token_embedding.weight, tiny_clip.text.token_embedding.weight.half().float()
    stored = source[[5, 49406, 49407]]
    assert table.shape == (VOCABULARY, 64) and loaded.geometry == tiny_clip.geometry
    assert torch.equal(table[[5, 49406, 49407]], stored)
    torch.testing.assert_close(table[[0, 6, 30000]], stored.mean(0).expand(3, -1))


@pytest.mark.skipif(not EMBEDDED.exists(), reason="the embedded weights are not built yet")
def test_the_embedded_mini_is_small_complete_and_offline():
    clip = load_clip()
    g = clip.geometry
    assert (clip.name, clip.pretrained) == ("mini", "embedded")
    assert EMBEDDED.stat().st_size < 12_000_000
    assert g.quick_gelu and g.vision_width != g.text_width and g.vocab_size == VOCABULARY
    assert (g.vision_layers, g.text_layers) == (12, 12)
    assert 1 < float(clip.logit_scale.exp()) < 100.5
    features = clip.encode_text(clip.tokenize(["a photo of a red circle.", "an unheard of word: quetzal"]))
    assert torch.isfinite(features).all()
    assert torch.isfinite(clip.encode_image(torch.zeros(1, 3, g.image_size, g.image_size))).all()
