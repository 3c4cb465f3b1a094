"""What samplers and evaluation see of a model: a `Denoiser`, tokens with masks -> log-probabilities.

`ModelDenoiser` wraps our own model, `LogitsModelDenoiser` any network with the usual Hugging Face forward (a public
LLaDA or Dream object), `FunctionDenoiser` a plain function of the tokens. `as_denoiser` picks by an explicit rule.
Whatever is wrapped: the mask id and the padding rows of the vocabulary have no mass (SUBS, MDLM section 3.2.3), the
rest is normalised in float32 (float64 where the logits are), the row of position i is the prediction of token i, and
logits from which no distribution can be made (NaN, nothing above -inf) are an error. Read next: `samplers/driver.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mdlm.attention_rows import Attention, attention_rows, between_slots, layer_count, mean_attention, noted_heads
from mdlm.checks import check_kv
from mdlm.emit import emit_log_probs
from mdlm.keyvalues import KeyValues
from mdlm.modeling import MDLMForMaskedLM
from mdlm.shadow import check_shadows, shadow_logits

MaskStyle = Literal["2d", "4d", "none"]
MASK_STYLES = ("2d", "4d", "none")


@runtime_checkable
class Denoiser(Protocol):
    """A predictor of the clean token at every position of a partly masked canvas.

    Optional capabilities (`CachedDenoiser`: stored keys and values) are further methods; a component that needs one
    says so when the run starts.
    """

    @property
    def mask_token_id(self) -> int:
        """Id that marks an undecided position; it has no mass in any answer."""

    @property
    def num_tokens(self) -> int:
        """Ids 0 .. num_tokens - 1 exist; the last axis of every answer."""

    @property
    def device(self) -> torch.device:
        """Where tokens are expected and answers live."""

    def __call__(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Log-probabilities in nats, float32 or float64, normalised over the last axis, -inf at the mask id.

        [batch, seq, num_tokens], or with `at` [rows, num_tokens] for its True positions in row-major order.
        `attention_mask` is True on real tokens (None: all); `position_ids` as in `MDLMModel.forward`.
        """


@runtime_checkable
class CachedDenoiser(Denoiser, Protocol):
    """A `Denoiser` that can be fed some positions of each row and use stored keys and values of the others.

    The optional capability behind `samplers/cache.py`; rows are one document each, positions count from its start.
    """

    @property
    def block_size(self) -> int | None:
        """Length of the model's blocks: a position depends on blocks up to its own. None: on everything."""

    @property
    def predicts_from_previous(self) -> bool:
        """Whether the prediction at i needs position i - 1 to be fed too (models with shifted logits)."""

    def key_values(self, rows: int, seq: int) -> KeyValues:
        """An empty store. Raises ValueError if the model, as it is loaded, cannot use one."""

    def feed(
        self,
        tokens: Int[Tensor, "batch fed"],
        kv: KeyValues,
        *,
        position_ids: Int[Tensor, "batch fed"],
        attention_mask: Bool[Tensor, "batch fed"] | None = None,
        at: Bool[Tensor, "batch fed"] | None = None,
    ) -> Float[Tensor, "..."]:
        """As `__call__` for the fed positions only (ascending in each row); their keys and values go into `kv`."""


