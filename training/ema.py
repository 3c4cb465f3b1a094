"""Exponential moving average of the weights, kept in float32: the weights that are evaluated and published.

The effective decay at the n-th update (from 0) is min(decay, (1 + n) / (10 + n)), so that the random start is forgotten
quickly: MDLM (2406.07524) and its code train with decay 0.9999 under this rule. Read next: `loop.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def effective_decay(decay: float, updates: int) -> float:
    """Weight of the old average when `updates` updates were made before; in [0.1, decay] for decay >= 0.1."""
    return min(decay, (1 + updates) / (10 + updates))


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class EMA:
    """Average of a model's trainable parameters; tied parameters are held once, sharded ones as this process's shard.

    Attributes:
        decay: upper bound of the effective decay, in [0, 1).
        updates: number of updates so far (steps that were skipped do not count).
        average: parameter name -> float32 tensor, shaped and sharded as the parameter.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"the EMA decay (--train.ema) is {decay}; it must lie in [0, 1)")
        self.decay = decay
        self.updates = 0
        self.average = {
            name: p.detach().to(torch.float32, copy=True) for name, p in model.named_parameters() if p.requires_grad
        }

    def _pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert parameters.keys() == self.average.keys(), "another model than the one the average was made of"
        return (
            [_local(average) for average in self.average.values()],
            [_local(parameters[name].detach()) for name in self.average],
        )

    @torch.no_grad()
    def update(self, model: nn.Module, steps: int = 1) -> None:
        """Moves the average towards the model's weights by 1 - effective decay, as if `steps` times over."""
        average, current = self._pairs(model)
        kept = math.prod(effective_decay(self.decay, self.updates + i) for i in range(steps))
        torch._foreach_lerp_(average, [c.to(torch.float32) for c in current], 1.0 - kept)
        self.updates += steps

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Within the block the model's parameters hold the average; afterwards their own values, bit for bit.

        Values are copied into the parameters' own memory, so compiled code and sharding stay valid. Costs one copy of
        the weights in memory while it lasts.
        """
        average, current = self._pairs(model)
        kept = [c.clone() for c in current]
        with torch.no_grad():
            torch._foreach_copy_(current, average)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(current, kept)

    @torch.no_grad()
    def load(self, average: Mapping[str, Tensor], updates: int) -> None:
        """Takes over saved averages (same names, shapes and sharding as `average`) and their number of updates."""
        assert average.keys() == self.average.keys(), "names differ"
        for name, tensor in average.items():
            _local(self.average[name]).copy_(_local(tensor))
        self.updates = updates
