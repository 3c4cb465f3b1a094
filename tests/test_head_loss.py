"""Head and loss in one equal `lm_head` followed by the definition of the loss, in value and in every gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdlm.head_loss
from mdlm.config import MDLMConfig
from mdlm.data import Batch
from mdlm.head_loss import Scored, fuses, nll_and_gradient_, weighted_nll
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import Objective
from mdlm.subs import subs_nll

VOCAB, TOKENS, MASK, WIDTH = 24, 20, 3, 6  # four padding rows of the vocabulary


def _case(rows: int, dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Scored]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    head = (2 * torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(MASK + 1, TOKENS, (rows,), generator=generator)
    weight = torch.rand(rows, generator=generator, dtype=torch.float64) * 3
    weight[::3] = 0.0
    return hidden.requires_grad_(), head.requires_grad_(), Scored(targets, weight, MASK, TOKENS)


def _plain(hidden: Tensor, head: Tensor, scored: Scored) -> tuple[Tensor, Tensor]:
    nll = subs_nll(hidden @ head.T, scored.targets, MASK, TOKENS)
    return (scored.weight * nll).sum(), nll.detach()


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("small", [False, True], ids=["one-chunk", "many-chunks"])
def test_loss_and_gradients_equal_the_definition(rows: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        monkeypatch.setitem(mdlm.head_loss._LOGITS, "cpu", 9 * VOCAB)
        monkeypatch.setattr(mdlm.head_loss, "_FEWEST_ROWS", 1)
        monkeypatch.setitem(mdlm.head_loss._IN_CACHE, "cpu", 2 * VOCAB)
    hidden, head, scored = _case(rows)
    answers = []
    for path in (_plain, weighted_nll):
        loss, nll = path(hidden, head, scored)
        gradients = torch.autograd.grad(0.7 * loss, (hidden, head))
        answers.append((loss.detach(), nll, *gradients))
    for expected, got in zip(*answers):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not bool(answers[1][2][::3].any()), "rows of weight 0 change nothing"


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(frozen: str) -> None:
    hidden, head, scored = _case(7)
    both = torch.autograd.grad(weighted_nll(hidden, head, scored)[0], (hidden, head))
    if frozen == "hidden":
        loss, _ = weighted_nll(hidden.detach(), head, scored)
        assert torch.equal(torch.autograd.grad(loss, head)[0], both[1])
    else:
        loss, _ = weighted_nll(hidden, head.detach(), scored)
        assert torch.equal(torch.autograd.grad(loss, hidden)[0], both[0])
    with torch.no_grad():
        assert torch.equal(weighted_nll(hidden, head, scored)[0], loss.detach())


def test_a_second_backward_is_refused() -> None:
    """The first one scales the gradients in place; another would scale them twice."""
    hidden, head, scored = _case(5)
    loss, _ = weighted_nll(hidden, head, scored)
    torch.autograd.grad(2 * loss, (hidden, head), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(2 * loss, (hidden, head))


def test_under_autocast_it_is_as_precise_as_the_head_and_the_definition() -> None:
    hidden, head, scored = _case(64, torch.float32)
    exact = [x.detach() for x in torch.autograd.grad(_plain(hidden.double(), head.double(), scored)[0], (hidden, head))]
    worst = {}
    for name, path in (("fused", weighted_nll), ("plain", _plain)):
        with torch.autocast("cpu", torch.bfloat16):
            loss, nll = path(hidden, head, scored)
        assert loss.dtype == torch.float64 or nll.dtype == torch.float32
        gradients = torch.autograd.grad(loss, (hidden, head))
        assert [g.dtype for g in gradients] == [torch.float32, torch.float32]
        worst[name] = [float((g - e).abs().max()) for g, e in zip(gradients, exact)]
    for fused, plain in zip(worst["fused"], worst["plain"]):
        assert fused <= 1.5 * plain


def test_a_double_model_under_autocast_stays_double() -> None:
    hidden, head, scored = _case(5)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = weighted_nll(hidden, head, scored)
    assert torch.equal(loss, weighted_nll(hidden, head, scored)[0])


def test_bad_targets_and_bad_logits_are_not_hidden() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, 9] = math.nan
    logits[2, 5] = -math.inf
    targets = torch.tensor([MASK, 5, 5, TOKENS])
    nll = nll_and_gradient_(logits, targets, None, MASK, TOKENS)
    assert nll[0] == nll[2] == nll[3] == math.inf
    assert bool(nll[1].isnan())
    gradient = torch.zeros(1, VOCAB)
    nll_and_gradient_(gradient, torch.tensor([TOKENS + 1]), torch.ones(1), MASK, TOKENS)
    assert not bool(gradient[0, [MASK, *range(TOKENS, VOCAB)]].any())


def _model(**options: Any) -> MDLMForMaskedLM:
    torch.manual_seed(0)
    config = MDLMConfig(
        vocab_size=64, num_tokens=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, mask_token_id=0, pad_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return MDLMForMaskedLM(config).double()


@pytest.mark.parametrize(
    "options",
    [{}, {"shift_logits": True}, {"block_size": 4}, {"block_size": 4, "shift_logits": True},
     {"tie_word_embeddings": True}],
    ids=["plain", "shifted", "blocks", "shifted-blocks", "tied"],
)  # fmt: skip
def test_training_with_the_fused_head_is_training_with_the_plain_one(options: dict[str, Any]) -> None:
    model = _model(**options)
    tokens = torch.randint(3, 61, (4, 16), generator=torch.Generator().manual_seed(5))
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.arange(4))
    answers = []
    for fused in (False, True):
        objective = Objective(
            global_batch=4, seed=0, mask_token_id=0, num_tokens=61, block_size=model.config.block_size, fused_head=fused
        )
        model.zero_grad()
        terms = objective.numerator(model, objective.noise(batch, 0))
        terms.loss.backward()
        answers.append((terms, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    (plain, expected), (fused_terms, got) = answers
    torch.testing.assert_close(fused_terms.loss, plain.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(fused_terms.nll_sum, plain.nll_sum, rtol=1e-9, atol=0)
    assert fused_terms.masked_count == plain.masked_count
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-9)


def test_only_a_plain_matrix_is_fused_and_asking_otherwise_is_an_error() -> None:
    assert fuses(nn.Linear(3, 4, bias=False))
    assert not fuses(nn.Linear(3, 4))
    assert not fuses(nn.Sequential(nn.Linear(3, 4, bias=False)))
    model = _model()
    tokens = torch.randint(3, 61, (1, 8))
    scored = Scored(tokens[0], torch.ones(8), 0, 61)
    with pytest.raises(ValueError, match="needs logits_at="):
        model(input_ids=tokens, scored=scored)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="plain matrix"):
        model(input_ids=tokens, logits_at=torch.ones(1, 8, dtype=torch.bool), scored=scored)


@pytest.mark.gpu
def test_cuda_equals_the_cpu() -> None:
    hidden, head, scored = _case(300, torch.float32)
    expected = torch.autograd.grad(weighted_nll(hidden, head, scored)[0], (hidden, head))
    there = Scored(scored.targets.cuda(), scored.weight.cuda(), MASK, TOKENS)
    h, w = hidden.detach().cuda().requires_grad_(), head.detach().cuda().requires_grad_()
    for got, want in zip(torch.autograd.grad(weighted_nll(h, w, there)[0], (h, w)), expected):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
