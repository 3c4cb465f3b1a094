"""Public models our transformer cannot host, run by the code that comes with them: LLaDA-MoE, LLaDA2.x and others.

`load_remote` gives a `Denoiser`, which is all that samplers and evaluation need. It runs Python files of the
checkpoint, so it works only where the user says `trust_remote_code=True`. What a family's forward wants stands
in `REMOTE`; for another family the user says it. Read next: `denoiser.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from mdlm.denoiser import LogitsModelDenoiser, MaskStyle
from mdlm.public_tokenizer import PublicTokenizer, read_json, settle_special_tokens
from mdlm.tokenization import num_tokens


@dataclass(frozen=True)
class Remote:
    """How the forward of a family is called."""

    shift: bool
    """The logits at i predict token i + 1."""
    mask_style: MaskStyle | None
    """See `LogitsModelDenoiser`; None: an additive block-causal mask, so a block size is needed."""


REMOTE = {
    "llada": Remote(shift=False, mask_style="none"),
    "lladamoe": Remote(shift=False, mask_style="none"),
    "llada2_moe": Remote(shift=False, mask_style=None),
}
"""`model_type` -> conventions. LLaDA-MoE (which says `llada`): whether its code heeds a padding mask is not documented,
so rows of different length are refused unless the user says another `mask_style`."""

_CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")


class BlockCausal(nn.Module):
    """Gives a network that takes a square additive mask the mask of a block-causal model (LLaDA2.x, 2512.15745).

    A token sees the real tokens of its row in blocks up to its own; padding sees padding, so no softmax is empty.
    """

    def __init__(self, model: nn.Module, block_size: int) -> None:
        super().__init__()
        self.model = model
        self.block_size = block_size

    def forward(
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Int[Tensor, "batch seq"] | None = None
    ) -> Any:
        """What the network returns; its logits are used."""
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        mask = additive_block_mask(real, positions // self.block_size, next(self.model.parameters()).dtype)
        return self.model(input_ids=input_ids, attention_mask=mask, position_ids=positions)


def additive_block_mask(
    real: Bool[Tensor, "batch seq"], blocks: Int[Tensor, "batch seq"], dtype: torch.dtype
) -> Float[Tensor, "batch 1 seq seq"]:
    """0 where a query (third axis) sees a key (last axis), -inf elsewhere."""
    sees = (real[:, :, None] == real[:, None, :]) & (blocks[:, :, None] >= blocks[:, None, :])
    return torch.zeros(sees.shape, dtype=dtype, device=real.device).masked_fill(~sees, -torch.inf)[:, None]


def load_remote(
    path: str | Path,
    trust_remote_code: bool = False,
    *,
    mask_token_id: int | None = None,
    block_size: int | None = None,
    shift_logits: bool | None = None,
    mask_style: MaskStyle | None = None,
    dtype: str = "float32",
    device: str = "auto",
) -> tuple[LogitsModelDenoiser, PreTrainedTokenizerBase]:
    """A `Denoiser` around a checkpoint's own code, and its tokenizer.

    Args:
        path: folder of the checkpoint.
        trust_remote_code: the user's word that the Python files of the folder may be run. Read them first.
        mask_token_id: the mask token, where neither config.json nor the tokenizer names it.
        block_size: length of the blocks of a block-causal model (LLaDA2.x: 32).
        shift_logits: whether the logits at i predict token i + 1; needed for a family not in `REMOTE`.
        mask_style: how the forward takes padding; needed for a family not in `REMOTE`.
        dtype: precision of the weights, a key of `mdlm.load.DTYPES`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...

    Raises:
        ValueError: without `trust_remote_code=True`; a folder that brings no code; conventions that are not known or
            contradict each other; a mask that is not a special token of the tokenizer.
    """
    from mdlm.load import DTYPES

    folder = Path(path)
    if not trust_remote_code:
        raise ValueError(
            f"load_remote runs the Python files in {folder}; read them, then say so: "
            "load_remote(path, trust_remote_code=True)"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    public = read_json(folder / "config.json")
    name = next((name for name in _CLASSES if name in public.get("auto_map", {})), None)
    if name is None:
        raise ValueError(f"{folder}/config.json names no code for {' or '.join(_CLASSES)} in auto_map")
    known = REMOTE.get(str(public.get("model_type")))
    if known is None and (shift_logits is None or mask_style is None):
        raise ValueError(
            f"model_type {public.get('model_type')!r} is not known here ({', '.join(REMOTE)}); say shift_logits and "
            "mask_style"
        )
    by_blocks = known is not None and known.mask_style is None and mask_style is None
    if by_blocks != (block_size is not None):
        what = "needs block_size: say the length it was trained with" if by_blocks else "takes no block_size"
        raise ValueError(f"model_type {public.get('model_type')!r} {what}")

    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ids = {f"{kind}_token_id": public.get(f"{kind}_token_id") for kind in ("mask", "eos", "pad", "bos")}
    stated = ids["mask_token_id"] if ids["mask_token_id"] is not None else tokenizer.mask_token_id
    if mask_token_id is not None and stated not in (None, mask_token_id):
        raise ValueError(f"mask_token_id={mask_token_id} was asked for, but the checkpoint says {stated}")
    ids["mask_token_id"] = stated if mask_token_id is None else mask_token_id
    if ids["mask_token_id"] is None:
        raise ValueError(f"{folder}: neither config.json nor the tokenizer names the mask token; say mask_token_id")
    settle_special_tokens(PublicTokenizer(tokenizer, {}, {}), ids, str(folder))
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model: nn.Module = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True, dtype=DTYPES[dtype])
    model = model.to(torch.device(chosen)).eval()
    denoiser = LogitsModelDenoiser(
        BlockCausal(model, block_size) if block_size is not None else model,
        mask_token_id=ids["mask_token_id"],
        num_tokens=min(num_tokens(tokenizer), int(public["vocab_size"])),
        shift=shift_logits if shift_logits is not None else (known is not None and known.shift),
        mask_style=mask_style or (known.mask_style if known is not None else None) or "2d",
    )
    return denoiser, tokenizer
