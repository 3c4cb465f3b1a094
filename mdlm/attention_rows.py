"""Which positions does a prediction read from? Attention weights between the positions asked for, and no others.

Span-level samplers (CLAD, 2605.29607; DAPD, 2603.12996) decide by attention what may be committed together. Asking a
network for all its weights would cost [heads, seq, seq] per layer and rule out flash attention. Here the queries and
keys of the last layers are noted while the one forward runs, whatever implementation runs it, and softmax(q k / sqrt d)
is computed again for the rows of interest only, once it is known which: those of tokens about to be committed. Values
are normalised over everything the row sees, padding excluded; only then are the columns of interest taken. Read next:
`samplers/conflicts.py`, which uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mdlm.attention import FlashPlan, document_ids, previous_in_document, token_positions
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
    count = at.sum(dim=-1, keepdim=True)
    used = torch.arange(int(count.max()), device=at.device) < count
    index = torch.zeros(used.shape, dtype=torch.int64, device=at.device)
    return index.masked_scatter_(used, at.nonzero()[:, 1]), used  # both in the order of rows, then of positions


TOGETHER = 4
"""Layers whose weights are computed in one go: more would need more memory than they save calls."""


Attention = Callable[[Bool[Tensor, "batch seq"]], Float[Tensor, "batch slots slots"]]
"""What one forward has attended to, between any of its positions that are asked for: see `attention_rows`."""


class Heads(NamedTuple):
    """Queries and keys of one layer, as they meet: `[batch, heads, seq, dim]`, or, under flash attention, packed as
    `FlashPlan` says."""

    query: Float[Tensor, "..."]
    key: Float[Tensor, "..."]


@contextmanager
def noted_heads(model: MDLMForMaskedLM, layers: int) -> Iterator[list[Heads]]:
    """While open, one forward notes the queries and keys of the last `layers` layers here."""
    noted: list[Heads] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        noted.append(Heads(*output))

    handles = [layer.self_attn.rotate.register_forward_hook(note) for layer in model.model.layers[-layers:]]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def attention_rows(
    model: MDLMForMaskedLM,
    noted: Sequence[Heads],
    at: Bool[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None,
    position_ids: Int[Tensor, "batch seq"] | None,
) -> Float[Tensor, "batch slots slots"]:
    """Attention from the prediction of each position in `at` to each position in `at`, mean over heads and over the
    layers noted; float32 or better, 0 in unused slots (see `slots`).

    The row of position i is that of the token its prediction is read from: of i itself, or, in a model with shifted
    logits, of the token before it. Columns are the positions themselves.
    """
    config = model.config
    index, used = slots(at)
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
        positions = token_positions(at.long(), attention_mask, position_ids).expand(at.shape)
        blocks = positions // config.block_size
        not_before = blocks.gather(1, source)[:, :, None] >= blocks[:, None, :]
        sees = not_before if sees is None else sees & not_before
    assert noted, "no layer ran"
    total: Tensor | float = 0.0
    for start in range(0, len(noted), TOGETHER):  # layers side by side, as if they were more heads of one
        layers = noted[start : start + TOGETHER]
        if plan is not None:
            layers = [Heads(*(_unpacked(heads, plan, at.shape) for heads in layer)) for layer in layers]
        heads, seq, width = layers[0].query.shape[1:]
        assert (len(at), seq) == at.shape, "the forward that was noted saw other tokens"
        picked = source[:, None, :, None].expand(-1, heads, -1, width)
        query = torch.cat([layer.query.gather(2, picked) for layer in layers], dim=1)
        weights = _weights(query, torch.cat([layer.key for layer in layers], dim=1), sees)
        total = total + weights * (len(layers) / len(noted))
    assert isinstance(total, Tensor)
    columns = total.gather(2, index[:, None, :].expand(-1, index.shape[1], -1))
    return columns.masked_fill(~(used[:, :, None] & used[:, None, :]), 0.0)


def mean_attention(
    model: nn.Module, inputs: dict[str, Tensor], layers: int | float
) -> tuple[Float[Tensor, "batch seq seq"], Float[Tensor, "batch seq vocab"]]:
    """For any network that returns its weights (`output_attentions`): their mean over heads and the last `layers`
    layers, and the logits of the same forward.

    Raises ValueError if it does not return them.
    """
    name, hint = type(model).__name__, "load it with attn_implementation='eager', or take a strategy that needs none"
    try:
        out = model(**inputs, output_attentions=True)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{name} does not return attention weights ({error}); {hint} ('depcap')") from error
    weights = getattr(out, "attentions", None)
    if not weights or any(weight is None for weight in weights):
        raise ValueError(f"{name} does not return attention weights; {hint} ('depcap')")
    last = weights[-layer_count(layers, len(weights)) :]
    total = sum(weight.to(torch.promote_types(weight.dtype, torch.float32)).mean(dim=1) for weight in last)
    return total / len(last), out.logits


def between_slots(
    weights: Float[Tensor, "batch seq seq"], source: Int[Tensor, "batch seq"], at: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch slots slots"]:
    """The weights between the positions in `at`, the row of each being that of its `source`; 0 in unused slots."""
    index, used = slots(at)
    rows = weights.gather(1, source.gather(1, index)[:, :, None].expand(-1, -1, weights.shape[2]))
    between = rows.gather(2, index[:, None, :].expand(-1, index.shape[1], -1))
    return between.masked_fill(~(used[:, :, None] & used[:, None, :]), 0.0)


def _unpacked(heads: Tensor, plan: FlashPlan, shape: torch.Size) -> Float[Tensor, "batch heads seq dim"]:
    """`[1, heads, real, dim]` at its places in the batch, zeros on padding."""
    packed = heads[0].transpose(0, 1)
    out = packed.new_zeros(shape.numel(), *packed.shape[1:])
    return out.index_copy(0, plan.tokens, packed).view(*shape, *packed.shape[1:]).transpose(1, 2)


def _weights(
    query: Float[Tensor, "batch heads slots dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    sees: Bool[Tensor, "batch slots seq"] | None,
) -> Float[Tensor, "batch slots seq"]:
    """softmax(q k / sqrt d), mean over heads."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # heads of one group share a key
    scores = grouped @ key[:, :, None].transpose(-1, -2) * query.shape[-1] ** -0.5
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
    ) -> tuple[Float[Tensor, "rows vocab"], Attention]:
        """What the denoiser answers at `at`, and the attention of that forward, to be asked before the next one; for
        `layers` see `layer_count`."""


