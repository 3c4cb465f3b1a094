"""`generate` and `stream`: prompts in, text out, with any strategy. The public face of the samplers.

    out = generate(model, tokenizer, ["def add(a, b):"], strategy="threshold", max_new_tokens=64, threshold=0.8)
    print(out.text[0], out.nfe, out.tokens_per_forward)

Read next: `canvas.py` (what goes in and comes out), `presets.py` (the strategies), `driver.py` (the loop).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from mdlm.denoiser import Denoiser, as_denoiser
from mdlm.samplers.arguments import checked, one_of
from mdlm.samplers.cache_policies import CacheName, cache_named
from mdlm.samplers.canvas import Canvas, Generation
from mdlm.samplers.constrain import Regex, as_regex
from mdlm.samplers.delimiters import with_token_ids
from mdlm.samplers.driver import Frame, Run, row_keys
from mdlm.samplers.guidance import Guided
from mdlm.samplers.ngrams import DistinctNgrams, NoRepeatNgram
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.prompts import check_length, check_tokenizer, decode_after, to_canvas
from mdlm.samplers.scores import DeferEos
from mdlm.samplers.stop import EosStop
from mdlm.samplers.strategy import InTurn, Strategy, Transform
from mdlm.samplers.traits import is_exchangeable, reads_scores, replaces_tokens
from mdlm.samplers.transforms import OncePerStep, RepetitionPenalty, SuppressAtStart, SuppressTokens

DEFAULT_STRATEGY = "threshold"
EosPolicy = Literal["stop", "defer", "ignore", "ban"]


@dataclass(frozen=True)
class Plan:
    """A call to `generate`, checked: what the driver needs."""

    denoiser: Denoiser
    canvas: Canvas
    strategy: Strategy
    seed: int | Sequence[int]
    tokenizer: PreTrainedTokenizerBase | None
    whole_text: bool
    """Decode whole rows, not only what was written."""
    batch_size: int

    def runs(self, top: int = 0) -> Iterator[Run]:
        """One run per batch of rows; `top` as in `Run`."""
        for start in range(0, len(self.canvas), self.batch_size):
            rows = range(start, min(start + self.batch_size, len(self.canvas)))
            canvas = self.canvas[list(rows)]
            seed = self.seed if isinstance(self.seed, int) else self.seed[start : rows.stop]
            yield Run(self.denoiser, canvas, self.strategy, row_keys(seed, len(rows), first_row=start), top)


def generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Any,
    *,
    strategy: str | Strategy | None = None,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    draw: Literal["after_select", "before_select"] | None = None,
    eos: EosPolicy = "stop",
    eos_token_id: int | Sequence[int] | None = None,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    no_repeat_ngram: int = 0,
    guidance: float = 0.0,
    cache: CacheName | None = None,
    regex: str | Regex | None = None,
    batch_size: int = 16,
    **knobs: Any,
) -> Generation:
    """Unmask an answer to each prompt.

    Args:
        model: an `MDLMForMaskedLM`, a public model that `as_denoiser` knows, or any `Denoiser`.
        tokenizer: needed for prompts that are text or chats, and for `Generation.text`.
        prompts: a string or a list of strings; a chat (list of {"role", "content"}) or a list of chats, which the
            tokenizer's chat template turns into ids; token ids (a list, a list of lists, a tensor `[seq]` or
            `[batch, seq]` without padding); or a `Canvas`, for infilling and for padded batches.
        strategy: a name in `PRESETS` (None: what the model's `generation_config` stores, else `threshold`), or a
            `Strategy`.
        max_new_tokens: positions to write after each prompt; a `Canvas` says so itself.
        seed: of all randomness; row i uses (seed, i). A list gives each row its own, independent of its place.
        temperature: 0 is greedy. None: the strategy's own (1 for the samplers of the model's law, 0 for the others).
        top_p: keep the smallest set of most probable tokens whose mass reaches this, in (0, 1].
        top_k: keep so many most probable tokens.
        min_p: keep tokens at least this fraction as probable as the most probable one, in [0, 1].
        draw: whether tokens are drawn before or after positions are selected; None: the strategy's own.
        eos: `stop`: a row ends at its first end-of-sequence token once everything left of it is written. `defer`: like
            stop, and such a token is committed only as the leftmost undecided one, so that it cannot cut an answer
            short (at temperature > 0 it draws before it selects). `ignore`: a token like any other. `ban`: never
            written.
        eos_token_id: which tokens end a sequence; None: the tokenizer's, else the model's.
        suppress_tokens: ids that are never written.
        begin_suppress_tokens: ids that are never written first.
        repetition_penalty: divides the probability of tokens that the row holds already, prompt included; tokens
            written in the same step count (see `OncePerStep`). 1: none.
        no_repeat_ngram: no run of so many tokens is written that the row, prompt included, holds already; tokens
            written in the same step count (see `ngrams.py`). 0: none.
        guidance: strength of classifier-free guidance by the prompt (see `Guided`); 0: none. Doubles the evaluations.
        regex: a regular expression that the text of each answer matches as a whole, up to its end-of-sequence token
            (see `token_automaton`, `Constraint`). Needs the tokenizer and the extra `constrain`. Its automaton takes
            seconds for a large vocabulary; `Regex(pattern, tokenizer)` in place of the text builds it once.
        cache: stored keys and values of earlier forwards, for fewer tokens per forward: `prefix`, `dual`, `delayed` and
            `interval` are approximations, `block` is exact and for block-causal models, `none` feeds everything (see
            `mdlm.samplers.cache_policies`, whose objects take intervals). None: the strategy's own.
        batch_size: rows per run. Changes the result only as far as the model's own arithmetic does: a network rounds
            differently in another batch, which decides between positions it predicts alike to the last digits, as on a
            canvas with nothing given.
        **knobs: the strategy's own, see its function in `PRESETS`.

    Raises:
        ValueError: an unknown strategy, a knob it does not take, a value out of range, prompts of an unknown kind, ids
            that the model does not know, an answer too long for the model.
    """
    options = {
        "strategy": strategy,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "draw": draw,
        "eos": eos,
        "eos_token_id": eos_token_id,
        "suppress_tokens": suppress_tokens,
        "begin_suppress_tokens": begin_suppress_tokens,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "guidance": guidance,
        "cache": cache,
        "regex": regex,
        "batch_size": batch_size,
    }
    plan = _plan(model, tokenizer, prompts, knobs=knobs, **checked(_plan, options))
    parts = []
    for run in plan.runs():
        while not run.done:
            run.advance()
        parts.append(_result(plan, run.frame(), run.finish))
    return Generation.join(parts)


def stream(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Any,
    *,
    strategy: str | Strategy | None = None,
    max_new_tokens: int = 128,
    seed: int | Sequence[int] = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    draw: Literal["after_select", "before_select"] | None = None,
    eos: EosPolicy = "stop",
    eos_token_id: int | Sequence[int] | None = None,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    no_repeat_ngram: int = 0,
    guidance: float = 0.0,
    cache: CacheName | None = None,
    regex: str | Regex | None = None,
    top: int = 0,
    **knobs: Any,
) -> Iterator[Frame]:
    """Watch it unmask: the canvas before the first step and after each one.

    Arguments as in `generate`, whose result the last frame holds; all prompts are one batch. `top`: how many of the
    likeliest tokens each frame keeps for every token written. Wrong arguments raise here, not at the first frame.
    """
    if not isinstance(top, int) or isinstance(top, bool) or top < 0:
        raise ValueError(f"top is {top!r}; it must be the number of likeliest tokens to keep, 0 or more")
    options = {
        "strategy": strategy,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "draw": draw,
        "eos": eos,
        "eos_token_id": eos_token_id,
        "suppress_tokens": suppress_tokens,
        "begin_suppress_tokens": begin_suppress_tokens,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "guidance": guidance,
        "cache": cache,
        "regex": regex,
        "batch_size": 1 << 30,
    }
    plan = _plan(model, tokenizer, prompt, knobs=knobs, **checked(_plan, options))
    return _frames(next(plan.runs(top)))


def _frames(run: Run) -> Iterator[Frame]:
    yield run.frame()
    while not run.done:
        run.advance()
        yield run.frame()


def _plan(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts: Any,
    *,
    strategy: str | Strategy | None,
    max_new_tokens: int,
    seed: int | Sequence[int],
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    draw: str | None,
    eos: str,
    eos_token_id: int | Sequence[int] | None,
    suppress_tokens: Sequence[int],
    begin_suppress_tokens: Sequence[int],
    repetition_penalty: float,
    no_repeat_ngram: int,
    guidance: float,
    cache: str | None,
    regex: str | Regex | None,
    batch_size: int,
    knobs: dict[str, Any],
) -> Plan:
    """The call with everything in it checked; its annotations are what `checked` holds the options to."""
    denoiser = as_denoiser(model)
    check_tokenizer(tokenizer, denoiser.mask_token_id)
    canvas = to_canvas(tokenizer, prompts, max_new_tokens)
    check_length(model, canvas)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be 1 or more")
    if not isinstance(seed, int) and len(seed) != len(canvas):
        raise ValueError(f"{len(seed)} seeds for {len(canvas)} rows; give one seed, or one for each row")
    built = _strategy(model, strategy, knobs)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    changes: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if draw is not None:
        if draw not in ("after_select", "before_select"):
            raise ValueError(f"draw is {draw!r}; it must be 'after_select' or 'before_select'")
        changes["before_select"] = draw == "before_select"
    built = dataclasses.replace(built, draw=dataclasses.replace(built.draw, **changes))
    ends = _end_ids(model, tokenizer, eos_token_id)
    _check_ids((*ends, *suppress_tokens, *begin_suppress_tokens), denoiser)
    built = _with_eos(with_token_ids(built, tokenizer), eos, ends, draw)
    banned = (*suppress_tokens, *ends) if eos == "ban" else tuple(suppress_tokens)
    built = _with_transforms(built, repetition_penalty, no_repeat_ngram, banned, tuple(begin_suppress_tokens))
    if regex is not None:
        closing = ends if eos in ("stop", "defer") else ()
        expression = as_regex(regex, tokenizer)
        constraint = expression.constraint(denoiser, closing, banned, tuple(begin_suppress_tokens))
        built = dataclasses.replace(built, constraint=constraint)
    if cache is not None:
        if not is_exchangeable(built.cache):
            raise ValueError(
                f"this strategy asks the denoiser in its own way ({type(built.cache).__name__}), which cache={cache!r} "
                "would replace; leave cache out"
            )
        built = dataclasses.replace(built, cache=cache_named(cache))
    if guidance != 0:
        built = dataclasses.replace(built, cache=Guided(guidance, built.cache))
    return Plan(denoiser, canvas, built, seed, tokenizer, isinstance(prompts, Canvas), batch_size)


def _strategy(model: Any, strategy: str | Strategy | None, knobs: dict[str, Any]) -> Strategy:
    if isinstance(strategy, Strategy):
        if knobs:
            raise ValueError(f"a Strategy object takes no further knobs, got {', '.join(knobs)}; set them in it")
        return strategy
    if strategy is None:
        stored = getattr(getattr(model, "generation_config", None), "strategy", None)
        if stored is not None:
            return _stored_strategy(stored, knobs)
    return build_strategy(DEFAULT_STRATEGY if strategy is None else strategy, **knobs)


def _stored_strategy(stored: Any, knobs: dict[str, Any]) -> Strategy:
    """The strategy that a `generation_config` names, with `knobs` over its own."""
    where = "the strategy stored in the model's generation_config"
    own = stored.get("knobs", {}) if isinstance(stored, Mapping) else None
    if own is None or not isinstance(own, Mapping) or not set(stored) <= {"name", "knobs"} or "name" not in stored:
        raise ValueError(
            f'{where} is {stored!r}; it must be {{"name": NAME}} or {{"name": NAME, "knobs": {{KNOB: VALUE}}}}; set it '
            "right, or name a strategy in the call"
        )
    try:
        return build_strategy(str(stored["name"]), **{**own, **knobs})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where} is {stored!r}: {error}") from error


def _end_ids(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, eos_token_id: int | Sequence[int] | None
) -> tuple[int, ...]:
    if eos_token_id is None:
        eos_token_id = getattr(tokenizer, "eos_token_id", None)
    if eos_token_id is None:
        eos_token_id = getattr(getattr(model, "config", None), "eos_token_id", None)
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


def _check_ids(tokens: tuple[int, ...], denoiser: Denoiser) -> None:
    wrong = [token for token in tokens if not 0 <= token < denoiser.num_tokens]
    if wrong:
        raise ValueError(f"token ids {wrong} do not exist; the model knows 0 .. {denoiser.num_tokens - 1}")


def _with_transforms(
    strategy: Strategy,
    repetition_penalty: float,
    no_repeat_ngram: int,
    suppress: tuple[int, ...],
    at_start: tuple[int, ...],
) -> Strategy:
    """The strategy's own transforms, then these; see `transforms.py` for the order."""
    transforms: list[Transform] = []
    admissions = [] if strategy.admit is None else [strategy.admit]
    for name, given in (("repetition_penalty", repetition_penalty != 1), ("no_repeat_ngram", no_repeat_ngram != 0)):
        if given and replaces_tokens(strategy.revise):
            raise ValueError(f"{name} looks at commits, but this strategy also edits written tokens; leave it out")
    if repetition_penalty != 1:
        transforms.append(RepetitionPenalty(repetition_penalty))
        admissions.append(OncePerStep())
    if no_repeat_ngram != 0:
        transforms.append(NoRepeatNgram(no_repeat_ngram))
        admissions.append(DistinctNgrams(no_repeat_ngram))
    if suppress:
        transforms.append(SuppressTokens(suppress))
    if at_start:
        transforms.append(SuppressAtStart(at_start))
    admit = admissions[0] if len(admissions) == 1 else InTurn(tuple(admissions)) if admissions else None
    return dataclasses.replace(strategy, transforms=(*strategy.transforms, *transforms), admit=admit)


