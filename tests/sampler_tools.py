"""What tests of samplers share: models whose answers are exactly the same in any batch, runs, and every preset."""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.denoiser import Denoiser, ModelDenoiser
from mdlm.emit import emit_log_probs
from mdlm.modeling import MDLMForMaskedLM
from mdlm.rng import counter_uniform, hash_counters
from mdlm.samplers.canvas import Canvas
from mdlm.samplers.driver import Frame, Run, row_keys
from mdlm.samplers.presets import PRESETS, build_strategy
from mdlm.samplers.strategy import Strategy

MASK, EOS, VOCAB = 0, 1, 9
"""Ids of the toys below; the mask id comes first, where a forgotten ban does the most harm."""


@dataclass
class HashDenoiser:
    """A random function of the whole row: every token (masks included) at every real position changes every logit.

    The row enters through an integer sum, so its answers do not depend on the batch, on padding or on threads, bit for
    bit. It counts its calls.
    """

    scale: float = 8.0
    """Largest difference of two logits: small = unsure."""
    seed: int = 0
    mask_token_id: int = MASK
    num_tokens: int = VOCAB
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    calls: int = 0
    rows_fed: int = 0
    tokens_fed: int = 0

    def count(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Note a call; True on real tokens."""
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        self.calls, self.rows_fed = self.calls + 1, self.rows_fed + len(tokens)
        self.tokens_fed += int(real.sum())
        return real

    def __call__(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """See `Denoiser`."""
        real = self.count(tokens, attention_mask)
        position = torch.arange(tokens.shape[1])
        row = (hash_counters(tokens, position, self.seed) * real).sum(dim=1)
        uniform = counter_uniform(row[:, None, None], position[:, None], torch.arange(self.num_tokens))
        logits = self.scale * uniform
        return emit_log_probs(logits if at is None else logits[at], self.mask_token_id, self.num_tokens)


def tiny_model(**options: typing.Any) -> ModelDenoiser:
    """Our transformer with random weights in float64, for components that need more than answers."""
    torch.manual_seed(0)
    sizes: dict[str, typing.Any] = {
        "vocab_size": 16,
        "num_tokens": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "max_position_embeddings": 128,
        "initializer_range": 0.5,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": 2,
    }
    model = MDLMForMaskedLM(MDLMConfig(**{**sizes, **options}))
    torch.nn.Module.to(model, torch.float64)
    return ModelDenoiser(model.eval())


@dataclass
class Outcome:
    """What became of a canvas, row by row."""

    frames: list[Frame]
    finish: list[str]
    lengths: list[int]

    @property
    def last(self) -> Frame:
        return self.frames[-1]

    def row(self, number: int) -> dict[str, typing.Any]:
        """Everything about one row, without padding."""
        last, end = self.last, self.lengths[number]
        return {
            "tokens": last.tokens[number, :end].tolist(),
            "step_map": last.step_map[number, :end].tolist(),
            "log_probs": [None if x != x else x for x in last.log_probs[number, :end].tolist()],
            "nfe": int(last.nfe[number]),
            "forwards": int(last.forwards[number]),
            "tokens_fed": int(last.tokens_fed[number]),
            "end": int(last.ends[number]),
            "finish": self.finish[number],
        }

    def rows(self) -> list[dict[str, typing.Any]]:
        """Every row."""
        return [self.row(number) for number in range(len(self.lengths))]


def unmask(
    denoiser: Denoiser, canvas: Canvas, strategy: Strategy, seed: int | Sequence[int] = 0, most: int = 2000
) -> Outcome:
    """Run to the end and keep every frame; fails if that takes more than `most` steps."""
    run = Run(denoiser, canvas, strategy, row_keys(seed, len(canvas)))
    frames = [run.frame()]
    while not run.done:
        run.advance()
        frames.append(run.frame())
        assert run.state.step <= most, f"not finished after {most} steps"
    return Outcome(frames, run.finish, canvas.lengths.tolist())


def knob_variations(preset: Callable[..., Strategy]) -> Iterator[dict[str, typing.Any]]:
    """Its defaults; then, with few steps, each knob changed alone: every choice of a Literal, both booleans, short and
    long blocks; few and many steps."""
    yield {}
    hints = typing.get_type_hints(preset)
    counted = {
        name: p.default for name, p in inspect.signature(preset).parameters.items() if isinstance(p.default, int)
    }
    many = counted.get("steps", 0) > 8
    for name, parameter in inspect.signature(preset).parameters.items():
        values: Sequence[typing.Any] = ()
        if typing.get_origin(hints[name]) is typing.Literal:
            values = typing.get_args(hints[name])
        elif hints[name] is bool:
            values = (True, False)
        elif name == "block_length":
            values = (None, 1, 3, 100) if type(None) in typing.get_args(hints[name]) else (1, 3, 100)
        elif name == "steps":
            values = (1, 3, 20)
        for value in values:
            if value != parameter.default:
                yield {**({"steps": 4} if many else {}), name: value}


def preset(name: str, **knobs: typing.Any) -> Strategy:
    """The preset for canvases of ids: without a tokenizer, what is said as text must be said as ids."""
    return build_strategy(name, **({"delimiters": (3,), **knobs} if name == "adablock" else knobs))


def every_strategy() -> list[tuple[str, Strategy]]:
    """Every preset with every variation of its knobs; those that contradict another knob's default are left out."""
    found = []
    for name, function in PRESETS.items():
        for knobs in knob_variations(function):
            try:
                strategy = preset(name, **knobs)
            except ValueError:
                assert knobs, f"the defaults of {name} are refused"
                continue
            found.append((f"{name}({', '.join(f'{knob}={value!r}' for knob, value in knobs.items())})", strategy))
    return found


def few_steps(name: str, **knobs: typing.Any) -> Strategy:
    """The preset with as few steps as make a short test, where it counts steps."""
    default = inspect.signature(PRESETS[name]).parameters.get("steps")
    many = default is not None and isinstance(default.default, int) and default.default > 8
    return preset(name, **knobs, **({"steps": 8} if many else {}))


def denoiser_for(strategy: Strategy, canvas: Canvas, scale: float = 8.0) -> Denoiser:
    """`HashDenoiser`, or the tiny model if the strategy asks for a capability it has not."""
    toy = HashDenoiser(scale)
    try:
        Run(toy, canvas, strategy, row_keys(0, len(canvas))).advance()
    except ValueError:
        return tiny_model()
    return HashDenoiser(scale)


def small_canvas() -> Canvas:
    """Two rows of different lengths, a mask id and an EOS id given."""
    return Canvas.from_prompts([[3, MASK, EOS], [4]], [3, 6])


def ragged_canvas(nothing_given: bool = True) -> Canvas:
    """Rows of different lengths: prompts that hold mask and EOS ids, a hole, nothing given, one and zero to write.

    Without `nothing_given` every row has a prompt: on masks alone a transformer predicts the same everywhere, and
    rounding, which depends on the batch, breaks the ties.
    """
    rows = [
        ([3, MASK, EOS, 4], [0, 0, 0, 0] + [1] * 7),
        ([], [1] * 5) if nothing_given else ([6], [0, *[1] * 5]),
        ([5, 5, MASK, 6, EOS, 7], [0, 1, 0, 1, 1, 0]),
        ([8, 7], [0, 0, 1]),
        ([4, MASK, 2], [0, 0, 0]),
        ([2], [0] + [1] * 10),
    ]
    tokens = [torch.tensor(given + [3] * (len(flags) - len(given))) for given, flags in rows]
    return Canvas.from_rows(tokens, [torch.tensor(flags, dtype=torch.bool) for _, flags in rows])


def same_rows(left: dict[str, typing.Any], right: dict[str, typing.Any], exact: bool = True) -> None:
    """Fails unless two rows are equal: bit for bit, or with log-probabilities up to rounding."""
    for name in left:
        if name == "log_probs" and not exact:
            for x, y in itertools.zip_longest(left[name], right[name]):
                assert (x is None) == (y is None)
                assert x is None or abs(x - y) < 1e-9, f"{x} is not {y}"
        else:
            assert left[name] == right[name], f"{name}: {left[name]} is not {right[name]}"


@dataclass
class DriftDenoiser(HashDenoiser):
    """As exact as `HashDenoiser`, but each decided token moves the logits of the others only a little: consecutive
    predictions resemble each other, and the same token tends to lead."""

    coupling: float = 1.0
    """How far one decided token may move a logit."""

    def __call__(
        self,
        tokens: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        """See `Denoiser`."""
        real = self.count(tokens, attention_mask)
        position, vocab = torch.arange(tokens.shape[1]), torch.arange(self.num_tokens)
        offset = position[:, None] - position
        push = counter_uniform(tokens[:, None, :, None], offset[:, :, None], vocab, self.seed, 1)
        push = (push * 2**20).long() * (real & (tokens != self.mask_token_id))[:, None, :, None]
        own = counter_uniform(position[:, None], vocab, self.seed, 2)
        logits = self.scale * own + self.coupling * (push.sum(dim=2) / 2**20)
        return emit_log_probs(logits if at is None else logits[at], self.mask_token_id, self.num_tokens)


def label(component: object) -> str:
    """Name of a component in test ids, the same in every process."""
    return getattr(component, "__name__", str(component))
