"""The bidirectional transformer: `MDLMModel` (tokens to hidden states) and `MDLMForMaskedLM` (to logits).

Attention goes through `transformers`' attention interface (`attn_implementation`); what each implementation is told
about padding, packed documents and blocks is in `attention.py`, the blocks the network is made of in `layers.py`.
Read next: `objective.py`, which trains this model.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple, is_flash_attention_requested

from mdlm.anneal import Annealing, annealed, check_annealing
from mdlm.attention import (
    FlashPlan,
    document_ids,
    flash_plan,
    flex_block_mask,
    prediction_source,
    previous_in_document,
    token_positions,
    visible,
    visible_twice,
)
from mdlm.checks import check_clean, check_feed, check_inputs, check_outputs
from mdlm.config import MDLMConfig
from mdlm.generation import generation_defaults
from mdlm.head_loss import Scored, ScoredOutput, fuses, weighted_nll
from mdlm.keyvalues import KeyValues, fed_predecessor
from mdlm.layers import (
    BranchLinear,
    DecoupledScale,
    MDLMLayer,
    ResidualOutput,
    branch_gain,
    normalised_stream,
    rotary_angles,
    stream_norm,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

HEAD_ROW_STEPS = 32
"""`logits_at` computes the head on a multiple of this fraction of the tokens: a matmul of a new size at every step
makes the CPU's library rebuild its kernels, which costs more than the rows saved."""


def head_rows(count: int, total: int) -> int:
    """Rows the head is computed on when `count` of `total` tokens are asked for."""
    step = math.ceil(total / HEAD_ROW_STEPS)
    return min(total, max(step, step * math.ceil(count / step)))


class MDLMPreTrainedModel(PreTrainedModel):
    """What both models share: saving and loading, initialisation, what `transformers` may do with them."""

    config: MDLMConfig
    config_class = MDLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MDLMLayer"]  # noqa: RUF012 - the form `transformers` reads
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BranchLinear):
            gain = branch_gain(self.config, isinstance(module, ResidualOutput))
            if gain != 1.0:
                init.normal_(module.weight, mean=0.0, std=self.config.initializer_range * gain)
        elif isinstance(module, DecoupledScale):
            init.constant_(module.weight, module.initial)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """`transformers`' resizing, which also sets `config.num_tokens` to `new_num_tokens`.

        Rows added by `pad_to_multiple_of` are beyond `num_tokens`, so they are never emitted. Give the number of tokens
        of the tokenizer, not a number rounded up by hand. Raises ValueError if a special token of the configuration
        would be cut off.
        """
        if new_num_tokens is not None:
            for name in ("mask_token_id", "pad_token_id", "eos_token_id", "bos_token_id"):
                token = getattr(self.config, name)
                if token is not None and token >= new_num_tokens:
                    raise ValueError(
                        f"{new_num_tokens} tokens leave no room for config.{name}={token}; set it to its new id first"
                    )
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is not None:
            self.config.num_tokens = new_num_tokens
        return embedding


