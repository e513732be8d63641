"""`croissant.json`: a packed data set described for the Hub, Dataset Search and `mlcroissant`, as Croissant 1.0.

https://docs.mlcommons.org/croissant/docs/croissant-spec.html. It is derived from the manifest alone, and nothing here
reads it: it changes no digest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shards.catalogue import find_or_none
from shards.manifest import Manifest, SplitEntry
from shards.tar import IMAGES

FILE = "croissant.json"
CONFORMS_TO = "http://mlcommons.org/croissant/1.0"


def croissant_json(manifest: Manifest) -> str:
    """Describe a packed data set: shards with SHA-256, classes, and the images and labels of each split."""
    dataset = find_or_none(manifest.dataset)
    subject = dataset.description if dataset else manifest.source
    names = [name.replace("_", " ").strip() for name in manifest.classnames]
    classes = _record_set("classes", ("label", "sc:Integer", {}), ("name", "sc:Text", {}))
    classes["dataType"] = "sc:Enumeration"
    classes["data"] = [{"classes/label": label, "classes/name": name} for label, name in enumerate(names)]
    document: dict[str, Any] = {
        "@context": json.loads(Path(__file__).with_name("croissant_context.json").read_text(encoding="utf-8")),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": manifest.dataset,
        "description": f"{subject}; {manifest.images:,} images as WebDataset",
        "version": "1.0.0",
        "distribution": [],
        "recordSet": [classes],
    }
    if dataset:
        document["license"] = dataset.licence
    for split, entry in manifest.splits.items():
        images = _file_set(f"{split}-images", entry, "image/*", *IMAGES)
        labels = _file_set(f"{split}-labels", entry, "text/plain", "cls")
        document["distribution"] += [*_tars(entry), images, labels]
        document["recordSet"].append(_records(f"{split}/images", images, "image", "sc:ImageObject"))
        document["recordSet"].append(_records(f"{split}/labels", labels, "label", "sc:Integer"))
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _tars(entry: SplitEntry) -> list[dict[str, Any]]:
    return [
        {
            "@type": "cr:FileObject",
            "@id": shard.file,
            "name": shard.file,
            "contentUrl": shard.file,
            "contentSize": f"{shard.size} B",
            "encodingFormat": "application/x-tar",
            "sha256": shard.sha256,
        }
        for shard in entry.shards
    ]


def _file_set(name: str, entry: SplitEntry, encoding: str, *extensions: str) -> dict[str, Any]:
    """Describe the members of a split's shards with some extensions."""
    return {
        "@type": "cr:FileSet",
        "@id": name,
        "name": name,
        "containedIn": [{"@id": shard.file} for shard in entry.shards],
        "encodingFormat": encoding,
        "includes": [f"*.{extension}" for extension in extensions],
    }


def _records(name: str, files: dict[str, Any], field: str, data_type: str) -> dict[str, Any]:
    """Describe a record per member: its content, and the key that image and label share, its name before the dot."""
    file_set = {"fileSet": {"@id": files["@id"]}}
    key = {**file_set, "extract": {"fileProperty": "filename"}, "transform": {"regex": r"^(.+)\.[a-z]+$"}}
    content = {**file_set, "extract": {"fileProperty": "content"}}
    return _record_set(name, ("key", "sc:Text", {"source": key}), (field, data_type, {"source": content}))


def _record_set(name: str, *fields: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Describe records by their fields (name, type, properties), of which the first is the key."""
    described = [
        {"@type": "cr:Field", "@id": f"{name}/{field}", "name": f"{name}/{field}", "dataType": data_type, **properties}
        for field, data_type, properties in fields
    ]
    key = {"@id": described[0]["@id"]}
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "key": key, "field": described}
