"""Attention between chosen positions, recomputed from the hidden states of the one forward, against its definition."""

from __future__ import annotations

import pytest
import torch
from model_tools import batch, make_model
from test_attention import _kernels_on_cpu, uncompiled_flex  # noqa: F401 - the first is a fixture
from torch import Tensor

from mdlm.attention import previous_in_document
from mdlm.attention_rows import AttentionTap, layer_count, slots
from mdlm.denoiser import FunctionDenoiser, ModelDenoiser
from mdlm.modeling import MDLMForMaskedLM

OPTIONS = [
    {},
    {"qk_norm": True, "qkv_bias": True},
    {"block_size": 2},
    {"shift_logits": True, "num_key_value_heads": 4},
]


def denoiser(model: MDLMForMaskedLM) -> ModelDenoiser:
    model.config.mask_token_id = 0
    return ModelDenoiser(model)


def eager_rows(model: MDLMForMaskedLM, arguments: dict, at: Tensor, layers: int) -> list[Tensor]:
    """`output_attentions` of `eager`, mean over heads and the last layers, cut to the positions asked for, per row."""
    weights = model(**arguments, output_attentions=True).attentions[-layers:]
    mean = torch.stack(weights).mean(dim=(0, 2))
    source = torch.arange(at.shape[1]).expand(at.shape)
    if model.config.shift_logits:
        source = previous_in_document(
            arguments["attention_mask"], arguments["position_ids"], arguments["input_ids"]
        ).expand(at.shape)
    return [row[source[b, at[b]]][:, at[b]] for b, row in enumerate(mean)]


def some(real: Tensor) -> Tensor:
    return real & (torch.rand(real.shape, generator=torch.Generator().manual_seed(3)) < 0.6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["dense", "right padding", "left padding", "packed", "packed and padded"])
@pytest.mark.parametrize("layers", [1, 2])
def test_rows_equal_what_eager_attention_returns(layout: str, options: dict, layers: int) -> None:
    model = make_model("eager", torch.float64, **options)
    arguments, real = batch(layout)
    at = some(real)
    log_probs, ask = denoiser(model).with_attention(arguments.pop("input_ids"), layers=layers, at=at, **arguments)
    arguments["input_ids"] = batch(layout)[0]["input_ids"]
    for row, expected in zip(ask(at), eager_rows(model, arguments, at, layers)):
        count = len(expected)
        torch.testing.assert_close(row[:count, :count], expected, rtol=0, atol=1e-10)
        assert not row[count:].any()
        assert not row[:, count:].any()
    plain = denoiser(model)(arguments["input_ids"], **{k: v for k, v in arguments.items() if k != "input_ids"}, at=at)
    assert torch.equal(log_probs, plain)


@uncompiled_flex
@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("layout", ["dense", "right padding", "left padding"])
def test_it_works_whatever_implementation_runs_the_forward(implementation: str, layout: str) -> None:
    dtype = torch.float32 if implementation == "flash_attention_2" else torch.float64
    arguments, real = batch(layout)
    at = some(real)
    answers = []
    for name in ("eager", implementation):
        inputs = dict(arguments)
        ask = denoiser(make_model(name, dtype)).with_attention(inputs.pop("input_ids"), layers=2, at=at, **inputs)[1]
        answers.append(ask(at))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-10)


def test_the_padding_mask_is_not_ignored() -> None:
    """CLAD's code computes its attention without the padding mask: wrong as soon as a batch is ragged."""
    model = make_model("sdpa", torch.float64)
    arguments, real = batch("right padding")
    alone = real[1].nonzero()[:, 0]
    ids = arguments["input_ids"]
    together = denoiser(model).with_attention(ids, layers=2, at=real, attention_mask=real)[1](real)[1]
    everywhere = torch.ones(1, len(alone), dtype=torch.bool)
    single = denoiser(model).with_attention(ids[1:, alone], layers=2, at=everywhere)[1](everywhere)[0]
    torch.testing.assert_close(together[: len(alone), : len(alone)], single, rtol=0, atol=1e-10)
    assert (single.sum(dim=-1) - 1).abs().max() < 1e-10, "all it sees is asked for, so its weights sum to 1"


