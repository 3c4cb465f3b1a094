"""Fixtures shared by all tests: one thread, the skip of `gpu` tests where there is no GPU, a tiny configuration."""

from __future__ import annotations

import pytest
import torch

from mdlm.config import MDLMConfig


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _gpu_only_where_there_is_one(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def tiny_config() -> MDLMConfig:
    """A model that runs in a millisecond: vocabulary 64 (60 real tokens), width 32, two layers."""
    return MDLMConfig(
        vocab_size=64,
        num_tokens=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        mask_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
