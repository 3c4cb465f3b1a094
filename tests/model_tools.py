"""Small models with weights that matter, batches in the layouts of `reference_model`, what the reference answers."""

from __future__ import annotations

from typing import Any

import reference_model as ref
import torch
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM

VOCAB = 24


def make_model(implementation: str = "eager", dtype: torch.dtype = torch.float32, **options: Any) -> MDLMForMaskedLM:
    """A model of two layers, width 16; the same weights for every implementation.

    They are large, so that attention is far from uniform; biases and norms are no longer 0 and 1, so that they count.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "initializer_range": 0.4,
    }
    model = MDLMForMaskedLM(MDLMConfig(**{**sizes, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    torch.nn.Module.to(model, dtype)
    model.config._attn_implementation = implementation  # the setter would look for a real flash-attn and a GPU
    return model


def batch(layout: str) -> tuple[dict[str, Any], Tensor]:
    """Arguments of `forward` for one of the layouts, and where its real tokens are."""
    rows = ref.LAYOUTS[layout].rows()
    real = torch.tensor([[d is not None for d in documents] for _, documents in rows])
    arguments = {
        "input_ids": torch.randint(0, VOCAB, real.shape, generator=torch.Generator().manual_seed(1)),
        "attention_mask": real if ref.LAYOUTS[layout].give_mask else None,
        "position_ids": torch.tensor([p for p, _ in rows]) if ref.LAYOUTS[layout].give_positions else None,
    }
    return arguments, real


def expected_logits(model: MDLMForMaskedLM, layout: str) -> Tensor:
    """The reference's float64 logits of a layout; NaN on padding."""
    config = model.config
    weights = {name: value.detach().double().cpu().numpy() for name, value in model.state_dict().items()}
    shape = ref.Shape(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
        config.rope_theta,
        config.rms_norm_eps,
        config.block_size,
        config.shift_logits,
        config.norm_placement,
    )
    ids = batch(layout)[0]["input_ids"].tolist()
    rows = [ref.logits(weights, shape, tokens, *row) for tokens, row in zip(ids, ref.LAYOUTS[layout].rows())]
    return torch.stack([torch.from_numpy(row) for row in rows])