@dataclass(frozen=True)
class ModelDenoiser:
    """Our own model. The head is computed on the rows asked for and nowhere else."""

    model: MDLMForMaskedLM

    def __post_init__(self) -> None:
        if self.model.config.mask_token_id is None:
            raise ValueError("the model's config has no mask_token_id; set it to the tokenizer's before sampling")

    @property
    def mask_token_id(self) -> int:
        """As in the model's config."""
        mask_token_id = self.model.config.mask_token_id
        assert mask_token_id is not None
        return mask_token_id

    @property
    def num_tokens(self) -> int:
        """As in the model's config."""
        return self.model.config.num_tokens

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.model.device

    @torch.no_grad()
    def __call__(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "..."]:
        """See `Denoiser`."""

        def logits() -> Float[Tensor, "..."]:
            out = self.model(tokens, attention_mask=attention_mask, position_ids=position_ids, logits_at=at)
            answer: Tensor = out.logits
            return answer

        return emit_log_probs(logits(), self.mask_token_id, self.num_tokens, overwrite=True, again=logits)

    @torch.no_grad()
    def with_attention(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        layers: int | float,
        at: Bool[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "rows vocab"], Attention]:
        """See `attention_rows.AttendingDenoiser`; one forward, under any attention implementation."""
        with noted_heads(self.model, layer_count(layers, self.model.config.num_hidden_layers)) as noted:
            log_probs = self(tokens, attention_mask=attention_mask, position_ids=position_ids, at=at)
        return log_probs, lambda asked: attention_rows(self.model, noted, asked, attention_mask, position_ids)

    def check_shadows(self) -> None:
        """See `shadow.ShadowDenoiser`."""
        check_shadows(self.model.config)

    @torch.no_grad()
    def with_shadows(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        at: Bool[Tensor, "batch seq"],
        shadows: Bool[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "shadow_rows vocab"]]:
        """See `shadow.ShadowDenoiser`."""
        canvas, judged = shadow_logits(self.model, tokens, attention_mask, at, shadows)
        return (
            emit_log_probs(canvas, self.mask_token_id, self.num_tokens),
            emit_log_probs(judged, self.mask_token_id, self.num_tokens),
        )

    @property
    def block_size(self) -> int | None:
        """As in the model's config."""
        return self.model.config.block_size

    @property
    def predicts_from_previous(self) -> bool:
        """As in the model's config (`shift_logits`)."""
        return self.model.config.shift_logits

    @torch.no_grad()
    def by_blocks(
        self,
        tokens: Int[Tensor, "batch seq"],
        clean: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"],
    ) -> Float[Tensor, "rows tokens"]:
        """See `eval/likelihood_block.py`; one forward of rows twice as long, for models with `block_size`."""
        out = self.model(
            tokens, attention_mask=attention_mask, position_ids=position_ids, logits_at=at, clean_ids=clean
        )
        return emit_log_probs(out.logits, self.mask_token_id, self.num_tokens, overwrite=True)

    @torch.no_grad()
    def key_values(self, rows: int, seq: int) -> KeyValues:
        """See `CachedDenoiser`."""
        check_kv(self.model.config)
        return KeyValues.empty(rows, seq, self.device)

    @torch.no_grad()
    def feed(
        self,
        tokens: Int[Tensor, "batch fed"],
        kv: KeyValues,
        *,
        position_ids: Int[Tensor, "batch fed"],
        attention_mask: Bool[Tensor, "batch fed"] | None = None,
        at: Bool[Tensor, "batch fed"] | None = None,
    ) -> Float[Tensor, "..."]:
        """See `CachedDenoiser`."""
        out = self.model(tokens, attention_mask=attention_mask, position_ids=position_ids, logits_at=at, kv=kv)
        return emit_log_probs(out.logits, self.mask_token_id, self.num_tokens, overwrite=True)


@dataclass(frozen=True)
class LogitsModelDenoiser:
    """A network with the usual forward: `model(input_ids=..., attention_mask=...)` returns an object with `.logits`."""

    model: nn.Module
    mask_token_id: int
    num_tokens: int
    shift: bool = False
    """The logits at i predict token i + 1 (Dream and other converted causal models)."""
    mask_style: MaskStyle = "2d"
    """`2d`: `attention_mask [batch, seq]`; `4d`: boolean `[batch, 1, seq, seq]`; `none`: the model takes no mask, so
    rows of different length in one batch are refused."""
    pass_position_ids: bool = False
    """Pass `position_ids` counted over the real tokens; needed with left padding by models that do not count them."""

    def __post_init__(self) -> None:
        if self.mask_style not in MASK_STYLES:
            raise ValueError(f"mask_style must be one of {', '.join(MASK_STYLES)}, got {self.mask_style!r}")
        if not 0 <= self.mask_token_id < self.num_tokens:
            raise ValueError(
                f"mask_token_id must be an id below num_tokens={self.num_tokens}, got {self.mask_token_id}"
            )

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def __call__(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "..."]:
        """See `Denoiser`. Raises ValueError for packed documents, and for padding where the model takes no mask."""
        logits = self.model(**self._inputs(tokens, attention_mask, position_ids)).logits
        return self._answer(logits, tokens, attention_mask, at)

    @torch.no_grad()
    def with_attention(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        layers: int | float,
        at: Bool[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "rows vocab"], Attention]:
        """See `attention_rows.AttendingDenoiser`. The model is asked for all its weights (`output_attentions`), which
        costs `[heads, seq, seq]` per layer; ValueError if it does not return them."""
        inputs = self._inputs(tokens, attention_mask, position_ids)
        mean, answer = mean_attention(self.model, inputs, layers)
        source = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.shift:
            source = _predecessor(tokens, attention_mask)
        log_probs = self._answer(answer, tokens, attention_mask, at)
        return log_probs, lambda asked: between_slots(mean, source, asked)

    def _inputs(
        self,
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None,
        position_ids: Int[Tensor, "batch seq"] | None,
    ) -> dict[str, Tensor]:
        """What the model's forward takes."""
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        if position_ids is not None and bool(((position_ids[:, 1:] == 0) & real[:, 1:] & real[:, :-1]).any()):
            raise ValueError("this model is called with one document per row; packed documents need MDLMForMaskedLM")
        inputs: dict[str, Tensor] = {"input_ids": tokens}
        if attention_mask is not None:
            if self.mask_style == "2d":
                inputs["attention_mask"] = attention_mask.long()
            elif self.mask_style == "4d":
                pairs = attention_mask[:, None, None, :] & attention_mask[:, None, :, None]
                own = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
                inputs["attention_mask"] = pairs | own  # a padding query sees itself, so no softmax is empty
            elif not bool(attention_mask.all()):
                raise ValueError(
                    "mask_style='none': this model cannot be told about padding; sample rows of one length at a time"
                )
        if self.pass_position_ids:
            counted = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            if attention_mask is not None:
                counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            inputs["position_ids"] = counted if position_ids is None else position_ids
        return inputs

    def _answer(
        self,
        logits: Float[Tensor, "batch seq vocab"],
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None,
        at: Bool[Tensor, "batch seq"] | None,
    ) -> Float[Tensor, "..."]:
        if self.shift:
            logits = logits.gather(1, _predecessor(tokens, attention_mask)[:, :, None].expand_as(logits))
        return emit_log_probs(logits if at is None else logits[at], self.mask_token_id, self.num_tokens)


