"""Data-parallel training that sends compressed gradients in every step: PowerSGD and LoCo as exchanges of gradients.

What the outer step does to pseudo-gradients every H steps (`routes.py`: project or code, all-to-all, mean in float32,
all-gather, error feedback) is done here to gradients in every step, in place of DDP's all-reduce. PowerSGD (1905.13727)
is the low-rank projection with classic feedback; LoCo (2407.04480) 4-bit codes with a moving average of the error,
itself kept in 8 bits and dropped every so often.

A compressor that remembers something (residuals, bases) works on all gradients at once, in the order of the parameters'
names, when DDP's last bucket is ready: DDP re-cuts its buckets after the first step, and again after every resume, and
a residual must never meet other parameters than its own. Torch's PowerSGD hook, which goes bucket by bucket, also
aborts on gloo with more than one of them. A compressor without memory goes bucket by bucket, while the backward is
still running. Read next: `routes.py`, `compress.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.futures import Future

from mdlm.training.exchange import Exchange, Merged, Message
from mdlm.training.fragments import Piece, layout, length
from mdlm.training.outer_config import OuterConfig


class Bucket(Protocol):
    """What is needed of `torch.distributed.GradBucket`."""

    def buffer(self) -> Float[Tensor, " values"]:
        """The gradients, flat."""

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one per parameter."""

    def parameters(self) -> list[Tensor]:
        """The parameters, in the same order."""

    def is_last(self) -> bool:
        """Whether no other bucket follows in this backward."""


@dataclass
class _Bucket:
    """A bucket that waits for its mean. DDP's own object is not kept: it is DDP's."""

    flat: Tensor
    gradients: list[tuple[Tensor, Tensor]]
    future: Future[Tensor]
    wait: Callable[[], Merged] | None


class CompressedGradients:
    """A DDP communication hook: `model.register_comm_hook(None, hook)` with this object's `hook`.

    After the backward all processes hold the same gradients bit for bit. If a process's gradient is not finite all
    processes get NaN, as with a plain all-reduce, and nothing is remembered of that step.

    Attributes:
        bytes_sent: bytes that this process has sent so far, messages' heads included.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OuterConfig,
        exchange: Exchange,
        plain: Callable[[Any], Future[Tensor]],
    ) -> None:
        """Works for the trainable parameters (name -> parameter, tied ones once).

        Args:
            parameters: what DDP reduces.
            config: the compression, and `start_step`: steps before which gradients travel uncompressed.
            exchange: the processes.
            plain: torch's all-reduce of a bucket, for those steps.
        """
        self._fragment = layout(parameters, 1)[0]
        self._places = {id(parameters[piece.name]): piece for piece in self._fragment}
        self._remembers = config.compress.feedback != "none" or config.compress.projection != "none"
        self._start_step = config.start_step
        self._exchange, self._plain = exchange, plain
        self._steps = 0
        self._waiting: list[_Bucket] = []
        self.bytes_sent = 0

    def hook(self, state: object, bucket: Bucket) -> Future[Tensor]:
        """What DDP calls with every bucket of a backward, in the same order on all processes."""
        last = bucket.is_last()
        if self._steps < self._start_step:
            self._steps += last
            return self._plain(bucket)
        flat, future = bucket.buffer(), Future[Tensor]()
        wait = None if self._remembers else self._exchange.start(self._message(flat))
        self._waiting.append(_Bucket(flat, list(zip(bucket.parameters(), bucket.gradients())), future, wait))
        if last:
            if self._remembers:
                self._all_at_once()
            else:
                self._bucket_by_bucket()
            for one in self._waiting:
                one.future.set_result(one.flat)
            self._waiting.clear()
            self._steps += 1
        return future

    def _message(self, flat: Tensor) -> Message:
        values = flat.to(torch.float32, copy=True)
        piece = Piece("bucket", (len(values),), 0, len(values), False)
        return Message(len(self._waiting), self._steps, (piece,), values, values, 1.0)

    def _bucket_by_bucket(self) -> None:
        for one in self._waiting:
            assert one.wait is not None
            one.flat.copy_(self._taken(one.wait()))

    def _all_at_once(self) -> None:
        values = torch.zeros(length(self._fragment), dtype=torch.float32, device=self._waiting[0].flat.device)
        views = [(g, self._places[id(p)].of(values)) for one in self._waiting for p, g in one.gradients]
        for gradient, place in views:
            place.copy_(gradient.view(place.shape))
        before = self._exchange.state_dict()
        merged = self._taken(self._exchange.start(Message(0, self._steps, self._fragment, values, values, 1.0))())
        if not bool(merged.isfinite().all()):
            self._exchange.load_state_dict(before)
        values.copy_(merged)
        for gradient, place in views:
            gradient.copy_(place.view(gradient.shape))

    def _taken(self, merged: Merged) -> Tensor:
        """The mean; NaN if a process had no part in it: its gradient was not finite."""
        self.bytes_sent += merged.stats.bytes_sent
        everyone = len(merged.stats.contributors) == self._exchange.islands
        return merged.delta if everyone else torch.full_like(merged.delta, torch.nan)

    def forget(self) -> None:
        """As before the first step."""
        self._steps = self.bytes_sent = 0
        self._exchange.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs; each process has its own residuals. Shares memory."""
        layout_ = [(piece.name, piece.shape) for piece in self._fragment]
        return {
            "steps": self._steps,
            "islands": self._exchange.islands,
            "layout": layout_,
            "exchange": self._exchange.state_dict() if self._remembers else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state; of another number of processes not the residuals, which belong to the old ones.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        own = [(piece.name, piece.shape) for piece in self._fragment]
        if [(name, tuple(shape)) for name, shape in state["layout"]] != own:
            raise ValueError("the saved residuals belong to other parameters: resume with the same model")
        self._steps = state["steps"]
        if state["islands"] == self._exchange.islands:
            self._exchange.load_state_dict(state["exchange"])
