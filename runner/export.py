"""Export trained runs as ONNX graphs: from images to the logits of the classes that the run learned, in float32.

Shapes: B images, C classes, S image size.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from procap.classifier import Classifier, OnlineClassifier
from procap.errors import UserError
from runner.session import Run
from runner.trained_runs import load_trained
from shards.files import explain_writing, replace_at_end


class _Logits(nn.Module):
    """A classifier as a module, whose gradient mode the caller chooses."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier.logits(self.classifier.encode(images))


def export_model(run: Run, out: Path) -> Path:
    """Write a finished run, in a session on the CPU, below `out` as an ONNX graph; returns its file.

    The graph maps `images` [B, 3, S, S] to `logits` [B, C]; its metadata has class names and normalisation.
    Raises UserError if the run is not finished, or its logits depend on more than the image and fixed class features.
    """
    trained = load_trained(run)
    clip, classifier = trained.clip, trained.method.classifier()
    method = trained.config.method
    if isinstance(classifier, OnlineClassifier):
        raise UserError(f"{method} adapts to the test images before an image, which no exported classifier does")
    if not classifier.keeps_class_features:
        raise UserError(f"{method} computes class features for each image, which no exported classifier does")
    # torch.export takes a dimension of size 1 for a constant, so the example has two images.
    images = torch.zeros(2, 3, clip.geometry.image_size, clip.geometry.image_size)
    try:
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass

        program = torch.onnx.export(
            _Logits(classifier).eval(),
            (images,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            verbose=False,
        )
    except ImportError as error:
        raise UserError(f"{error}; install what this needs: pip install -e '.[export]' in the checkout") from error
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # stack traces at nodes name local folders
    # The classes, and how images are prepared.
    facts = {
        "run": trained.config.path,
        "classnames": list(trained.method.space.names()),
        "image_size": clip.geometry.image_size,
        "mean": list(clip.preparation.mean),
        "std": list(clip.preparation.std),
        "interpolation": clip.preparation.interpolation,
        "resize": "squash" if clip.preparation.squash else "shorter side, then the centre",
    }
    program.model.metadata_props["procap"] = json.dumps(facts)
    file = out / run.path / "onnx" / "model.onnx"
    with explain_writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_at_end(file) as temporary:
            program.save(temporary)
    return file
