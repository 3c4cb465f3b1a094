"""The optimizers of the outer step: torch's own, and delayed Nesterov.

Each fragment has its own optimizer over its own anchors, which are tensors apart from the model's parameters: with one
optimizer for all, or with the parameters themselves, stepping one fragment would also consume the gradients that inner
training has left on the others. A tensor whose `grad` is None is left alone, momentum included: that is how a merge
rule rolls a tensor back. Read next: `outer.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mdlm.training.outer_config import OuterConfig


class DelayedNesterov(Optimizer):
    """Nesterov whose momentum is renewed only every `buffer` gradients, for gradients that arrive one by one.

    With g the pseudo-gradient, N = buffer and c = spread (Async Local-SGD, 2401.09135, algorithm 3): the buffer d
    collects g; at every N-th step m = mu m + d / N, anchor -= lr ((1 - c N + c) mu m + g / N), d = 0; between them
    anchor -= lr (c mu m + g / N). With N = 1 it is torch's Nesterov. HALoS (2506.04531) passes N times its base rate.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float, buffer: int, spread: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "buffer": buffer, "spread": spread})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One gradient applied to every tensor that has one."""
        assert closure is None, "a pseudo-gradient cannot be evaluated again"
        for group in self.param_groups:
            lr, mu, n, c = group["lr"], group["momentum"], group["buffer"], group["spread"]
            for anchor in group["params"]:
                if anchor.grad is None:
                    continue
                state = self.state[anchor]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(anchor)
                    state["delayed"] = torch.zeros_like(anchor)
                    state["step"] = 0
                state["step"] += 1
                state["delayed"].add_(anchor.grad)
                share = c
                if state["step"] % n == 0:
                    state["momentum_buffer"].mul_(mu).add_(state["delayed"], alpha=1 / n)
                    state["delayed"].zero_()
                    share = 1 - c * n + c
                anchor.sub_(state["momentum_buffer"], alpha=lr * share * mu).sub_(anchor.grad, alpha=lr / n)


def _sgd(anchors: Sequence[Tensor], c: OuterConfig) -> Optimizer:
    """Anchor -= lr d."""
    return torch.optim.SGD(anchors, lr=c.lr)


def _nesterov(anchors: Sequence[Tensor], c: OuterConfig) -> Optimizer:
    """m = mu m + d; anchor -= lr (d + mu m)."""
    return torch.optim.SGD(anchors, lr=c.lr, momentum=c.momentum, nesterov=c.momentum > 0)


def _heavy_ball(anchors: Sequence[Tensor], c: OuterConfig) -> Optimizer:
    """m = mu m + d; anchor -= lr m (Polyak's momentum, as in SlowMo, 1910.00643; it is not Nesterov's)."""
    return torch.optim.SGD(anchors, lr=c.lr, momentum=c.momentum)


def _adam(anchors: Sequence[Tensor], c: OuterConfig) -> Optimizer:
    """Adam on pseudo-gradients (FedAdam)."""
    return torch.optim.Adam(anchors, lr=c.lr, betas=(c.momentum, c.beta2), eps=c.eps)


def _delayed_nesterov(anchors: Sequence[Tensor], c: OuterConfig) -> Optimizer:
    """See `DelayedNesterov`."""
    return DelayedNesterov(anchors, lr=c.lr, momentum=c.momentum, buffer=c.buffer, spread=c.spread)


OPTIMIZERS: dict[str, Callable[[Sequence[Tensor], OuterConfig], Optimizer]] = {
    "sgd": _sgd,
    "nesterov": _nesterov,
    "heavy_ball": _heavy_ball,
    "adam": _adam,
    "delayed_nesterov": _delayed_nesterov,
}
"""`--outer.optimizer` -> function(anchors of one fragment, options) -> optimizer."""


def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Takes over the saved momenta, but not the saved learning rate: options come from the configuration of the run."""
    own = copy.deepcopy(state["state"])  # torch would share memory with the saved tensors
    optimizer.load_state_dict({"state": own, "param_groups": optimizer.state_dict()["param_groups"]})
