"""A tiny model that knows what comes after a letter, for the tests of the evaluation harness.

It is trained, in a few seconds, on `a>b;` and end tokens behind it, as one training example is: prompt given, answer
masked. A text may hold several of them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.tokenization import num_tokens, padded_vocab_size, train_bpe

LETTERS = "abcdefgh"
TASKS = Path(__file__).parent / "harness_tasks"
LENGTH = 8


def letter_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte: <|mask|> 0, <|pad|> 1, <|eos|> 2, then 256 bytes."""
    return train_bpe(["ab"], 259)


def config_for(tokenizer: PreTrainedTokenizerBase, **options: int) -> MDLMConfig:
    """Width 48, one layer."""
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    return MDLMConfig(
        vocab_size=padded_vocab_size(tokenizer),
        num_tokens=num_tokens(tokenizer),
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **{**sizes, **options},
    )


def training_rows(tokenizer: PreTrainedTokenizerBase, shift: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `x>y;` followed by end tokens, and where the answer is; some with an example before the question."""
    rows, answers = [], []
    for first in (None, *range(len(LETTERS) - 1)):
        for i in range(len(LETTERS) - 1):
            shown = "" if first is None else f"{LETTERS[first]}>{LETTERS[(first + shift) % len(LETTERS)]};"
            prompt = tokenizer.encode(f"{shown}{LETTERS[i]}>", add_special_tokens=False)
            answer = tokenizer.encode(f"{LETTERS[(i + shift) % len(LETTERS)]};", add_special_tokens=False)
            ids = prompt + answer
            rows.append(ids + [tokenizer.eos_token_id] * (LENGTH - len(ids)))
            answers.append([False] * len(prompt) + [True] * (LENGTH - len(prompt)))
    return torch.tensor(rows), torch.tensor(answers)


@cache
def trained_model(steps: int = 400) -> MDLMForMaskedLM:
    """The model that knows; one for all tests of a process."""
    tokenizer = letter_tokenizer()
    torch.manual_seed(0)
    model = MDLMForMaskedLM(config_for(tokenizer))
    rows, answer = training_rows(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        pick = torch.randint(len(rows), (32,), generator=generator)
        t = torch.rand(32, 1, generator=generator)
        masked = answer[pick] & (torch.rand(32, LENGTH, generator=generator) < t.clamp(min=0.1))
        logits = model(rows[pick].masked_fill(masked, tokenizer.mask_token_id)).logits
        loss = torch.nn.functional.cross_entropy(logits[masked], rows[pick][masked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()
