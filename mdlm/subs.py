"""The SUBS parameterisation (MDLM, 2406.07524, section 3.2.3): log-probabilities without mass on the mask id.

This is the definition; `head_loss.py` makes the training loss without keeping the logits. Read next: `objective.py`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of log-probabilities made from logits of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def subs_log_probs(
    logits: Float[Tensor, "*axes vocab"], mask_token_id: int, num_tokens: int
) -> Float[Tensor, "*axes tokens"]:
    """Log-probabilities of the tokens that may be emitted (SUBS, MDLM section 3.2.3), shape [..., num_tokens].

    The column of the mask id is -inf, the padding rows of the vocabulary (ids >= num_tokens) are cut off, the rest is
    normalised in float32 (float64 logits: float64). A NaN in an allowed column makes its whole row NaN.
    """
    allowed = logits[..., :num_tokens].to(compute_dtype(logits.dtype))
    column = torch.tensor(mask_token_id, device=logits.device)
    return allowed.index_fill(-1, column, -torch.inf).log_softmax(dim=-1)


def subs_nll(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, "rows"], mask_token_id: int, num_tokens: int
) -> Float[Tensor, "rows"]:
    """Negative log-likelihood in nats of each row's target under `subs_log_probs`; +inf where it may not be emitted."""
    log_probs = subs_log_probs(logits, mask_token_id, num_tokens)
    nll = -log_probs.gather(1, targets[:, None].clamp(max=num_tokens - 1)).squeeze(1)
    return nll.masked_fill((targets == mask_token_id) | (targets >= num_tokens), torch.inf)
