"""Hand-made runs for the tests of the page: what happened in them is written here, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers.driver import Frame
from mdlm.tokenization import num_tokens, padded_vocab_size, train_bpe

SCRIPT = "<script>window.hacked = 1</script>"
COMMENT = "</script><!-- <script>"


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes and a few words; hostile tokens of their own."""
    tokenizer = train_bpe(["the cat sat on the mat " * 4], vocab_size=270)
    tokenizer.add_tokens([SCRIPT, COMMENT])
    return tokenizer


def frames_of(
    tokenizer: PreTrainedTokenizerBase,
    given: Sequence[int | None],
    steps: Sequence[dict[int, tuple[int, float] | None]],
    end: int | None = None,
    top: Sequence[tuple[int, float]] = (),
) -> list[Frame]:
    """One row. `steps` says per step which position got which token with which log-probability (None: taken back);
    every write had the same `top`. `end`: length of the row after the last step."""
    seq, mask = len(given), tokenizer.mask_token_id
    tokens = torch.tensor([[mask if token is None else token for token in given]])
    masked = torch.tensor([[token is None for token in given]])
    step_map = torch.full((1, seq), -1)
    log_probs = torch.full((1, seq), torch.nan, dtype=torch.float64)
    top_tokens = torch.full((1, seq, len(top)), -1)
    top_log_probs = torch.full((1, seq, len(top)), torch.nan, dtype=torch.float64)
    frames = []
    for number in range(len(steps) + 1):
        for position, event in () if number == 0 else steps[number - 1].items():
            token, log_prob = (mask, torch.nan) if event is None else event
            tokens[0, position], masked[0, position], log_probs[0, position] = token, event is None, log_prob
            step_map[0, position] = -1 if event is None else number - 1
            for place, (other, value) in enumerate(top):
                top_tokens[0, position, place], top_log_probs[0, position, place] = other, value
        count = torch.tensor([number])
        frames.append(
            Frame(
                step=number,
                tokens=tokens.clone(),
                masked=masked.clone(),
                step_map=step_map.clone(),
                log_probs=log_probs.clone(),
                nfe=count,
                forwards=count,
                tokens_fed=count * seq,
                ends=torch.tensor([end if end is not None and number == len(steps) else seq]),
                top_tokens=top_tokens.clone(),
                top_log_probs=top_log_probs.clone(),
            )
        )
    return frames


def save_checkpoint(folder: Path) -> None:
    """A tiny model with random weights, and its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = MDLMForMaskedLM(
        MDLMConfig(
            vocab_size=padded_vocab_size(tokenizer),
            num_tokens=num_tokens(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=64,
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
