"""SUBS: tokens that cannot be emitted have no mass, the fast loss equals the plain one, nothing bad is hidden."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from mdlm.subs import subs_log_probs, subs_nll

VOCAB, TOKENS, MASK = 24, 20, 3  # four padding rows of the vocabulary


def _logits(rows: int, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_log_probs_equal_the_reference_whatever_the_precision_of_the_logits(dtype: torch.dtype) -> None:
    logits = _logits(30, dtype)
    got = subs_log_probs(logits.reshape(5, 6, VOCAB), MASK, TOKENS)
    exact = reference.allowed_log_softmax(logits.double().numpy(), MASK, TOKENS).reshape(5, 6, TOKENS)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(got.numpy(), exact, atol=1e-12 if dtype == torch.float64 else 3e-6)
    assert bool((got[..., MASK] == -math.inf).all())
    torch.testing.assert_close(got.double().exp().sum(-1), torch.ones(5, 6).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, VOCAB), (7, VOCAB), (1400, 400)])  # the last takes several chunks
def test_nll_and_its_gradient_equal_the_plain_path(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, vocab = shape
    targets = torch.randint(MASK + 1, TOKENS, (rows,), generator=torch.Generator().manual_seed(2))
    weight = torch.linspace(3, -1, rows, dtype=torch.float64)
    gradients = []
    values = []
    for fast in (True, False):
        logits = _logits(rows, dtype, vocab).requires_grad_()
        if fast:
            nll = subs_nll(logits, targets, MASK, TOKENS)
        else:
            nll = -subs_log_probs(logits.double(), MASK, TOKENS).gather(1, targets[:, None]).squeeze(1)
        values.append(nll.detach().double())
        gradients.append(torch.autograd.grad((nll * weight).sum(), logits)[0].double())
    exact = dtype == torch.float64
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-12 if exact else 1e-5)
    grad_tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=grad_tolerance)
    assert bool((gradients[0][:, MASK] == 0).all())
    assert bool((gradients[0][:, TOKENS:] == 0).all())


def test_nll_passes_gradcheck_and_leaves_the_logits_alone() -> None:
    logits = _logits(6, torch.float64).requires_grad_()
    before = logits.detach().clone()
    targets = torch.tensor([4, 5, 6, 7, 19, 0])
    assert torch.autograd.gradcheck(lambda x: subs_nll(x, targets, MASK, TOKENS), (logits,))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("column", [MASK, TOKENS, VOCAB - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_cannot_be_emitted_takes_no_probability(column: int, dtype: torch.dtype) -> None:
    """Adversarial logits: the mask id or a padding row is the argmax by far."""
    targets = torch.full((9,), 7)
    plain = _logits(9, dtype)
    hostile = plain.clone()
    hostile[:, column] = 3e4
    hostile.requires_grad_()
    nll = subs_nll(hostile, targets, MASK, TOKENS)
    assert torch.equal(nll, subs_nll(plain, targets, MASK, TOKENS))
    (gradient,) = torch.autograd.grad(nll.sum(), hostile)
    assert bool(gradient.isfinite().all())
    assert float(subs_log_probs(hostile.detach(), MASK, TOKENS).exp().sum(-1).min()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("target", [MASK, TOKENS, VOCAB - 1])
def test_a_target_that_cannot_be_emitted_costs_infinity(target: int) -> None:
    logits = torch.zeros(1, VOCAB, requires_grad=True)
    nll = subs_nll(logits, torch.tensor([target]), MASK, TOKENS)
    assert float(nll.detach()) == math.inf
    (gradient,) = torch.autograd.grad(nll.sum(), logits)
    assert not bool(gradient[0, [MASK, *range(TOKENS, VOCAB)]].any())


def test_nan_and_infinity_are_not_hidden() -> None:
    targets = torch.tensor([5, 5, 5, 5])
    logits = torch.zeros(4, VOCAB)
    logits[0, 9] = math.nan
    logits[1, 5] = -math.inf
    logits[2] = -math.inf
    logits[3, 9] = math.inf
    nll = subs_nll(logits, targets, MASK, TOKENS)
    assert nll.isnan().tolist()[:1] + nll.isnan().tolist()[2:3] == [True, True]
    assert float(nll[1]) == math.inf
    assert not bool(nll[3].isfinite())
    assert bool(subs_log_probs(logits, MASK, TOKENS)[0, [4, 5, 9]].isnan().all())


@pytest.mark.gpu
def test_cuda_nll_and_gradient_equal_the_cpu() -> None:
    targets = torch.randint(MASK + 1, TOKENS, (1400,), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for device in ("cpu", "cuda"):
            logits = _logits(1400, dtype, 400).to(device).requires_grad_()
            nll = subs_nll(logits, targets.to(device), MASK, TOKENS)
            results.append((nll.detach().cpu(), torch.autograd.grad(nll.sum(), logits)[0].cpu()))
        torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-2, atol=1e-5)