class MDLMModel(MDLMPreTrainedModel):
    """The backbone: token ids to the last, normalised hidden states."""

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([MDLMLayer(config, n) for n in range(config.num_hidden_layers)])
        self.norm: nn.Module = nn.Identity()
        if not normalised_stream(config.norm_placement):
            self.norm = stream_norm(config)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    def embed(
        self, tokens: Int[Tensor, "batch seq"], positions: Int[Tensor, "rows seq"]
    ) -> Float[Tensor, "batch seq width"]:
        """What enters the first layer: the tokens' vectors, plus those of their positions if these are learned."""
        hidden = self.embed_tokens(tokens)
        return hidden + self.embed_positions(positions) if self.config.position_embedding == "learned" else hidden

    def plan_flash(
        self, attention_mask: Tensor | None, position_ids: Int[Tensor, "batch seq"] | None
    ) -> FlashPlan | None:
        """The cumulative lengths `forward` needs under flash attention; None where it needs none.

        Their number depends on the data, so a compiled backbone gets them from outside, as `MDLMForMaskedLM` does.
        """
        if not is_flash_attention_requested(self.config):
            return None
        documents = document_ids(None if attention_mask is None else attention_mask.bool(), position_ids)
        return None if documents is None else flash_plan(documents)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | Int[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        flash: FlashPlan | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        kv: KeyValues | None = None,
        clean_ids: Int[Tensor, "batch seq"] | None = None,
        annealing: Annealing | None = None,
    ) -> BaseModelOutput:
        """Hidden state of every token.

        Args:
            input_ids: token ids, mask ids included.
            attention_mask: 1 or True where there is a token, 0 or False on padding. None: no padding.
            position_ids: positions that restart at 0 at every packed document; a token sees its own document only.
                None: each row is one document, counted over its real tokens.
            flash: what `plan_flash` returned for the same batch; computed here if None.
            output_hidden_states: also return the states before each layer and the normalised last one.
            output_attentions: also return the attention weights of each layer; needs `eager`.
            kv: keys and values of the rows' other positions; see `check_feed` for what it asks of the other arguments.
            clean_ids: what `input_ids` was before it was noised: each block then sees itself noised and the blocks
                before it clean (`attention.visible_twice`); the other arguments describe both alike. For models with
                `block_size`.
            annealing: hide some of the later keys, while a causal model learns to look ahead (`anneal.py`).

        Returns:
            `last_hidden_state [batch, seq, width]`; with `clean_ids` `[batch, 2 seq, width]`, noised tokens first.
            Padding gets finite values without a meaning.

        Raises:
            ValueError: shapes that do not fit each other, a sequence longer than `max_position_embeddings`, ids outside
                the embedding (checked on the CPU; an accelerator would have to wait for it), `block_size` under flash
                attention, `output_attentions` of another implementation than `eager`, what `check_feed` refuses,
                `clean_ids` of a model without blocks or beside `kv`, what `check_annealing` refuses.
        """
        config = self.config
        uses_flash = is_flash_attention_requested(config)
        assert flash is None or uses_flash, "a flash plan is made by plan_flash"
        check_inputs(config, input_ids, attention_mask, position_ids)
        check_outputs(config, output_hidden_states, output_attentions)
        real = None if attention_mask is None else attention_mask.bool()
        positions = token_positions(input_ids, real, position_ids)

        mask: Tensor | BlockMask | None = None
        feeding = None
        if clean_ids is not None:
            check_clean(config, input_ids, clean_ids, kv)
            assert config.block_size is not None, "checked by check_clean"
            documents = document_ids(real, position_ids)
            if config._attn_implementation == "flex_attention":
                mask = flex_block_mask(positions.expand_as(input_ids), documents, config.block_size, twice=True)
            else:
                mask = visible_twice(positions, documents, config.block_size)
            input_ids, positions = torch.cat([input_ids, clean_ids], dim=1), torch.cat([positions, positions], dim=1)
        elif kv is not None:
            check_feed(config, position_ids)
            feeding = kv.feeding(positions, real, config.block_size)
            mask = feeding.mask
        elif uses_flash:
            flash = flash if flash is not None else self.plan_flash(real, position_ids)
        elif config._attn_implementation == "flex_attention":
            documents = document_ids(real, position_ids)
            mask = flex_block_mask(positions.expand_as(input_ids), documents, config.block_size)
        else:
            mask = visible(positions, document_ids(real, position_ids), config.block_size)
        if annealing is not None:
            check_annealing(config, feeds_parts=kv is not None)
            assert mask is None or isinstance(mask, Tensor), "checked"
            mask = annealed(mask, positions, annealing)
        hidden = self.embed(input_ids, positions)
        batch, seq, width = hidden.shape
        if flash is not None:
            hidden = hidden.reshape(1, -1, width)[:, flash.tokens]
            positions = positions.expand(batch, seq).reshape(1, -1)[:, flash.tokens]

        rotation = rotary_angles(config, positions)
        states, attentions = [], []
        for layer in self.layers:
            if output_hidden_states:
                states.append(hidden)
            hidden, weights = layer(hidden, rotation, mask, flash, feeding)
            if output_attentions:
                attentions.append(weights)
        hidden = self.norm(hidden)
        if flash is not None:
            hidden = hidden.new_zeros(batch * seq, width).index_copy(0, flash.tokens, hidden[0]).view(batch, seq, width)
        return BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )


