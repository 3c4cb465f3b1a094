"""Engines beside the outer step: compressed gradients in every step, and primal averaging, as the loop sees them.

Both are for one island: all processes share every step, as without an outer step. Read next: `hooks.py`, `primal.py`,
which do the work; `islands.py`, whose `Outer` they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mdlm.training import packed
from mdlm.training.ema import EMA
from mdlm.training.hooks import CompressedGradients
from mdlm.training.islands import Moment
from mdlm.training.links import Gloo, Links
from mdlm.training.outer_config import OuterConfig
from mdlm.training.primal import PrimalAveraging
from mdlm.training.routes import exchange

RECORD_EVERY = 10
"""Steps between two records of what was sent."""


class _OneIsland:
    """What an engine of one island answers to questions about others, and its file in a checkpoint."""

    name: str
    """Of the file."""

    def __init__(self, core: nn.Module, links: Links) -> None:
        self.team, self._core = links.team, core

    def dense(self, step: int) -> bool:
        """Every step is shared by all islands: there is one."""
        return True

    def total(self, numbers: Tensor) -> Tensor:
        """As they are."""
        return numbers

    def share_gradients(self) -> None:
        """Nothing to do."""

    def after_step(self, step: int, tokens: int, stop: bool, last: bool) -> Moment:
        """Nothing happens between steps."""
        return Moment(stop=stop)

    def published(self, ema: EMA | None) -> AbstractContextManager[None]:
        """The average of the weights if there is one, else the weights."""
        return nullcontext() if ema is None else ema.swapped_in(self._core)

    def common_step(self) -> int | None:
        """Nobody else saves."""
        return None

    def largest(self, value: float) -> float:
        """As it is."""
        return value

    def verify(self, facts: Mapping[str, Any]) -> None:
        """Nobody to compare with."""

    def attach(self, run: Any) -> None:
        """What it needs it has."""

    def close(self) -> None:
        """Nothing runs."""

    def state(self) -> dict[str, Any]:
        """What this process saves."""
        raise NotImplementedError

    def take(self, state: dict[str, Any]) -> None:
        """Takes over what was saved."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """One file per process."""
        packed.write(folder / f"{self.name}-{self.team.rank}.safetensors", self.state())

    def load(self, folder: Path) -> None:
        """This process's file, or the main one's if there were fewer processes. Raises ValueError without either."""
        own, main = (folder / f"{self.name}-{rank}.safetensors" for rank in (self.team.rank, 0))
        if not main.is_file():
            raise ValueError(f"--resume: {main} is not there: the checkpoint was made with another --outer.engine")
        self.take(packed.read(own if own.is_file() else main))


class Gradients(_OneIsland):
    """Compressed gradients (`hooks.py`). Implements `Outer`."""

    name = "gradients"

    def __init__(self, core: nn.Module, model: nn.Module, config: OuterConfig, links: Links) -> None:
        """Sets the hook. Raises ValueError unless the model is wrapped in DDP over several processes."""
        super().__init__(core, links)
        if not isinstance(model, DistributedDataParallel):
            raise ValueError("--outer.engine gradients compresses what DDP sends: it needs DDP and 2 processes or more")
        transport = Gloo(dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size(), links.patience)
        self._exchange = exchange(config, transport)
        parameters = {name: p for name, p in core.named_parameters() if p.requires_grad}
        everybody = dist.group.WORLD
        assert everybody is not None
        self._hook = CompressedGradients(parameters, config, self._exchange, partial(allreduce_hook, everybody))
        model.register_comm_hook(None, lambda state, bucket: self._hook.hook(state, bucket))  # DDP reads annotations
        self._recorded = 0

    def after_step(self, step: int, tokens: int, stop: bool, last: bool) -> Moment:
        """Now and then a record of the bytes sent."""
        if step % RECORD_EVERY and not last:
            return Moment(stop=stop)
        sent, self._recorded = self._hook.bytes_sent - self._recorded, self._hook.bytes_sent
        return Moment([{"bytes_sent": sent, "bytes_total": self._hook.bytes_sent}], stop=stop)

    def forget(self) -> None:
        """See `Outer`."""
        self._hook.forget()

    def close(self) -> None:
        """Ends the thread."""
        self._exchange.rewind()
        self._exchange.close()

    def state(self) -> dict[str, Any]:
        """Residuals, bases and the number of steps."""
        return self._hook.state_dict()

    def take(self, state: dict[str, Any]) -> None:
        """See `CompressedGradients.load_state_dict`."""
        self._hook.load_state_dict(state)


class Primal(_OneIsland):
    """Primal averaging (`primal.py`). Implements `Outer`."""

    name = "primal"

    def __init__(self, core: nn.Module, optimizer: torch.optim.Optimizer, config: OuterConfig, links: Links) -> None:
        super().__init__(core, links)
        parameters = {name: p for name, p in core.named_parameters() if p.requires_grad}
        keeps = config.momentum ** (1 / config.every)
        self._average = PrimalAveraging(optimizer, parameters, keeps, config.interpolation)

    def published(self, ema: EMA | None) -> AbstractContextManager[None]:
        """The average x."""
        assert ema is None, "refused by the configuration"
        return self._average.averaged()

    def forget(self) -> None:
        """See `Outer`."""
        self._average.forget()

    def state(self) -> dict[str, Any]:
        """The optimizer's own sequence; the other is in the parameters."""
        return self._average.state_dict()

    def take(self, state: dict[str, Any]) -> None:
        """See `PrimalAveraging.load_state_dict`."""
        self._average.load_state_dict(state)
