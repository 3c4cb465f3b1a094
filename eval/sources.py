"""Sources whose probabilities are known exactly: the ground truth that likelihoods and samplers are measured against.

A source is a distribution over sequences of fixed length. It draws them, gives their exact log-probability and entropy,
and is at the same time a perfect denoiser: called like any `mdlm.denoiser.Denoiser`, it returns the exact conditional
of every masked position given any set of revealed tokens. What a sampler or an estimator does wrong with it is the
sampler's own error, not a model's.

Ordinary symbols are 0 .. vocab-1; the mask id is `vocab`, the last of `num_tokens` = vocab + 1 tokens. Everything is
float64, in nats. A further source derives from `ExactSource` and gives `sample`, `log_prob`, `entropy` and
`conditionals`. Read next: `likelihood.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

Impossible = Literal["error", "uniform"]


class ExactSource(ABC):
    """A distribution over sequences of `length` symbols, and the perfect denoiser for it.

    A sampler that commits dependent tokens together reaches states of probability zero. A position that is independent
    of the contradiction keeps its conditional; for one that no symbol fits, `impossible` says what to predict: `error`
    raises, `uniform` predicts uniformly over the symbols.
    """

    def __init__(self, length: int, vocab: int, device: torch.device | str, impossible: Impossible) -> None:
        if length < 1 or vocab < 1:
            raise ValueError(f"a source needs at least one position and one symbol, got length {length}, vocab {vocab}")
        if impossible not in ("error", "uniform"):
            raise ValueError(f"impossible states can be met with 'error' or 'uniform', got {impossible!r}")
        self.length = length
        self.vocab = vocab
        self.mask_token_id = vocab
        self.num_tokens = vocab + 1
        self.device = torch.device(device)
        self.impossible = impossible

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Int64[Tensor, "n length"]:
        """n independent sequences."""

    @abstractmethod
    def log_prob(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n"]:
        """Exact log-probability of whole sequences, nats; -inf where impossible."""

    @abstractmethod
    def entropy(self) -> float:
        """Exact entropy of one sequence, nats."""

    entropy_error: float = 0.0
    """Standard error of `entropy` in nats where it is an estimate; known once `entropy` was called."""

    def step_log_probs(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n length"]:
        """log p(symbol | symbols left of it), nats, at each position; sums to `log_prob`. A symbol behind impossible
        ones is judged as `conditionals` does. A source with another natural order conditions along that one."""
        x = sequences.long()
        out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
        for i in range(self.length):
            masked = torch.arange(self.length, device=x.device).expand_as(x) >= i
            p = self.conditionals(x.masked_fill(masked, 0), masked)[:, i]
            total = p.sum(dim=-1)
            out[:, i] = torch.log(p.gather(1, x[:, i, None])[:, 0] / torch.where(total > 0, total, 1.0))
        return out

    @abstractmethod
    def conditionals(
        self, tokens: Int[Tensor, "batch length"], masked: Bool[Tensor, "batch length"]
    ) -> Float64[Tensor, "batch length vocab"]:
        """p(symbol at a position | all revealed symbols), up to a factor per position; all zeros where none fits.

        Only masked positions are read by the caller. `tokens` holds an arbitrary symbol at masked positions.
        """

    def __call__(
        self,
        tokens: Int[Tensor, "batch length"],
        *,
        attention_mask: Bool[Tensor, "batch length"] | None = None,
        position_ids: Int[Tensor, "batch length"] | None = None,
        at: Bool[Tensor, "batch length"] | None = None,
    ) -> Float64[Tensor, "..."]:
        """Log-probs [batch, length, num_tokens], or [rows, num_tokens] of the positions in `at`, row-major.

        The mask id has -inf; a revealed position predicts itself. Raises ValueError for other lengths, padding or
        packed documents (the distribution is over whole sequences), unknown tokens, and impossible states where the
        source was not told to be uniform there.
        """
        self._check(tokens, attention_mask, position_ids)
        masked = tokens == self.mask_token_id
        probs = self.conditionals(tokens.masked_fill(masked, 0), masked)
        probs = torch.where(masked[..., None], probs, self._one_hot(tokens))
        if at is not None:
            probs, masked = probs[at], masked[at]
        total = probs.sum(dim=-1, keepdim=True)
        if bool((total == 0).any()):
            if self.impossible == "error":
                raise ValueError(
                    "no symbol fits a masked position: the revealed tokens have probability zero together; "
                    "build the source with impossible='uniform' to go on from such states"
                )
            probs, total = torch.where(total == 0, 1.0, probs), torch.where(total == 0, float(self.vocab), total)
        log_probs = torch.log(probs) - torch.log(total)
        return torch.nn.functional.pad(log_probs, (0, 1), value=-math.inf)

    def _one_hot(self, tokens: Tensor) -> Float64[Tensor, "*axes vocab"]:
        """1 at the symbol; all zeros for the mask id."""
        return (tokens[..., None] == torch.arange(self.vocab, device=tokens.device)).double()

    def _check(self, tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
        if tokens.ndim != 2 or tokens.shape[1] != self.length:
            raise ValueError(
                f"this source speaks of sequences of {self.length} tokens, got shape {tuple(tokens.shape)}"
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("a source has no padding: attention_mask must be True everywhere (or None)")
        if position_ids is not None and not bool(
            (position_ids == torch.arange(self.length, device=tokens.device)).all()
        ):
            raise ValueError(f"a source's rows are one document: position_ids must be 0..{self.length - 1} (or None)")
        if bool(((tokens < 0) | (tokens >= self.num_tokens)).any()):
            raise ValueError(f"tokens must lie in 0..{self.mask_token_id} (the last is the mask), got others")


def _distribution(values: Tensor, what: str) -> Float64[Tensor, "*axes symbols"]:
    """`values` as float64, checked to be distributions over the last axis."""
    p = values.double()
    if not bool((p >= 0).all()) or not torch.allclose(p.sum(dim=-1), torch.ones(()).double(), atol=1e-9):
        raise ValueError(f"{what} must be probabilities that sum to 1")
    return p / p.sum(dim=-1, keepdim=True)


def _entropy(p: Float64[Tensor, "*axes symbols"]) -> Float64[Tensor, "*axes"]:
    return torch.special.entr(p).sum(dim=-1)


def _draw(p: Float64[Tensor, "*n symbols"], n: int, generator: torch.Generator) -> Int64[Tensor, "n"]:
    """n symbols by inversion in float64, from one distribution [symbols] or from one each [n symbols]."""
    cumulative = p.cumsum(dim=-1)
    u = torch.rand(n, dtype=torch.float64, generator=generator, device=p.device)
    # Scaled by the rounded total, u stays below it, so a symbol of probability zero is never drawn.
    if p.ndim == 1:
        return torch.searchsorted(cumulative, u * cumulative[-1], right=True)
    return torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True).squeeze(1)


class TabularSource(ExactSource):
    """Any joint distribution, as a table of vocab^length probabilities: for lengths and vocabularies that fit."""

    def __init__(self, joint: Tensor, impossible: Impossible = "error") -> None:
        """`joint`: one axis of equal size per position."""
        if joint.ndim < 1 or len(set(joint.shape)) != 1:
            raise ValueError(f"the joint table needs one axis of equal size per position, got {tuple(joint.shape)}")
        super().__init__(joint.ndim, joint.shape[0], joint.device, impossible)
        self.joint = _distribution(joint.reshape(-1), "the joint table").reshape(joint.shape)
        grids = torch.meshgrid(*[torch.arange(n, device=joint.device) for n in joint.shape], indexing="ij")
        self._sequences = torch.stack([g.reshape(-1) for g in grids], dim=1)

    @classmethod
    def random(
        cls, length: int, vocab: int, generator: torch.Generator, scale: float = 1.5, impossible: Impossible = "error"
    ) -> TabularSource:
        """A softmax of normal draws with standard deviation `scale`: every position depends on every other."""
        logits = scale * torch.randn(vocab**length, dtype=torch.float64, generator=generator, device=generator.device)
        return cls(logits.softmax(dim=0).reshape((vocab,) * length), impossible)

    def sample(self, n: int, generator: torch.Generator) -> Int64[Tensor, "n length"]:
        """n independent sequences."""
        return self._sequences[_draw(self.joint.reshape(-1), n, generator)]

    def log_prob(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n"]:
        """Exact log-probability, nats."""
        return torch.log(self.joint[tuple(sequences.long().unbind(dim=1))])

    def entropy(self) -> float:
        """Exact entropy of one sequence, nats."""
        return float(_entropy(self.joint.reshape(-1)))

    def conditionals(
        self, tokens: Int[Tensor, "batch length"], masked: Bool[Tensor, "batch length"]
    ) -> Float64[Tensor, "batch length vocab"]:
        """Sums of the table over the sequences that agree with the revealed tokens."""
        agrees = ((tokens[:, None, :] == self._sequences) | masked[:, None, :]).all(dim=-1)
        weight = agrees * self.joint.reshape(-1)
        return torch.einsum("bs,slv->blv", weight, self._one_hot(self._sequences))


def state_posteriors(
    initial: Float64[Tensor, "states"],
    transition: Float64[Tensor, "states states"],
    evidence: Float64[Tensor, "batch length states"],
) -> Float64[Tensor, "batch length states"]:
    """p(state at a position | all evidence) of a Markov chain by forward-backward, up to a factor per position.

    `evidence` is p(what was seen at a position | state), 1 where nothing was. Messages are normalised at every step, so
    long chains do not underflow. Evidence that contradicts what stands beside it starts a new message; a position
    between the two has no state that fits both, and zeros.
    """

    def normalised(message: Tensor, otherwise: Tensor) -> Tensor:
        total = message.sum(dim=-1, keepdim=True)
        return torch.where(total > 0, message / torch.where(total > 0, total, 1.0), otherwise)

    length = evidence.shape[1]
    forward = [normalised(initial * evidence[:, 0], evidence[:, 0])]
    for i in range(1, length):
        forward.append(normalised((forward[-1] @ transition) * evidence[:, i], evidence[:, i]))
    backward = [torch.ones_like(forward[-1])]
    for i in range(length - 1, 0, -1):
        seen = normalised(evidence[:, i] * backward[-1], evidence[:, i])
        backward.append(normalised(seen @ transition.T, torch.ones_like(seen)))
    return torch.stack(forward, dim=1) * torch.stack(backward[::-1], dim=1)


class MarkovSource(ExactSource):
    """A first-order Markov chain: exact at any length, with dependence that fades with distance."""

    def __init__(self, initial: Tensor, transition: Tensor, length: int, impossible: Impossible = "error") -> None:
        """`initial` [vocab]; `transition` [vocab, vocab], row = from, column = to."""
        vocab = initial.shape[0]
        if initial.ndim != 1 or transition.shape != (vocab, vocab):
            raise ValueError(
                "a chain needs initial [vocab] and transition [vocab, vocab], "
                f"got {tuple(initial.shape)} and {tuple(transition.shape)}"
            )
        super().__init__(length, vocab, initial.device, impossible)
        self.initial = _distribution(initial, "the initial distribution")
        self.transition = _distribution(transition, "the rows of the transition matrix")

    @classmethod
    def random(
        cls, length: int, vocab: int, generator: torch.Generator, scale: float = 1.5, impossible: Impossible = "error"
    ) -> MarkovSource:
        """Every law is a softmax of normal draws with standard deviation `scale`; the first symbol has its own."""
        logits = scale * torch.randn(
            vocab + 1, vocab, dtype=torch.float64, generator=generator, device=generator.device
        )
        p = logits.softmax(dim=1)
        return cls(p[0], p[1:], length, impossible)

    def sample(self, n: int, generator: torch.Generator) -> Int64[Tensor, "n length"]:
        """n independent sequences, symbol by symbol."""
        symbols = [_draw(self.initial, n, generator)]
        for _ in range(1, self.length):
            symbols.append(_draw(self.transition[symbols[-1]], n, generator))
        return torch.stack(symbols, dim=1)

    def step_log_probs(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n length"]:
        """log p(symbol | the one before it), nats."""
        x = sequences.long()
        steps = torch.log(self.transition)[x[:, :-1], x[:, 1:]]
        return torch.cat([torch.log(self.initial)[x[:, :1]], steps], dim=1)

    def log_prob(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n"]:
        """Exact log-probability, nats."""
        return self.step_log_probs(sequences).sum(dim=1)

    def entropy(self) -> float:
        """Exact entropy of one sequence, nats: that of the first symbol, then of each step from where the chain is."""
        total, here, per_state = _entropy(self.initial), self.initial, _entropy(self.transition)
        for _ in range(1, self.length):
            total = total + here @ per_state
            here = here @ self.transition
        return float(total)

    def conditionals(
        self, tokens: Int[Tensor, "batch length"], masked: Bool[Tensor, "batch length"]
    ) -> Float64[Tensor, "batch length vocab"]:
        """Forward-backward with the revealed symbols as evidence."""
        evidence = torch.where(masked[..., None], 1.0, self._one_hot(tokens))
        return state_posteriors(self.initial, self.transition, evidence)


class CopySource(ExactSource):
    """The second half repeats the first, whose symbols are independent: dependence at a long distance and no other.

    Two masked copies of a symbol drawn in parallel agree only by chance, so it shows what parallel unmasking costs.
    """

    def __init__(self, probs: Tensor, length: int, impossible: Impossible = "error") -> None:
        """`probs` [vocab]: the law of each symbol of the first half; `length` must be even."""
        if length % 2:
            raise ValueError(f"a copy source needs an even length, got {length}")
        super().__init__(length, probs.shape[0], probs.device, impossible)
        self.probs = _distribution(probs, "the symbol probabilities")

    def sample(self, n: int, generator: torch.Generator) -> Int64[Tensor, "n length"]:
        """n independent sequences."""
        half = self.length // 2
        return _draw(self.probs, n * half, generator).reshape(n, half).repeat(1, 2)

    def log_prob(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n"]:
        """Exact log-probability, nats; -inf where the halves differ."""
        first, second = sequences.long().chunk(2, dim=1)
        log_p = torch.log(self.probs)[first].sum(dim=1)
        return torch.where((first == second).all(dim=1), log_p, -math.inf)

    def entropy(self) -> float:
        """Exact entropy of one sequence, nats: that of its first half."""
        return float(_entropy(self.probs)) * (self.length // 2)

    def conditionals(
        self, tokens: Int[Tensor, "batch length"], masked: Bool[Tensor, "batch length"]
    ) -> Float64[Tensor, "batch length vocab"]:
        """The twin's symbol where it is revealed, else `probs`. Twins that differ say nothing about other pairs."""
        twin, twin_masked = tokens.roll(self.length // 2, dims=1), masked.roll(self.length // 2, dims=1)
        return torch.where(twin_masked[..., None], self.probs, self._one_hot(twin))
