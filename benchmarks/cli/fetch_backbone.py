"""`procap fetch backbone`: download the weights of CLIP, for machines that have no network when they train."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.cli.flags import command, flag
from benchmarks.console.output import columns, show, show_json


@command("procap fetch backbone ViT-B/16", "procap fetch backbone ViT-B/16 RN50 --pretrained openai")
def backbone(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="CLIPs, see `procap ls backbones`")],
    pretrained: Annotated[str, flag("TAG", "weights [default: the backbone's own]")] = "",
) -> int:
    """Download weights to the cache of the Hugging Face Hub, $HF_HOME, and print their size, digest and file.

    The digest is that of the weights in results. Weights that are there already are not downloaded again. On a machine
    without a network, set HF_HOME to a copy of the folder, or name the file with --pretrained.
    """
    from procap.weights.architectures import canonical_name
    from procap.weights.loading import find_source, weights_digest

    rows: list[dict[str, Any]] = []
    for name in names:
        architecture, tag = canonical_name(name, pretrained or None)
        file = find_source(architecture, tag).file
        rows.append({
            "backbone": name,
            "bytes": file.stat().st_size if file else 0,
            "digest": weights_digest(architecture, tag),
            "file": str(file or ""),
        })  # fmt: skip
    shown = [(row["backbone"], f"{row['bytes'] / 1e6:,.0f} MB", row["digest"], row["file"]) for row in rows]
    show(columns(("backbone", "size", "digest", "file"), shown))
    show_json(rows)
    return 0
