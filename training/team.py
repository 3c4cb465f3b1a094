"""Which processes make every step together: all of a launch, or, with islands, those of one island.

The loop asks a `Team` for every collective, and never accelerate, whose collectives always join the whole launch: a
gathered loss would otherwise wait for the slow network between islands at every step. Read next: `links.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor


@dataclass(frozen=True)
class Team:
    """This process among those that share each step. All methods must be called by every process of the team."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """None: all processes of the launch."""

    @staticmethod
    def of(accelerator: Accelerator) -> Team:
        """All processes of the launch."""
        return Team(accelerator.process_index, accelerator.num_processes, accelerator.device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the team's files."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Tensor:
        """Sum (or largest value) of `tensor` over the team, changed in place, on the team's device."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return tensor

    def barrier(self) -> None:
        """Waits for the whole team."""
        if self.size > 1:
            self.all_reduce(torch.zeros((), device=self.device)).item()

    def gather(self, thing: Any) -> list[Any]:
        """Every process's (picklable) thing, in order of rank, on all of them."""
        things = [thing]
        if self.size > 1:
            things = [None] * self.size
            dist.all_gather_object(things, thing, group=self.group)
        return things

    def share(self, thing: Any, source: int = 0) -> Any:
        """The (picklable) thing of the process `source`, on all of them."""
        box = [thing]
        if self.size > 1:
            dist.broadcast_object_list(box, group_src=source, group=self.group)
        return box[0]

    def copy_from(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites `tensor` with that of the process `source`."""
        if self.size > 1:
            moved = tensor.to(self.device)
            dist.broadcast(moved, group_src=source, group=self.group)
            if moved is not tensor:
                tensor.copy_(moved)
        return tensor
