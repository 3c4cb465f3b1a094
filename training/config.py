"""The configuration of a run: one tree of frozen dataclasses, each beside the code it configures, and its parser.

A YAML file (`--config recipe.yaml`) gives values, the command line overrides them (`--optim.lr 1e-3`), `--print_config`
shows the result, and a key that does not exist is an error that names the nearest one. Read next: `loop.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from jsonargparse import ActionYesNo, ArgumentParser, set_parsing_settings

from mdlm.adapter import AdapterConfig
from mdlm.data import DataConfig
from mdlm.objective import ObjectiveConfig
from mdlm.tokenization import TokenizerConfig
from mdlm.training.drift import DriftConfig
from mdlm.training.lr import LRSchedule
from mdlm.training.optim import OptimConfig
from mdlm.training.outer_config import OuterConfig, preset_values


def _require(condition: bool, flag: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"--{flag} is {value!r}; it must be {allowed}")


_OF_A_FOLDER = ("shift_logits", "add_mask_token", "mask_token_id")
"""Options of `ModelConfig` that say what a public folder leaves open."""


@dataclass(frozen=True)
class ModelConfig:
    """The model: a new one by its sizes, or the weights, config and tokenizer of a folder (`init_from`)."""

    init_from: str | None = None
    """Folder or hub name to start from: a checkpoint or run of ours, the model of the package (`builtin:python-8m`), or
    a public model (LLaDA, Dream, ...); the sizes below then come from it and must not be given. Or a causal model
    (Llama, Qwen, GPT-2), with `add_mask_token` or `mask_token_id`."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 6
    """Transformer blocks."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads (grouped-query attention); null: as many as query heads."""
    head_dim: int | None = None
    """Width of a head; null: hidden_size / num_attention_heads."""
    intermediate_size: int | None = None
    """Width of the MLP; null: 8/3 of hidden_size, rounded up to a multiple of 64."""
    max_position_embeddings: int | None = None
    """Longest row the model accepts; null: `data.seq_len`."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square inside every RMSNorm."""
    norm_placement: str = "pre"
    """Where norms and residual sums sit: pre, post, peri (sandwich), span, hybrid or deepnorm."""
    linear: str = "dense"
    """Projections of the blocks: dense, or sdd (their output normalised and scaled)."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = True
    """One matrix for embedding and head."""
    block_size: int | None = None
    """Block diffusion: attention is full inside blocks of this many positions and causal between them, and each block
    is noised under its clean past; null: bidirectional, or with `init_from` what the folder says."""
    shift_logits: bool | None = None
    """The row for position i is computed at position i - 1, as in models that come from causal ones; null: no, or with
    `init_from` what the folder says (causal models: yes)."""
    add_mask_token: bool = False
    """With `init_from` of a causal model: add a token `<|mask|>`, whose rows are the mean of the others."""
    mask_token_id: int | None = None
    """With `init_from` of a public model that does not name it: the mask, a special token of its tokenizer."""
    attn_implementation: str = "sdpa"
    """How attention is computed: sdpa, eager, flash_attention_2, flash_attention_3 or flex_attention."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more time."""

    def __post_init__(self) -> None:
        """Raises ValueError if sizes are given beside `init_from`. Sizes themselves are checked by `MDLMConfig`."""
        if self.init_from is not None:
            free = {"init_from", "attn_implementation", "gradient_checkpointing", "block_size", *_OF_A_FOLDER}
            given = [
                f.name for f in dataclasses.fields(self) if f.name not in free and getattr(self, f.name) != f.default
            ]
            if given:
                raise ValueError(
                    f"--model.init_from takes the architecture from {self.init_from}; "
                    f"remove {', '.join(f'--model.{name}' for name in given)}"
                )
        elif self.add_mask_token or self.mask_token_id is not None:
            raise ValueError(
                "--model.add_mask_token and --model.mask_token_id are for a model of --model.init_from; the tokenizer "
                "of a new one has a mask token"
            )

    def architecture(self) -> dict[str, Any]:
        """The fields that `MDLMConfig` takes (of a model made from sizes)."""
        apart = {"init_from", "attn_implementation", "gradient_checkpointing", "max_position_embeddings"}
        apart |= {"add_mask_token", "mask_token_id"}
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in apart}
        return {**sizes, "shift_logits": bool(self.shift_logits)}


