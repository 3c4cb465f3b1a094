"""Sources as text, one character per symbol: what a model is trained on (layer B), and how it then speaks of symbols.

`mdlm.training.layer_b` writes samples with `as_lines` and trains under `symbol_tokenizer`; `SourceModel` lets the model
stand where the source's own oracle stands. Read next: `curves.py`.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mdlm.denoiser import ModelDenoiser
from mdlm.eval.sources import ExactSource
from mdlm.modeling import MDLMForMaskedLM
from mdlm.tokenization import EOS, MASK, PAD

SYMBOLS = string.ascii_letters + string.digits
"""Symbol k is written as the k-th of these characters."""


def symbols_of(source: ExactSource) -> str:
    """The characters of a source's symbols, in order. Raises ValueError if it has more than there are characters."""
    if source.vocab > len(SYMBOLS):
        raise ValueError(f"a source of {source.vocab} symbols cannot be written with {len(SYMBOLS)} characters")
    return SYMBOLS[: source.vocab]


def as_lines(source: ExactSource, sequences: Int64[Tensor, "n length"]) -> list[str]:
    """Each sequence as a string."""
    characters = symbols_of(source)
    return ["".join(characters[symbol] for symbol in row) for row in sequences.tolist()]


def symbol_tokenizer(source: ExactSource) -> PreTrainedTokenizerFast:
    """One token per character of the source, and <|mask|> (id 0), <|pad|> (1), <|eos|> (2)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate([MASK, PAD, EOS, *symbols_of(source)])}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        mask_token=MASK,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class SourceModel:
    """A model trained on a source, called like the source: sequences of its symbols, without the end token.

    The end token stands behind every sequence, as in training. Mass on tokens that are no symbols is taken away and the
    rest normalised. Raises ValueError if the tokenizer does not write the source's symbols or the model is too short.
    """

    model: MDLMForMaskedLM
    tokenizer: PreTrainedTokenizerBase
    source: ExactSource
    ids: Int64[Tensor, "tokens"] = field(init=False)
    """Token id of each symbol, then of the mask."""

    def __post_init__(self) -> None:
        vocabulary = self.tokenizer.get_vocab()
        missing = [symbol for symbol in symbols_of(self.source) if symbol not in vocabulary]
        if missing:
            raise ValueError(
                f"the model's tokenizer has no token for {', '.join(missing)}, symbols of this source: it was trained "
                "on something else"
            )
        most = self.model.config.max_position_embeddings
        if self.source.length + 1 > most:
            raise ValueError(
                f"sequences of {self.source.length} symbols and an end token are longer than the model takes ({most})"
            )
        ids = [vocabulary[symbol] for symbol in symbols_of(self.source)]
        object.__setattr__(self, "ids", torch.tensor([*ids, self.tokenizer.mask_token_id], device=self.device))

    @cached_property
    def _denoiser(self) -> ModelDenoiser:
        return ModelDenoiser(self.model)

    @property
    def mask_token_id(self) -> int:
        """The source's."""
        return self.source.mask_token_id

    @property
    def num_tokens(self) -> int:
        """The source's."""
        return self.source.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.model.device

    def __call__(
        self,
        tokens: Int[Tensor, "batch length"],
        *,
        attention_mask: Bool[Tensor, "batch length"] | None = None,
        position_ids: Int[Tensor, "batch length"] | None = None,
        at: Bool[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "..."]:
        """See `Denoiser`. Raises ValueError for padding, as a source does."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("a source has no padding: attention_mask must be True everywhere (or None)")
        end = torch.full((len(tokens), 1), self.tokenizer.eos_token_id, device=tokens.device)
        where = torch.ones_like(tokens, dtype=torch.bool) if at is None else at
        asked = torch.nn.functional.pad(where, (0, 1), value=False)
        log_probs = self._denoiser(torch.cat([self.ids[tokens], end], dim=1), at=asked)
        symbols = log_probs[:, self.ids[:-1]].log_softmax(dim=-1)
        answer = torch.nn.functional.pad(symbols, (0, 1), value=-math.inf)
        return answer if at is not None else answer.view(*tokens.shape, self.num_tokens)
