"""The LM head and its loss in one: the weighted NELBO terms of a few rows without keeping their logits.

The largest tensor of a training step is [rows, vocab]. Its gradient is known as soon as the logits are (softmax minus
one-hot, times the row's weight, which the objective fixes before the forward), so both are made for some rows at a
time, the gradient in the place of the logits, and turned into the gradients of hidden states and head at once. The
definition is `lm_head` followed by `subs.subs_nll`; nothing differs but time, memory and the order of sums.
Read next: `objective.py`, which asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from transformers.utils import ModelOutput

from mdlm.subs import compute_dtype

_IN_CACHE = {"cpu": 2**18}  # elements of the float32 work space: one megabyte stays in a core's cache
_IN_CACHE_ELSEWHERE = 2**26
_LOGITS = {"cpu": 2**23}  # logits alive at a time, unless that is fewer rows than
_FEWEST_ROWS = 256  # whose products still pay for adding their gradient to the head's
_LOGITS_ELSEWHERE = 2**28
_HEAD_ROWS = 8192  # of the head's gradient, made at a time


@dataclass(frozen=True)
class Scored:
    """What the loss of the rows that `logits_at` names needs to know, in their order."""

    targets: Int[Tensor, "rows"]
    weight: Float[Tensor, "rows"]
    """Factor on each row's negative log-likelihood; rows of weight 0 are evaluated and change nothing."""
    mask_token_id: int
    num_tokens: int


@dataclass
class ScoredOutput(ModelOutput):
    """What `MDLMForMaskedLM` returns for `scored`."""

    loss: Float[Tensor, ""] | None = None
    """Weighted sum of `nll`; differentiable once, and a second backward raises."""
    nll: Float32[Tensor, "rows"] | None = None
    """Negative log-likelihood of each row's target in nats, without gradient."""


def fuses(head: nn.Module) -> bool:
    """Whether `head` is a plain matrix product, which is what can be fused (not an adapted or a scaled one)."""
    return type(head) is nn.Linear and head.bias is None


def weighted_nll(
    hidden: Float[Tensor, "rows width"], head: Float[Tensor, "vocab width"], scored: Scored
) -> tuple[Float[Tensor, ""], Float32[Tensor, "rows"]]:
    """(sum of weight x nll, nll per row without gradient) under SUBS, float32 or better.

    Under autocast the products are made in its precision, as `nn.Linear` makes them. A target that may not be emitted
    costs +inf; NaN in an allowed column gives NaN.
    """
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    loss, nll = _WeightedNll.apply(
        hidden, head, scored.targets, scored.weight, scored.mask_token_id, scored.num_tokens, dtype
    )
    return loss, nll


class _WeightedNll(torch.autograd.Function):
    """Gradients are made in the forward, for an upstream gradient of 1; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weight: Tensor,
        mask_token_id: int,
        num_tokens: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, of_head = ctx.needs_input_grad[:2]
        x, matrix = hidden.to(dtype), head.to(dtype)
        exact = compute_dtype(dtype)
        weight = weight.to(exact)
        nll = torch.empty(len(targets), dtype=exact, device=hidden.device)
        grad_hidden = torch.empty_like(x) if of_hidden else None
        grad_head = torch.zeros(head.shape, dtype=exact, device=head.device) if of_head else None
        elements = max(_LOGITS.get(hidden.device.type, _LOGITS_ELSEWHERE), _FEWEST_ROWS * len(head))
        for rows in _chunks(len(targets), len(head), elements):
            logits = x[rows] @ matrix.T
            wants = weight[rows] if of_hidden or of_head else None
            nll[rows] = nll_and_gradient_(logits, targets[rows], wants, mask_token_id, num_tokens)
            if grad_hidden is not None:
                grad_hidden[rows] = logits @ matrix
            if grad_head is not None:
                for part in range(0, len(head), _HEAD_ROWS):
                    grad_head[part : part + _HEAD_ROWS] += logits[:, part : part + _HEAD_ROWS].T @ x[rows]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.dtypes = hidden.dtype, head.dtype
        loss = torch.where(weight == 0, 0.0, weight * nll).sum()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(grad.to(grad_hidden.dtype)).to(ctx.dtypes[0])
        if grad_head is not None:
            grad_head = grad_head.mul_(grad).to(ctx.dtypes[1])  # in place: a second backward raises
        return grad_hidden, grad_head, None, None, None, None, None


def nll_and_gradient_(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, "rows"],
    weight: Float[Tensor, "rows"] | None,
    mask_token_id: int,
    num_tokens: int,
) -> Float[Tensor, "rows"]:
    """The rows' nll; with `weight`, the gradient of the weighted sum is written over the logits."""
    exact = compute_dtype(logits.dtype)
    nll = torch.empty(len(targets), dtype=exact, device=logits.device)
    for rows in _chunks(len(targets), logits.shape[1], _IN_CACHE.get(logits.device.type, _IN_CACHE_ELSEWHERE)):
        target = targets[rows, None]
        x = logits[rows].to(exact, copy=True)
        x[:, mask_token_id] = -torch.inf
        x[:, num_tokens:] = -torch.inf
        own = x.gather(1, target)
        largest = x.amax(dim=1, keepdim=True)
        total = x.sub_(largest).exp_().sum(dim=1, keepdim=True)
        nll[rows] = (total.log() + largest - own)[:, 0]
        if weight is not None:
            scale = weight[rows, None]
            x.mul_(scale / total).scatter_add_(1, target, -scale)
            x[:, mask_token_id] = 0.0
            x[:, num_tokens:] = 0.0
            logits[rows] = x.to(logits.dtype)
    return nll


def _chunks(rows: int, vocab: int, elements: int) -> Iterator[slice]:
    size = max(1, elements // vocab)
    if size > 1:
        size = 2 ** (size.bit_length() - 1)  # few sizes: the CPU's matmul library builds a kernel for each
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