def _with_eos(strategy: Strategy, eos: str, ends: tuple[int, ...], draw: str | None) -> Strategy:
    one_of("eos", eos, get_args(EosPolicy))
    if eos in ("stop", "defer") and ends:
        strategy = dataclasses.replace(strategy, stop=(*strategy.stop, EosStop(ends)))
    if eos == "defer" and ends:
        if not reads_scores(strategy.select):
            raise ValueError(
                "eos='defer' ranks positions by what they predict, but this strategy chooses them without looking at "
                "scores; use eos='stop' or another strategy"
            )
        if replaces_tokens(strategy.revise):
            raise ValueError("eos='defer' ranks commits, but this strategy also edits written tokens; use eos='stop'")
        if strategy.draw.temperature > 0:  # which positions would end the answer is known once they are drawn
            if draw == "after_select":
                raise ValueError(
                    "eos='defer' draws tokens before it selects positions when temperature > 0; leave draw out, or "
                    "use eos='stop'"
                )
            strategy = dataclasses.replace(strategy, draw=dataclasses.replace(strategy.draw, before_select=True))
        strategy = dataclasses.replace(strategy, score=DeferEos(strategy.score, ends))
    return strategy


def _result(plan: Plan, frame: Frame, finish: list[str]) -> Generation:
    ends = frame.ends.tolist()
    tokens = [row[:end].cpu() for row, end in zip(frame.tokens, ends)]
    steps = [row[:end].cpu() for row, end in zip(frame.step_map, ends)]
    text = [""] * len(tokens)
    if plan.tokenizer is not None:
        given = [0 if plan.whole_text else int((step < 0).cumprod(0).sum()) for step in steps]
        shown = tokens if plan.whole_text else [row[step >= 0] for row, step in zip(tokens, steps)]
        parts = zip(tokens, given, shown)
        text = [decode_after(plan.tokenizer, row[:n].tolist(), new.tolist()) for row, n, new in parts]
    return Generation(
        tokens=tokens,
        text=text,
        nfe=frame.nfe.cpu(),
        forwards=frame.forwards.cpu(),
        tokens_fed=frame.tokens_fed.cpu(),
        step_map=steps,
        log_probs=[row[:end].cpu() for row, end in zip(frame.log_probs, ends)],
        finish=finish,
    )
