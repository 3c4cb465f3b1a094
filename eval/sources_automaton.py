"""Sources with hidden structure: weighted automata over any order of the positions, and explicit lists of sequences.

A path starts in a state, and at every position emits a symbol and moves on; the weight of a sequence is the sum over
its paths. Hidden Markov models, brackets of bounded depth, parity, noisy copies, sums with carries and formats are all
of this kind, and forward-backward over states gives every conditional exactly, whatever is revealed (Rabiner, 1989;
weights are made probabilities by pushing them back from the end: Mohri, 1997). The automaton may visit the positions
in another order than the sequence has, so that dependence at a distance costs few states. Read next: `sources_zoo.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from mdlm.eval.sources import ExactSource, Impossible, _distribution, _draw, _entropy

Rules = Callable[[int, Hashable], Mapping[int, tuple[float, Hashable]]]
"""(step, state) -> {symbol: (weight, next state)}."""

ENTROPY_DRAWS = 20_000


def _scaled(message: Tensor, otherwise: Tensor) -> Tensor:
    """Messages with sum 1; `otherwise` where the sum is 0."""
    total = message.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, message / torch.where(total > 0, total, 1.0), otherwise)


class AutomatonSource(ExactSource):
    """Sequences in proportion to the weight of their paths: a product over steps, summed over states."""

    def __init__(
        self,
        initial: Tensor,
        kernels: Sequence[Tensor],
        final: Tensor | None = None,
        order: Sequence[int] | None = None,
        impossible: Impossible = "error",
    ) -> None:
        """`initial` [states]; one kernel [states, vocab, states of the next step] per step, weights of 0 or more;
        `final` [last states], default ones; `order`: the position that each step writes, default left to right.

        Raises ValueError if shapes do not fit, weights are negative, or no path has a weight above 0.
        """
        if not kernels or any(kernel.ndim != 3 for kernel in kernels):
            raise ValueError("an automaton needs one kernel [states, vocab, next states] per step")
        super().__init__(len(kernels), kernels[0].shape[1], initial.device, impossible)
        final = torch.ones(kernels[-1].shape[2]) if final is None else final
        sizes = [len(initial), *(kernel.shape[2] for kernel in kernels)]
        expected = [(size, self.vocab, after) for size, after in itertools.pairwise(sizes)]
        if [tuple(kernel.shape) for kernel in kernels] != expected or final.shape != (sizes[-1],):
            raise ValueError("the states after a step must be those before the next one, and all steps share a vocab")
        if any(bool((weights < 0).any()) for weights in (initial, final, *kernels)):
            raise ValueError("weights must be 0 or more")
        if sorted(order or range(self.length)) != list(range(self.length)):
            raise ValueError(f"order must hold each position 0..{self.length - 1} once, got {order}")
        self.order = torch.tensor(list(order or range(self.length)), device=self.device)

        steps, after = [], final.double()
        for kernel in reversed(kernels):  # after each step, the weight of all that can follow
            pushed = kernel.double() * after
            total = pushed.sum(dim=(1, 2))
            steps.append(pushed / torch.where(total > 0, total, 1.0)[:, None, None])
            after = total / total.max().clamp(min=1e-300)
        start = initial.double() * after
        if not bool(start.sum() > 0):
            raise ValueError("no sequence has a weight above 0")
        self.initial = _distribution(start / start.sum(), "the initial distribution")
        self._kernels = steps[::-1]
        # Symbol `vocab` stands for "not revealed": the sum over symbols.
        self._moves = [torch.cat([k, k.sum(dim=1, keepdim=True)], dim=1).transpose(0, 1) for k in self._kernels]
        self._prior = [self.initial]
        for moves in self._moves:
            self._prior.append(self._prior[-1] @ moves[-1])
        self.unambiguous = int((self.initial > 0).sum()) == 1 and all(
            bool(((kernel > 0).sum(dim=2) <= 1).all()) for kernel in self._kernels
        )
        self._entropy_value: float | None = None

    @classmethod
    def from_rules(
        cls,
        start: Hashable,
        rules: Rules,
        length: int,
        vocab: int,
        accept: Callable[[Hashable], bool] = lambda state: True,
        order: Sequence[int] | None = None,
        impossible: Impossible = "error",
    ) -> AutomatonSource:
        """From the moves of each state, as far as they can be reached from `start`. One path per sequence."""
        layers, kernels = [[start]], []
        for step in range(length):
            moves = [dict(rules(step, state)) for state in layers[-1]]
            reached = {state: None for move in moves for weight, state in move.values() if weight > 0}
            number = {state: index for index, state in enumerate(reached)}
            kernel = torch.zeros(len(moves), vocab, max(1, len(number)), dtype=torch.float64)
            for row, move in enumerate(moves):
                for symbol, (weight, state) in move.items():
                    if weight > 0:
                        kernel[row, symbol, number[state]] = weight
            kernels.append(kernel)
            layers.append(list(number) or [None])
        final = torch.tensor([float(accept(state)) for state in layers[-1]])
        return cls(torch.ones(1), kernels, final, order, impossible)

    def sample(self, n: int, generator: torch.Generator) -> Int64[Tensor, "n length"]:
        """n independent sequences, step by step."""
        state = _draw(self.initial, n, generator)
        out = torch.empty(n, self.length, dtype=torch.int64, device=self.device)
        for position, kernel in zip(self.order.tolist(), self._kernels):
            both = _draw(kernel.flatten(1)[state], n, generator)
            out[:, position], state = both // kernel.shape[2], both % kernel.shape[2]
        return out

    def step_log_probs(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n length"]:
        """log p(symbol | symbols of the steps before) at each position, nats; after an impossible one as if nothing
        had been seen."""
        seen, belief = sequences.long()[:, self.order], self.initial.expand(len(sequences), -1)
        out = torch.empty(seen.shape, dtype=torch.float64, device=self.device)
        for i, moves in enumerate(self._moves):
            message = torch.bmm(belief[:, None], moves[seen[:, i]])[:, 0]
            out[:, self.order[i]] = message.sum(dim=-1).log()
            belief = _scaled(message, self._anew(i, seen[:, i]))
        return out

    def log_prob(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n"]:
        """Exact log-probability, nats; -inf where no path emits the sequence."""
        return self.step_log_probs(sequences).sum(dim=1)

    def entropy(self) -> float:
        """Entropy of one sequence, nats: exact where each sequence has one path. Else the mean of -log p over a fixed
        set of draws, whose standard error is `entropy_error` (0 where exact)."""
        if self._entropy_value is None:
            self._entropy_value = self._exact_entropy() if self.unambiguous else self._estimated_entropy()
        return self._entropy_value

    def _exact_entropy(self) -> float:
        self.entropy_error = 0.0
        each = (prior @ _entropy(kernel.sum(dim=2)) for prior, kernel in zip(self._prior, self._kernels))
        return float(sum(each))

    def _estimated_entropy(self) -> float:
        drawn = self.sample(ENTROPY_DRAWS, torch.Generator(self.device).manual_seed(0))
        nats = -self.log_prob(drawn)
        self.entropy_error = float(nats.std()) / math.sqrt(ENTROPY_DRAWS)
        return float(nats.mean())

    def _anew(self, i: int, symbols: Int64[Tensor, " batch"]) -> Float64[Tensor, "batch states"]:
        """What this step's symbol alone says of the state after it; nothing if it can never stand there."""
        alone = (self._prior[i] @ self._moves[i])[symbols]
        return _scaled(alone, self._prior[i + 1].expand_as(alone))

    def conditionals(
        self, tokens: Int[Tensor, "batch length"], masked: Bool[Tensor, "batch length"]
    ) -> Float64[Tensor, "batch length vocab"]:
        """Forward-backward over states. Evidence that contradicts what was seen before it starts a new message, as in
        `state_posteriors`."""
        seen = tokens.long().masked_fill(masked, self.vocab)[:, self.order]
        forward = [self.initial.expand(len(tokens), -1)]
        for i, moves in enumerate(self._moves[:-1]):
            message = torch.bmm(forward[-1][:, None], moves[seen[:, i]])[:, 0]
            forward.append(_scaled(message, self._anew(i, seen[:, i])))
        out = torch.empty(len(tokens), self.length, self.vocab, dtype=torch.float64, device=self.device)
        backward = torch.ones(len(tokens), self._kernels[-1].shape[2], dtype=torch.float64, device=self.device)
        for i in range(self.length - 1, -1, -1):
            moves = self._moves[i]
            ahead = torch.einsum("bt,vst->bvs", backward, moves[:-1])
            out[:, self.order[i]] = torch.einsum("bs,bvs->bv", forward[i], ahead)
            both = torch.cat([ahead, ahead.sum(dim=1, keepdim=True)], dim=1)
            chosen = both[torch.arange(len(tokens), device=self.device), seen[:, i]]
            alone = moves[seen[:, i]].sum(dim=2)
            backward = _scaled(chosen, _scaled(alone, torch.ones_like(alone)))
        return out


