"""The NELBO of a block-diffusion model: how likely a text is written block by block, each under its clean past.

BD3-LM (arXiv 2503.09573, eq. 8): the sum over blocks of each one's own NELBO, every block with a time of its own, all
blocks of a row in one evaluation over [x_t ; x_0]. Blocks are noised as rows are (`mdlm/block.py`), so everything that
`likelihood.py` says of times, masks and the standard error holds; the unit of the error stays the group of rows. With
`block_size` 1 no noise is left: the number is the exact negative log-likelihood of a causal model.
Read first: `likelihood.py`, which asks here wherever a protocol or a denoiser has blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from mdlm.block import units_of
from mdlm.data import Batch

if TYPE_CHECKING:
    from mdlm.denoiser import Denoiser
    from mdlm.eval.likelihood import NelboProtocol


@runtime_checkable
class BlockDenoiser(Protocol):
    """A `Denoiser` that predicts every block of a row under the clean blocks before it, all in one evaluation."""

    @property
    def block_size(self) -> int | None:
        """Length of its blocks; None: it has none, and `by_blocks` raises ValueError."""

    def by_blocks(
        self,
        tokens: Int[Tensor, "batch seq"],
        clean: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows tokens"]:
        """As `Denoiser.__call__`, but what `tokens` masks in earlier blocks is read from `clean`."""


def blocks_of(denoiser: Denoiser) -> int | None:
    """Length of the blocks of the network behind a denoiser, whether or not it takes [x_t ; x_0]; None: no blocks."""
    if isinstance(denoiser, BlockDenoiser):
        return denoiser.block_size
    inner = getattr(denoiser, "model", None)
    found: int | None = getattr(getattr(inner, "shape", inner), "block_size", None)
    return found


def with_own_blocks(protocol: NelboProtocol, denoiser: Denoiser) -> NelboProtocol:
    """`protocol` with the denoiser's own blocks, where it does not say any.

    The masks of a whole row would show such a model a noised past, which it was never trained on. Raises ValueError
    where the protocol names blocks that the denoiser does not have, or a network with blocks cannot take [x_t ; x_0].
    """
    own = blocks_of(denoiser)
    if not isinstance(denoiser, BlockDenoiser) and own is not None:
        raise ValueError(
            f"{type(denoiser).__name__} has blocks of {own}, but no forward over noised and clean text, which the "
            "likelihood of a model with blocks needs; convert it to MDLMForMaskedLM where its format allows"
        )
    if protocol.block_size is None:
        return protocol if own is None else replace(protocol, block_size=own)
    if protocol.block_size != own:
        has = "has no blocks that it evaluates at once" if own is None else f"has blocks of {own}"
        raise ValueError(
            f"the protocol asks for blocks of {protocol.block_size}, but {type(denoiser).__name__} {has}; leave "
            "block_size out"
        )
    return protocol


def block_noise(
    protocol: NelboProtocol, batch: Batch, sample: int, mask_token_id: int
) -> tuple[Bool[Tensor, "batch seq"], Float64[Tensor, "batch seq"]]:
    """One draw of the masks of every block, and what the loss of each masked token weighs."""
    units = units_of(batch, protocol.block_size, protocol.strata_rows)
    narrow = Batch(units.input_ids, units.maskable, units.numbers)
    per_unit = replace(protocol, block_size=None, strata_rows=protocol.strata_rows * units.per_row)
    corruption, weight = per_unit.noise(narrow, sample, mask_token_id)
    return units.per_token(corruption.masked), units.per_token(weight[:, None] * corruption.masked)


def block_log_probs(
    denoiser: Denoiser, batch: Batch, masked: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "rows tokens"]:
    """Log-probabilities at the masked tokens, packed; `batch` holds the clean ones, both on the denoiser's device."""
    assert isinstance(denoiser, BlockDenoiser), "checked by with_own_blocks"
    with torch.no_grad():
        return denoiser.by_blocks(
            batch.input_ids.masked_fill(masked, denoiser.mask_token_id),
            batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            at=masked,
        )
