"""Denoisers: what every adapter owes (no mass on the mask id, row i predicts token i, no NaN), and which is chosen."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch
from model_tools import VOCAB, batch, expected_logits, make_model
from torch import Tensor, nn

from mdlm.denoiser import (
    PUBLIC_MODELS,
    Denoiser,
    FunctionDenoiser,
    LogitsModelDenoiser,
    ModelDenoiser,
    as_denoiser,
)
from mdlm.emit import emit_log_probs

INF = math.inf
TOKENS, MASK = 20, 3


# Logits to log-probabilities.


@pytest.mark.parametrize("mask", [0, 3, 5])
def test_extreme_logits_are_limits(mask: int) -> None:
    """+inf takes all the mass, several share it, -inf has none, whatever stands at the mask id or in the padding."""
    others = [i for i in range(6) if i != mask]
    rows = torch.zeros(5, 8)
    rows[:, 6:] = INF  # padding of the vocabulary
    rows[:, mask] = torch.tensor([INF, -INF, math.nan, 3e38, 0.0])
    rows[0, others[1]] = INF
    rows[1, others[0]] = rows[1, others[3]] = INF
    rows[2, others[0]] = -INF
    rows[3, others[:4]] = -INF
    rows[4, others[2]] = 3e38
    expected = torch.full((5, 6), -INF)
    expected[0, others[1]] = 0.0
    expected[1, [others[0], others[3]]] = -math.log(2)
    expected[2, others[1:]] = -math.log(4)
    expected[3, others[4]] = 0.0
    expected[4, others] = -3e38
    expected[4, others[2]] = 0.0
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        logits = rows.to(dtype)
        got = emit_log_probs(logits.reshape(1, 5, 8), mask, 6)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got[0, :4], expected[:4].to(got.dtype), atol=1e-6, rtol=0)
        assert got[0, 4, others[2]] == 0
        assert bool((got[0, 4, [o for o in others if o != others[2]]] < -1e38).all())
    assert emit_log_probs(rows[:0], mask, 6).shape == (0, 6)


@pytest.mark.parametrize("mask", [0, 3])
@pytest.mark.parametrize("place", [0, 1, 5])
def test_nan_in_a_token_that_may_be_emitted_is_an_error(mask: int, place: int) -> None:
    logits = torch.zeros(2, 4, 8)
    logits[1, 2, place] = math.nan
    if place == mask:
        assert bool(emit_log_probs(logits, mask, 6).exp().sum(-1).isclose(torch.ones(())).all())
        return
    with pytest.raises(ValueError, match="hold NaN"):
        emit_log_probs(logits, mask, 6)
    logits[1, 2, place], logits[0, 0, 7] = 0.0, math.nan
    assert bool(emit_log_probs(logits, mask, 6).exp().sum(-1).isclose(torch.ones(())).all())


@pytest.mark.parametrize("mask", [0, 3])
def test_a_position_that_allows_nothing_but_the_mask_is_an_error(mask: int) -> None:
    logits = torch.zeros(3, 8)
    logits[1] = -INF
    logits[1, mask] = 5.0
    with pytest.raises(ValueError, match="nothing to choose from"):
        emit_log_probs(logits, mask, 6)


# Our own model.


@pytest.mark.parametrize("layout", ["right padding", "left padding", "dense"])
@pytest.mark.parametrize("options", [{}, {"shift_logits": True}, {"block_size": 4}])
def test_our_model_answers_as_the_reference_with_the_head_on_the_rows_asked_for(
    layout: str, options: dict[str, Any]
) -> None:
    model = make_model(dtype=torch.float64, num_tokens=TOKENS, mask_token_id=MASK, **options)
    denoiser = ModelDenoiser(model)
    assert isinstance(denoiser, Denoiser)
    assert (denoiser.mask_token_id, denoiser.num_tokens) == (MASK, TOKENS)
    inputs, real = batch(layout)
    expected = reference.allowed_log_softmax(expected_logits(model, layout)[real].numpy(), MASK, TOKENS)
    inputs["tokens"] = inputs.pop("input_ids")
    everywhere = denoiser(**inputs)
    assert everywhere.shape == (*real.shape, TOKENS)
    assert not everywhere.requires_grad
    np.testing.assert_allclose(everywhere[real].numpy(), expected, atol=1e-5)  # norms and rotations are float32
    at = real & (torch.rand(real.shape, generator=torch.Generator().manual_seed(0)) < 0.4)
    some = denoiser(**inputs, at=at)
    np.testing.assert_allclose(some.numpy(), everywhere[at].numpy(), atol=1e-12)
    assert bool((some[:, MASK] == -INF).all())
    assert denoiser(**inputs, at=torch.zeros_like(real)).shape == (0, TOKENS)


def test_a_model_without_a_mask_id_is_refused() -> None:
    with pytest.raises(ValueError, match="mask_token_id"):
        ModelDenoiser(make_model(mask_token_id=None))


# Anybody's network.


class Net(nn.Module):
    """One layer of attention over real tokens: predicts from its own token, its place and what it may see."""

    def __init__(self, style: str, **config: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(3, VOCAB, VOCAB, generator=generator, dtype=torch.float64))
        self.style = style
        self.config = SimpleNamespace(**config)
        self.seen: dict[str, Tensor] = {}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Any:
        self.seen = {"mask": attention_mask, "position_ids": position_ids}  # type: ignore[dict-item]
        seq = input_ids.shape[1]
        visible = torch.ones(1, seq, seq, dtype=torch.bool)
        if attention_mask is not None:
            assert self.style != "none"
            if self.style == "2d":
                assert attention_mask.dtype == torch.int64
                visible = attention_mask.bool()[:, None, :].expand(-1, seq, -1)
            else:
                assert attention_mask.dtype == torch.bool
                assert attention_mask.shape[1:] == (1, seq, seq)
                visible = attention_mask[:, 0]
        own, context, place = (self.table[i][input_ids] for i in range(3))
        scores = (own @ context.transpose(1, 2)).masked_fill(~visible, -INF)
        logits = own + scores.softmax(-1) @ context
        if position_ids is not None:
            logits = logits + place.roll(1, -1) * position_ids[..., None]
        return SimpleNamespace(logits=logits)


def padded(rows: list[list[int]], side: str, fill: int = 7) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, real = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[number, where], real[number, where] = torch.tensor(row), True
    return ids, real


ROWS = [[5, 3, 8, 3, 3], [9, 3], [1, 2, 3, 4]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("style", ["2d", "4d"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_padding_of_either_side_means_nothing(side: str, style: str, shift: bool, positions: bool) -> None:
    """Each row's answers are those of the row alone, which are the network's own, shifted by one where that is said."""
    net = Net(style)
    denoiser = LogitsModelDenoiser(net, MASK, TOKENS, shift, style, positions)  # type: ignore[arg-type]
    ids, real = padded(ROWS, side)
    together = denoiser(ids, attention_mask=real)
    assert not bool(together.isnan().any())  # Dream #55: NaN of padded rows printed as "!!!!"
    assert torch.equal(denoiser(ids, attention_mask=real, at=real), together[real])
    for number, row in enumerate(ROWS):
        tokens = torch.tensor([row])
        own = {"position_ids": torch.arange(len(row))[None]} if positions else {}
        logits = net(tokens, **own).logits[0]
        order = [max(i - 1, 0) for i in range(len(row))] if shift else list(range(len(row)))
        expected = reference.allowed_log_softmax(logits[order].detach().numpy(), MASK, TOKENS)
        np.testing.assert_allclose(denoiser(tokens)[0].numpy(), expected, atol=1e-9)
        np.testing.assert_allclose(together[number][real[number]].numpy(), expected, atol=1e-9)


def test_what_the_network_is_given() -> None:
    ids, real = padded(ROWS, "left")
    net = Net("2d")
    LogitsModelDenoiser(net, MASK, TOKENS)(ids)
    assert net.seen == {"mask": None, "position_ids": None}
    LogitsModelDenoiser(net, MASK, TOKENS, pass_position_ids=True)(ids, attention_mask=real)
    assert net.seen["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 1], [0, 0, 1, 2, 3]]
    own = (torch.arange(5) + 2).expand(3, 5)
    LogitsModelDenoiser(net, MASK, TOKENS, pass_position_ids=True)(ids, position_ids=own)
    assert torch.equal(net.seen["position_ids"], own)


def test_a_network_that_takes_no_mask_is_given_none_and_no_padding() -> None:
    denoiser = LogitsModelDenoiser(Net("none"), MASK, TOKENS, mask_style="none")
    ids, real = padded(ROWS, "right")
    with pytest.raises(ValueError, match="mask_style='none'"):
        denoiser(ids, attention_mask=real)
    assert torch.equal(denoiser(ids, attention_mask=torch.ones_like(real)), denoiser(ids))


def test_packed_documents_need_our_model() -> None:
    with pytest.raises(ValueError, match="packed documents"):
        LogitsModelDenoiser(Net("2d"), MASK, TOKENS)(torch.ones(1, 4).long(), position_ids=torch.tensor([[0, 1, 0, 1]]))


def test_wrong_descriptions_of_a_network_are_refused() -> None:
    with pytest.raises(ValueError, match="one of 2d, 4d, none, got '3d'"):
        LogitsModelDenoiser(Net("2d"), MASK, TOKENS, mask_style="3d")  # type: ignore[arg-type]
    for mask in (-1, TOKENS):
        with pytest.raises(ValueError, match="below num_tokens=20"):
            LogitsModelDenoiser(Net("2d"), mask, TOKENS)
        with pytest.raises(ValueError, match="below num_tokens=20"):
            FunctionDenoiser(lambda tokens: tokens, mask, TOKENS)


# Plain functions.


def test_a_function_of_the_tokens_is_a_denoiser() -> None:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    denoiser = FunctionDenoiser(lambda tokens: table[tokens], MASK, TOKENS)
    assert isinstance(denoiser, Denoiser)
    assert as_denoiser(denoiser) is denoiser
    tokens = torch.tensor([[1, 3, 5], [3, 3, 2]])
    expected = reference.allowed_log_softmax(table[tokens].double().numpy(), MASK, TOKENS)
    np.testing.assert_allclose(denoiser(tokens).numpy(), expected, atol=1e-6)
    at = tokens == MASK
    assert torch.equal(denoiser(tokens, at=at), denoiser(tokens)[at])
    assert torch.equal(denoiser(tokens, attention_mask=torch.ones_like(at)), denoiser(tokens))


def test_a_function_that_knows_nothing_of_padding_gets_none_unless_it_says_so() -> None:
    tokens, real = torch.ones(2, 3).long(), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    strict, careless = (
        FunctionDenoiser(lambda t: torch.zeros(*t.shape, VOCAB), MASK, TOKENS, ragged_ok=ok) for ok in (False, True)
    )
    with pytest.raises(ValueError, match="ragged_ok=True"):
        strict(tokens, attention_mask=real)
    assert careless(tokens, attention_mask=real).shape == (2, 3, TOKENS)


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, VOCAB), (3, 3, VOCAB), (2, 3, TOKENS - 1), (2, 3, VOCAB, 1)])
def test_logits_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    denoiser = FunctionDenoiser(lambda tokens: torch.zeros(shape), MASK, TOKENS)
    with pytest.raises(ValueError, match=r"must give \[batch, seq, at least num_tokens=20\]"):
        denoiser(torch.ones(2, 3).long())


# Which adapter.


def test_our_model_is_recognised() -> None:
    model = make_model(mask_token_id=MASK)
    assert as_denoiser(model) == ModelDenoiser(model)


@pytest.mark.parametrize(("model_type", "shift", "style"), [("llada", False, "2d"), ("Dream", True, "4d")])
def test_public_models_are_recognised_by_their_config(model_type: str, shift: bool, style: str) -> None:
    net = Net(style, model_type=model_type, mask_token_id=MASK, vocab_size=TOKENS)
    denoiser = as_denoiser(net)
    assert isinstance(denoiser, LogitsModelDenoiser)
    assert (denoiser.shift, denoiser.mask_style, denoiser.mask_token_id, denoiser.num_tokens) == (shift, style, 3, 20)
    told = as_denoiser(net, mask_token_id=0, num_tokens=7)
    assert (told.mask_token_id, told.num_tokens) == (0, 7)


def test_what_is_not_known_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"not a model known here \(llada, Dream\); wrap it: LogitsModelDenoiser"):
        as_denoiser(Net("2d", model_type="other", mask_token_id=MASK, vocab_size=TOKENS))
    with pytest.raises(ValueError, match="wrap it: LogitsModelDenoiser"):
        as_denoiser(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="give it: as_denoiser"):
        as_denoiser(Net("2d", model_type="llada", mask_token_id=None, vocab_size=TOKENS))
    with pytest.raises(ValueError, match="wrap a function of the tokens as FunctionDenoiser"):
        as_denoiser(lambda tokens: tokens)
    with pytest.raises(ValueError, match="str is not a model nor a Denoiser"):
        as_denoiser("GSAI-ML/LLaDA-8B-Base")
    assert set(PUBLIC_MODELS) == {"llada", "Dream"}