@dataclass
class AttentionTap:
    """A denoiser that keeps the attention of its calls, for those who see only a `Feeder`.

    Raises ValueError if the denoiser has no attention to give.
    """

    denoiser: Any
    layers: int | float
    taken: list[tuple[Attention, int]] = field(default_factory=list)
    """Of each call since it was last emptied, with the length of what it was fed."""

    def __post_init__(self) -> None:
        if not isinstance(self.denoiser, AttendingDenoiser):
            raise ValueError(
                f"this strategy reads attention, which {type(self.denoiser).__name__} does not give; ModelDenoiser (an "
                "MDLMForMaskedLM) and LogitsModelDenoiser (a model that returns its weights) do, and so does any "
                "denoiser with a method with_attention(tokens, layers=, at=, attention_mask=, position_ids=). A "
                "strategy that needs none: 'depcap'"
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
        self.taken.append((attention, tokens.shape[1]))
        return answer

    def take(self, rows: Bool[Tensor, " batch"]) -> Attention:
        """The attention of the first call since the last `take` (under guidance: of the branch that sees the prompt),
        which was about these rows; zeros in others."""
        attention, seq = self.taken[0]
        self.taken.clear()

        def of_all_rows(at: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch slots slots"]:
            assert not bool(at[:, seq:].any()), "no attention where nothing was fed"
            if bool(rows.all()):
                return attention(at[:, :seq])
            found = attention(at[rows, :seq])
            out = found.new_zeros(rows.shape[0], *found.shape[1:])
            out[rows] = found
            return out

        return of_all_rows