def test_rows_follow_the_shift_of_the_logits() -> None:
    """CLAD's Dream path reads the dependency of position i from row i, though its prediction came from row i - 1."""
    plain, shifted = make_model("eager", torch.float64), make_model("eager", torch.float64, shift_logits=True)
    ids = batch("dense")[0]["input_ids"]
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    own = denoiser(plain).with_attention(ids, layers=2, at=everywhere)[1](everywhere)
    moved = denoiser(shifted).with_attention(ids, layers=2, at=everywhere)[1](everywhere)
    assert (moved[:, 1:] - own[:, :-1]).abs().max() < 1e-12
    assert (moved[:, 0] - own[:, 0]).abs().max() < 1e-12, "the first token has no other"
    assert (moved[:, 1:] - own[:, 1:]).abs().max() > 1e-3


def test_values_are_normalised_over_the_whole_row_before_columns_are_taken() -> None:
    model = make_model("eager", torch.float64)
    ids = batch("dense")[0]["input_ids"]
    few = torch.zeros_like(ids, dtype=torch.bool)
    few[:, 3:6] = True
    everywhere = torch.ones_like(few)
    ask = denoiser(model).with_attention(ids, layers=2, at=everywhere)[1]
    part, full = ask(few), ask(everywhere)
    torch.testing.assert_close(part, full[:, 3:6, 3:6], rtol=0, atol=1e-12)
    assert bool((part.sum(dim=-1) < 0.99).all())


def hooks(model: MDLMForMaskedLM) -> list[str]:
    return [name for name, module in model.model.layers.named_modules() if module._forward_hooks]


def test_one_forward_and_no_hooks_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("sdpa")
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    ids = batch("dense")[0]["input_ids"]
    denoiser(model).with_attention(ids, layers=1, at=torch.ones_like(ids, dtype=torch.bool))
    assert len(calls) == 1
    assert not hooks(model)
    monkeypatch.setattr(model.lm_head, "forward", None)
    with pytest.raises(TypeError):
        denoiser(model).with_attention(ids, layers=1, at=torch.ones_like(ids, dtype=torch.bool))
    assert not hooks(model), "nor after an error"


def test_slots_are_the_positions_from_the_left() -> None:
    at = torch.tensor([[False, True, True, False], [True, False, False, False], [False] * 4])
    index, used = slots(at)
    assert index.tolist() == [[1, 2], [0, 0], [0, 0]]
    assert used.tolist() == [[True, True], [True, False], [False, False]]


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (4, 4), (99, 28), (0.3, 9), (0.25, 7)])
def test_layers_are_a_number_or_a_fraction(layers: float, count: int) -> None:
    assert layer_count(layers, 28) == count


@pytest.mark.parametrize("layers", [0, -1, 1.5, 0.0])
def test_wrong_numbers_of_layers_are_refused(layers: float) -> None:
    with pytest.raises(ValueError, match="layers is"):
        layer_count(layers, 28)


def test_a_denoiser_without_attention_is_refused_and_those_with_it_are_named() -> None:
    plain = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 3), mask_token_id=0, num_tokens=3)
    with pytest.raises(ValueError, match="FunctionDenoiser does not give; ModelDenoiser"):
        AttentionTap(plain, 4)


def test_rows_that_were_not_fed_have_no_attention() -> None:
    tap = AttentionTap(denoiser(make_model("eager", torch.float64)), 1)
    ids = batch("dense")[0]["input_ids"]
    tap(ids[1:], at=torch.ones(1, ids.shape[1], dtype=torch.bool))
    taken = tap.take(torch.tensor([False, True]))(torch.ones(2, ids.shape[1], dtype=torch.bool))
    assert not taken[0].any()
    assert torch.allclose(taken[1].sum(dim=-1), torch.ones(ids.shape[1]).double())
