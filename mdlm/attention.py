"""Who may attend to whom: padding, packed documents and blocks, in the form each attention implementation wants.

Every rule comes from two integers per token. Its *position* inside its document, and its *document* (-1: padding). A
query sees a key if both lie in the same document and, in a block-causal model, the query's block is not before the
key's. Padding sees padding only, so no row of attention is ever empty and none can become NaN. `eager`, `sdpa` and
implementations a user registers get this as a boolean mask, `flex_attention` as a `BlockMask`, flash attention as
cumulative lengths over one row of real tokens (Dao, 2307.08691). With no padding, packing or blocks there is no mask.

Block diffusion trains on a row twice as long, [x_t ; x_0] (BD3-LM, 2503.09573, section 3 and appendix B.6): noised
tokens, then the same tokens clean. Its mask has three parts. A noised token sees its own block of x_t (block-diagonal)
and the blocks of x_0 before its own (offset block-causal), a clean one the blocks of x_0 up to its own (block-causal);
x_0 never sees x_t. So one forward predicts every block as if it had been fed alone behind its clean past.

Whether there is one is decided by which arguments are None, never by their values: a branch on values would force the
device to synchronise, and break the graph under `torch.compile`. Read next: `modeling.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class FlashPlan(NamedTuple):
    """How flash attention reads a padded or packed batch: real tokens in one row, documents by cumulative lengths."""

    tokens: Int[Tensor, " real"]
    """Indices of the real tokens in the flattened batch, document by document."""
    cu_seq_lens: Int[Tensor, " documents_plus_one"]
    """Int32; document d is `tokens[cu_seq_lens[d] : cu_seq_lens[d + 1]]`."""
    max_length: int
    """Length of the longest document, in tokens."""


def token_positions(
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None,
    position_ids: Int[Tensor, "batch seq"] | None,
) -> Int[Tensor, "rows seq"]:
    """Position of each token inside its document; one row for all (`rows` = 1) where no row differs.

    Without `position_ids` a row is one document and positions count its real tokens, so that padding on the left moves
    nothing. The positions of padding mean nothing.
    """
    if position_ids is not None:
        return position_ids
    if attention_mask is not None:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.arange(input_ids.shape[1], device=input_ids.device)[None]


def document_ids(
    attention_mask: Bool[Tensor, "batch seq"] | None, position_ids: Int[Tensor, "batch seq"] | None
) -> Int[Tensor, "batch seq"] | None:
    """Number of the document each token belongs to, inside its row; -1 for padding. None: each row is one document.

    A document starts at every real token whose position is 0 (the convention of `transformers` for packed rows).
    """
    if position_ids is None:
        return None if attention_mask is None else attention_mask.long() - 1
    if attention_mask is None:
        return (position_ids == 0).long().cumsum(-1)
    starts = (position_ids == 0) & attention_mask
    return starts.long().cumsum(-1).masked_fill(~attention_mask, -1)


def visible(
    positions: Int[Tensor, "rows seq"],
    documents: Int[Tensor, "batch seq"] | None,
    block_size: int | None,
) -> Bool[Tensor, "rows 1 seq seq"] | None:
    """True where a query (third axis) may attend to a key (last axis), the same for all heads. None: everywhere.

    `visible_twice` is the mask of [x_t ; x_0].
    """
    mask = None
    if documents is not None:
        mask = documents[:, :, None] == documents[:, None, :]
    if block_size is not None:
        blocks = positions // block_size
        not_before = blocks[:, :, None] >= blocks[:, None, :]
        mask = not_before if mask is None else mask & not_before
    return None if mask is None else mask[:, None]


def visible_twice(
    positions: Int[Tensor, "rows seq"], documents: Int[Tensor, "batch seq"] | None, block_size: int
) -> Bool[Tensor, "rows 1 both both"]:
    """`visible` for [x_t ; x_0], both = 2 seq: x_t and x_0 share positions and documents, which are given once."""
    blocks = positions // block_size
    same, before = blocks[:, :, None] == blocks[:, None, :], blocks[:, :, None] > blocks[:, None, :]
    if documents is not None:
        together = documents[:, :, None] == documents[:, None, :]
        same, before = same & together, before & together
    noised = torch.cat([same, before], dim=-1)
    clean = torch.cat([torch.zeros_like(same), same | before], dim=-1)
    return torch.cat([noised, clean], dim=1)[:, None]


def flex_block_mask(
    positions: Int[Tensor, "batch seq"],
    documents: Int[Tensor, "batch seq"] | None,
    block_size: int | None,
    twice: bool = False,
) -> BlockMask | None:
    """The rule of `visible` as a `BlockMask` for `flex_attention`, which skips the tiles it leaves empty.

    With `twice` that of `visible_twice`, and the mask is twice as long as `positions`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if documents is None and block_size is None:
        return None
    document = torch.zeros_like(positions) if documents is None else documents
    block = torch.zeros_like(positions) if block_size is None else positions // block_size
    batch, seq = document.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[row, query] == document[row, key]) & (block[row, query] >= block[row, key])

    def sees_twice(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        noised, from_noised = query < seq, key < seq
        query, key = query % seq, key % seq
        same, before = block[row, query] == block[row, key], block[row, query] > block[row, key]
        by_blocks = torch.where(noised, torch.where(from_noised, same, before), ~from_noised & (same | before))
        return (document[row, query] == document[row, key]) & by_blocks

    length = 2 * seq if twice else seq
    # compiled, the mask is built tile by tile; otherwise all seq x seq values exist at once
    compiled = positions.device.type != "cpu" and not torch.compiler.is_compiling()
    rule = sees_twice if twice else sees
    return create_block_mask(rule, batch, None, length, length, device=positions.device, _compile=compiled)


def flash_plan(documents: Int[Tensor, "batch seq"]) -> FlashPlan:
    """Cumulative lengths of the documents of a batch. Waits for the device, so it is made once per batch.

    A batch of nothing but padding still yields one token, because the kernels refuse to run on none.
    """
    batch, seq = documents.shape
    rows = torch.arange(batch, device=documents.device)[:, None]
    keys = (rows * (seq + 1) + documents).masked_fill(documents < 0, -1).flatten()
    tokens = (keys >= 0).nonzero().squeeze(-1)
    if len(tokens) == 0:
        tokens = tokens.new_zeros(1)
    # rows and documents are numbered in reading order, so the keys of the real tokens never decrease
    lengths = torch.unique_consecutive(keys[tokens], return_counts=True)[1]
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return FlashPlan(tokens, ends, int(lengths.max()))


def previous_in_document(
    attention_mask: Bool[Tensor, "batch seq"] | None,
    position_ids: Int[Tensor, "batch seq"] | None,
    input_ids: Int[Tensor, "batch seq"],
) -> Int[Tensor, "rows seq"]:
    """Index of the real token before each token in the same document; its own index for the first one and for padding.

    This is where a model with shifted logits (Dream) keeps its prediction of a token.
    """
    index = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    documents = document_ids(attention_mask, position_ids)
    if documents is None:
        return (index - 1).clamp(min=0)
    real = documents >= 0
    last_real = index.masked_fill(~real, -1).cummax(-1).values
    before = nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    same = real & (before >= 0) & (documents.gather(1, before.clamp(min=0)) == documents)
    return torch.where(same, before, index)


def prediction_source(
    previous: Int[Tensor, "rows seq"], positions: Int[Tensor, "rows seq"], block_size: int
) -> Int[Tensor, "rows seq"]:
    """Where in [x_t ; x_0] a model with shifted logits keeps its prediction of each token; from `previous_in_document`.

    That is the noised token before it, or the clean one if the token is the first of its block: what a sampler finds
    there once the block before is finished.
    """
    seq = previous.shape[1]
    blocks = (positions // block_size).expand(previous.shape[0], seq)
    return torch.where(blocks.gather(1, previous) == blocks, previous, previous + seq)


def eager_attention(
    module: nn.Module,
    query: Float[Tensor, "batch heads seq dim"],
    key: Float[Tensor, "batch kv_heads seq dim"],
    value: Float[Tensor, "batch kv_heads seq dim"],
    attention_mask: Bool[Tensor, "rows 1 seq seq"] | None,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "batch seq heads dim"], Float[Tensor, "batch heads seq seq"]]:
    """Attention by its definition, softmax in float32 or better: the implementation all others are tested against.

    Returns:
        The heads' outputs and the attention weights. `module` and `dropout` (0 in this model) complete the signature
        that `transformers` gives attention functions.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights
