"""Speed of sampling against a plain loop, in one run: `python -m mdlm.eval.speed_sampling tokens | overhead`.

`tokens`: tokens per second of greedy decoding, one token a step, without a cache and with the prefix and the dual
cache, for one row and for a batch, as ratios to the loop one would write first (`plain_loop`). `overhead`: the share of
a step that is spent outside the network, for every strategy. Random weights: nothing is said about quality. One JSON
object per line, as in `speed.py`, which see for why only ratios of the same run mean anything. Read next:
`samplers/cache_policies.py`.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.denoiser import ModelDenoiser
from mdlm.eval.speed import alternate, measure
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Run, row_keys
from mdlm.samplers.generate import generate
from mdlm.samplers.presets import PRESETS, build_strategy
from mdlm.samplers.speculate import Speculative

MASK = 0


def random_model(vocab: int, layers: int, width: int, seq: int, block_size: int | None = None) -> MDLMForMaskedLM:
    """A model that answers at random, with heads of 64."""
    torch.manual_seed(0)
    config = MDLMConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=seq,
        mask_token_id=MASK,
        block_size=block_size,
    )
    return MDLMForMaskedLM(config).eval()


def random_prompts(rows: int, length: int, vocab: int) -> Int64[Tensor, "rows length"]:
    """Ids without the mask id."""
    return torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def masked_canvas(
    model: MDLMForMaskedLM, prompts: Int64[Tensor, "rows length"], new_tokens: int
) -> Int64[Tensor, "rows seq"]:
    """Prompts with so many mask ids behind."""
    mask = model.config.mask_token_id
    assert mask is not None
    masks = prompts.new_full((len(prompts), new_tokens), mask)
    return torch.cat([prompts, masks], dim=1)


@torch.no_grad()
def plain_step(
    model: MDLMForMaskedLM, canvas: Int64[Tensor, "rows seq"], end: int, temperature: float = 0.0
) -> Int64[Tensor, "rows seq"]:
    """One token more in each row, left of `end`, in the style of public code: the whole canvas is fed, the head is
    computed on every position, float64 Gumbel noise raced over the vocabulary (which at temperature 0 changes nothing),
    probabilities are taken in float64 everywhere, and each row's position is picked by `topk` in a loop over rows."""
    mask = model.config.mask_token_id
    assert mask is not None
    undecided = canvas == mask
    logits = model(canvas).logits
    logits[..., mask] = -torch.inf
    noise = torch.rand_like(logits, dtype=torch.float64)
    race = logits.double().exp() / (-noise.log()) ** temperature
    drawn = race.argmax(dim=-1)
    probs = logits.double().softmax(dim=-1)
    confidence = probs.gather(-1, drawn[..., None])[..., 0]
    confidence[:, end:] = -torch.inf
    confidence = torch.where(undecided, confidence, -torch.inf)
    commit = torch.zeros_like(undecided)
    for row in range(len(canvas)):
        commit[row, confidence[row].topk(1).indices] = True
    return torch.where(commit, drawn, canvas)


def plain_loop(
    model: MDLMForMaskedLM,
    prompts: Int64[Tensor, "rows length"],
    new_tokens: int,
    block: int,
    temperature: float = 0.0,
) -> Int64[Tensor, "rows seq"]:
    """One token a step in blocks, every step a `plain_step`; `new_tokens` is a multiple of `block`. Above temperature 0
    the noise comes from torch's generator."""
    length = prompts.shape[1]
    canvas = masked_canvas(model, prompts, new_tokens)
    for end in range(length + block, length + new_tokens + 1, block):
        for _ in range(block):
            canvas = plain_step(model, canvas, end, temperature)
    return canvas


