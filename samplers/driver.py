"""The step loop: `Run` unmasks a canvas under a `Strategy`, one `advance()` per step.

The driver, not the components, guarantees:

- progress: a row commits at least one token per step, or follows a finite schedule; revisions are counted;
- only editable positions are written, known by a flag of their own, so prompts may contain any id;
- the mask id is never written, and a distribution that cannot be drawn from is an error;
- a row's result and counts depend on the row, its seed and what the model answers, and on nothing else: noise is a hash
  of (seed, row, step, position), every rule works per row, finished rows leave the batch.

One step: window, forward, transforms, (draw), score, select, (draw), commit, revise, stop. Read next: one strategy in
`select.py`, then `presets.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from mdlm.attention_rows import AttentionTap
from mdlm.denoiser import Denoiser
from mdlm.passes import row_blocks
from mdlm.rng import hash_counters
from mdlm.samplers.cache import Feeder
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.constrain import Paths
from mdlm.samplers.state import NOISE_TOKEN, State, Step
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.traits import attention_layers, draws_itself, is_normalised, reads_scores, replaces_tokens
from mdlm.samplers.windows import PlanningWindow


def row_keys(seed: int | Sequence[int], rows: int, first_row: int = 0) -> Int64[Tensor, " batch"]:
    """Noise keys: of (seed, row number) for one seed; of each row's own seed alone for a list of seeds.

    Raises ValueError if a list does not have one seed per row, and for seeds of more than 64 bits.
    """
    if not all(-(2**63) <= number < 2**63 for number in ([seed] if isinstance(seed, int) else seed)):
        raise ValueError(f"seed is {seed}; a seed must be a whole number of at most 64 bits (signed)")
    if isinstance(seed, int):
        return hash_counters(seed, torch.arange(first_row, first_row + rows))
    if len(seed) != rows:
        raise ValueError(f"{len(seed)} seeds for {rows} rows; give one seed, or one for each row")
    return hash_counters(torch.tensor(list(seed)), 0)


@dataclass(frozen=True)
class Frame:
    """The whole canvas between two steps; tensors are copies. Finished rows stay as they ended."""

    step: int
    """Steps done."""
    tokens: Int64[Tensor, "batch seq"]
    """Undecided positions hold the mask id."""
    masked: Bool[Tensor, "batch seq"]
    step_map: Int64[Tensor, "batch seq"]
    log_probs: Float[Tensor, "batch seq"]
    nfe: Int64[Tensor, " batch"]
    forwards: Int64[Tensor, " batch"]
    tokens_fed: Int64[Tensor, " batch"]
    ends: Int64[Tensor, " batch"]
    """Length of each row: of the canvas, or where it ended early."""
    top_tokens: Int64[Tensor, "batch seq top"]
    """The likeliest tokens where `step_map` was written, likeliest first; -1 elsewhere. `top` is what the run was asked
    to keep, 0 by default."""
    top_log_probs: Float[Tensor, "batch seq top"]
    """Their log-probabilities in nats, untempered; NaN elsewhere."""


_KEPT = ("tokens", "masked", "step_map", "log_probs", "nfe", "forwards", "tokens_fed")


class Run:
    """One canvas being unmasked.

    Raises ValueError for given tokens outside the denoiser's vocabulary, for what the strategy's cache needs of the
    denoiser and does not find, for a selector that reads attention where the denoiser gives none (or under a cache),
    and for a window that looks at predictions under a selector that does not.
    """

    def __init__(
        self, denoiser: Denoiser, canvas: Canvas, strategy: Strategy, keys: Int64[Tensor, " batch"], top: int = 0
    ) -> None:
        """`top`: how many of the likeliest tokens to keep for each token written, for whoever watches."""
        canvas = canvas.to(denoiser.device)
        given = canvas.tokens[canvas.real & ~canvas.editable]
        if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < denoiser.num_tokens:
            raise ValueError(
                f"the canvas holds token ids from {int(given.min())} to {int(given.max())}, the model knows 0 .. "
                f"{denoiser.num_tokens - 1}; is this the model's tokenizer?"
            )
        self.planning = strategy.window if isinstance(strategy.window, PlanningWindow) else None
        if self.planning is not None and strategy.select.blind:
            raise ValueError(
                f"{type(strategy.window).__name__} sizes its blocks by predictions, but "
                f"{type(strategy.select).__name__} chooses positions without looking at any; take another window or "
                "another selector"
            )
        self.strategy, self.mask_token_id = strategy, denoiser.mask_token_id
        self.tap = _attention_tap(denoiser, strategy)
        self.feed = strategy.cache.start(denoiser) if self.tap is None else _feed_through(self.tap, strategy)
        rows, seq = canvas.tokens.shape
        zeros = torch.zeros(rows, dtype=torch.int64, device=denoiser.device)
        self.state = State(
            rows=torch.arange(rows, device=denoiser.device),
            keys=keys.to(denoiser.device),
            tokens=canvas.tokens.masked_fill(canvas.editable, denoiser.mask_token_id),
            editable=canvas.editable,
            masked=canvas.editable.clone(),
            lengths=canvas.lengths,
            origin=canvas.editable.int().argmax(dim=-1),
            step_map=torch.full((rows, seq), -1, device=denoiser.device),
            log_probs=torch.full((rows, seq), torch.nan, dtype=torch.float64, device=denoiser.device),
            edits=torch.zeros((rows, seq), dtype=torch.int64, device=denoiser.device),
            nfe=zeros.clone(),
            forwards=zeros.clone(),
            tokens_fed=zeros.clone(),
            block=zeros - 1,
            block_step=zeros.clone(),
            window=torch.zeros_like(canvas.editable),
        )
        self.paths: Paths | None = None
        if strategy.constraint is not None:
            strategy.constraint.check(self.state, strategy)
        self.finish = ["length"] * rows
        top = min(top, denoiser.num_tokens - 1)  # all but the mask id
        self._top_tokens = torch.full((rows, seq, top), -1, device=denoiser.device)
        self._top_log_probs = torch.full((rows, seq, top), torch.nan, dtype=torch.float64, device=denoiser.device)
        self._ends = canvas.lengths.clone()
        self._kept = {name: getattr(self.state, name).clone() for name in _KEPT}
        self._retire(~self.state.masked.any(dim=-1))

    @property
    def done(self) -> bool:
        """Whether every row is finished."""
        return len(self.state.rows) == 0

    def frame(self) -> Frame:
        """The canvas as it is now."""
        self._store()
        kept = {name: value.clone() for name, value in self._kept.items()}
        undecided = (kept["step_map"] < 0)[..., None]
        return Frame(
            step=self.state.step,
            ends=self._ends.clone(),
            top_tokens=self._top_tokens.masked_fill(undecided, -1),
            top_log_probs=self._top_log_probs.masked_fill(undecided, torch.nan),
            **kept,
        )

    def advance(self) -> None:
        """One step of every unfinished row."""
        step = self._look()
        commit = self._choose(step)
        commit = self._write(step, commit)
        for observer in self.strategy.observers:
            observer(step, commit)
        if self.strategy.revise is not None:
            self._revise(step, commit)
        if self._top_tokens.shape[-1]:
            self._note(step)
        self.state.step += 1
        self.state.block_step += 1
        self._stop()

    def _look(self) -> Step:
        """The step's window and predictions."""
        state, strategy = self.state, self.strategy
        window, block = strategy.window(state)
        if strategy.revise is not None:  # a window that is full, but not yet revised to the end, is not left
            stay = strategy.revise.pending(state) & ~(state.masked & state.window).any(dim=-1)
            stay = stay & state.window.any(dim=-1)
            window, block = torch.where(stay[:, None], state.window, window), torch.where(stay, state.block, block)
        state.block_step = torch.where(block == state.block, state.block_step, 0)
        state.block, state.window = block, window
        candidates = window & state.masked
        empty = state.masked.any(dim=-1) & ~candidates.any(dim=-1)
        if strategy.revise is not None:
            empty = empty & ~stay
        if bool(empty.any()):
            raise ValueError(
                f"the window {type(strategy.window).__name__} holds no undecided position of an unfinished row, so the "
                "run would never end; a window must reach at least one"
            )
        step = Step(state, window, candidates, self.mask_token_id, draw=strategy.draw)
        step.at = step.candidates
        if strategy.select.blind:
            step.at = self._ensure_progress(step, strategy.select(torch.zeros_like(state.log_probs), step))
        if strategy.revise is not None and strategy.revise.reads_decided:
            step.at = step.at | (window & state.editable & ~state.masked)
        if not bool(step.at.any()):
            return step
        step.log_probs = self.feed(state, state.tokens, step.at, window)
        if self.tap is not None:
            step.attention = self.tap.take(step.at.any(dim=-1))
        for transform in strategy.transforms:
            step.log_probs = transform(step.log_probs, step)
        if not all(is_normalised(transform) for transform in strategy.transforms):
            step.log_probs = normalise(step.log_probs, self.mask_token_id)
        if strategy.constraint is not None:
            self.paths = strategy.constraint(step)
            step.log_probs = self.paths.log_probs
        if self.planning is not None:
            state.window = step.window = window & self.planning.plan(step)
            step.candidates = step.candidates & step.window
        return step

    def _choose(self, step: Step) -> Bool[Tensor, "batch seq"]:
        """The positions to commit."""
        strategy = self.strategy
        assert step.at is not None
        if strategy.select.blind:
            return step.at & step.candidates
        if strategy.draw.before_select:
            step.drawn = self._draw(step)
        scores = self._scores(step)
        drawn, chosen = step.drawn, strategy.select(scores, step)
        if step.drawn is not drawn and not draws_itself(strategy.select, strategy.draw.temperature):
            raise ValueError(
                f"{type(strategy.select).__name__} draws tokens and does not say so; give it an attribute draws "
                "('sampling' or 'always', see samplers/traits.py)"
            )
        return self._ensure_progress(step, chosen, scores)

    def _scores(self, step: Step) -> Float[Tensor, "batch seq"]:
        """The scorer's numbers at the candidates (zeros for a selector that follows a schedule of its own and reads
        none), -inf elsewhere."""
        strategy = self.strategy
        if strategy.select.schedule is not None and not reads_scores(strategy.select):
            return torch.zeros_like(self.state.log_probs).masked_fill_(~step.candidates, -torch.inf)
        return step.dense(strategy.score(step), fill=-torch.inf).masked_fill(~step.candidates, -torch.inf)

    def _draw(self, step: Step) -> Int64[Tensor, " rows"]:
        """A token for each prediction: each on its own, or jointly under a constraint."""
        uniform = self._token_noise(*step.index)
        if self.paths is not None:
            return self.paths.draw(self.strategy.draw, uniform)
        return self.strategy.draw(step.log_probs, uniform)

    def _token_noise(self, row: Int64[Tensor, " rows"], position: Int64[Tensor, " rows"]) -> Float64[Tensor, " rows"]:
        """A uniform number to draw the token of each of these positions by; zeros where none is needed."""
        if self.strategy.draw.temperature == 0:
            return torch.zeros(len(row), dtype=torch.float64, device=row.device)
        return self.state.uniform_at(NOISE_TOKEN, row, position)

    def _ensure_progress(
        self, step: Step, commit: Bool[Tensor, "batch seq"], scores: Float[Tensor, "batch seq"] | None = None
    ) -> Bool[Tensor, "batch seq"]:
        """`commit` within the candidates, and at least one per row, or all at the end of a schedule."""
        commit = commit & step.candidates
        schedule = self.strategy.select.schedule
        if schedule is not None:
            return commit | (step.candidates & (self.state.block_step >= schedule - 1)[:, None])
        stuck = ~commit.any(dim=-1, keepdim=True)
        if not bool(stuck.any()):
            return commit
        score = torch.zeros_like(self.state.log_probs) if scores is None else scores
        lowest = torch.finfo(score.dtype).min
        best = torch.where(step.candidates, score.clamp(min=lowest), -torch.inf).argmax(dim=-1, keepdim=True)
        return commit | (torch.zeros_like(commit).scatter_(-1, best, stuck) & step.candidates)

    def _write(self, step: Step, commit: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
        """Draw tokens where none is drawn yet, write them, and say where: at what is admitted of `commit`."""
        state = self.state
        row, position = commit.nonzero(as_tuple=True)
        if len(row) == 0:
            return commit
        chosen = step.packed(commit)
        if step.drawn is None and self.paths is not None:
            step.drawn = self._draw(step)
        if step.drawn is not None:
            tokens, written = step.drawn[chosen], step.of(step.drawn)[chosen]
        elif self.strategy.draw.temperature == 0:
            written, tokens = (part[chosen] for part in step.best)
        else:
            log_probs = step.log_probs if bool(chosen.all()) else step.log_probs[chosen]
            tokens = self.strategy.draw(log_probs, self._token_noise(row, position))
            written = log_probs.gather(-1, tokens[:, None])[:, 0]
        written = written.double()
        if bool((written.isnan() | (tokens == self.mask_token_id)).any()):
            raise ValueError(
                "the denoiser gave NaN, or mass to the mask id; it must give log-probabilities with -inf at the mask id"
            )
        if self.strategy.admit is not None:
            stay = self.strategy.admit(step, row, position, tokens, written)
            row, position, tokens, written = row[stay], position[stay], tokens[stay], written[stay]
            commit = torch.zeros_like(commit).index_put_((row, position), stay.new_tensor(True))
        state.tokens = state.tokens.masked_scatter(commit, tokens)  # commits come in row-major order
        state.masked = state.masked & ~commit
        state.step_map = state.step_map.masked_fill(commit, state.step)
        state.log_probs = state.log_probs.masked_scatter(commit, written)
        return commit

    def _revise(self, step: Step, commit: Bool[Tensor, "batch seq"]) -> None:
        """Take back or replace what the reviser says, as far as it may."""
        state, reviser, schedule = self.state, self.strategy.revise, self.strategy.select.schedule
        assert reviser is not None
        revision = reviser(step, commit)
        may = state.editable & ~state.masked
        if reviser.max_edits is not None:
            may = may & (state.edits < reviser.max_edits)
        else:
            assert schedule is not None, "a reviser without max_edits needs a selector with a schedule"
        if revision.replace is not None:
            assert revision.tokens is not None
            if not replaces_tokens(reviser):
                raise ValueError(
                    f"{type(reviser).__name__} replaces tokens and does not say so; give it an attribute replaces = "
                    "True (see samplers/traits.py)"
                )
            replace = revision.replace & may & (revision.tokens != state.tokens)
            allowed = step.dense(torch.ones_like(step.index[0], dtype=torch.bool), fill=False)
            assert not bool((replace & ~allowed).any()), "a reviser may only replace tokens it has a prediction for"
            picked = step.packed(revision.tokens).clamp(min=0)
            state.log_probs = torch.where(replace, step.dense(step.of(picked).double(), 0.0), state.log_probs)
            state.tokens = torch.where(replace, revision.tokens, state.tokens)
            state.step_map = torch.where(replace, state.step, state.step_map)
            state.edits += replace
        if revision.remask is not None:
            remask = revision.remask & may
            if schedule is not None:
                remask = remask & (state.block_step < schedule - 1)[:, None]
            state.tokens = state.tokens.masked_fill(remask, self.mask_token_id)
            state.masked = state.masked | remask
            state.step_map = state.step_map.masked_fill(remask, -1)
            state.log_probs = state.log_probs.masked_fill(remask, torch.nan)
            state.edits += remask

    def _note(self, step: Step) -> None:
        """Keep the likeliest tokens where this step wrote."""
        state = self.state
        written = state.step_map == state.step
        row, position = written.nonzero(as_tuple=True)
        if len(row):
            log_probs, tokens = step.log_probs[step.packed(written)].topk(self._top_tokens.shape[-1])
            self._top_tokens[state.rows[row], position] = tokens
            self._top_log_probs[state.rows[row], position] = log_probs.double()

    def _stop(self) -> None:
        """Retire the rows that are finished."""
        state, reviser = self.state, self.strategy.revise
        pending = torch.zeros_like(state.rows, dtype=torch.bool) if reviser is None else reviser.pending(state)
        done = ~state.masked.any(dim=-1) & ~pending
        for rule in self.strategy.stop:
            end = rule(state)
            ended = (end >= 0) & ~pending  # what may still be revised ends nothing
            for row in state.rows[ended].tolist():  # few, and each once in its life
                self.finish[row] = rule.name
            self._ends[state.rows[ended]] = end[ended]
            done = done | ended
        if bool(done.any()):
            self._retire(done)

    def _retire(self, done: Bool[Tensor, " batch"]) -> None:
        """Store the finished rows and drop them from the batch."""
        self._store()
        rest = (~done).nonzero()[:, 0]
        self.state = self.state.keep(rest)
        self.feed.keep(rest)

    def _store(self) -> None:
        for name, value in self._kept.items():
            value[self.state.rows] = getattr(self.state, name)


def _attention_tap(denoiser: Denoiser, strategy: Strategy) -> AttentionTap | None:
    """Between feeder and denoiser if the selector reads attention."""
    layers = attention_layers(strategy.select)
    return None if layers is None else AttentionTap(denoiser, layers)


def _feed_through(tap: AttentionTap, strategy: Strategy) -> Feeder:
    try:
        return strategy.cache.start(tap)
    except ValueError as error:  # the tap gives whole forwards only
        raise ValueError(
            f"{type(strategy.select).__name__} reads attention over the whole canvas, which a forward with the cache "
            f"{type(strategy.cache).__name__} does not compute; leave the cache out"
        ) from error


def normalise(log_probs: Float[Tensor, "rows vocab"], mask_token_id: int) -> Float[Tensor, "rows vocab"]:
    """Log-probabilities without mass on the mask id. Raises ValueError where a transform left NaN or nothing."""
    column = torch.tensor(mask_token_id, device=log_probs.device)
    out, best = torch.empty_like(log_probs), log_probs.new_empty(len(log_probs))
    for block in row_blocks(log_probs, len(log_probs)):
        normal = log_probs[block].index_fill(-1, column, -torch.inf).log_softmax(dim=-1)
        out[block], best[block] = normal, normal.amax(dim=-1)
    if bool(best.isnan().any()):
        raise ValueError(
            "after the transforms of this strategy no token may be written at some position (or a probability is NaN); "
            "allow more tokens"
        )
    return out
