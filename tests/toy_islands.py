"""A small model and its inner trainings for tests of the outer step: float32 for the product, float64 for oracles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from simulated_islands import Link, Network, on_islands
from torch import Tensor, nn

from mdlm.training.outer import Landed, OuterStep
from mdlm.training.outer_config import OuterConfig
from mdlm.training.routes import exchange

LAYERS = {"embed": 20, "layers.0": 16, "layers.1": 16, "layers.2": 16, "head": 20}
"""Parameters of `Toy` in order, with their numbers of values; 88 in all."""


class Toy(nn.Module):
    """Embedding, three layers, head: a language model of five tokens that predicts the next from the last."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.head = nn.Linear(4, 5, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def loss(model: nn.Module, island: int, step: int, rows: int = 8) -> Tensor:
    """Cross-entropy on random bigrams, the same for the same island and step."""
    generator = torch.Generator().manual_seed(1000 * island + step)
    tokens = torch.randint(0, 5, (rows, 2), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()


_random = np.random.default_rng(7)
CURVATURE = _random.uniform(0.2, 2.0, 88)
TARGETS = _random.normal(size=(4, 64, 88))
RATE = 0.1


def quadratic(island: int, step: int, theta: np.ndarray) -> np.ndarray:
    """One inner SGD step on 1/2 |theta - target|^2 weighted by the curvature; targets differ by island and step."""
    return theta - RATE * CURVATURE * (theta - TARGETS[island, step])


@torch.no_grad()
def quadratic_(model: nn.Module, island: int, step: int) -> None:
    """The same step on the model."""
    start = 0
    for p in model.parameters():
        stop = start + p.numel()
        curvature = torch.tensor(CURVATURE[start:stop], dtype=torch.float32).view(p.shape)
        target = torch.tensor(TARGETS[island, step, start:stop], dtype=torch.float32).view(p.shape)
        p.sub_(RATE * curvature * (p - target))
        start = stop


Inner = Callable[[nn.Module, int, int], None]


class Island:
    """One island's model, link and outer step."""

    def __init__(self, config: OuterConfig, network: Network, island: int, model: nn.Module | None = None) -> None:
        self.model = Toy() if model is None else model
        self.island = island
        self.link = Link(network, island)
        self.exchange = exchange(config, self.link)
        self.outer = OuterStep(self.model, config, self.exchange)
        self.landed: list[Landed] = []

    def train(self, steps: range, inner: Inner = quadratic_) -> None:
        """Tokens differ by island and step."""
        for n in steps:
            inner(self.model, self.island, n)
            self.landed += self.outer.step(n, tokens=1 + self.island * (n % 4))


def train_islands(
    config: OuterConfig, islands: int, steps: int, inner: Inner = quadratic_, finish: bool = False
) -> list[Island]:
    """All islands from the same start, `steps` inner steps each; `finish` ends with what is left of the round."""
    network = Network(islands)

    def work(island: int) -> Island:
        one = Island(config, network, island)
        one.train(range(1, steps + 1), inner)
        if finish:
            one.landed += one.outer.finish(steps)
        one.exchange.close()
        return one

    return on_islands(islands, work)
