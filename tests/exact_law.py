"""The exact law of what a strategy writes, on sources small enough to enumerate (vocab^length <= 729).

Probability is propagated over partial states. In each round the product's own window, transforms, scorer, selector,
progress rule and reviser work on all partial states as one batch (`Run._look`, `_choose`, `_write`, `_revise`); only
the noise is taken from them: every outcome of it becomes a state of its own, with its probability.

- tokens: after selection, the product of the (tempered, truncated) marginals at the committed positions; before
  selection, all tokens at all candidates;
- NOISE_ORDER: every permutation of the candidates is equally likely;
- NOISE_REVEAL, NOISE_REMASK: each position decides alone whether its uniform number lies below some level. The level
  is found by bisection of what the product does, then every set of positions is enumerated.

    law = exact_law(markov(5), Strategy(select=TopK(2), draw=Draw(temperature=1.0)))
    law.kl(source_law(markov(5))), law.nfe
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdlm.eval.sources import ExactSource, MarkovSource
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.draw import truncated_probs
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.state import NOISE_ORDER, NOISE_REMASK, NOISE_REVEAL, NOISE_TOKEN, RowMemory, State, Step
from mdlm.samplers.strategy import Strategy


def markov(length: int, forward: float = 0.92, impossible: str = "error") -> MarkovSource:
    """The source of the published figures: uniform over 3 symbols, then x -> x + 1 (mod 3) with probability `forward`,
    the rest shared equally."""
    rest = (1 - forward) / 2
    transition = torch.full((3, 3), rest, dtype=torch.float64)
    transition[torch.arange(3), (torch.arange(3) + 1) % 3] = forward
    return MarkovSource(torch.full((3,), 1 / 3).double(), transition, length, impossible)  # type: ignore[arg-type]


def sequences(source: ExactSource) -> Tensor:
    """All sequences, in the order of the entries of a law."""
    return torch.tensor(list(itertools.product(range(source.vocab), repeat=source.length)))


def source_law(source: ExactSource) -> Tensor:
    """The source's own probabilities."""
    return source.log_prob(sequences(source)).exp()


@dataclass
class Law:
    """What a strategy writes."""

    probs: Tensor
    """Of each of `sequences(source)`, float64."""
    nfe: float
    """Expected number of function evaluations."""
    committed: Tensor
    """Expected number of steps in which so many tokens were committed: index 0 .. length."""

    def kl(self, p: Tensor) -> float:
        """KL(p || law) in nats."""
        return float(torch.where(p > 0, p * (p.log() - self.probs.log()), 0.0).sum())

    def tv(self, p: Tensor) -> float:
        """Total variation distance to p."""
        return float((p - self.probs).abs().sum() / 2)

    def entropy(self) -> float:
        """Entropy in nats."""
        return float(torch.special.entr(self.probs).sum())


