"""Batches and losses of block diffusion for the tests."""

from __future__ import annotations

from typing import Any

import reference_block as rb
import reference_model as ref
import torch
from model_tools import VOCAB, batch
from reference import allowed_log_softmax
from torch import Tensor

from mdlm.data import Batch
from mdlm.objective import NoisedBatch, Objective, ObjectiveConfig

MASK = 0
SIZES = [1, 2, 4, 9]
"""Block sizes for the rows of nine tokens of `reference_model.LAYOUTS`."""


def objective(block_size: int | None, global_batch: int = 2, seed: int = 0, **options: Any) -> Objective:
    config = ObjectiveConfig(**options)
    return config.build(
        global_batch=global_batch, seed=seed, mask_token_id=MASK, num_tokens=VOCAB, block_size=block_size
    )


def layout_batch(layout: str, prompt: int = 0) -> Batch:
    """The layout's rows; the first `prompt` tokens of every row may not be noised."""
    arguments, real = batch(layout)
    maskable = real.clone()
    maskable[:, :prompt] = False
    return Batch(
        arguments["input_ids"].clamp(min=1), maskable, torch.tensor([3, 4]),
        arguments["attention_mask"], arguments["position_ids"],
    )  # fmt: skip


def rows_batch(rows: int, seq: int, start: int = 0, packed: bool = False) -> Batch:
    """Rows from number `start` on; packed: documents of 5, 2, 7, ... tokens that differ from row to row."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCAB, (start + rows, seq), generator=generator)[start:]
    maskable = torch.rand(start + rows, seq, generator=generator)[start:] < 0.8
    positions = None
    if packed:
        starts = torch.rand(start + rows, seq, generator=generator)[start:] < 0.3
        starts[:, 0] = True
        place = torch.arange(seq).expand(rows, seq)
        positions = place - torch.where(starts, place, 0).cummax(1).values
    return Batch(ids, maskable, torch.arange(start, start + rows), None, positions)


def loss_and_gradient(model: Any, parts: list[NoisedBatch], loss: Objective) -> tuple[float, dict[str, Tensor]]:
    """Numerators over the sum of the denominators, as the loop has it."""
    model.zero_grad()
    denominator = sum(float(loss.denominator(part)) for part in parts)
    total = 0.0
    for part in parts:
        terms = loss.numerator(model, part).loss / denominator
        terms.backward()
        total += terms.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}


def predictor(model: Any) -> rb.Predict:
    """The reference model with the weights of this one."""
    config = model.config
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    shape = ref.Shape(
        config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers, config.rope_theta,
        config.rms_norm_eps, config.block_size, config.shift_logits,
    )  # fmt: skip
    return lambda *row: allowed_log_softmax(ref.logits(weights, shape, *row), MASK, VOCAB)
