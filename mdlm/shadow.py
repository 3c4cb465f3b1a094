"""What would the model say of a decided token if it did not see it? Shadow rows (WINO, 2507.18578, section 3.2).

Each decided token gets a shadow: one more mask token at the same position, appended to the row. The canvas does not see
shadows; a shadow sees the canvas without the token that it stands for, and itself. So one forward over L + (number of
shadows) tokens predicts the undecided positions as usual and judges all decided ones.

In a network of one layer that is exactly the prediction with the token masked. In deeper ones it is an approximation:
the other tokens have read the hidden one in earlier layers, and carry a trace of it. Read next: `samplers/wino.py`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mdlm.attention import document_ids, token_positions, visible
from mdlm.attention_rows import slots
from mdlm.config import MDLMConfig
from mdlm.layers import rotary_angles
from mdlm.modeling import MDLMForMaskedLM


@runtime_checkable
class ShadowDenoiser(Protocol):
    """A `Denoiser` that can judge decided tokens by shadow rows."""

    def check_shadows(self) -> None:
        """Raises ValueError if this model or its attention implementation has none."""

    def with_shadows(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        at: Bool[Tensor, "batch seq"],
        shadows: Bool[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "shadow_rows vocab"]]:
        """Log-probabilities at `at` as usual, and at `shadows` as seen from their shadows; both in row-major order.

        Feeds one more token for each position in `shadows`, in the same forward.
        """


def check_shadows(config: MDLMConfig) -> None:
    """Raises ValueError if a model of this configuration cannot be given shadows."""
    if config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"shadow rows need a mask for each query, which {config._attn_implementation} does not take here; "
            "load the model with attn_implementation='sdpa', or verify by masking each token in turn (verify='masked')"
        )
    if config.shift_logits:
        raise ValueError(
            "shadow rows are not defined for a model that predicts each token from the one before it (shift_logits); "
            "verify by masking each token in turn (verify='masked')"
        )


def shadow_logits(
    model: MDLMForMaskedLM,
    tokens: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None,
    at: Bool[Tensor, "batch seq"],
    shadows: Bool[Tensor, "batch seq"],
) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "shadow_rows vocab"]]:
    """Raw logits at `at`, and at `shadows` as seen from their shadows. One document per row."""
    config, backbone = model.config, model.model
    assert config.mask_token_id is not None
    seq = tokens.shape[1]
    place, used = slots(shadows)
    width = place.shape[1]
    positions = token_positions(tokens, attention_mask, None).expand_as(tokens)
    all_positions = torch.cat([positions, positions.gather(1, place)], dim=1)
    all_tokens = torch.cat([tokens, torch.full_like(place, config.mask_token_id)], dim=1)
    documents = document_ids(attention_mask, None)
    documents = torch.zeros_like(tokens) if documents is None else documents
    all_documents = torch.cat([documents, torch.where(used, 0, -1)], dim=1)
    mask = visible(all_positions, all_documents, config.block_size)
    assert mask is not None
    mask[:, :, :, seq:] = False
    own = torch.arange(seq, device=tokens.device) == place[:, :, None]
    mask[:, 0, seq:, :seq] &= ~own
    mask[:, :, seq:, seq:] |= torch.eye(width, dtype=torch.bool, device=tokens.device)

    hidden = backbone.embed(all_tokens, all_positions)
    rotation = rotary_angles(config, all_positions)
    for layer in backbone.layers:
        hidden, _ = layer(hidden, rotation, mask, None)
    hidden = backbone.norm(hidden)

    def head(part: Float[Tensor, "batch _ width"], where: Bool[Tensor, "batch _"]) -> Float[Tensor, "rows vocab"]:
        rows, count = model._rows_at(part, where, None)
        logits: Tensor = model.lm_head(rows)[:count]
        return logits

    return head(hidden[:, :seq], at), head(hidden[:, seq:], used)
