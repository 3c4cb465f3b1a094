"""The average of the weights against its closed form, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mdlm.training.ema import EMA, effective_decay


class Tied(nn.Module):
    """Two names for one matrix, a frozen one, and a bias in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.second.bias = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def set_weights(model: Tied, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=generator))


def test_effective_decay() -> None:
    assert effective_decay(0.999, 0) == 0.1
    assert effective_decay(0.999, 8) == 0.5
    assert effective_decay(0.999, 10**6) == 0.999
    assert effective_decay(0.05, 0) == 0.05


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99])
def test_average_equals_the_weighted_sum_of_the_weights(decay: float) -> None:
    model = Tied()
    set_weights(model, 0)
    history = [{n: p.detach().double() for n, p in model.named_parameters()}]
    ema = EMA(model, decay)
    steps = 30
    for n in range(steps):
        set_weights(model, n + 1)
        history.append({n: p.detach().double() for n, p in model.named_parameters()})
        ema.update(model)
    decays = [min(decay, (1 + n) / (10 + n)) for n in range(steps)]
    weights = [torch.tensor(decays, dtype=torch.float64).prod()]
    weights += [(1 - decays[n]) * torch.tensor(decays[n + 1 :], dtype=torch.float64).prod() for n in range(steps)]
    assert sum(weights) == pytest.approx(1.0)
    assert ema.updates == steps
    assert list(ema.average) == ["first.weight", "second.bias"]
    for name, average in ema.average.items():
        assert average.dtype == torch.float32
        expected = sum(w * h[name] for w, h in zip(weights, history, strict=True))
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-6)


def test_swapping_in_and_out_restores_every_bit_and_keeps_the_memory() -> None:
    model = Tied()
    set_weights(model, 0)
    ema = EMA(model, 0.9)
    set_weights(model, 1)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}

    def fails() -> None:
        with ema.swapped_in(model):
            assert torch.equal(model.second.weight, ema.average["first.weight"])
            assert model.second.bias.dtype == torch.bfloat16
            raise KeyError("an error inside the block must not leave the average in the model")

    with pytest.raises(KeyError):
        fails()
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])


def test_loading_continues_bit_for_bit() -> None:
    model = Tied()
    ema, other = EMA(model, 0.9), EMA(model, 0.9)
    for n in range(3):
        set_weights(model, n)
        ema.update(model)
    other.load({name: tensor.clone() for name, tensor in ema.average.items()}, ema.updates)
    for one in (ema, other):
        one.update(model)
    assert ema.updates == other.updates == 4
    for name in ema.average:
        assert torch.equal(ema.average[name], other.average[name])


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"--train\.ema"):
        EMA(Tied(), decay)
