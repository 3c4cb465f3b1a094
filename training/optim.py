"""Optimizers: AdamW (fused), and Muon for the hidden matrices with AdamW for the rest.

Muon: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): momentum, then the update is
replaced by (nearly) its closest semi-orthogonal matrix, found by five Newton-Schulz steps. Decoupled weight decay and
the update scale that lets Muon share AdamW's learning rate: Liu et al. (Moonlight, 2502.16982), eq. 4. Embeddings,
head, norms and biases are AdamW's (Loshchilov & Hutter, 1711.05101). Read next: `lr.py`, then `loop.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic step: steep at 0, so five steps bring every singular value near 1 (not to exactly 1)."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and gradient clipping."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw` for everything, or `muon` for the hidden matrices and AdamW for embeddings, head, norms and biases."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging factors of the gradient and of its square, each in [0, 1)."""
    eps: float = 1e-8
    """AdamW's floor of the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings (norms and biases have none)."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global L2 norm where it is exceeded; null: no clipping."""
    muon_lr: float | None = None
    """Peak rate of Muon's matrices; null: `lr`."""
    muon_momentum: float = 0.95
    """Muon's momentum, in [0, 1)."""
    muon_nesterov: bool = True
    """Nesterov momentum in Muon."""
    muon_scale: Literal["match_rms", "spectral"] = "match_rms"
    """Muon's step per matrix, in units of the rate. `match_rms`: 0.2 sqrt(max(rows, columns)), whose entries are as
    large as AdamW's, so `lr` serves both; `spectral`: sqrt(max(1, rows / columns)), for rates about 0.02."""
    muon_precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the Newton-Schulz steps; auto: bfloat16 on a GPU, float32 elsewhere."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        for flag, value in (("lr", self.lr), ("muon_lr", self.muon_lr), ("clip_norm", self.clip_norm)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"--optim.{flag} is {value}; it must be a positive number")
        if self.eps <= 0:
            raise ValueError(f"--optim.eps is {self.eps}; it must be positive")
        if self.weight_decay < 0:
            raise ValueError(f"--optim.weight_decay is {self.weight_decay}; it must be 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"--optim.betas is {self.betas}; both must lie in [0, 1)")
        if not 0.0 <= self.muon_momentum < 1.0:
            raise ValueError(f"--optim.muon_momentum is {self.muon_momentum}; it must lie in [0, 1)")


def newton_schulz(
    matrices: Float[Tensor, "count rows columns"], steps: int = 5, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "count rows columns"]:
    """Each matrix U S V' -> about U V': its singular values s become p(...p(s / |G|)), p(x) = a x + b x^3 + c x^5.

    After five steps they lie within [0.67, 1.14], if s / |G| (the Frobenius norm) was above 0.004. Zero stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp_min(1e-12).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def muon_scale(kind: str, rows: int, columns: int) -> float:
    """Factor on the orthogonal update of a `rows` x `columns` matrix; see `OptimConfig.muon_scale`."""
    if kind == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    assert kind == "spectral", kind
    return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """Muon on the parameter groups with `algorithm="muon"` (matrices only), AdamW on those with `algorithm="adamw"`.

    Muon: m <- momentum m + (1 - momentum) g; u = newton_schulz(g + momentum (m - g)) with Nesterov, else of m;
    W <- (1 - lr weight_decay) W - lr muon_scale u. Matrices of one shape go through Newton-Schulz together.

    Parameters sharded by FSDP2 (DTensor): the momentum stays sharded; each step gathers the update of each matrix and
    every process orthogonalises all of them, then keeps its own part. Right, but neither time nor traffic is divided.

    Raises ValueError for a Muon group that holds anything but matrices.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Literal["match_rms", "spectral"] = "match_rms",
        precision: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        defaults = {
            "algorithm": "adamw",
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "scale": scale,
            "precision": precision,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if group["algorithm"] == "muon" and p.ndim != 2:
                    raise ValueError(f"Muon updates matrices; it was given a parameter of shape {tuple(p.shape)}")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["algorithm"] == "muon":
                self._muon_step(group, parameters)
            elif parameters:
                self._adamw_step(group, parameters)
        return loss

    def _adamw_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        adamw(
            parameters,
            [cast(Tensor, p.grad) for p in parameters],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon_step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        by_shape: defaultdict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p in parameters:
            gradient = cast(Tensor, p.grad)
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            average = self.state[p]["momentum"]
            average.lerp_(gradient, 1.0 - group["momentum"])
            update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
            by_shape[p.shape].append((p, update.full_tensor() if isinstance(update, DTensor) else update))
        for (rows, columns), pairs in by_shape.items():
            stacked = torch.stack([update for _, update in pairs])
            orthogonal = newton_schulz(stacked, dtype=_precision(group["precision"], stacked.device))
            step = -group["lr"] * muon_scale(group["scale"], rows, columns)
            for (p, _), update in zip(pairs, orthogonal, strict=True):
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.add_(shard_like(update, p), alpha=step)


def _precision(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """`full`, which every process holds whole, sharded as `like` is; as it is where `like` is a plain tensor."""
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        mesh, like.placements
    )


def hidden_matrices(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trainable matrices of `model` by name, without embeddings (of tokens or positions) and head."""
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    ends |= {id(head.weight) for head in [model.get_output_embeddings()] if head is not None}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and id(p) not in ends}


def parameter_groups(model: PreTrainedModel, config: OptimConfig) -> list[dict[str, Any]]:
    """The trainable parameters of `model`, each once, in groups with a `name`, `algorithm`, `weight_decay`, `base_lr`.

    `muon`: hidden matrices (only if `config.name` is "muon"); `decay`: other parameters of two or more axes
    (embeddings, head, and everything for AdamW); `no_decay`: norms and biases. Empty groups are left out.
    """
    hidden = {id(p) for p in hidden_matrices(model).values()}
    groups: dict[str, list[nn.Parameter]] = {"muon": [], "decay": [], "no_decay": []}
    for p in model.parameters():
        if not p.requires_grad:
            continue
        if config.name == "muon" and id(p) in hidden:
            groups["muon"].append(p)
        else:
            groups["decay" if p.ndim >= 2 else "no_decay"].append(p)
    muon_lr = config.lr if config.muon_lr is None else config.muon_lr
    return [
        {
            "name": name,
            "params": parameters,
            "algorithm": "muon" if name == "muon" else "adamw",
            "weight_decay": 0.0 if name == "no_decay" else config.weight_decay,
            "lr": muon_lr if name == "muon" else config.lr,
            "base_lr": muon_lr if name == "muon" else config.lr,
        }
        for name, parameters in groups.items()
        if parameters
    ]


def build_optimizer(model: PreTrainedModel, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer that `config` names over the trainable parameters of `model` (not yet wrapped or sharded).

    Raises ValueError if nothing is trainable.
    """
    groups = parameter_groups(model, config)
    if not groups:
        raise ValueError("the model has no trainable parameter: every parameter has requires_grad=False")
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return Muon(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        scale=config.muon_scale,
        precision=config.muon_precision,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's rate to its own peak (`base_lr`) times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