class MDLMForMaskedLM(MDLMPreTrainedModel):
    """The denoiser network: the backbone and a linear head. Logits are raw; `subs.subs_log_probs` makes them the
    distribution of the SUBS parameterisation."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - the form `transformers` reads

    def __init__(self, config: MDLMConfig) -> None:
        super().__init__(config)
        self.model = MDLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.generation_config = generation_defaults(config)
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *model_args: Any, **options: Any
    ) -> MDLMForMaskedLM:
        """`transformers`' loading; a checkpoint in a public format (LLaDA, Dream, ...) is converted meanwhile.

        For a public one `options` may be `dtype` (default: as stored), `device_map` (one device), `subfolder`,
        `attn_implementation`, those that find it on the hub, and what its configuration leaves open: `mask_token_id`,
        `add_mask_token`, `shift_logits`, `block_size`, as for `mdlm convert`. Raises ValueError as that does.
        """
        from mdlm.public_model import load_if_public

        if pretrained_model_name_or_path is not None and options.get("state_dict") is None:
            converted = load_if_public(os.fspath(pretrained_model_name_or_path), model_args, options)
            if converted is not None:
                return converted
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | Int[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        logits_at: Bool[Tensor, "batch seq"] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        kv: KeyValues | None = None,
        clean_ids: Int[Tensor, "batch seq"] | None = None,
        annealing: Annealing | None = None,
        scored: Scored | None = None,
    ) -> MaskedLMOutput | ScoredOutput:
        """Raw logits of every token, or of the tokens asked for, or their loss.

        Args:
            input_ids, attention_mask, position_ids, output_hidden_states, output_attentions, kv, clean_ids, annealing:
                as in `MDLMModel`. With `clean_ids` the logits are those of the noised tokens.
            logits_at: compute the head on these positions only. Changes nothing but time and memory.
            scored: return the loss of the positions of `logits_at` (`head_loss.py`) instead of their logits.

        Returns:
            `logits [batch, seq, vocab]`, or with `logits_at` `[rows, vocab]` for its True positions in reading order.
            The logits at i are the prediction of token i, also in a model with `config.shift_logits`: there they come
            from the hidden state of the token before it in its document (the first token's from its own).

        Raises:
            ValueError: as `MDLMModel`, or `logits_at` is not a boolean mask of the shape of `input_ids`, or `scored`
                comes without it or for a head that is not a plain matrix (`head_loss.fuses`).
        """
        check_inputs(self.config, input_ids, attention_mask, position_ids)
        if logits_at is not None and (logits_at.dtype != torch.bool or logits_at.shape != input_ids.shape):
            raise ValueError(
                f"logits_at is {logits_at.dtype} of shape {list(logits_at.shape)}; it must be a boolean mask of the "
                f"shape of input_ids, {list(input_ids.shape)}"
            )
        if scored is not None and (logits_at is None or not fuses(self.lm_head)):
            raise ValueError(
                f"scored= needs logits_at= and a head that is a plain matrix, got logits_at={logits_at} and "
                f"{type(self.lm_head).__name__}: leave scored out and make the loss from the logits (subs.subs_nll)"
            )
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            flash=None if kv is not None else self.model.plan_flash(attention_mask, position_ids),
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            kv=kv,
            clean_ids=clean_ids,
            annealing=annealing,
            return_dict=True,
        )
        hidden = out.last_hidden_state
        source = None
        if self.config.shift_logits and kv is not None:
            assert position_ids is not None, "checked by check_feed"
            wanted = logits_at if logits_at is not None or attention_mask is None else attention_mask.bool()
            source = fed_predecessor(position_ids, wanted)
        elif self.config.shift_logits:
            real = None if attention_mask is None else attention_mask.bool()
            source = previous_in_document(real, position_ids, input_ids)
            if clean_ids is not None:
                assert self.config.block_size is not None, "checked by check_clean"
                source = prediction_source(
                    source, token_positions(input_ids, real, position_ids), self.config.block_size
                )
            source = source.expand_as(input_ids)
        elif clean_ids is not None and logits_at is None:
            hidden = hidden[:, : input_ids.shape[1]]
        if logits_at is not None:
            rows, count = self._rows_at(hidden, logits_at, source)
            if scored is not None:
                return self._score(rows, count, scored)
            logits = self.lm_head(rows)[:count] if len(rows) > count else self.lm_head(rows)
        elif source is not None:
            logits = self.lm_head(hidden.gather(1, source[:, :, None].expand(-1, -1, hidden.shape[2])))
        else:
            logits = self.lm_head(hidden)
        return MaskedLMOutput(logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)

    def _rows_at(
        self,
        hidden: Float[Tensor, "batch seq width"],
        at: Bool[Tensor, "batch seq"],
        source: Int[Tensor, "batch seq"] | None,
    ) -> tuple[Float[Tensor, "rows width"], int]:
        """The hidden states that predict the positions of `at`, filled up to `head_rows`, and how many they are."""
        rows = at.flatten().nonzero().squeeze(-1)
        count, total, seq = len(rows), at.numel(), at.shape[1]
        if source is not None or hidden.shape[1] != seq:
            column = rows % seq if source is None else source.flatten()[rows]
            rows = rows // seq * hidden.shape[1] + column
        rows = F.pad(rows, (0, head_rows(count, total) - count))
        return hidden.flatten(0, 1).index_select(0, rows), count

    def _score(self, rows: Float[Tensor, "rows width"], count: int, scored: Scored) -> ScoredOutput:
        spare = len(rows) - count
        filled = replace(scored, targets=F.pad(scored.targets, (0, spare)), weight=F.pad(scored.weight, (0, spare)))
        loss, nll = weighted_nll(rows, self.lm_head.weight, filled)
        return ScoredOutput(loss=loss, nll=nll[:count])

    @classmethod
    def can_generate(cls) -> bool:
        """True: `save_pretrained` and `from_pretrained` keep `generation_config`, whose `strategy` generation uses."""
        return True

    adjust_generation_fn = GenerationMixin.adjust_generation_fn  # reads generation_config.json; the rest is not ours

    def generate(self, inputs: Any, *, tokenizer: Any = None, strategy: Any = None, **options: Any) -> Any:
        """Unmask text: `mdlm.samplers.generate.generate(self, tokenizer, inputs, strategy=..., **options)`."""
        from mdlm.samplers.generate import generate

        return generate(self, tokenizer, inputs, strategy=strategy, **options)
