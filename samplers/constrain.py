"""A constraint on the text of an answer: the tokens of one step are drawn jointly, so that an automaton accepts it.

DINGO (2505.23061): a dynamic programme over positions and states of the automaton, where a position that stays masked
is any symbol. At temperature 0 it finds the most probable string under the product of the marginals that can be
completed to an accepted answer; above, it draws from that product restricted to such strings (backward messages, then
states forward, then tokens given the states). Part of such a string may be committed: the rest of it completes the
answer, so a later step always finds one. Both are exact if the positions without a prediction stand behind those with
one. Between them (selectors that do not look), the best string and acceptance stay exact, but a drawn one is weighed by
the number of state paths that its gaps allow. Scores see the marginals of the restricted product, so confidence means:
given the constraint.

Cost per step, outside the model: a few passes over `[rows, vocab]`, `states * classes` numbers per prediction, and a
loop over the positions from the first undecided to the last predicted or decided one, with `states^2` numbers per row.
Read next: `automaton.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.denoiser import Denoiser
from mdlm.samplers.automaton import TokenAutomaton, token_automaton, token_texts
from mdlm.samplers.draw import Draw, invert_cdf, truncated_probs
from mdlm.samplers.state import NOISE_STATE, State, Step
from mdlm.samplers.traits import draws_itself, ends_at_end_tokens, replaces_tokens

if TYPE_CHECKING:
    from mdlm.samplers.strategy import Strategy


def answer(state: State) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]:
    """First position and length of each row's answer: what is to be written behind everything given."""
    position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
    given = ~state.editable & (position < state.lengths[:, None])
    start = torch.where(given, position + 1, 0).amax(dim=-1)
    return start, state.lengths - start


@dataclass(frozen=True, eq=False)
class Constraint:
    """The answer of every row must be accepted by `automaton`."""

    automaton: TokenAutomaton
    at_start: tuple[int, ...] = ()
    """Ids that something else keeps from the first editable position of a row; for the check only."""

    def check(self, state: State, strategy: Strategy) -> None:
        """Raises ValueError, before anything is written, where an answer has no length that the automaton accepts, for
        rows without an answer at their end, and for components that write or end rows behind the constraint's back."""
        if draws_itself(strategy.select, strategy.draw.temperature):
            other = "another selector" if draws_itself(strategy.select, 0.0) else "temperature 0"
            raise ValueError(
                f"{type(strategy.select).__name__} draws tokens itself, which a constraint must do; take {other}"
            )
        if replaces_tokens(strategy.revise):
            raise ValueError(
                f"{type(strategy.revise).__name__} replaces tokens one by one, which a constraint cannot follow; leave "
                "one of them out"
            )
        for rule in strategy.stop:
            if not ends_at_end_tokens(rule):
                raise ValueError(
                    f"{type(rule).__name__} may end an answer anywhere, a constraint only where it is accepted; leave "
                    "one of them out"
                )
        start, length = answer(state)
        table = torch.nn.functional.pad(self.completable(int(length.amax())), (0, 1))
        possible = table[length, 0]
        if self.at_start:
            follow = table[(length - 1).clamp(min=0)][:, self._first_states()].any(dim=-1)
            possible = torch.where((state.origin == start) & (length > 0), follow, possible)
        bad = (state.masked.any(dim=-1) & ~possible).nonzero()[:, 0].tolist()
        if bad:
            row, places = int(state.rows[bad[0]]), int(length[bad[0]])
            raise ValueError(
                f"row {row} has {places} positions to write at its end, and no sequence of so many tokens (or of fewer "
                "and an end-of-sequence token, if such tokens end rows) satisfies the constraint"
                f"{' and the tokens suppressed at the start' if self.at_start else ''}; give it more or fewer"
            )

    def _first_states(self) -> Int64[Tensor, " classes"]:
        """Where the tokens lead that may stand first; `states` stands for nowhere."""
        token_class, classes = self.automaton.token_class, self.automaton.next_state.shape[1]
        suppressed = torch.tensor(self.at_start, device=token_class.device).unique()
        every = torch.bincount(token_class, minlength=classes)
        allowed = every > torch.bincount(token_class[suppressed], minlength=classes)
        return torch.where(allowed, self.automaton.next_state[0], self.automaton.states)

    def completable(self, length: int) -> Bool[Tensor, "lengths states"]:
        """Whether 0 .. `length` further tokens can lead from a state to acceptance."""
        automaton, rows = self.automaton, []
        here = automaton.accepting
        for _ in range(length + 1):
            rows.append(here)
            here = torch.cat([here, here.new_zeros(1)])[automaton.next_state].any(dim=-1)
        return torch.stack(rows)

    def __call__(self, step: Step) -> Paths:
        """What the constraint makes of this step's predictions."""
        return Paths(self, step)