def _predecessor(
    tokens: Int[Tensor, "batch seq"], attention_mask: Bool[Tensor, "batch seq"] | None
) -> Int[Tensor, "batch seq"]:
    """Index of the token before each one; the first real token of a row has itself."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if attention_mask is None:
        return (index - 1).clamp(min=0)
    first = attention_mask.int().argmax(dim=-1, keepdim=True)
    return torch.where(index <= first, index, index - 1)


@dataclass(frozen=True)
class FunctionDenoiser:
    """A plain function: tokens `[batch, seq]` (mask ids included) to logits `[batch, seq, at least num_tokens]`.

    It is told nothing of padding; with `ragged_ok` it states that what stands right of a row's end does not change the
    row's logits, otherwise rows of different length in one batch are refused.
    """

    function: Callable[[Tensor], Tensor]
    mask_token_id: int
    num_tokens: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ragged_ok: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.mask_token_id < self.num_tokens:
            raise ValueError(
                f"mask_token_id must be an id below num_tokens={self.num_tokens}, got {self.mask_token_id}"
            )

    @torch.no_grad()
    def __call__(
        self,
        tokens: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        position_ids: Int[Tensor, "batch seq"] | None = None,
        at: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "..."]:
        """See `Denoiser`; `position_ids` do not reach the function."""
        if attention_mask is not None and not self.ragged_ok and not bool(attention_mask.all()):
            raise ValueError(
                "this function is told nothing of padding, so all rows of a batch must have one length; sample them "
                "one at a time or build FunctionDenoiser(..., ragged_ok=True) if right padding means nothing to it"
            )
        logits = self.function(tokens)
        if logits.shape[:2] != tokens.shape or logits.ndim != 3 or logits.shape[2] < self.num_tokens:
            raise ValueError(
                f"the function gave logits of shape {list(logits.shape)} for tokens of shape {list(tokens.shape)}; it "
                f"must give [batch, seq, at least num_tokens={self.num_tokens}]"
            )
        return emit_log_probs(logits if at is None else logits[at], self.mask_token_id, self.num_tokens)


PUBLIC_MODELS: dict[str, dict[str, Any]] = {
    "llada": {"shift": False, "mask_style": "2d"},
    "Dream": {"shift": True, "mask_style": "4d"},
}
"""`config.model_type` of public masked-diffusion models -> what `LogitsModelDenoiser` must know about them."""


def as_denoiser(model: Any, mask_token_id: int | None = None, num_tokens: int | None = None) -> Denoiser:
    """The `Denoiser` for `model`, by this rule, first match wins:

    1. an `MDLMForMaskedLM`: `ModelDenoiser`;
    2. any other `torch.nn.Module` whose `config.model_type` stands in `PUBLIC_MODELS`: `LogitsModelDenoiser` with that
       entry, mask id and size from `config.mask_token_id` and `config.vocab_size` where the arguments do not say them;
    3. something that already is a `Denoiser`: itself.

    Everything else raises ValueError that names the adapter to use: whether logits are shifted cannot be guessed.
    """
    if isinstance(model, MDLMForMaskedLM):
        return ModelDenoiser(model)
    if isinstance(model, nn.Module):
        config = vars(model).get("config")
        known = None if config is None else PUBLIC_MODELS.get(config.model_type)
        if config is None or known is None:
            raise ValueError(
                f"{type(model).__name__} is not a model known here ({', '.join(PUBLIC_MODELS)}); wrap it: "
                "LogitsModelDenoiser(model, mask_token_id=..., num_tokens=..., shift=True or False)"
            )
        mask_token_id = config.mask_token_id if mask_token_id is None else mask_token_id
        num_tokens = config.vocab_size if num_tokens is None else num_tokens
        if mask_token_id is None:
            raise ValueError("the model's config has no mask_token_id; give it: as_denoiser(model, mask_token_id=...)")
        return LogitsModelDenoiser(model, mask_token_id, num_tokens, **known)
    if isinstance(model, Denoiser):
        return model
    raise ValueError(
        f"{type(model).__name__} is not a model nor a Denoiser; wrap a function of the tokens as "
        "FunctionDenoiser(function, mask_token_id=..., num_tokens=...)"
    )
