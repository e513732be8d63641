"""Counted work of a prompt method over a frozen CLIP: floating-point operations of matrix products, by arithmetic.

A multiplication and an addition are two operations; element-wise work, softmax and norms are left out, as in
`torch.utils.flop_counter`, whose conventions these are: causal attention counts in full, its backward pass computes
the scores anew (five products for two). Frozen weights have no gradient, so a linear layer costs the same once more.

Shapes: B images, C classes (text rows), L sequence, P prompt tokens, D width, M hidden width, E joint embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from procap.exact_optimizations import Savings
from procap.geometry import Geometry
from procap.methods.method import Method
from procap.packing import PromptSet
from procap.plan import INPUT, Plan


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a forward pass and of the backward pass through it."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True)
class Rows:
    """The rows of one block's batch of sequences.

    inputs: rows that enter, all sequences together, shared ones once. outputs: rows whose state is wanted behind it.
    pairs: query-key pairs of attention, one head. learned: rows that carry a gradient where the first learned tokens
    enter; those behind the block always do.
    """

    inputs: int
    outputs: int
    pairs: int
    learned: int


def block_work(rows: Rows, width: int, hidden: int, *, gradient: bool, twice: bool = False) -> Work:
    """One residual block: attention with its four projections, and the MLP.

    twice: the projections of learned rows are computed with the constant ones first, and then again with a graph.
    """
    queries = 2 * rows.outputs * width * width
    keys_values = 4 * rows.inputs * width * width
    behind = 2 * rows.outputs * (width * width + 2 * width * hidden)
    attention = 4 * rows.pairs * width
    forward = queries + keys_values + behind + attention
    if not gradient:
        return Work(forward)
    share = rows.learned / rows.inputs
    projected = share * (queries + keys_values)
    return Work(forward + projected * twice, projected + behind + 2.5 * attention)


def image_work(
    geometry: Geometry, plan: Plan, batch: int, savings: Savings, *, train: bool, executed: bool = False
) -> Work:
    """`encode_image` of `batch` images [B] with the tokens of `plan`."""
    g = geometry
    patches = (g.image_size // g.patch_size) ** 2
    length = 1 + patches + _added(plan, INPUT)
    first = _first_learned(plan) if train else None
    work = Work(2.0 * batch * patches * 3 * g.patch_size**2 * g.vision_width)
    for layer in range(g.vision_layers):
        length += _added(plan, layer)
        last = savings.last_rows and layer == g.vision_layers - 1
        learned = _entering(plan, layer, first)
        frozen = savings.frozen_rows and layer == first and 2 * learned <= length
        rows = Rows(
            inputs=batch * length,
            outputs=batch if last else batch * length,
            pairs=batch * length * (1 if last else length),
            learned=batch * (learned if frozen else length),
        )
        gradient = first is not None and layer >= first
        work += block_work(rows, g.vision_width, g.vision_mlp, gradient=gradient, twice=executed and frozen)
    projection = 2.0 * batch * g.vision_width * g.embed_dim
    return work + Work(projection, projection if first is not None else 0.0)


@dataclass(frozen=True)
class TextShape:
    """One set of class prompts in the text tower.

    rows: in every block; shared: of them those of the prefix. pairs: query-key pairs of a block. ends: rows that are
    read out, as the last block asks for them, and last_pairs: its pairs then.
    """

    rows: int
    shared: int
    pairs: int
    ends: int
    last_pairs: int


def text_shape(geometry: Geometry, prompts: PromptSet, plan: Plan, savings: Savings, *, executed: bool) -> TextShape:
    """What `prompts` come to under `plan`: what must be computed, or what is `executed`, masked scores and all."""
    columns = max(prompts.lengths) if savings.trim or savings.pack else prompts.ids.shape[1]
    added = sum(_added(plan, layer) for layer in range(INPUT, geometry.text_layers))
    packs, shares = savings.pack, savings.prefix
    if executed and (packs or shares):
        layers, context = geometry.text_layers, geometry.context_length
        layout = prompts.layout(plan, layers, context, savings.trim, packs, shares)
        if layout is not None:
            shared, groups = _shared_rows(prompts, plan) if shares else 0, layout.patterns[0].groups
            size = (layout.rows - shared) // groups
            pairs = shared**2 + groups * size * (shared + size) if groups > 1 else layout.rows**2
            return TextShape(layout.rows, shared, pairs, len(layout.ends), len(layout.ends) * (shared + size))
        packs = shares = False
    lengths = [min(length + added, geometry.context_length) for length in prompts.lengths]
    if not packs:
        lengths = [min(columns + added, geometry.context_length)] * len(lengths)
    shared = _shared_rows(prompts, plan) if shares else 0
    pairs = shared**2 + sum((length - shared) * length for length in lengths)
    return TextShape(shared + sum(lengths) - shared * len(lengths), shared, pairs, len(lengths), sum(lengths))


def text_work(
    geometry: Geometry,
    prompts: PromptSet,
    plan: Plan,
    savings: Savings,
    *,
    train: bool,
    copies: int = 1,
    executed: bool = False,
) -> Work:
    """`encode_text` of `prompts` with the tokens of `plan`, under `copies` sets of them."""
    g = geometry
    shape = text_shape(g, prompts, plan, savings, executed=executed)
    first = _first_learned(plan) if train else None
    work = Work()
    for layer in range(g.text_layers):
        last = savings.last_rows and layer == g.text_layers - 1
        learned = _entering(plan, layer, first) * (1 if shape.shared else len(prompts))
        frozen = savings.frozen_rows and layer == first and 2 * learned <= shape.rows
        rows = Rows(
            inputs=copies * shape.rows,
            outputs=copies * (shape.ends if last else shape.rows),
            pairs=copies * (shape.last_pairs if last else shape.pairs),
            learned=copies * (learned if frozen else shape.rows),
        )
        gradient = first is not None and layer >= first
        work += block_work(rows, g.text_width, g.text_mlp, gradient=gradient, twice=executed and frozen)
    if first is not None and savings.chunk_rows is not None and copies * shape.rows > savings.chunk_rows:
        work += Work(0.0, work.forward)
    projection = 2.0 * copies * len(prompts) * g.text_width * g.embed_dim
    return work + Work(projection, projection if first is not None else 0.0)


def training_step(method: Method, batch: int, *, executed: bool = False) -> Work:
    """One step of `method` on `batch` images, under the savings of its towers: both towers, prompts and loss.

    executed: count what the towers do, masked scores included, instead of what must be done.
    """
    clip, prompts = method.clip, method.prompts
    copies = batch if _conditional(method) else 1
    image_plan, text_plan = method.plans(prompts)
    work = image_work(clip.geometry, image_plan, batch, clip.savings, train=True, executed=executed)
    work += text_work(
        clip.geometry, prompts.tokenized, text_plan, clip.savings, train=True, copies=copies, executed=executed
    )
    classes = len(prompts.ids)
    return work + own_work(method, batch, classes, train=True) + logit_work(method, batch, classes, train=True)


def evaluation(method: Method, batch: int, *, every_batch: bool, executed: bool = False) -> Work:
    """Logits of `batch` images; `every_batch`: prompts and class features are computed for them anew."""
    clip, prompts = method.clip, method.prompts
    classes, conditional = len(prompts.ids), _conditional(method)
    image_plan, text_plan = method.plans(prompts)
    work = image_work(clip.geometry, image_plan, batch, clip.savings, train=False)
    work += logit_work(method, batch, classes, train=False)
    if every_batch or conditional:
        copies = batch if conditional else 1
        work += text_work(
            clip.geometry, prompts.tokenized, text_plan, clip.savings, train=False, copies=copies, executed=executed
        )
        work += own_work(method, batch, classes, train=False)
    return work


def logit_work(method: Method, batch: int, classes: int, *, train: bool) -> Work:
    """Cosines of B images and C classes; in training with gradients for both sides where both have them."""
    forward = 2.0 * batch * classes * method.clip.geometry.embed_dim
    return Work(forward, 2 * forward if train else 0.0)


def own_work(method: Method, batch: int, classes: int, *, train: bool) -> Work:
    """The method's own linear layers, with gradients for weights and inputs; exact for the methods of this package."""
    forward = 0.0
    tokens = int(getattr(method.options, "n_ctx", 1))
    depth = int(getattr(method.options, "depth", 1))
    for name, module in method.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        head = name.partition(".")[0]
        if head in ("image_head", "text_head") and not train:
            continue
        rows = {"image_head": batch, "meta_net": batch, "text_head": classes}.get(head, tokens)
        # One projection between the modalities serves every level.
        rows *= depth if name == "vision_to_text" else 1
        forward += 2.0 * rows * module.in_features * module.out_features
    if train and hasattr(method, "text_head"):
        forward += 2.0 * batch * classes * int(getattr(method.options, "nce_width", 0))
    return Work(forward, 2 * forward if train else 0.0)


def _conditional(method: Method) -> bool:
    """Whether every image has class prompts of its own."""
    return hasattr(method, "meta_net")


def _added(plan: Plan, layer: int) -> int:
    return sum(op.tokens.shape[-2] for op in plan if op.layer == layer and op.mode != "replace")


def _first_learned(plan: Plan) -> int | None:
    """The first block whose input has a gradient; INPUT is the first block's."""
    return min((max(0, op.layer) for op in plan if op.tokens.requires_grad), default=None)


def _entering(plan: Plan, layer: int, first: int | None) -> int:
    """Learned rows per sequence that enter at block `layer`, where it is the first that has any."""
    if first != layer:
        return 0
    return sum(op.tokens.shape[-2] for op in plan if max(0, op.layer) == layer and op.tokens.requires_grad)


def _shared_rows(prompts: PromptSet, plan: Plan) -> int:
    """Leading rows that are the same for every class: equal ids, and tokens that are not per class."""
    equal = next((column for column, same in enumerate(prompts.same) if not same), len(prompts.same))
    own_tokens = [op.start for op in plan if op.tokens.dim() == 3]
    return max(0, min([equal, min(prompts.lengths) - 1, *own_tokens]))
