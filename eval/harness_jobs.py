"""Requests of the evaluation harness as jobs on token ids, and the answers to batches of jobs. Nothing of lm-eval's.

Every answer is a function of the job: its ids, its options, its noise. Read next: `harness_score.py`,
`harness_text.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mdlm.denoiser import Denoiser, as_denoiser
from mdlm.eval.harness_options import RequestOptions
from mdlm.eval.harness_score import Pair, Score, combine, greedy_matches, row_number, score_pairs, windows
from mdlm.eval.harness_store import Record, answer_key
from mdlm.eval.harness_text import (
    DEFAULT_NEW_TOKENS,
    UntilStop,
    Wish,
    cut,
    encode,
    encode_pair,
    end_ids,
    read_wish,
)
from mdlm.samplers.generate import generate
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.prompts import decode_after

Ids = list[int]


@dataclass(frozen=True)
class Job:
    """A request as token ids, with what decides its answer."""

    options: RequestOptions
    prompt: Ids
    answer: Ids
    """Of a likelihood; empty for a generation."""
    noise: int
    """With the seed it decides all randomness."""
    wish: Wish | None = None
    """Of a generation, its length filled in."""
    truncated: bool = False
    """Whether the prompt's beginning was cut off for lack of room."""

    @property
    def alike(self) -> str:
        """Jobs that may be answered in one batch have the same."""
        return answer_key(self.options.describe(), None if self.wish is None else vars(self.wish))


def batches(jobs: Mapping[str, Job], size: int) -> Iterable[dict[str, Job]]:
    """The jobs in batches of one kind, the longest first."""
    groups: dict[str, list[tuple[str, Job]]] = {}
    for key, job in jobs.items():
        groups.setdefault(job.alike, []).append((key, job))
    for group in groups.values():
        group.sort(key=lambda item: -len(item[1].prompt) - len(item[1].answer))
        for start in range(0, len(group), size):
            yield dict(group[start : start + size])


