"""From a network's logits to log-probabilities one can draw from, whatever the logits hold.

SUBS (`subs.py`): no mass on the mask id, padding rows of the vocabulary cut off, normalised in float32 or better.
Infinite logits are limits, and logits from which no law can be made are an error. Read next: `denoiser.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mdlm.passes import row_blocks
from mdlm.subs import subs_log_probs


def emit_log_probs(
    logits: Float[Tensor, "*axes vocab"],
    mask_token_id: int,
    num_tokens: int,
    overwrite: bool = False,
    again: Callable[[], Float[Tensor, "*axes vocab"]] | None = None,
) -> Float[Tensor, "*axes tokens"]:
    """`subs_log_probs` for any logits: infinite ones are limits (several +inf share the mass), the rest raises.

    With `overwrite` the logits are the caller's to lose: the answer takes their place where it fits, block by block
    (`passes.py`). `again`, which computes the same logits once more, saves looking through them first: it is asked
    where the answer shows that they held no law. Raises ValueError for NaN and for a position where nothing but the
    mask id is above -inf.
    """
    if not overwrite:
        return _with_limits(subs_log_probs(logits, mask_token_id, num_tokens), logits, mask_token_id, num_tokens)
    logits.select(-1, mask_token_id).fill_(-torch.inf)
    rows, wide = logits.flatten(0, -2), torch.promote_types(logits.dtype, torch.float32)
    fits = wide == logits.dtype and num_tokens == logits.shape[-1]
    if fits and not rows.requires_grad:
        if again is not None:
            log_probs = torch.log_softmax(rows, dim=-1, out=rows)
            if not bool(_broken(log_probs, mask_token_id).any()):
                return log_probs.view(logits.shape)
            return emit_log_probs(again(), mask_token_id, num_tokens)
        if bool(rows.amax(dim=-1).isfinite().all()):  # no limits to take
            return torch.log_softmax(rows, dim=-1, out=rows).view(logits.shape)
    out = rows if fits else rows.new_empty((len(rows), num_tokens), dtype=wide)
    blocks = list(row_blocks(rows, len(rows)))
    for block in blocks:
        log_probs = rows[block, :num_tokens].to(wide).log_softmax(dim=-1)
        log_probs = _with_limits(log_probs, rows[block], mask_token_id, num_tokens)
        if len(blocks) == 1:
            return log_probs.view(*logits.shape[:-1], num_tokens)
        out[block] = log_probs
    return out.view(*logits.shape[:-1], num_tokens)


def _broken(log_probs: Float[Tensor, "*axes tokens"], mask_token_id: int) -> Bool[Tensor, "*axes"]:
    """Whose logits held NaN or +inf, or nothing else than -inf: then the log-softmax is NaN at every other token."""
    return log_probs[..., 1 if mask_token_id == 0 else 0].isnan()


def _with_limits(
    log_probs: Float[Tensor, "*axes tokens"], logits: Float[Tensor, "*axes vocab"], mask_token_id: int, num_tokens: int
) -> Float[Tensor, "*axes tokens"]:
    """The log-softmax of logits, where infinite ones broke it, mended; see `emit_log_probs`."""
    broken = _broken(log_probs, mask_token_id)
    if not bool(broken.any()):
        return log_probs
    rows = logits[broken].to(log_probs.dtype)
    allowed = rows[:, :num_tokens].index_fill(-1, torch.tensor(mask_token_id, device=rows.device), -torch.inf)
    if bool(allowed.isnan().any()):
        raise ValueError(
            "the model's logits hold NaN; check its weights and its precision (float16 overflows where bfloat16 holds)"
        )
    if bool((allowed == -torch.inf).all(dim=-1).any()):
        raise ValueError(
            "the model's logits are -inf for every token that may be emitted at some position, so there is nothing to "
            "choose from"
        )
    infinite = allowed == torch.inf
    limit = torch.where(infinite, 0.0, -torch.inf).to(rows.dtype)
    repaired = torch.where(infinite.any(dim=-1, keepdim=True), limit, allowed).log_softmax(dim=-1)
    return log_probs.masked_scatter(broken[..., None].expand_as(log_probs), repaired)