@dataclass
class EnumeratedState(State):
    """A state whose noise is given by hand; row i stands for many rows and has probability `weight[i]`."""

    weight: Tensor = field(default_factory=lambda: torch.ones(1).double())
    noise: dict[int, Tensor] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def keep(self, rows: Tensor) -> EnumeratedState:
        """These rows, repeated ones as often as they occur."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values = {name: value[rows] if isinstance(value, Tensor) else value for name, value in values.items()}
        values["memory"] = {component: kept.keep(rows) for component, kept in self.memory.items()}
        values["noise"] = {purpose: value[rows] for purpose, value in self.noise.items()}
        return EnumeratedState(**values)

    def uniform(self, purpose: int, dense: bool = True) -> Tensor:
        """What was put in for this purpose; 1/2 if nothing was."""
        assert dense, "noise per row is not enumerated"
        self.asked.add(purpose)
        default = torch.full(self.tokens.shape, 0.5, dtype=torch.float64)
        return self.noise.get(purpose, default)

    def uniform_at(self, purpose: int, row: Tensor, position: Tensor) -> Tensor:
        return self.uniform(purpose)[row, position]


def exact_law(
    source: ExactSource, strategy: Strategy, history: bool | None = None, max_rounds: int = 10_000, drop: float = 0.0
) -> Law:
    """The law of `strategy` on an empty canvas of the source.

    States that differ only in how they were reached are one, unless `history` (default: whether there is a reviser);
    what components remember always counts. States below probability `drop` are left out.
    """
    assert source.vocab**source.length <= 729
    history = strategy.revise is not None if history is None else history
    run = Run(source, Canvas.from_prompts([[]], source.length), strategy, row_keys(0, 1))
    values = {f.name: getattr(run.state, f.name) for f in dataclasses.fields(State)}
    state = EnumeratedState(**values)
    radix = source.vocab ** torch.arange(source.length - 1, -1, -1)
    law = Law(torch.zeros(source.vocab**source.length).double(), 0.0, torch.zeros(source.length + 1).double())
    for _ in range(max_rounds):
        state = _round(run, state, law)
        done = ~state.masked.any(dim=-1)
        if strategy.revise is not None:
            done = done & ~strategy.revise.pending(state)
        law.probs.index_add_(0, (state.tokens * radix).sum(-1)[done], state.weight[done])
        state = _merged(state.keep((~done & (state.weight > drop)).nonzero()[:, 0]), history)
        if not len(state.weight):
            return law
    raise AssertionError(f"not finished after {max_rounds} steps")


def _round(run: Run, state: EnumeratedState, law: Law) -> EnumeratedState:
    """One step of every state, all outcomes."""
    strategy = run.strategy
    state = _enumerate_selection(run, state)
    by_hand = dataclasses.replace(strategy, draw=_DrawNoise(strategy.draw.before_select))  # type: ignore[arg-type]
    if strategy.draw.before_select and not strategy.select.blind:
        step = _look(run, copy.deepcopy(state))
        state, tokens, chance = _enumerate_tokens(step, state, step.candidates, strategy)
        state.noise[NOISE_TOKEN], state.nfe = tokens.double(), torch.zeros_like(state.nfe)
        run.strategy = by_hand
        step = _look(run, state)
        commit = run._choose(step)
    else:
        state.nfe = torch.zeros_like(state.nfe)
        step = _look(run, state)
        commit = run._choose(step)
        assert step.drawn is None, "a selector that draws tokens itself cannot be enumerated"
        state, tokens, chance = _enumerate_tokens(step, state, commit, strategy)
        state.noise[NOISE_TOKEN] = tokens.double()
        step, commit = _children(step, state), commit[state.rows]
        run.strategy, run.state = by_hand, state
    state.weight = state.weight * chance
    commit = run._write(step, commit)
    run.strategy = strategy
    law.nfe += float((state.weight * state.nfe).sum())
    law.committed.index_add_(0, commit.sum(-1), state.weight)
    if strategy.revise is not None:
        state = _revised(run, step, commit, state)
    state.step += 1
    state.block_step += 1
    return state


@dataclass(frozen=True)
class _DrawNoise:
    """A draw whose uniform numbers are the tokens."""

    before_select: bool
    temperature: float = 1.0
    """Not 0: the noise is asked for."""

    def __call__(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        return uniform.long()


def _look(run: Run, state: EnumeratedState) -> Step:
    run.state = state
    return run._look()


def _numbered(state: EnumeratedState) -> EnumeratedState:
    state.rows = torch.arange(len(state.weight))
    return state


def _children(step: Step, state: EnumeratedState) -> Step:
    """The step as the children see it; `state.rows` names the parent of each."""
    parent = state.rows
    child = Step(state, step.window[parent], step.candidates[parent], step.mask_token_id)
    assert step.at is not None
    child.at = step.at[parent]
    number = torch.full(step.at.shape, -1)
    number[step.at] = torch.arange(int(step.at.sum()))
    if step.log_probs.numel():
        packed = number[parent][child.at]
        child.log_probs = step.log_probs[packed]
        child.drawn = None if step.drawn is None else step.drawn[packed]
    return child


def _enumerate_selection(run: Run, state: EnumeratedState) -> EnumeratedState:
    """Rows split by the outcomes of the noise that chooses positions."""
    strategy = run.strategy
    probe = copy.deepcopy(state)
    probe.noise, probe.asked = {}, set()
    run.state = probe
    step = _look(run, probe)
    run._choose(step)
    asked = probe.asked - {NOISE_TOKEN}
    assert asked <= {NOISE_ORDER, NOISE_REVEAL}, f"noise {asked} cannot be enumerated"
    if NOISE_ORDER in asked:
        state = _enumerate_orders(state, step.candidates)
        assert NOISE_REVEAL not in asked
    if NOISE_REVEAL in asked:
        assert strategy.select.blind

        def reveals(uniform: Tensor) -> Tensor:
            trial = state.keep(torch.arange(len(state.weight)))
            trial.noise = {NOISE_REVEAL: uniform}
            window, block = strategy.window(trial)
            trial.block_step = torch.where(block == trial.block, trial.block_step, 0)
            trial_step = Step(trial, window, window & trial.masked, run.mask_token_id)
            run.state = trial
            return run._ensure_progress(trial_step, strategy.select(torch.zeros_like(trial.log_probs), trial_step))

        state = _enumerate_flags(state, NOISE_REVEAL, step.candidates, reveals)
    return state


def _enumerate_orders(state: EnumeratedState, candidates: Tensor) -> EnumeratedState:
    """A row for each permutation of its candidates; the first of a permutation has the highest number."""
    parents, noises, chances = [], [], []
    for row, flags in enumerate(candidates):
        where = flags.nonzero()[:, 0]
        orders = torch.tensor(list(itertools.permutations(range(len(where)))))
        noise = torch.full((len(orders), len(flags)), 0.5, dtype=torch.float64)
        noise[:, where] = (orders + 1.0).double() / (len(where) + 1)
        noises.append(noise)
        parents += [row] * len(orders)
        chances += [1 / len(orders)] * len(orders)
    state = state.keep(torch.tensor(parents))
    state.weight = state.weight * torch.tensor(chances, dtype=torch.float64)
    state.noise[NOISE_ORDER] = torch.cat(noises)
    return state


def _enumerate_flags(
    state: EnumeratedState, purpose: int, where: Tensor, happens: Callable[[Tensor], Tensor]
) -> EnumeratedState:
    """A row for each set of positions at which `happens(uniform)` may be true, which it is below a level."""
    low, high = torch.zeros(where.shape).double(), torch.ones(where.shape).double()
    always, never = happens(high - 2.0**-53), ~happens(low + 2.0**-60)
    for _ in range(54):
        middle = (low + high) / 2
        yes = happens(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    level = torch.where(always, 1.0, torch.where(never, 0.0, low))
    level = torch.where(where, level, 0.0)
    parents, flags, chances = _outcomes(torch.stack([1 - level, level], dim=-1))
    state = state.keep(parents)
    state.weight = state.weight * chances
    state.noise[purpose] = torch.where(flags == 1, 2.0**-60, 1 - 2.0**-53).double()
    return state


def _outcomes(probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every outcome of independent choices, one per position, `probs` [rows, seq, choices]: its row, the choices made
    [outcomes, seq] and its probability. Impossible ones are left out."""
    parents, chances = torch.arange(len(probs)), torch.ones(len(probs)).double()
    choices = torch.zeros(len(probs), 0, dtype=torch.int64)
    for position in range(probs.shape[1]):
        options = probs[parents, position]
        before, choice = options.nonzero(as_tuple=True)
        parents, chances = parents[before], chances[before] * options[before, choice]
        choices = torch.cat([choices[before], choice[:, None]], dim=1)
    return parents, choices, chances


