"""Loss terms as plain functions of tensors: ProCAP's three auxiliary ones, in float32, and a distance of distributions.

Shapes: B images, C classes, H InfoNCE width, P prompt tokens, D width, K rows, E joint embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def info_nce(image: Tensor, text: Tensor, labels: Tensor, log_temperature: Tensor) -> Tensor:
    """Compute the symmetric supervised InfoNCE term of ProCAP (section 3.4, equations 7 to 9), a scalar.

    image: [B, H] and text: [C, H], both of unit length; labels: [B] int64 in 0..C-1; log_temperature: log of tau_p.

    Image to class: cross-entropy of `image . text / tau_p` over all C classes, mean over the batch. Class to image: for
    each class present in the batch, minus the log of the total softmax weight of its images among all images of the
    batch; mean over these classes. The result is the mean of the two.
    The batch must be the global one: under data parallelism gather `image` and `labels` over the ranks first.
    """
    with torch.autocast(image.device.type, enabled=False):
        # [B, C], as `is_label`; what is reduced over the images (dim 0) is [C].
        similarity = image.float() @ text.float().t() * torch.exp(-log_temperature.float())
        image_to_class = F.cross_entropy(similarity, labels)
        is_label = labels[:, None] == torch.arange(len(text), device=labels.device)
        present = is_label.any(dim=0)
        # The fill is finite because -inf would make the gradient of absent classes NaN instead of zero. Their columns
        # are kept so that shapes are fixed and the host does not wait for the device.
        positives = similarity.masked_fill(~is_label, torch.finfo(similarity.dtype).min)
        # For each class over the images (dim 0): all positives of a class are in one logarithm.
        deficit = similarity.logsumexp(dim=0) - positives.logsumexp(dim=0)
        class_to_image = torch.where(present, deficit, 0.0).sum() / present.sum()
        return (image_to_class + class_to_image) / 2


def kl_to_standard_normal(mu: Tensor, logvar: Tensor) -> Tensor:
    """Sum KL(N(mu, exp(logvar)) || N(0, 1)) over every element of `mu` and `logvar` (same shape); a scalar.

    ProCAP's equation 3. Pass the log-variance that is sampled from, that is, after clamping.
    """
    mu, logvar = mu.float(), logvar.float()
    # Half the squared mean is part of it: at the paper's weights this outweighs `l2` five to one.
    return 0.5 * (logvar.exp() + mu.square() - 1 - logvar).sum()


def l2(mu: Tensor) -> Tensor:
    """Sum the squared norm of `mu` [..., P, D] over all tokens, ProCAP's equation 4; a scalar."""
    return mu.float().square().sum()


def mmd(now: Tensor, past: Tensor) -> Tensor:
    """Compute the squared maximum mean discrepancy of rows [K, E] under a Gaussian kernel of bandwidth 1."""
    pairs = ((now, now), (past, past), (now, past))
    # The means include the diagonals, and no root is taken, as in ReBaPL's public code; memory is K x K x E.
    same, other, cross = ((-(a[:, None] - b).square().sum(dim=2) / 2).exp().mean() for a, b in pairs)
    return same + other - 2 * cross
