"""Checkpoints of public trainers: files are read without running them, and their tensors become a method's."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from procap.clip import CLIP
from procap.errors import UserError
from procap.methods import METHODS, build_method, load_public, method_class
from procap.methods.public import frozen_state, load_public_state, public_state
from procap.text import LabelSpace
from procap.weights.public import PublicFile, pack_public, read_public

PUBLIC = [name for name in METHODS if method_class(name).public_layout]
OPTIONS = {"mmrl": {"width": 16}}


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that holds another one, as Dassl's does."""

    def __init__(self, successor: Any) -> None:
        self.successor = successor
        super().__init__(successor.optimizer)

    def get_lr(self) -> list[float]:
        return [1e-5]


def trained() -> tuple[nn.Module, dict[str, Any]]:
    """A module after one step, and all that Dassl saves of it: the scheduler is an object with the optimizer in it."""
    module = nn.Linear(3, 2).half().float()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = Warmup(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    plain = {name: value for name, value in vars(scheduler).items() if name != "optimizer"}
    return module, {
        "state_dict": module.state_dict(),
        "epoch": 5,
        "optimizer": optimizer.state_dict(),
        "scheduler": plain,
        "val_result": 81.5,
    }


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_files_of_dassl_are_read_with_live_objects_in_them(tmp_path, is_zip):
    module, content = trained()
    file = tmp_path / "model.pth.tar-5"
    torch.save(content, file, _use_new_zipfile_serialization=is_zip)
    found = read_public(file)
    assert found.epoch == 5
    assert found.tensors.keys() == module.state_dict().keys()
    assert all(torch.equal(found.tensors[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_code_in_a_file_does_not_run(tmp_path, is_zip):
    module, content = trained()
    file, trace = tmp_path / "model.pth.tar-5", tmp_path / "it-ran"
    torch.save(content | {"scheduler": Hostile(trace)}, file, _use_new_zipfile_serialization=is_zip)
    assert read_public(file).tensors.keys() == module.state_dict().keys()
    torch.save({"state_dict": {"ctx": Hostile(trace)}}, file, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UserError, match="ctx in it is something else"):
        read_public(file)
    assert not trace.exists()


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_a_damaged_file_is_an_error_of_one_line(tmp_path, is_zip, share):
    file = tmp_path / "model.pth.tar-5"
    torch.save(trained()[1], file, _use_new_zipfile_serialization=is_zip)
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(UserError, match="no readable checkpoint") as raised:
        read_public(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}, {"state_dict": {"ctx": 3}}])
def test_a_file_without_tensors_is_refused(tmp_path, content):
    file = tmp_path / "model.pth.tar-5"
    torch.save(content, file)
    with pytest.raises(UserError, match="holds no state dict"):
        read_public(file)


def test_a_zip_file_that_is_no_checkpoint_is_named(tmp_path):
    file = tmp_path / "model.pth.tar-5"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "no pickle")
    with pytest.raises(UserError, match=r"not one of torch\.save"):
        read_public(file)


@pytest.mark.parametrize("format", ["dassl", "safetensors"])
def test_what_is_written_is_read_again_and_needs_no_code(tmp_path, format):
    file = tmp_path / f"model.{'safetensors' if format == 'safetensors' else 'pth.tar-7'}"
    tensors = {"ctx": torch.randn(4, 8)}
    file.write_bytes(pack_public(PublicFile(tensors, 7), format))
    found = read_public(file)
    assert found.epoch == 7 and torch.equal(found.tensors["ctx"], tensors["ctx"])
    if format == "dassl":
        assert torch.load(file, weights_only=True).keys() == trained()[1].keys()


def built(name: str, clip: CLIP, space: LabelSpace, seed: int = 0) -> Any:
    return build_method(name, clip, space, OPTIONS.get(name, {}), torch.Generator().manual_seed(seed))


def saved(name: str, clip: CLIP, space: LabelSpace, seed: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    """A method, and the state dict that its public trainer would save: fp16, with the buffers and the frozen towers."""
    method = built(name, clip, space, seed)
    layout = method.public_layout
    words = clip.token_embedding(method.class_ids)
    if layout.module == "adapter_learner":
        extra = {"token_embedding": words, "tokenized_prompts": method.class_ids}
    elif "prompt_learner.ctx" in method.public_names().values():
        n_ctx = method.options.n_ctx
        extra = {"token_prefix": words[:, :1], "token_suffix": words[:, 1 + n_ctx :]}
        extra = extra if layout.module else {f"prompt_learner.{key}": value for key, value in extra.items()}
    else:
        extra = {}
    if not layout.module:
        extra |= frozen_state(clip) | {"logit_scale": clip.logit_scale}
    extra |= {f"{start}weight" if start.endswith(".") else start: torch.ones(2) for start in layout.unused}
    state = extra | public_state(method)
    return method, {key: value.half() if value.is_floating_point() else value for key, value in state.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_state_dicts_of_public_code_become_the_method(tiny_clip, tiny_space, name):
    theirs, state = saved(name, tiny_clip, tiny_space)
    ours = built(name, tiny_clip, tiny_space)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_public_state(ours, state)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value.half().float()), key


LAYOUTS = {
    "2sfs": (
        "two_stages",
        {"visual.transformer.resblocks.0.ln_1.weight": (128,), "transformer.resblocks.1.ln_2.bias": (64,)},
    ),
    "coop": ("prompt_learner", {"ctx": (4, 64)}),
    "cocoop": (
        "prompt_learner",
        {
            "ctx": (4, 64),
            "meta_net.linear1.weight": (3, 48),
            "meta_net.linear1.bias": (3,),
            "meta_net.linear2.weight": (64, 3),
            "meta_net.linear2.bias": (64,),
        },
    ),
    "kgcoop": ("prompt_learner", {"ctx": (4, 64)}),
    "maple": ("MultiModalPromptLearner", {"prompt_learner.ctx": (2, 64), "prompt_learner.proj.weight": (128, 64)}),
    "ivlp": ("VLPromptLearner", {"prompt_learner.ctx": (2, 64), "image_encoder.VPT": (2, 128)}),
    "promptsrc": (
        "VLPromptLearner",
        {"prompt_learner.ctx": (4, 64), "text_encoder.transformer.resblocks.8.VPT_shallow": (4, 64)},
    ),
    "vpt": ("prompt_learner", {"image_encoder.VPT": (8, 128)}),
    "coprompt": (
        "MultiModalPromptLearner",
        {"prompt_learner.ctx": (4, 64), "adapter_image.fc.0.weight": (12, 48), "adapter_text.fc.2.weight": (48, 12)},
    ),
    "tcp": ("prompt_learner", {"ctx": (4, 64), "meta_net.linear1.weight": (128, 48)}),
    "mma": ("adapter_learner", {"text_adapter.5.down.0.weight": (32, 64), "shared_adapter.12.0.bias": (32,)}),
    "skipt": (
        "learnable_params",
        {"image_encoder.transformer.resblocks.6.mlp.c_fc.weight": (512, 128), "text_encoder.text_projection": (64, 48)},
    ),
    "mmrl": (
        "MultiModalPromptLearner",
        {
            "representation_learner.compound_rep_tokens": (5, 16),
            "image_encoder.proj_rep": (128, 48),
            "image_encoder.conv1.weight": (128, 3, 16, 16),
            "text_encoder.text_projection": (64, 48),
        },
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_exports_have_the_names_and_shapes_of_the_public_code(tiny_clip, tiny_space, name):
    method = built(name, tiny_clip, tiny_space)
    folder, tensors = LAYOUTS[name]
    state = public_state(method)
    assert method.public_layout.folder == folder
    assert {key: tuple(state[key].shape) for key in tensors} == tensors
    learned = sum(parameter.numel() for parameter in method.parameters())
    frozen = sum(tensor.numel() for tensor in frozen_state(tiny_clip).values()) if name == "mmrl" else 0
    assert sum(tensor.numel() for tensor in state.values()) == learned + frozen


def test_another_method_other_options_and_damaged_values_are_refused(tiny_clip, tiny_space):
    _, maple = saved("maple", tiny_clip, tiny_space)
    for name, message in (
        ("ivlp", "lacks"),
        ("promptsrc", r"prompt_learner.ctx is \[2, 64\], expected \[4, 64\]"),
        ("coop", "lacks ctx"),
        ("vpt", "lacks image_encoder.VPT"),
    ):
        with pytest.raises(UserError, match=f"no checkpoint of .* with these options: .*{message}"):
            load_public_state(built(name, tiny_clip, tiny_space), maple)
    _, ivlp = saved("ivlp", tiny_clip, tiny_space)
    with pytest.raises(UserError, match="no checkpoint of MaPLe"):
        load_public_state(built("maple", tiny_clip, tiny_space), ivlp)
    with pytest.raises(UserError, match="ZeroShot has no public code"):
        load_public_state(built("zeroshot", tiny_clip, tiny_space), maple)


def test_tensors_under_public_names_are_set_or_refused_in_one_line(tiny_clip, tiny_space):
    method, value = built("coop", tiny_clip, tiny_space), torch.ones(4, 64)
    load_public(method, {"prompt_learner.ctx": value})
    assert torch.equal(method.context, value)
    for name, tensors, message in (
        ("coop", {"ctx": value}, "not a checkpoint of CoOp: lacks prompt_learner.ctx; has unknown ctx"),
        ("coop", {"prompt_learner.ctx": value[:2]}, r"prompt_learner.ctx is \[2, 64\], expected \[4, 64\]"),
        ("procap", {"prompt_learner.ctx": value}, "ProCAP has no public code whose tensors could be loaded"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            load_public(built(name, tiny_clip, tiny_space), tensors)
        assert "\n" not in str(raised.value)


def test_another_backbone_and_other_classes_are_refused(tiny_clip, tiny_space, tiny_geometry):
    _, state = saved("maple", tiny_clip, tiny_space)
    other = CLIP.random(tiny_geometry, seed=5, name="other")
    with pytest.raises(UserError, match="trained on other weights than those of other: image_encoder"):
        load_public_state(built("maple", other, tiny_space), state)
    with pytest.raises(UserError, match="trained on 5 classes, while there are 2 here"):
        load_public_state(built("maple", tiny_clip, LabelSpace(("cat", "dog"))), state)
    renamed = LabelSpace((*tiny_space.classnames[:-1], "dog"))
    with pytest.warns(UserWarning, match="other words for 1 of 5 classes, such as 'dog'"):
        load_public_state(built("maple", tiny_clip, renamed), state)