class ListedSource(ExactSource):
    """Finitely many sequences, each with its probability: for constraints whose solutions can be listed."""

    def __init__(
        self,
        sequences: Int64[Tensor, "n length"],
        vocab: int,
        probs: Tensor | None = None,
        impossible: Impossible = "error",
    ) -> None:
        """`sequences`: all different; `probs` [n]: default uniform."""
        if sequences.ndim != 2 or not len(sequences) or len(sequences.unique(dim=0)) != len(sequences):
            raise ValueError("a list of sequences needs at least one, [n, length], all different")
        if not 0 <= int(sequences.min()) <= int(sequences.max()) < vocab:
            raise ValueError(f"symbols must lie in 0..{vocab - 1}")
        super().__init__(sequences.shape[1], vocab, sequences.device, impossible)
        self.sequences = sequences
        uniform = torch.full((len(sequences),), 1 / len(sequences), dtype=torch.float64, device=sequences.device)
        self.probs = uniform if probs is None else _distribution(probs, "the probabilities of the sequences")

    def sample(self, n: int, generator: torch.Generator) -> Int64[Tensor, "n length"]:
        """n independent sequences."""
        return self.sequences[_draw(self.probs, n, generator)]

    def _agreement(self, tokens: Tensor, masked: Tensor) -> Float64[Tensor, "batch n"]:
        return ((tokens[:, None] == self.sequences) | masked[:, None]).all(dim=-1) * self.probs

    def log_prob(self, sequences: Int[Tensor, "n length"]) -> Float64[Tensor, "n"]:
        """Exact log-probability, nats; -inf for sequences that are not listed."""
        return self._agreement(sequences, torch.zeros_like(sequences, dtype=torch.bool)).sum(dim=1).log()

    def entropy(self) -> float:
        """Exact entropy of one sequence, nats."""
        return float(_entropy(self.probs))

    def conditionals(
        self, tokens: Int[Tensor, "batch length"], masked: Bool[Tensor, "batch length"]
    ) -> Float64[Tensor, "batch length vocab"]:
        """Sums over the listed sequences that agree with the revealed tokens."""
        weight = self._agreement(tokens, masked)
        return torch.einsum("bs,slv->blv", weight, self._one_hot(self.sequences))