@dataclass(frozen=True)
class LoopConfig:
    """Length, batch and arithmetic of the run."""

    steps: int | None = 1000
    """Optimizer steps of the whole run, those before a resume included; null: as many as `max_seconds` allows."""
    max_seconds: float | None = None
    """Fix the number of steps (at most `steps`) by the clock: a short probe measures a step, its effect is undone, and
    what fits is done. Saving, validation and previews come on top. The number is stored, so a resume is exact."""
    global_batch: int = 32
    """Rows per optimizer step, over all processes and accumulated micro-batches."""
    micro_batch: int | None = None
    """Rows per process and forward; null: global_batch / processes (no accumulation)."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Arithmetic of forward and backward; weights, loss and optimizer are float32 in each."""
    compile: bool = False
    """torch.compile the transformer (not the head, whose number of rows changes)."""
    ema: float | None = None
    """Decay of the moving average of the weights, which is then evaluated and saved as the model; null: none."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained: shell patterns of their names, e.g. `model.embed_tokens.*`."""
    max_bad_steps: int = 10
    """Stop after this many steps in a row whose loss or gradient is not finite (each is skipped and counted)."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    corruption_warmup: float = 0.0
    """Length of the corruption warm-up as a fraction of all steps, in [0, 1); or give `objective.warmup_steps`."""
    measure_peak: bool = True
    """Measure the machine's matmul peak at the start (a second or two), to report MFU."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        _require(self.steps is None or self.steps >= 1, "train.steps", self.steps, "1 or more")
        _require(self.max_seconds is None or self.max_seconds > 0, "train.max_seconds", self.max_seconds, "positive")
        if self.steps is None and self.max_seconds is None:
            raise ValueError("--train.steps and --train.max_seconds are both null; one of them must end the run")
        _require(self.global_batch >= 1, "train.global_batch", self.global_batch, "1 or more")
        _require(self.micro_batch is None or self.micro_batch >= 1, "train.micro_batch", self.micro_batch, "1 or more")
        _require(self.ema is None or 0.0 <= self.ema < 1.0, "train.ema", self.ema, "in [0, 1)")
        _require(self.max_bad_steps >= 1, "train.max_bad_steps", self.max_bad_steps, "1 or more")
        _require(self.log_every >= 1, "train.log_every", self.log_every, "1 or more")
        fraction = self.corruption_warmup
        _require(0.0 <= fraction < 1.0, "train.corruption_warmup", fraction, "a fraction of all steps, in [0, 1)")

    def accumulation(self, processes: int) -> int:
        """Micro-batches per process and step. Raises ValueError if the global batch does not divide."""
        micro = self.micro_batch or self.global_batch // processes
        if micro == 0 or self.global_batch % (micro * processes):
            raise ValueError(
                f"--train.global_batch {self.global_batch} must be a multiple of processes ({processes}) x "
                f"--train.micro_batch ({self.micro_batch or 'not given'})"
            )
        return self.global_batch // (micro * processes)