def tokens(
    vocab: int = 8192,
    layers: int = 6,
    width: int = 256,
    prompt: int = 64,
    new_tokens: int = 128,
    block: int = 32,
    batch: int = 16,
    rounds: int = 3,
) -> dict[str, Any]:
    """Greedy decoding, one token a step, against the plain loop; `batch_gain` is the tokens per second of a batch over
    those of one row, both with the same cache.

    Args:
        vocab: rows of the embedding.
        layers: transformer blocks.
        width: hidden size.
        prompt: given tokens.
        new_tokens: written tokens, a multiple of the block.
        block: block length.
        batch: rows of the large batch.
        rounds: whole generations of each candidate; medians are reported.
    """
    if new_tokens % block:
        raise ValueError(f"new_tokens={new_tokens} is not a multiple of block={block}; the plain loop needs that")
    model = random_model(vocab, layers, width, prompt + new_tokens)

    def ours(rows: int, cache: Any) -> Callable[[int], None]:
        prompts = random_prompts(rows, prompt, vocab)
        return lambda _: check_finished(
            generate(
                model,
                None,
                prompts,
                strategy="confidence",
                block_length=block,
                max_new_tokens=new_tokens,
                eos="ignore",
                batch_size=rows,
                cache=cache,
            ).nfe,
            new_tokens,
        )

    single = random_prompts(1, prompt, vocab)

    def plain(_: int) -> None:
        written = plain_loop(model, single, new_tokens, block)[:, prompt:] != MASK
        check_finished(written.sum(dim=-1), new_tokens)

    candidates: dict[str, Callable[[int], None]] = {"plain": plain}
    rows_of = {"plain": 1}
    for rows in (1, batch):
        for cache in ("none", "prefix", "dual"):
            candidates[f"{cache} x{rows}"], rows_of[f"{cache} x{rows}"] = ours(rows, cache), rows
    seconds = alternate(candidates, rounds, warmup=1, burst=1)
    rate = {name: rows_of[name] * new_tokens / taken for name, taken in seconds.items()}
    return {
        "measurement": "tokens",
        "vocab": vocab,
        "layers": layers,
        "width": width,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "block": block,
        "tokens_per_s": rate,
        "ratio_to_plain": {cache: rate[f"{cache} x1"] / rate["plain"] for cache in ("none", "prefix", "dual")},
        "batch": batch,
        "batch_gain": {cache: rate[f"{cache} x{batch}"] / rate[f"{cache} x1"] for cache in ("none", "prefix", "dual")},
    }


def check_finished(counts: Tensor, expected: int) -> None:
    """Fails if some row is not done, or not in as many steps as all candidates must take."""
    assert counts.tolist() == [expected] * len(counts), f"{counts.tolist()} instead of {expected} in each row"


class NetworkClock:
    """Seconds spent in forwards of a model."""

    def __init__(self, model: MDLMForMaskedLM) -> None:
        self.seconds, self._start = 0.0, 0.0
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._start


def overhead(
    vocab: int = 32768,
    layers: int = 6,
    width: int = 256,
    prompt: int = 64,
    new_tokens: int = 128,
    block: int = 32,
    batch: int = 1,
    steps: int = 12,
    rounds: int = 5,
    strategies: list[str] | None = None,
) -> dict[str, Any]:
    """Share of a step outside the network (log-softmax, scores, selection, writing), per strategy with its defaults.

    A run does the same in every round, so of each step the fastest round counts, in the network and outside it: what
    else the machine does only ever adds. Strategies with a `block_length` get `block`. The speculative ones spend
    forwards, not overhead, and are left out.

    Args:
        vocab: rows of the embedding.
        layers: transformer blocks.
        width: hidden size.
        prompt: given tokens.
        new_tokens: positions to write.
        block: block length.
        batch: rows.
        steps: steps with a forward of each run, from the first one on.
        rounds: runs of each strategy.
        strategies: names; all but the speculative ones if not given.
    """
    model = random_model(vocab, layers, width, prompt + new_tokens)
    clock = NetworkClock(model)
    canvas = Canvas.from_prompts(list(random_prompts(batch, prompt, vocab)), new_tokens)
    names = strategies or [name for name in PRESETS if not isinstance(build_strategy(name).cache, Speculative)]
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            known = inspect.signature(PRESETS[name]).parameters
            knobs: dict[str, Any] = {"block_length": block} if "block_length" in known else {}
            if "delimiters" in known and known["delimiters"].default:  # texts, and there is no tokenizer
                knobs["delimiters"] = (MASK,)  # which is never predicted
            run = Run(ModelDenoiser(model), canvas, build_strategy(name, **knobs), row_keys(0, batch))
            taken: list[tuple[float, float]] = []
            while not run.done and len(taken) < steps:
                clock.seconds, start = 0.0, time.perf_counter()
                run.advance()
                if clock.seconds:  # a step without a forward has no share
                    taken.append((clock.seconds, time.perf_counter() - start - clock.seconds))
            times[name].append(taken)
    shares: dict[str, float] = {}
    milliseconds: dict[str, list[float]] = {}
    for name, repeats in times.items():
        network, outside = (
            statistics.fmean(min(part[place] for part in same) for same in zip(*repeats, strict=True))
            for place in (0, 1)
        )
        shares[name] = outside / (network + outside)
        milliseconds[name] = [round(1e3 * value, 2) for value in (network, outside)]
    return {
        "measurement": "overhead",
        "vocab": vocab,
        "layers": layers,
        "width": width,
        "prompt": prompt,
        "new_tokens": new_tokens,
        "block": block,
        "batch": batch,
        "share": shares,
        "milliseconds (network, outside)": milliseconds,
    }


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {"tokens": tokens, "overhead": overhead}


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m mdlm.eval.speed_sampling`."""
    return measure(COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