class Regex:
    """A regular expression that the text of an answer matches as a whole, and its automata over a tokenizer's tokens.

    An automaton takes seconds for a large vocabulary. `generate(regex="...")` builds it anew; who asks often makes a
    `Regex` once and hands that in: it keeps what it has built, for each set of end tokens and banned ones.
    """

    def __init__(self, pattern: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pattern, self.tokenizer = pattern, tokenizer
        self._built: dict[tuple[Any, ...], TokenAutomaton] = {}

    def __repr__(self) -> str:
        return f"Regex({self.pattern!r})"

    def constraint(
        self,
        denoiser: Denoiser,
        eos_token_ids: Sequence[int] = (),
        banned: Sequence[int] = (),
        at_start: Sequence[int] = (),
    ) -> Constraint:
        """The constraint that every answer matches; see `token_automaton`, also for what it raises, and `Constraint`
        for `at_start`."""
        mask, ends, never = denoiser.mask_token_id, tuple(sorted(set(eos_token_ids))), tuple(sorted(set(banned)))
        key = (denoiser.num_tokens, mask, ends, never, denoiser.device)
        if key not in self._built:
            texts = token_texts(self.tokenizer, denoiser.num_tokens)
            texts[mask] = None
            self._built[key] = token_automaton(self.pattern, texts, ends, never).to(denoiser.device)
        return Constraint(self._built[key], tuple(at_start))


def as_regex(regex: str | Regex, tokenizer: PreTrainedTokenizerBase | None) -> Regex:
    """The expression over this tokenizer. Raises ValueError without one, and for a `Regex` over another."""
    if isinstance(regex, Regex):
        own = regex.tokenizer
        if tokenizer is not None and tokenizer is not own and tokenizer.get_vocab() != own.get_vocab():
            raise ValueError(f"{regex} was made for another tokenizer; make one for this: Regex(pattern, tokenizer)")
        return regex
    if tokenizer is None:
        raise ValueError("a regular expression speaks of text, which needs a tokenizer; give one")
    return Regex(regex, tokenizer)


class Paths:
    """The paths through the automaton of one step.

    In *span* coordinates each row starts at the first undecided position of its answer and ends behind the last one
    that has a prediction or is decided: `[batch, span]`.
    """

    log_probs: Float[Tensor, "rows vocab"]
    """The marginals of the product restricted to what can be completed to an accepted answer."""

    def __init__(self, constraint: Constraint, step: Step) -> None:
        assert step.at is not None
        self.step, self.raw, self.automaton = step, step.log_probs, constraint.automaton
        state = step.state
        self.batch, position = step.index
        start, _ = answer(state)
        seat = torch.arange(state.tokens.shape[1], device=start.device)
        undecided = state.masked & (seat >= start[:, None])
        seen = step.at & undecided
        self.low = torch.where(undecided.any(dim=-1), undecided.int().argmax(dim=-1), state.lengths)
        fixed = state.editable & ~state.masked & (seat >= start[:, None])
        high = torch.maximum(torch.where(seen | fixed, seat + 1, 0).amax(dim=-1), self.low)
        self.span = int((high - self.low).amax())
        here = self.low[:, None] + torch.arange(self.span, device=start.device)
        within = here < high[:, None]
        here = torch.where(within, here, 0)
        self.tokens = state.tokens.gather(1, here)
        self.decided = within & ~state.masked.gather(1, here)
        self.unseen = within & ~self.decided & ~seen.gather(1, here)
        self.under = step.packed(seen)
        """Which predictions the constraint is about."""
        self.batch, self.place = self.batch[self.under], (position - self.low[step.index[0]])[self.under]
        self.first = self._state_before(start)
        left = state.lengths - high
        open_ends = constraint.completable(int(left.amax()))[left]
        self.ends = torch.where(open_ends, 0.0, -torch.inf).double()
        self.noise = state.uniform(NOISE_STATE).gather(1, here)
        self.log_probs = self._marginals()

    def _state_before(self, start: Int64[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        """The state of each row behind its decided beginning."""
        automaton, state = self.automaton, self.step.state
        steps = torch.nn.functional.pad(automaton.next_state, (0, 0, 0, 1), value=automaton.states)
        now = torch.zeros_like(start)
        width = state.tokens.shape[1] - 1
        for offset in range(int((self.low - start).amax())):
            seat = start + offset
            token = state.tokens.gather(1, seat.clamp(max=width)[:, None])[:, 0]
            now = torch.where(seat < self.low, steps[now, automaton.token_class[token]], now)
        assert bool((now < automaton.states).all()), "a decided token broke the constraint"
        return now

    def _class_weights(self, weights: Float[Tensor, "rows vocab"], reduce: str) -> Float64[Tensor, "rows classes"]:
        """Largest log-weight, or logarithm of the summed weights, of each class of tokens."""
        index = self.automaton.token_class.expand_as(weights)
        shape = (len(weights), self.automaton.next_state.shape[1])
        best = weights.new_full(shape, -torch.inf).scatter_reduce_(1, index, weights, "amax")
        if reduce == "amax":
            return best.double()
        base = torch.where(best > -torch.inf, best, 0.0)
        scaled = (weights - base.gather(1, index)).exp().double()
        return base.double() + scaled.new_zeros(shape).scatter_add_(1, index, scaled).log()

    def _moves(self, classes: Float64[Tensor, "rows classes"], reduce: str) -> Float64[Tensor, "batch span states to"]:
        """Log-weight of going from state to state at each place."""
        states, steps = self.automaton.states, self.automaton.next_state
        number = torch.arange(states, device=steps.device)
        any_symbol = torch.zeros(states, states + 1, dtype=torch.bool, device=steps.device).scatter_(1, steps, True)
        taken = steps.T[self.automaton.token_class[self.tokens]]
        moves = (number[:, None] == number).expand(*self.tokens.shape, states, states)  # behind the span: stay
        moves = torch.where(self.unseen[..., None, None], any_symbol[:, :-1], moves)
        moves = torch.where(self.decided[..., None, None], taken[..., None] == number, moves)
        log_moves = torch.where(moves, 0.0, -torch.inf).double()
        index = steps.expand(len(classes), *steps.shape)
        values = classes[:, None, :].expand_as(index)
        best = values.new_full((len(classes), states, states + 1), -torch.inf)
        best = best.scatter_reduce_(2, index, values, "amax")
        if reduce == "sum":
            base = torch.where(best > -torch.inf, best, 0.0)
            scaled = (values - base.gather(2, index)).exp()
            best = base + torch.zeros_like(base).scatter_add_(2, index, scaled).log()
        log_moves[self.batch, self.place] = best[..., :-1]
        return log_moves

    def _backward(
        self, moves: Float64[Tensor, "batch span states to"], reduce: str
    ) -> Float64[Tensor, "batch places states"]:
        """Log-weight of all that follows each place (`amax`: of the best of it), up to a constant per place."""
        now = self.ends
        found = [now]
        for place in range(self.span - 1, -1, -1):
            now = _reduced(moves[:, place] + now[:, None, :], reduce)
            now = _levelled(now)
            found.append(now)
        return torch.stack(found[::-1], dim=1)

    def _marginals(self) -> Float[Tensor, "rows vocab"]:
        """See `log_probs`."""
        if not len(self.place):
            return self.raw
        raw = self.raw if len(self.place) == len(self.raw) else self.raw[self.under]
        classes = self._class_weights(raw, "sum")
        moves = self._moves(classes, "sum")
        after = self._backward(moves, "sum")
        self._check(after)
        now = torch.full_like(self.ends, -torch.inf).scatter_(1, self.first[:, None], 0.0)
        before = []
        for place in range(self.span):
            before.append(now)
            now = _levelled(_reduced(now[:, :, None] + moves[:, place], "sum", dim=1))
        follow = torch.nn.functional.pad(after[self.batch, self.place + 1], (0, 1), value=-torch.inf)
        ways = follow[:, self.automaton.next_state] + torch.stack(before, dim=1)[self.batch, self.place][..., None]
        ways = torch.logsumexp(ways, dim=1)
        total = torch.logsumexp(classes + ways, dim=-1, keepdim=True) - torch.logsumexp(classes, dim=-1, keepdim=True)
        shifted = raw + (ways - total)[:, self.automaton.token_class].to(raw.dtype)
        if len(self.place) == len(self.raw):
            return shifted
        return self.raw.index_put((self.under.nonzero()[:, 0],), shifted)

    def _check(self, after: Float64[Tensor, "batch places states"]) -> None:
        stuck = after[:, 0].gather(1, self.first[:, None])[:, 0] == -torch.inf
        if bool(stuck.any()):
            raise ValueError(
                f"row {int(self.step.state.rows[stuck][0])}: the model (or a list of suppressed tokens) gives "
                "probability 0 to every answer that satisfies the constraint; widen the one or the other"
            )

    def draw(self, draw: Draw, uniform: Float64[Tensor, " rows"]) -> Int64[Tensor, " rows"]:
        """A token for every prediction, jointly accepted; of equal ones at temperature 0 the lowest id.

        Where what `draw` truncates leaves a row no accepted answer, its marginals are not truncated in this step.
        """
        if not len(self.place):
            return draw(self.raw, uniform)
        greedy, under = draw.temperature == 0, self.under
        tempered = self.raw if greedy else self.raw / draw.temperature
        weights = tempered
        if not greedy and (draw.top_p, draw.top_k, draw.min_p) != (None, None, None):
            weights = tempered.masked_fill(truncated_probs(self.raw, draw) == 0, -torch.inf)
        moves, after = self._weigh(weights[under], greedy)
        stuck = after[:, 0].gather(1, self.first[:, None])[:, 0] == -torch.inf
        if bool(stuck.any()):
            weights = torch.where(stuck[self.step.index[0]][:, None], tempered, weights)
            moves, after = self._weigh(weights[under], greedy)
        source, target = self._walk(moves, after, greedy)
        refused = self.automaton.next_state[source] != target[:, None]
        weights = weights.clone()
        weights[under] = weights[under].masked_fill(refused[:, self.automaton.token_class], -torch.inf)
        if greedy:
            return weights.argmax(dim=-1)
        return invert_cdf((weights - weights.amax(dim=-1, keepdim=True)).exp(), uniform)

    def _weigh(self, weights: Float[Tensor, "rows vocab"], greedy: bool) -> tuple[Tensor, Tensor]:
        reduce = "amax" if greedy else "sum"
        moves = self._moves(self._class_weights(weights, reduce), reduce)
        return moves, self._backward(moves, reduce)

    def _walk(
        self,
        moves: Float64[Tensor, "batch span states to"],
        after: Float64[Tensor, "batch places states"],
        greedy: bool,
    ) -> tuple[Int64[Tensor, " rows"], Int64[Tensor, " rows"]]:
        """State before and after each prediction on the best path, or on one that is drawn."""
        now = self.first
        path = [now]
        for place in range(self.span):
            weights = moves[:, place].gather(1, now[:, None, None].expand(-1, 1, moves.shape[-1]))[:, 0]
            weights = weights + after[:, place + 1]
            if greedy:
                now = weights.argmax(dim=-1)
            else:
                probs = (weights - weights.amax(dim=-1, keepdim=True)).exp()
                now = invert_cdf(probs, self.noise[:, place])
            path.append(now)
        states = torch.stack(path, dim=1)
        return states[self.batch, self.place], states[self.batch, self.place + 1]


def _reduced(weights: Float64[Tensor, "..."], reduce: str, dim: int = -1) -> Float64[Tensor, "..."]:
    return weights.amax(dim=dim) if reduce == "amax" else torch.logsumexp(weights, dim=dim)


def _levelled(weights: Float64[Tensor, "batch states"]) -> Float64[Tensor, "batch states"]:
    """The largest of each row becomes 0; rows of -inf stay."""
    top = weights.amax(dim=-1, keepdim=True)
    return weights - torch.where(top > -torch.inf, top, 0.0)
