"""What a run starts from: its tokenizer and its model, new or of a folder (`model.init_from`).

A folder may hold a checkpoint of ours, a public model, or a causal one that is to become a denoiser: then the mask
token is added and the conventions are said here (`recipes/adapt.yaml`). Read next: `setup.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mdlm.adapter import attach, freeze, has_adapter
from mdlm.anneal import check_annealing
from mdlm.config import MDLMConfig
from mdlm.convert import is_public, open_checkpoint
from mdlm.data import training_texts
from mdlm.load import check_finite, hub_folder, model_folder
from mdlm.modeling import MDLMForMaskedLM
from mdlm.shipped import PREFIX
from mdlm.tokenization import (
    check_vocab,
    load_tokenizer,
    num_tokens,
    open_tokenizer,
    padded_vocab_size,
    prepare_tokenizer,
)
from mdlm.training.config import TrainConfig
from mdlm.training.team import Team

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`train.precision` -> the type that products are made in."""


def make_tokenizer(config: TrainConfig, resume: Path | None, team: Team) -> PreTrainedTokenizerBase:
    """The tokenizer configured; else the checkpoint's or that of `init_from`; else one that the main process trains."""
    if config.tokenizer.path is not None:
        return load_tokenizer(config.tokenizer.path)
    source = initial_folder(config) if resume is None else resume
    if source is not None:
        return load_tokenizer(source) if not _is_public(source) else _public_tokenizer(source, config)
    data = dataclasses.replace(config.data, seed=config.seed)
    trained = open_tokenizer(config.tokenizer, lambda: training_texts(data)) if team.is_main else None
    shared: PreTrainedTokenizerBase = team.share(trained)
    return shared


def initial_folder(config: TrainConfig) -> str | None:
    """What `init_from` means: the folder, of a run its newest checkpoint, of a hub model its files in the cache, which
    are downloaded; None without it. Raises ValueError if there is none of these."""
    source = config.model.init_from
    if source is None or Path(source).is_dir() or source.startswith(PREFIX):
        return None if source is None else str(model_folder(source))
    return str(_downloaded(source))


@functools.cache  # a repository that changes during a run is not looked at again
def _downloaded(name: str) -> Path:
    found = hub_folder(name, download=True)
    if found is None:
        raise ValueError(f"--model.init_from {name}: no such folder, and not to be had on the hub")
    return found


def _is_public(source: str | Path) -> bool:
    return (Path(source) / "config.json").is_file() and is_public(Path(source))


def _said(config: TrainConfig, source: str | Path) -> dict[str, Any]:
    """What the run says about a public folder. Raises ValueError for a folder of ours, which says it itself, and for
    an adapter beside it."""
    options = config.model
    said = {
        "shift_logits": options.shift_logits,
        "add_mask_token": options.add_mask_token or None,
        "mask_token_id": options.mask_token_id,
    }
    given = {name: value for name, value in said.items() if value is not None}
    if given and not _is_public(source):
        raise ValueError(
            f"{', '.join(f'--model.{name}' for name in given)}: {source} is a checkpoint of ours, whose config.json "
            "says it already; remove it"
        )
    if given and config.lora.r is not None:
        raise ValueError(
            f"--lora.r beside {', '.join(f'--model.{name}' for name in given)}: an adapter must find its base again; "
            "make the base with `mdlm convert` first"
        )
    return given


def _public_tokenizer(source: str | Path, config: TrainConfig) -> PreTrainedTokenizerBase:
    opened = open_checkpoint(source, **_said(config, source)).tokenizer
    if opened is None:
        raise ValueError(f"--model.init_from {source}: the folder holds no tokenizer")
    return prepare_tokenizer(opened.tokenizer)


def _stored_model(config: TrainConfig, source: str | Path, resumed: bool) -> MDLMForMaskedLM:
    """The model in a folder, ours or public, in float32; as stored, if it is to be quantised.

    Raises ValueError for weights that are not finite, or not exactly those of the model.
    """
    attention = config.model.attn_implementation
    if has_adapter(Path(source)):
        raise ValueError(f"--model.init_from {source} holds an adapter, not a model: make one of it with `mdlm merge`")
    dtype: torch.dtype | str = torch.float32 if config.lora.quantize is None else "auto"
    said = {} if resumed else _said(config, source)
    if Path(source).is_dir() and not _is_public(source):
        open_checkpoint(source)  # transformers would draw missing weights at random
    model = MDLMForMaskedLM.from_pretrained(source, dtype=dtype, attn_implementation=attention, **said)
    check_finite(model, source)
    return model.train()


def make_model(
    config: TrainConfig, resume: Path | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[MDLMForMaskedLM, str | None]:
    """The model with its initial weights, the same on every process, and the hash of what its adapter (if any) is
    beside. Raises ValueError where sizes do not fit."""
    torch.manual_seed(config.seed)
    options = config.model
    initial = initial_folder(config)
    if initial is not None:
        if resume is None or config.lora.r is not None:
            model = _stored_model(config, initial, resumed=False)
        else:
            model = _stored_model(config, resume, resumed=True)
        if options.block_size is not None:
            model.config.block_size = options.block_size
    else:
        sizes = MDLMConfig(
            vocab_size=padded_vocab_size(tokenizer),
            num_tokens=num_tokens(tokenizer),
            max_position_embeddings=options.max_position_embeddings or config.data.seq_len,
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
            **options.architecture(),
        )
        model = MDLMForMaskedLM._from_config(sizes, attn_implementation=options.attn_implementation)
    if config.data.seq_len > model.config.max_position_embeddings:
        raise ValueError(
            f"--data.seq_len {config.data.seq_len} is longer than the model's max_position_embeddings "
            f"({model.config.max_position_embeddings}); lower it"
        )
    check_vocab(tokenizer, model.config)
    if model.config.mask_token_id is None:
        raise ValueError(f"--model.init_from {options.init_from}: its config.json has no mask_token_id; set it there")
    if config.objective.anneal_steps:
        check_annealing(model.config)
    base = None if config.lora.r is None else attach(model, config.lora, COMPUTE[config.train.precision])
    freeze(model, config.train.freeze)
    if options.gradient_checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name of the method is younger than transformers 5
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, base