@dataclass(frozen=True)
class Worker:
    """A model with its tokenizer, and how it is asked."""

    model: Any
    """What `generate` takes: our model, a public one, or a `Denoiser`."""
    tokenizer: PreTrainedTokenizerBase
    batch_size: int = 16
    max_length: int | None = None
    """Longest prompt and answer together."""
    seed: int = 0

    @property
    def denoiser(self) -> Denoiser:
        """The model as a `Denoiser`."""
        return as_denoiser(self.model)

    @property
    def block_size(self) -> int | None:
        """Of a block-causal model."""
        found: int | None = getattr(getattr(self.model, "config", None), "block_size", None)
        return found

    def likelihood(self, context: str, continuation: str, options: RequestOptions) -> Job:
        """A continuation to be scored. Choices of one context share their noise, which cancels in comparisons."""
        if context == "":
            prompt, answer = [], encode(self.tokenizer, continuation)
            if answer and answer[0] == self._prefix(options):  # it brings its own beginning
                prompt, answer = answer[:1], answer[1:]
        else:
            prompt, answer = encode_pair(self.tokenizer, context, continuation)
        if not answer:
            raise ValueError(f"the continuation {continuation!r} has no token: there is nothing to score")
        prompt, truncated = self._fit(self._begin(prompt, options), len(answer), options)
        noise = row_number(*([context] if context else ["", continuation]))
        return Job(options, prompt, answer, noise, truncated=truncated)

    def rolling(self, text: str, options: RequestOptions) -> Job:
        """A whole text to be scored, every token once."""
        ids, first = encode(self.tokenizer, text), self._begin([], options)
        return Job(options, first, ids[1:] if first and ids[:1] == first else ids, row_number(text))

    def generation(self, context: str, gen_kwargs: Mapping[str, Any], options: RequestOptions, repeat: int = 0) -> Job:
        """A context to be continued; another `repeat` is another sample."""
        wish = read_wish(gen_kwargs)
        length = options.given("max_new_tokens") or wish.max_new_tokens or DEFAULT_NEW_TOKENS
        prompt = encode(self.tokenizer, context)
        prompt = self._begin(prompt, options) if prompt or options.texts.add_bos_token else prompt
        prompt, truncated = self._fit(prompt, length, options)
        return Job(options, prompt, [], row_number(context, repeat), replace(wish, max_new_tokens=length), truncated)

    def _prefix(self, options: RequestOptions) -> int | None:
        """The given token in front of a text without context."""
        own = (options.texts.prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((token for token in own if token is not None), None)

    def _begin(self, prompt: Ids, options: RequestOptions) -> Ids:
        """The prompt behind the token that it must begin with, if there is one."""
        bos = self.tokenizer.bos_token_id
        if options.texts.add_bos_token:
            return prompt if prompt[:1] == [bos] else [bos, *prompt]
        prefix = self._prefix(options)
        return prompt if prompt or prefix is None else [prefix]

    def _fit(self, prompt: Ids, answer: int, options: RequestOptions) -> tuple[Ids, bool]:
        """The end of the prompt that fits beside the answer, and whether any was cut off."""
        room = len(prompt) if self.max_length is None else self.max_length - answer
        if room < min(1, len(prompt)):
            raise ValueError(
                f"an answer of {answer} tokens leaves no room for its prompt in {self.max_length}; lower "
                "max_new_tokens (or the task's max_gen_toks), or leave the task out"
            )
        if len(prompt) <= room:
            return prompt, False
        kept = prompt[:1] if options.texts.add_bos_token else []
        return [*kept, *prompt[len(prompt) - room + len(kept) :]], True

    def score(self, jobs: list[Job]) -> list[Record]:
        """The likelihoods of jobs of one kind, and whether greedy decoding writes these answers."""
        pairs = [Pair(job.prompt, job.answer, job.noise) for job in jobs]
        scores = self._scores(pairs, jobs[0].options)
        greedy = greedy_matches(self.denoiser, pairs, block_size=self.block_size, batch=self.batch_size)
        return [
            {**_record(score), "greedy": matches, "greedy_nfe": nfe} for score, (matches, nfe) in zip(scores, greedy)
        ]

    def score_texts(self, jobs: list[Job]) -> list[Record]:
        """The likelihoods of whole texts."""
        parts = [windows(job.answer, job.prompt, self.max_length, job.noise) for job in jobs]
        flat = [pair for own in parts for pair in own]
        scores = iter(self._scores(flat, jobs[0].options) if flat else [])
        return [{**_record(combine([next(scores) for _ in own])), "windows": len(own)} for own in parts]

    def _scores(self, pairs: list[Pair], options: RequestOptions) -> list[Score]:
        return score_pairs(
            self.denoiser,
            pairs,
            options.likelihood,
            guidance=options.given("guidance"),
            block_size=self.block_size,
            seed=self.seed,
            batch=self.batch_size,
        )

    def generate(self, jobs: list[Job]) -> list[Record]:
        """The texts that jobs of one kind ask for, cut before the first `until` string."""
        options, wish = jobs[0].options, jobs[0].wish
        assert wish is not None
        assert wish.max_new_tokens is not None
        call = {**dict(wish.sampling), **options.generation, "max_new_tokens": wish.max_new_tokens}
        special = end_ids(self.tokenizer, wish.until)
        if special:
            own = options.given("eos_token_id")
            own = self.tokenizer.eos_token_id if own is None else own
            ends = [own] if isinstance(own, int) else list(own or ())
            call["eos_token_id"] = list(dict.fromkeys([*ends, *special]))
        strategy = build_strategy(options.strategy, **options.knobs)
        if wish.until:
            strategy = replace(strategy, stop=(*strategy.stop, UntilStop(self.tokenizer, wish.until)))
        seeds = [row_number(self.seed, job.noise) for job in jobs]
        out = generate(
            self.model,
            self.tokenizer,
            [job.prompt for job in jobs],
            strategy=strategy,
            seed=seeds,
            batch_size=self.batch_size,
            **call,
        )
        records = []
        for i, job in enumerate(jobs):
            ids = out.tokens[i][len(job.prompt) :].tolist()
            text = decode_after(self.tokenizer, job.prompt, ids[:-1] if out.finish[i] == "eos" else ids)
            counts = {name: int(getattr(out, name)[i]) for name in ("nfe", "forwards", "tokens_fed", "new_tokens")}
            records.append({"text": cut(text, wish.until), "finish": out.finish[i], **counts})
        return records


def _record(score: Score) -> Record:
    """As JSON, which knows no NaN."""
    error = score.standard_error
    return {
        "log_likelihood": score.log_likelihood,
        "standard_error": error if error == error else None,
        "tokens": score.tokens,
        "nfe": score.nfe,
    }
