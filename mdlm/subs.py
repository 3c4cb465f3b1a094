"""The SUBS parameterisation (MDLM, 2406.07524, section 3.2.3): log-probabilities without mass on the mask id.

`subs_log_probs` is the definition; `subs_nll` is what training uses of it, without a second tensor of the size of the
logits. Read next: `objective.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 2**18}  # one megabyte of float32 stays in a core's cache
_CHUNK_ELEMENTS_ELSEWHERE = 2**26


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def subs_log_probs(
    logits: Float[Tensor, "*axes vocab"], mask_token_id: int, num_tokens: int
) -> Float[Tensor, "*axes tokens"]:
    """Log-probabilities of the tokens that may be emitted (SUBS, MDLM section 3.2.3), shape [..., num_tokens].

    The column of the mask id is -inf, the padding rows of the vocabulary (ids >= num_tokens) are cut off, the rest is
    normalised in float32 (float64 logits: float64). A NaN in an allowed column makes its whole row NaN.
    """
    allowed = logits[..., :num_tokens].to(_compute_dtype(logits))
    column = torch.tensor(mask_token_id, device=logits.device)
    return allowed.index_fill(-1, column, -torch.inf).log_softmax(dim=-1)


class _SubsNll(torch.autograd.Function):
    """-log p of the targets under SUBS, a few rows at a time.

    Beside the logits only the gradient is ever as large as [rows, vocab], and with `reuse` it takes their place: no
    float32 copy of bf16 logits, no stored log-softmax, no dense one-hot gradient. The plain definition is
    `subs_log_probs(...).gather(...)`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mask_token_id: int, num_tokens: int, reuse: bool) -> Tensor:
        dtype = _compute_dtype(logits)
        normaliser = logits.new_empty(logits.shape[0], dtype=dtype)
        for rows in _chunks(logits):
            x = _allowed(logits[rows], dtype, mask_token_id, num_tokens, -torch.inf)
            largest = x.amax(dim=1, keepdim=True)
            normaliser[rows] = x.sub_(largest).exp_().sum(dim=1).log_().add_(largest[:, 0])
        nll = normaliser - logits.gather(1, targets[:, None]).squeeze(1).to(dtype)
        ctx.save_for_backward(logits, targets, normaliser)
        ctx.mask_token_id, ctx.num_tokens, ctx.reuse = mask_token_id, num_tokens, reuse
        return nll.masked_fill((targets == mask_token_id) | (targets >= num_tokens), torch.inf)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, normaliser = ctx.saved_tensors
        grad_logits = logits if ctx.reuse else torch.empty_like(logits)
        for rows in _chunks(logits):
            x = _allowed(logits[rows], normaliser.dtype, ctx.mask_token_id, ctx.num_tokens, -torch.inf)
            x = x.sub_(normaliser[rows, None]).exp_().mul_(grad[rows, None])
            x.scatter_add_(1, targets[rows, None], -grad[rows, None])
            x[:, ctx.mask_token_id] = 0.0
            x[:, ctx.num_tokens :] = 0.0
            grad_logits[rows] = x.to(logits.dtype)
        return grad_logits, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    count, vocab = logits.shape
    size = max(1, _CHUNK_ELEMENTS.get(logits.device.type, _CHUNK_ELEMENTS_ELSEWHERE) // vocab)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _allowed(logits: Tensor, dtype: torch.dtype, mask_token_id: int, num_tokens: int, fill: float) -> Tensor:
    """A fresh copy with every column that may not be emitted set to `fill`."""
    x = logits.to(dtype, copy=True)
    x[:, mask_token_id] = fill
    x[:, num_tokens:] = fill
    return x


def subs_nll(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, "rows"],
    mask_token_id: int,
    num_tokens: int,
    reuse: bool = False,
) -> Float[Tensor, "rows"]:
    """Negative log-likelihood in nats of each row's target under `subs_log_probs`, differentiable once.

    float32 or better. A target that may not be emitted costs +inf; NaN in an allowed column gives NaN. With `reuse` the
    backward writes the gradient over the logits, for a caller that does not look at them again (the largest tensor of a
    training step is then there once); a second backward raises.
    """
    nll: Tensor = _SubsNll.apply(logits, targets, mask_token_id, num_tokens, reuse)
    return nll
