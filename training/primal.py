"""Primal averaging (GPA): what the outer step does for a single island, without rounds.

Three sequences ("Smoothing DiLoCo", 2512.17131): gradients are taken at y = mu_y x + (1 - mu_y) z; the inner optimizer
moves z; x = mu_x x + (1 - mu_x) z is their average, and the model that is evaluated and saved. With
mu_x = momentum^(1 / H) the average forgets over H steps as much as DiLoCo's outer momentum does in one round, but moves
in every step. mu_x = 0 is the inner optimizer itself; with mu_y = 1 and plain SGD it is heavy ball with momentum mu_x
and learning rate (1 - mu_x) lr.

One buffer besides the parameters: they hold y, the buffer z, and with w = y - (1 - mu_y) z = mu_y x
    y' = mu_x w + (1 - mu_x mu_y) z',
so that training never forms x. Read next: `outer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mdlm.training.fragments import local


class PrimalAveraging:
    """Wraps an optimizer's `step`, by its hooks: a step that is left out (an overflow) changes nothing.

    Decoupled weight decay acts on z, the sequence that the optimizer moves.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], mu_x: float, mu_y: float
    ) -> None:
        """Starts with x = y = z.

        Args:
            optimizer: the inner optimizer over the parameters (torch's own, not a wrapper of it).
            parameters: name -> trainable parameter, tied ones once.
            mu_x: weight of the average on its past, in [0, 1).
            mu_y: weight of the average where gradients are taken, in (0, 1].

        Raises:
            ValueError: a weight out of range.
        """
        if not 0 <= mu_x < 1:
            raise ValueError(f"mu_x is {mu_x}; it must lie in [0, 1): at 1 the average never moves")
        if not 0 < mu_y <= 1:
            raise ValueError(f"mu_y is {mu_y}; it must lie in (0, 1]: at 0 the average is not part of training")
        self.mu_x, self.mu_y = mu_x, mu_y
        self.parameters = dict(parameters)
        self._z = {name: local(p.detach()).clone() for name, p in self.parameters.items()}
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _before(self, *_: object) -> None:
        """Parameters: y -> z, which the optimizer moves; buffer: z -> w."""
        for name, p in self.parameters.items():
            y, z = local(p.detach()), self._z[name]
            w = y - (1 - self.mu_y) * z
            y.copy_(z)
            z.copy_(w)

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        """Parameters: z' -> y'; buffer: w -> z'."""
        for name, p in self.parameters.items():
            y, z = local(p.detach()), self._z[name]
            moved = z.mul(self.mu_x).add_(y, alpha=1 - self.mu_x * self.mu_y)
            z.copy_(y)
            y.copy_(moved)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the parameters hold the average x (evaluate and save there); then y again."""
        kept = {name: local(p.detach()).clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, p in self.parameters.items():
                y = local(p.detach())
                y.copy_((y - (1 - self.mu_y) * self._z[name]) / self.mu_y)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    local(p.detach()).copy_(kept[name])

    def forget(self) -> None:
        """As at the start, with the parameters as they are: x = y = z."""
        for name, p in self.parameters.items():
            self._z[name].copy_(local(p.detach()))

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """z; y is what the parameters hold, and is saved with them. Shares memory."""
        return {"z": self._z}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes over a saved z. Raises ValueError if it belongs to other parameters or shards."""
        shapes = {name: tuple(z.shape) for name, z in self._z.items()}
        if {name: tuple(saved.shape) for name, saved in state["z"].items()} != shapes:
            raise ValueError(
                "the saved average has other parameters or shapes: resume with the same model and sharding"
            )
        for name, z in self._z.items():
            z.copy_(state["z"][name])
