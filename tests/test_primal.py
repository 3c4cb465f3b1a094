"""Primal averaging against its three sequences in float64, and its limits: the plain optimizer and heavy ball."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from toy_islands import Toy, loss

from mdlm.training.primal import PrimalAveraging

SIZE = 12
_random = np.random.default_rng(3)
CURVATURE = _random.uniform(0.2, 2.0, SIZE)
TARGETS = _random.normal(size=(200, SIZE))
START = _random.normal(size=SIZE)


def gradient(step: int, at: np.ndarray) -> np.ndarray:
    return CURVATURE * (at - TARGETS[step])


def three_sequences(steps: int, mu_x: float, mu_y: float, lr: float, decay: float, adam: bool) -> tuple:
    """(x, y, z) after `steps`, each kept, in float64. AdamW: betas 0.9 and 0.95, eps 1e-8, decoupled decay of z."""
    x, z = START.copy(), START.copy()
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for n in range(steps):
        g = gradient(n, mu_y * x + (1 - mu_y) * z)
        update = g
        if adam:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            update = m / (1 - 0.9 ** (n + 1)) / (np.sqrt(v / (1 - 0.95 ** (n + 1))) + 1e-8)
        z = z - lr * decay * z - lr * update
        x = mu_x * x + (1 - mu_x) * z
    return x, mu_y * x + (1 - mu_y) * z, z


class Vector(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(START[:5], dtype=dtype))
        self.b = nn.Parameter(torch.tensor(START[5:], dtype=dtype))

    def flat(self) -> np.ndarray:
        return torch.cat([self.a, self.b]).detach().double().numpy()


def train(model: Vector, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for n in steps:
        g = torch.tensor(gradient(n, model.flat()), dtype=model.a.dtype)
        model.a.grad, model.b.grad = g[:5].clone(), g[5:].clone()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("mu_x", [0.0, 0.9 ** (1 / 8), 0.99])
@pytest.mark.parametrize("mu_y", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
def test_it_follows_the_three_sequences(mu_x: float, mu_y: float, adam: bool) -> None:
    model = Vector()
    optimizer = adamw(model) if adam else torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.0)
    average = PrimalAveraging(optimizer, dict(model.named_parameters()), mu_x, mu_y)
    train(model, optimizer, range(60))
    x, y, _ = three_sequences(60, mu_x, mu_y, 0.05, 0.1 if adam else 0.0, adam)
    assert model.flat() == pytest.approx(y, abs=1e-12)
    with average.averaged():
        assert model.flat() == pytest.approx(x, abs=1e-12)
    assert model.flat() == pytest.approx(y, abs=1e-12)


def test_float32_rounding_does_not_pile_up() -> None:
    """The average forgets errors as it forgets its past: 1 / (1 - mu_x) = 608 steps of 6e-8 are the most."""
    model = Vector(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = PrimalAveraging(optimizer, dict(model.named_parameters()), 0.9 ** (1 / 64), 0.7)
    train(model, optimizer, range(200))
    x, y, _ = three_sequences(200, 0.9 ** (1 / 64), 0.7, 0.05, 0.0, adam=False)
    assert np.abs(model.flat() - y).max() < 608 * 6e-8
    with average.averaged():
        assert np.abs(model.flat() - x).max() < 608 * 6e-8


def test_without_averaging_it_is_the_optimizer_itself_bit_for_bit() -> None:
    plain, wrapped = Toy(), Toy()
    for model in (plain, wrapped):
        optimizer = adamw(model)
        if model is wrapped:
            PrimalAveraging(optimizer, dict(model.named_parameters()), 0.0, 0.7)
        for n in range(8):
            optimizer.zero_grad()
            loss(model, 0, n).backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters()))


def test_gradients_at_the_average_make_it_heavy_ball() -> None:
    """x' - x = mu (x - its last value) - (1 - mu) lr g(x): torch's momentum with another learning rate."""
    ball, averaged = Vector(), Vector()
    train(ball, torch.optim.SGD(ball.parameters(), lr=(1 - 0.9) * 0.2, momentum=0.9), range(60))
    optimizer = torch.optim.SGD(averaged.parameters(), lr=0.2)
    PrimalAveraging(optimizer, dict(averaged.named_parameters()), 0.9, 1.0)
    train(averaged, optimizer, range(60))
    assert averaged.flat() == pytest.approx(ball.flat(), abs=1e-12)


def test_the_average_differs_from_the_iterate() -> None:
    x, y, z = three_sequences(60, 0.99, 0.7, 0.05, 0.0, adam=True)
    assert min(np.abs(x - y).max(), np.abs(y - z).max()) > 0.01


def test_averaged_puts_back_every_bit_even_after_an_error() -> None:
    model = Vector(torch.float32)
    optimizer = adamw(model)
    average = PrimalAveraging(optimizer, dict(model.named_parameters()), 0.97, 0.7)
    train(model, optimizer, range(5))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), average.averaged():
        raise KeyError
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model = Vector(torch.float32)
    optimizer = adamw(model)
    average = PrimalAveraging(optimizer, dict(model.named_parameters()), 0.97, 0.7)
    train(model, optimizer, range(5))
    saved = copy.deepcopy((average.state_dict(), optimizer.state_dict(), model.state_dict()))
    train(model, optimizer, range(5, 9))
    again = Vector(torch.float32)
    again.load_state_dict(saved[2])
    optimizer = adamw(again)
    restored = PrimalAveraging(optimizer, dict(again.named_parameters()), 0.97, 0.7)
    restored.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(again, optimizer, range(5, 9))
    assert np.array_equal(again.flat(), model.flat())
    with pytest.raises(ValueError, match="other parameters or shapes"):
        restored.load_state_dict({"z": {"a": saved[0]["z"]["a"]}})
    restored.forget()
    with restored.averaged():
        assert again.flat() == pytest.approx(model.flat(), abs=1e-6)  # x = y = z


@pytest.mark.parametrize(("mu_x", "mu_y"), [(1.0, 0.7), (-0.1, 0.7), (0.9, 0.0), (0.9, 1.1)])
def test_weights_out_of_range_are_named(mu_x: float, mu_y: float) -> None:
    model = Vector()
    with pytest.raises(ValueError, match="must lie in"):
        PrimalAveraging(adamw(model), dict(model.named_parameters()), mu_x, mu_y)
