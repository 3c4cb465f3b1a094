"""Which positions does a prediction read from? Attention weights between the positions asked for, and no others.

Span-level samplers (CLAD, 2605.29607; DAPD, 2603.12996) decide by attention what may be committed together. Asking a
network for all its weights would cost [heads, seq, seq] per layer and rule out flash attention. Here the inputs of the
last layers' attention are noted while the one forward runs, whatever implementation runs it, and softmax(q k / sqrt d)
is computed again for the rows of interest only. Values are normalised over everything the row sees, padding excluded;
only then are the columns of interest taken. Read next: `samplers/conflicts.py`, which uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mdlm.attention import FlashPlan, document_ids, previous_in_document, token_positions
from mdlm.layers import MDLMAttention, rotary_angles, rotate
from mdlm.modeling import MDLMForMaskedLM


def layer_count(layers: int | float, total: int) -> int:
    """How many of `total` layers `layers` means: a number of them (all, if there are fewer), or a fraction in (0, 1),
    rounded up. Raises ValueError for anything else."""
    if isinstance(layers, float) and 0 < layers < 1:
        return math.ceil(layers * total)
    if isinstance(layers, int) and layers >= 1:
        return min(layers, total)
    raise ValueError(f"layers is {layers}; it must be a whole number of 1 or more, or a fraction between 0 and 1")


def slots(at: Bool[Tensor, "batch seq"]) -> tuple[Int[Tensor, "batch slots"], Bool[Tensor, "batch slots"]]:
    """The True positions of each row, from the left, in as many columns as the fullest row needs; and which columns a
    row uses. Unused ones hold position 0."""
    row, position = at.nonzero(as_tuple=True)
    slot = (at.long().cumsum(dim=-1) - 1)[row, position]
    count = at.sum(dim=-1)
    used = torch.arange(int(count.max()), device=at.device) < count[:, None]
    index = torch.zeros(used.shape, dtype=torch.int64, device=at.device)
    index[row, slot] = position
    return index, used


@contextmanager
def noted_inputs(model: MDLMForMaskedLM, layers: int) -> Iterator[dict[nn.Module, Float[Tensor, "..."]]]:
    """While open, the input of the attention of the last `layers` layers, `[batch, seq, width]` or, under flash
    attention, packed as `FlashPlan` says."""
    noted: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden"]
        assert module not in noted, "one forward at a time"
        noted[module] = hidden

    modules = [layer.self_attn for layer in model.model.layers[-layers:]]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def attention_rows(
    model: MDLMForMaskedLM,
    noted: dict[nn.Module, Float[Tensor, "..."]],
    at: Bool[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None,
    position_ids: Int[Tensor, "batch seq"] | None,
) -> Float[Tensor, "batch slots slots"]:
    """Attention from the prediction of each position in `at` to each position in `at`, mean over heads and over the
    layers in `noted`; float32 or better, 0 in unused slots (see `slots`).

    The row of position i is that of the token its prediction is read from: of i itself, or, in a model with shifted
    logits, of the token before it. Columns are the positions themselves.
    """
    config = model.config
    index, used = slots(at)
    positions = token_positions(at.long(), attention_mask, position_ids).expand(at.shape)
    documents = document_ids(attention_mask, position_ids)
    plan = model.model.plan_flash(attention_mask, position_ids)
    source = index
    if config.shift_logits:
        before = previous_in_document(attention_mask, position_ids, at.long()).expand(at.shape)
        source = before.gather(1, index)
    sees = None
    if documents is not None:
        sees = documents.gather(1, source)[:, :, None] == documents[:, None, :]
    if config.block_size is not None:
        blocks = positions // config.block_size
        not_before = blocks.gather(1, source)[:, :, None] >= blocks[:, None, :]
        sees = not_before if sees is None else sees & not_before
    key_turn = rotary_angles(config, positions)
    query_turn = rotary_angles(config, positions.gather(1, source))

    total: Tensor | None = None
    for module, hidden in noted.items():
        assert isinstance(module, MDLMAttention)
        if plan is not None:
            hidden = _unpacked(hidden, plan, at.shape)
        assert hidden.shape[:2] == at.shape, "the forward that was noted saw other tokens"
        chosen = hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[-1]))
        weights = _weights(module, chosen, hidden, query_turn, key_turn, sees)
        total = weights if total is None else total + weights
    assert total is not None, "no layer ran"
    columns = total.gather(2, index[:, None, :].expand(-1, index.shape[1], -1))
    return (columns / len(noted)).masked_fill(~(used[:, :, None] & used[:, None, :]), 0.0)


def _unpacked(hidden: Tensor, plan: FlashPlan, shape: torch.Size) -> Float[Tensor, "batch seq width"]:
    """`[1, real, width]` at its places in the batch, zeros on padding."""
    out = hidden.new_zeros(shape.numel(), hidden.shape[-1])
    return out.index_copy(0, plan.tokens, hidden[0]).view(*shape, -1)


def _weights(
    module: MDLMAttention,
    chosen: Float[Tensor, "batch slots width"],
    hidden: Float[Tensor, "batch seq width"],
    query_turn: tuple[Tensor, Tensor],
    key_turn: tuple[Tensor, Tensor],
    sees: Bool[Tensor, "batch slots seq"] | None,
) -> Float[Tensor, "batch slots seq"]:
    """softmax(q k / sqrt d) of one layer, mean over heads."""

    def heads(projected: Tensor, norm: nn.Module, turn: tuple[Tensor, Tensor]) -> Tensor:
        by_head = projected.view(*projected.shape[:2], -1, module.head_dim)
        return rotate(norm(by_head).transpose(1, 2), *turn)

    query = heads(module.q_proj(chosen), module.q_norm, query_turn)
    key = heads(module.k_proj(hidden), module.k_norm, key_turn)
    grouped = query.unflatten(1, (-1, module.num_key_value_groups))  # heads of one group share a key
    scores = grouped @ key[:, :, None].transpose(-1, -2) * module.head_dim**-0.5
    if sees is not None:
        scores = scores.masked_fill(~sees[:, None, None], float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).mean(dim=(1, 2))


@runtime_checkable
class AttendingDenoiser(Protocol):
    """The optional capability of a `Denoiser`: attention of the same forward that gives the predictions."""

    def with_attention(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        layers: int | float,
        at: Bool[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "batch slots slots"]]:
        """What the denoiser answers at `at`, and the attention between those positions: see `attention_rows` and, for
        `layers`, `layer_count`."""


@dataclass
class AttentionTap:
    """A denoiser that keeps the attention of its calls, for those who see only a `Feeder`.

    Raises ValueError if the denoiser has no attention to give.
    """

    denoiser: Any
    layers: int | float
    taken: list[Float[Tensor, "batch slots slots"]] = field(default_factory=list)
    """Of each call since it was last emptied."""

    def __post_init__(self) -> None:
        if not isinstance(self.denoiser, AttendingDenoiser):
            raise ValueError(
                f"this strategy reads attention, which {type(self.denoiser).__name__} does not give; ModelDenoiser (an "
                "MDLMForMaskedLM) does, and so does any denoiser with a method with_attention(tokens, layers=, at=, "
                "attention_mask=, position_ids=). A strategy that needs none: 'depcap'"
            )

    @property
    def mask_token_id(self) -> int:
        """See `Denoiser`."""
        return int(self.denoiser.mask_token_id)

    @property
    def num_tokens(self) -> int:
        """See `Denoiser`."""
        return int(self.denoiser.num_tokens)

    @property
    def device(self) -> torch.device:
        """See `Denoiser`."""
        device: torch.device = self.denoiser.device
        return device

    def __call__(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "..."]:
        """See `Denoiser`; `at` is needed."""
        assert at is not None
        answer, attention = self.denoiser.with_attention(
            tokens, layers=self.layers, at=at, attention_mask=attention_mask, position_ids=position_ids
        )
        self.taken.append(attention)
        return answer

    def take(self, rows: Bool[Tensor, " batch"]) -> Float[Tensor, "batch slots slots"]:
        """The attention of the first call since the last `take` (under guidance: of the branch that sees the prompt),
        which was about these rows; zeros in others."""
        attention = self.taken[0]
        self.taken.clear()
        if attention.shape[0] == rows.shape[0]:
            return attention
        out = attention.new_zeros(rows.shape[0], *attention.shape[1:])
        out[rows] = attention
        return out