@dataclass(frozen=True)
class ValidationConfig:
    """The NELBO on held-out rows, with the same masks every time, so that the values can be compared."""

    every: int = 500
    """Steps between two validations; 0: never."""
    at_start: bool = False
    """Validate before the first step too: what fine-tuning starts from."""
    draws: int = 1
    """Noise levels drawn per row of the validation text (`data.validation_rows` limits the rows)."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        _require(self.every >= 0, "validation.every", self.every, "0 (never) or more")
        _require(self.draws >= 1, "validation.draws", self.draws, "1 or more")


@dataclass(frozen=True)
class PreviewConfig:
    """Samples printed and logged while training."""

    every: int = 0
    """Steps between two previews; 0: never."""
    prompts: tuple[str, ...] = ("",)
    """One sample is drawn after each."""
    length: int = 64
    """Tokens per sample."""
    steps: int = 32
    """Denoising steps per sample."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        _require(self.every >= 0, "preview.every", self.every, "0 (never) or more")
        _require(len(self.prompts) >= 1, "preview.prompts", self.prompts, "a list of at least one string")
        _require(self.length >= 1, "preview.length", self.length, "1 or more")
        _require(self.steps >= 1, "preview.steps", self.steps, "1 or more")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how much to keep. The last step is always saved."""

    every: int = 500
    """Steps between two checkpoints; 0: only the last."""
    keep_last: int = 2
    """Checkpoints kept; older ones are deleted after a newer one is complete."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        _require(self.every >= 0, "checkpoint.every", self.every, "0 (only the last) or more")
        _require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "1 or more")


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    output_dir: str
    """Folder of the run: checkpoints, metrics.jsonl, tracker files."""
    resume: str = "none"
    """`auto`: go on from the newest checkpoint in output_dir, start afresh without one; a checkpoint folder; `none`."""
    overwrite: bool = False
    """Delete the checkpoints and metrics that output_dir holds from another run."""
    seed: int = 0
    """Initial weights, noise and order of the data."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Where metrics go besides metrics.jsonl."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    train: LoopConfig = field(default_factory=LoopConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)

    def __post_init__(self) -> None:
        """Raises ValueError naming the flags that do not go together."""
        limit = self.model.max_position_embeddings
        if self.model.init_from is None and limit is not None and self.data.seq_len > limit:
            raise ValueError(
                f"--data.seq_len {self.data.seq_len} is longer than --model.max_position_embeddings {limit}; "
                "lower the one or raise the other"
            )
        if self.objective.warmup_steps and self.train.corruption_warmup:
            raise ValueError(
                f"--objective.warmup_steps ({self.objective.warmup_steps}) and --train.corruption_warmup "
                f"({self.train.corruption_warmup}) both set the corruption warm-up; set one of them to 0"
            )
        if self.objective.search_range and not self.validation.every:
            raise ValueError("--objective.search_range searches at every validation: set --validation.every")
        if self.lora.r is not None and self.model.init_from is None:
            raise ValueError(f"--lora.r {self.lora.r} trains beside the weights of a model: set --model.init_from")
        if self.lora.r is not None and self.model.block_size is not None:
            raise ValueError(
                f"--model.block_size {self.model.block_size} changes the model that --lora.r {self.lora.r} trains "
                "beside, and the adapter would be used without: train all weights, or begin with a model of such blocks"
            )
        if self.tokenizer.path is not None and self.model.init_from is not None:
            raise ValueError("--model.init_from brings its own tokenizer; remove --tokenizer.path")
        if self.outer.preset == "none" and self.outer != OuterConfig():
            raise ValueError("--outer options have no effect without --outer.preset; give one (or custom)")
        if self.outer.engine == "primal" and self.train.ema is not None:
            raise ValueError("--outer.engine primal averages the weights itself; leave --train.ema out")
        if self.outer.engine == "gradients" and self.train.precision == "fp16":
            raise ValueError(
                "--outer.engine gradients does not work with fp16: residuals of gradients whose scale changes"
            )
        if self.outer.preset == "muloco" and self.optim.name != "muon":
            raise ValueError(f"--outer.preset muloco is Muon inside; --optim.name is {self.optim.name}")


class _Parser(ArgumentParser):
    """An `ArgumentParser` whose complaint about an unknown key names the nearest one that exists."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        groups = {field.name for field in dataclasses.fields(TrainConfig)}
        super().error(message + nearest_keys(message, {*option_names(TrainConfig), *groups, "config"}), ex)


def option_names(node: type, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields below a config dataclass, e.g. `optim.lr`."""
    for f in dataclasses.fields(node):
        factory = f.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield from option_names(factory, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def nearest_keys(message: str, known: set[str]) -> str:
    """A hint to append to a message about unknown keys; empty if it is about something else or nothing is near."""
    in_group = re.search(r"Group '(.*)' does not accept option '(.*)'", message)
    at_top = re.search(r"Option '(.*)' is not accepted", message)
    if in_group is not None:
        unknown = [f"{in_group[1]}.{in_group[2]}"]
    elif at_top is not None:
        unknown = [at_top[1]]
    elif "unrecognized arguments" in message:
        unknown = re.findall(r"--([\w.\-]+)", message)
    else:
        return ""
    hints = []
    for key in unknown:
        near = [name for name in sorted(known) if name.rpartition(".")[2] == key.rpartition(".")[2]]
        near += difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        if near:
            hints.append(f"'{key}' is unknown; did you mean '{near[0]}'?")
    return "".join(f"\n{hint}" for hint in hints)


def parse_config(argv: Sequence[str] | None = None, prog: str = "python -m mdlm.training") -> TrainConfig:
    """The configuration that YAML files and command line give; exits with a message where they are wrong.

    Raises ValueError (from the dataclasses) for values that are well-formed but not allowed.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--config recipe.yaml] [--option value ...]",
        description="Train a masked-diffusion language model.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with values for the options below.")
    overwrite = "Delete the checkpoints and metrics that output_dir holds from another run."
    parser.add_argument("--overwrite", action=ActionYesNo, nargs="?", default=False, help=overwrite)
    parser.add_class_arguments(TrainConfig, skip={"overwrite"})
    parser.link_arguments("seed", "data.seed")
    given = sys.argv[1:] if argv is None else list(argv)
    without_printing = [argument for argument in given if not argument.startswith("--print_config")]
    parser.set_defaults(preset_values(parser.parse_args(without_printing).outer.preset))
    options = parser.instantiate(parser.parse_args(given))
    return TrainConfig(**{f.name: options[f.name] for f in dataclasses.fields(TrainConfig)})


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The resolved configuration as plain JSON-able values."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
