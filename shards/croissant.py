"""`croissant.json`: a packed data set described for the Hub, Dataset Search and `mlcroissant`, as Croissant 1.0.

https://docs.mlcommons.org/croissant/docs/croissant-spec.html. It is derived from the manifest alone, and nothing here
reads it: it changes no digest.
"""

from __future__ import annotations

import json
from typing import Any

from shards.catalogue import find_or_none
from shards.manifest import Manifest
from shards.tar import IMAGES

FILE = "croissant.json"
CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
_TERMS = (
    "citeAs", "column", "equivalentProperty", "extract", "field", "fileObject", "fileProperty", "fileSet", "format",
    "includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex",
    "repeated", "replace", "samplingRate", "separator", "source", "subField", "transform",
)  # fmt: skip
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS},
}


def croissant_json(manifest: Manifest) -> str:
    """Describe a packed data set: its shards with their SHA-256, and for each split records of images and of labels."""
    dataset = find_or_none(manifest.dataset)
    subject = dataset.description if dataset else manifest.source
    document: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": manifest.dataset,
        "description": f"{subject}; {manifest.images:,} images as WebDataset",
        "version": "1.0.0",
        "distribution": [],
        "recordSet": [_classes(manifest)],
    }
    if dataset:
        document["license"] = dataset.licence
    for split in manifest.splits:
        document["distribution"] += _files(manifest, split)
        document["recordSet"].append(_records(split, "images", "image", "sc:ImageObject"))
        document["recordSet"].append(_records(split, "labels", "label", "sc:Integer"))
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _files(manifest: Manifest, split: str) -> list[dict[str, Any]]:
    """List the shards of a split, and the images and labels in them."""
    shards = manifest.splits[split].shards
    tars = [
        {
            "@type": "cr:FileObject",
            "@id": shard.file,
            "name": shard.file,
            "contentUrl": shard.file,
            "contentSize": f"{shard.size} B",
            "encodingFormat": "application/x-tar",
            "sha256": shard.sha256,
        }
        for shard in shards
    ]
    members = {
        "images": ("image/*", [f"*.{extension}" for extension in IMAGES]),
        "labels": ("text/plain", ["*.cls"]),
    }
    sets = [
        {
            "@type": "cr:FileSet",
            "@id": f"{split}-{name}",
            "name": f"{split}-{name}",
            "containedIn": [{"@id": shard.file} for shard in shards],
            "encodingFormat": encoding,
            "includes": includes,
        }
        for name, (encoding, includes) in members.items()
    ]
    return [*tars, *sets]


def _classes(manifest: Manifest) -> dict[str, Any]:
    """List the class names by label."""
    return {
        "@type": "cr:RecordSet",
        "@id": "classes",
        "name": "classes",
        "dataType": "sc:Enumeration",
        "key": {"@id": "classes/label"},
        "field": [_field("classes/label", "sc:Integer"), _field("classes/name", "sc:Text")],
        "data": [
            {"classes/label": label, "classes/name": name.replace("_", " ").strip()}
            for label, name in enumerate(manifest.classnames)
        ],
    }


def _records(split: str, name: str, field: str, data_type: str) -> dict[str, Any]:
    """Describe the images or the labels of a split: a key, which both share, and the content of a member of a shard."""
    files = {"fileSet": {"@id": f"{split}-{name}"}}
    key = {**files, "extract": {"fileProperty": "filename"}, "transform": {"regex": r"^(.+)\.[a-z]+$"}}
    content = {**files, "extract": {"fileProperty": "content"}}
    return {
        "@type": "cr:RecordSet",
        "@id": f"{split}/{name}",
        "name": f"{split}/{name}",
        "key": {"@id": f"{split}/{name}/key"},
        "field": [
            _field(f"{split}/{name}/key", "sc:Text", source=key),
            _field(f"{split}/{name}/{field}", data_type, source=content),
        ],
    }


def _field(name: str, data_type: str, **properties: Any) -> dict[str, Any]:
    return {"@type": "cr:Field", "@id": name, "name": name, "dataType": data_type, **properties}