def _enumerate_tokens(
    step: Step, state: EnumeratedState, where: Tensor, strategy: Strategy
) -> tuple[EnumeratedState, Tensor, Tensor]:
    """A row for each choice of tokens at `where`: the rows (numbered by parent), the tokens, their probability."""
    draw = strategy.draw
    marginals = torch.zeros((*where.shape, step.mask_token_id + 1), dtype=torch.float64)
    if step.log_probs.numel():
        if draw.temperature == 0:
            packed = torch.nn.functional.one_hot(step.log_probs.argmax(-1), step.mask_token_id + 1).double()
        else:
            packed = truncated_probs(step.log_probs, draw)
            packed = packed / packed.sum(-1, keepdim=True)
        marginals[step.index] = packed
    nothing = torch.nn.functional.one_hot(torch.tensor(step.mask_token_id)).double()  # the mask id is never drawn
    parents, tokens, chances = _outcomes(torch.where(where[..., None], marginals, nothing))
    return _numbered(state).keep(parents), tokens.masked_fill(tokens == step.mask_token_id, -1), chances


def _revised(run: Run, step: Step, commit: Tensor, state: EnumeratedState) -> EnumeratedState:
    """The reviser's part of the step, its noise enumerated."""

    def revised(parents: EnumeratedState, rows: Tensor, noise: Tensor | None) -> EnumeratedState:
        numbered = copy.deepcopy(_numbered(parents)).keep(rows)
        numbered.noise = {} if noise is None else {NOISE_REMASK: noise}
        numbered.asked = set()
        run.state = numbered
        run._revise(_children(step, numbered), commit[rows])
        return numbered

    every = torch.arange(len(state.weight))
    probe = revised(state, every, None)
    if not probe.asked:
        return probe
    assert probe.asked == {NOISE_REMASK}, f"noise {probe.asked} cannot be enumerated"
    split = _enumerate_flags(
        _numbered(state), NOISE_REMASK, ~state.masked, lambda u: revised(state, every, u).masked & ~state.masked
    )
    weight = split.weight
    out = revised(state, split.rows, split.noise[NOISE_REMASK])
    out.weight = weight
    return out


def _merged(state: EnumeratedState, history: bool) -> EnumeratedState:
    """Equal states as one, with the sum of their probabilities."""
    if not len(state.weight):
        return state
    parts = [state.tokens, state.masked, state.block[:, None], state.block_step[:, None], state.edits]
    if history:
        parts += [state.step_map, state.log_probs.nan_to_num(nan=1.0)]
    for memory in state.memory.values():
        if not isinstance(memory, RowMemory):
            return state
        parts += [memory[name].reshape(len(state.weight), -1) for name in memory.tensors]
    table = torch.cat([part.double() for part in parts], dim=1)
    _, inverse = table.unique(dim=0, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1,), len(inverse)).scatter_reduce(
        0, inverse, torch.arange(len(inverse)), "amin"
    )
    weight = torch.zeros(len(first)).double().index_add_(0, inverse, state.weight)
    out = state.keep(first)
    out.weight = weight
    return out
