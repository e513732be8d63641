"""The embedded CLIP `mini`: a tiny ViT CLIP trained on generated images, shipped inside the package.

Its file keeps only the vocabulary rows that its training used: `token_rows` [R] says which, `token_embedding.weight`
[R, D] holds them. Every other word gets their mean, so that any class name can be tokenized and none is random.

Shapes: R stored vocabulary rows, V vocabulary, D text width.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from procap.clip import CLIP
from procap.errors import UserError
from procap.weights.files import geometry_of, read_weights

EMBEDDED = Path(__file__).with_name("mini.safetensors")
VOCABULARY = 49408


def load_mini(path: Path | None = None) -> CLIP:
    """Load the embedded model, or another of its format. Raises UserError for a file that is not in that format."""
    source = path or EMBEDDED
    weights = read_weights(source)
    rows = weights.state.pop("token_rows", None)
    table = weights.state.get("text.token_embedding.weight")
    if rows is None or table is None or weights.quick_gelu is None:
        raise UserError(f"{source} is not in mini's format: it needs token_rows, token_embedding.weight, quick_gelu")
    weights.state["text.token_embedding.weight"] = expand_vocabulary(table, rows)
    geometry = geometry_of(weights, weights.quick_gelu, source)
    try:
        return CLIP.from_state(weights.state, geometry, name="mini", pretrained=str(path or "embedded"))
    except ValueError as error:
        raise UserError(f"{source} does not hold a complete mini: {error}") from None


def expand_vocabulary(table: Tensor, rows: Tensor) -> Tensor:
    """Expand stored rows [R, D] to the full table [V, D], float32; rows that are not stored get the stored mean."""
    stored = table.float()
    if len(rows) != len(stored) or not 0 <= int(rows.min()) <= int(rows.max()) < VOCABULARY:
        raise UserError(f"mini's token_rows do not match its embedding: {len(rows)} row numbers for {len(stored)} rows")
    full = stored.mean(dim=0).repeat(VOCABULARY, 1)
    full[rows] = stored
    return full
