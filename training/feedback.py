"""Error feedback: what a message could not carry is added to the next one, so that errors do not add up.

With u = x + e meant and s sent, classic feedback keeps e = u - s, hence sum of sent = sum of x - e: after any number of
messages the sums differ by one residual. Functions are pure: a message that failed leaves its residual as it was and
can be sent again. Read next: `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

from mdlm.training.compress import Codec, codec
from mdlm.training.outer_config import CompressConfig

Residual = Mapping[str, Any]
"""One buffer's memory: "wire" UInt8[bytes], the unsent part as it is stored; "messages" int, how many were sent."""


@dataclass(frozen=True)
class ErrorFeedback:
    """How residuals are made.

    none: there are none. classic: e = decay (u - s) (SparseLoCo, 2508.15706, and MuLoCo, 2505.23725, decay below 1).
    loco: e = decay e + (1 - decay) (u - s), dropped after every `reset_every` messages *of that buffer* (LoCo,
    2407.04480); with decay 1 - beta also ScaleCom's low-pass filter.
    """

    kind: str
    decay: float
    reset_every: int
    store: Codec

    @staticmethod
    def of(c: CompressConfig) -> ErrorFeedback:
        """As the options say."""
        return ErrorFeedback(c.feedback, c.decay, c.reset_every, codec(c.store, c))

    def residual(self, memory: Residual | None, like: Float32[Tensor, " values"]) -> Float32[Tensor, " values"]:
        """The unsent part e; zeros before the first message."""
        if memory is None:
            return torch.zeros_like(like)
        return self.store.decode(memory["wire"], len(like)).to(like.device)

    def meant(self, memory: Residual | None, values: Float32[Tensor, " values"]) -> Float32[Tensor, " values"]:
        """What to send in place of `values`: u = x + e."""
        return values if self.kind == "none" else values + self.residual(memory, values)

    def after(
        self, memory: Residual | None, meant: Float32[Tensor, " values"], sent: Float32[Tensor, " values"]
    ) -> Residual | None:
        """The memory after a message that was to carry `meant` and decodes to `sent`."""
        if self.kind == "none":
            return None
        messages = (0 if memory is None else memory["messages"]) + 1
        error = meant - sent
        if self.kind == "classic":
            error = error.mul_(self.decay)
        elif self.reset_every and messages % self.reset_every == 0:
            error = torch.zeros_like(error)
        else:
            error = self.residual(memory, meant).mul_(self.decay).add_(error, alpha=1 - self.decay)
        return {"wire": self.store.encode(error), "messages": messages}
