"""How much the singular values of the weights still change in proportion: SoSD, the stability of singular distribution.

The spectrum of a matrix divided by its sum is a distribution. It settles long before the loss does (2605.26489): its
drift, here the sum of absolute differences between two measurements `every` steps apart (0: same proportions, 2:
nothing in common), falls by orders of magnitude when the first, fast phase of training is over. Scaling a matrix
changes nothing. The paper's curves start near 1e-2. Read next: `metrics.py`, where the values go.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mdlm.checkpoint import read_state
from mdlm.training.optim import hidden_matrices

_FILE = "drift.safetensors"
_STEP = "step"


@dataclass(frozen=True)
class DriftConfig:
    """Spectral drift (SoSD) of some weight matrices, as a metric."""

    every: int = 0
    """Steps between two measurements; 0: never."""
    matrices: int = 8
    """How many matrices are watched, evenly spread over those trained (embedding and head excepted)."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        for name, least in (("every", 0), ("matrices", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--drift.{name} is {getattr(self, name)}; it must be {least} or more")


def proportions(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rank"]:
    """Singular values over their sum, descending, in float32 or better; all 0 for a matrix of zeros."""
    values = torch.linalg.svdvals(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))
    total = values.sum()
    return values / torch.where(total > 0, total, 1.0)


def sampled_matrices(model: PreTrainedModel, count: int) -> dict[str, Tensor]:
    """At most `count` of the trained matrices of `model` by name, evenly spaced in its order, from first to last."""
    every = list(hidden_matrices(model).items())
    count = min(count, len(every))
    return dict(every[round(k * (len(every) - 1) / max(1, count - 1))] for k in range(count))


class SpectralDrift:
    """Remembers the last spectra of the sampled matrices; a part of the run's state, so a resumed run goes on exactly.

    Every process makes and measures it, since sharded matrices are gathered together; the main one computes.
    """

    def __init__(self, model: PreTrainedModel, config: DriftConfig, main: bool) -> None:
        """Measures `model` as the start. Raises ValueError if it trains no matrix."""
        self._main = main
        self._matrices = sampled_matrices(model, config.matrices)
        if not self._matrices:
            raise ValueError("--drift.every: no matrix of the model is trained, so there is no spectrum to watch")
        self._before, self._step = self._spectra(), 0

    @torch.no_grad()
    def _spectra(self) -> dict[str, Tensor]:
        spectra = {}
        for name, matrix in self._matrices.items():
            whole = matrix.full_tensor() if isinstance(matrix, DTensor) else matrix
            if self._main:
                spectra[name] = proportions(whole).cpu()
        return spectra

    def measure(self, step: int) -> dict[str, Any]:
        """Mean and largest drift since the last call, that of every matrix, and how many steps ago that was.

        Empty but on the main process.
        """
        now, before, since = self._spectra(), self._before, step - self._step
        self._before, self._step = now, step
        drifts = {name: float((now[name] - before[name]).abs().sum()) for name in now}
        if not drifts:
            return {}
        return {
            "drift": sum(drifts.values()) / len(drifts),
            "largest": max(drifts.values()),
            "since_steps": since,
            "matrices": drifts,
        }

    def save(self, folder: Path) -> None:
        """The main process writes the last spectra below `folder`."""
        if self._main:
            save_file({**self._before, _STEP: torch.tensor(self._step)}, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Takes the spectra up again. A run that did not watch them, or watched others, is measured from here on."""
        stored = load_file(folder / _FILE) if (folder / _FILE).is_file() else {}
        if stored.keys() - {_STEP} == self._matrices.keys():
            self._step = int(stored.pop(_STEP))
            self._before = stored if self._main else {}
        else:
            self._before, self._step = self._spectra(), read_state(folder.parent)["step"]
