"""What `gpu.py` measures, part by part: attention over packed documents, training steps, sampling of a large model.

Sizes come in two sets: `FULL` for a GPU with 80 GB or more, `TOY` to try the script on a CPU. Times are medians, with
the device waited for; memory is the peak of what torch holds (a CPU has no such count: None).
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from lines import Case
from torch import Tensor
from transformers import AutoModelForMaskedLM

from mdlm.attention import flex_block_mask
from mdlm.config import MDLMConfig
from mdlm.data import Batch
from mdlm.eval.speed_sampling import masked_canvas, plain_step, random_prompts
from mdlm.flops import matmul_peak, train_flops_per_token
from mdlm.modeling import MDLMForMaskedLM
from mdlm.objective import Objective
from mdlm.samplers.generate import generate

CACHES = ("none", "prefix", "dual", "delayed", "interval")
ATTENTION = ("sdpa", "flex_attention", "varlen_attn", "flash_attn")
PLAIN = "plain loop"
HALF = torch.bfloat16


class Skip(Exception):
    """What this machine cannot do, with the reason."""


@dataclass(frozen=True)
class Shape:
    """A transformer and what a training step of it is fed."""

    width: int
    layers: int
    heads: int
    vocab: int
    rows: int
    seq: int
    inner: int | None = None
    tied: bool = True

    def config(self, seq: int | None = None) -> MDLMConfig:
        """The model's configuration; the mask is the last id."""
        return MDLMConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.inner,
            max_position_embeddings=seq or self.seq,
            mask_token_id=self.vocab - 1,
            tie_word_embeddings=self.tied,
        )


@dataclass(frozen=True)
class Sizes:
    """Everything that is smaller on a toy."""

    matmul: int
    tokens: int
    """Of the packed row that attention is measured on."""
    heads: int
    dim: int
    longest: int
    """Of its documents; the shortest is a sixteenth of it."""
    steps: int
    shapes: dict[str, Shape]
    large: Shape
    prompt: int
    new_tokens: int
    block: int
    batches: tuple[int, ...]


FULL = Sizes(
    matmul=8192,
    tokens=16384,
    heads=16,
    dim=128,
    longest=4096,
    steps=10,
    shapes={
        "100M": Shape(768, 12, 12, 32768, rows=32, seq=1024),
        "1B": Shape(2048, 20, 16, 32768, rows=8, seq=2048),
        "100M, vocabulary 131072": Shape(768, 12, 12, 131072, rows=32, seq=1024),
    },
    large=Shape(4096, 32, 32, 126464, rows=1, seq=4096, inner=12288, tied=False),
    prompt=256,
    new_tokens=128,
    block=32,
    batches=(1, 8),
)
_TOY = Shape(32, 2, 2, 128, rows=2, seq=32)
TOY = Sizes(
    matmul=64,
    tokens=64,
    heads=2,
    dim=16,
    longest=32,
    steps=1,
    shapes=dict.fromkeys(FULL.shapes, _TOY),
    large=_TOY,
    prompt=8,
    new_tokens=8,
    block=4,
    batches=(1, 2),
)


def document_lengths(total: int, longest: int) -> list[int]:
    """Lengths of packed documents: longest, longest / 4, longest / 16, and again, until `total` is full."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(min(max(1, longest // 4 ** (len(lengths) % 3)), total - sum(lengths)))
    return lengths


@dataclass
class Machine:
    """A device with the sizes that are measured on it."""

    device: torch.device
    sizes: Sizes

    @cached_property
    def peak(self) -> float:
        """FLOP/s of a bf16 matmul: what MFU is a share of."""
        return matmul_peak(self.device, HALF, self.sizes.matmul)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, step: Callable[[], Any], warmup: int = 2) -> float:
        """Median seconds of a call."""
        for _ in range(warmup):
            step()
        times = []
        for _ in range(self.sizes.steps):
            self.wait()
            start = time.perf_counter()
            step()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def forget_peak(self) -> None:
        """Begins to count the peak memory anew."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Most memory that torch has held since."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    # attention

    def attention(self, case: Case) -> dict[str, Any]:
        """Forward and backward of attention in one packed row; every document sees itself."""
        sizes = self.sizes
        lengths = document_lengths(sizes.tokens, sizes.longest)
        shape = (sizes.tokens, sizes.heads, sizes.dim)
        generator = torch.Generator(self.device).manual_seed(0)
        query, key, value, direction = (
            torch.randn(shape, generator=generator, device=self.device).to(HALF) for _ in range(4)
        )
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        attend = self.attend(case["implementation"], lengths)
        with torch.no_grad():
            expected = self.attend("sdpa", lengths)(*inputs)
            difference = float((attend(*inputs) - expected).abs().max())

        def step() -> None:
            torch.autograd.grad(attend(*inputs), inputs, direction)

        self.forget_peak()
        seconds = self.seconds(step)
        pairs = sum(n * n for n in lengths)
        useful = 3.5 * 4 * pairs * sizes.heads * sizes.dim  # the backward makes 5 products where the forward makes 2
        return {
            "documents": lengths,
            "seconds": seconds,
            "flops_share": useful / seconds / self.peak,
            "difference_from_sdpa": difference,
            "peak_bytes": self.peak_bytes(),
        }

    def attend(self, name: str, lengths: list[int]) -> Callable[..., Any]:
        """An implementation for documents of these lengths: [tokens, heads, dim] three times -> the same shape."""
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=self.device, dtype=torch.int32)
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(self.device)
        longest = max(lengths)

        def as_batch(call: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            return lambda *packed: call(*(x.transpose(0, 1)[None] for x in packed))[0].transpose(0, 1)

        if name == "sdpa":
            mask = (document[:, None] == document)[None, None]
            return as_batch(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        if self.device.type != "cuda":
            raise Skip(f"{name} with a backward needs a CUDA device")
        if name == "flex_attention":
            from torch.nn.attention.flex_attention import flex_attention

            places = torch.arange(len(document), device=self.device)[None]
            blocks = flex_block_mask(places, document[None], None)
            compiled = torch.compile(flex_attention)
            return as_batch(lambda q, k, v: compiled(q, k, v, block_mask=blocks))
        if name == "varlen_attn":
            if importlib.util.find_spec("torch.nn.attention.varlen") is None:
                raise Skip(f"torch {torch.__version__} has no torch.nn.attention.varlen")
            from torch.nn.attention.varlen import varlen_attn

            return lambda q, k, v: varlen_attn(q, k, v, starts, starts, longest, longest)
        assert name == "flash_attn", name
        if importlib.util.find_spec("flash_attn") is None:
            raise Skip("the package flash-attn is not installed: pip install 'mdlm-torch[flash]'")
        from flash_attn import flash_attn_varlen_func

        return lambda q, k, v: flash_attn_varlen_func(q, k, v, starts, starts, longest, longest)

    # training

    def train(self, case: Case) -> dict[str, Any]:
        """Whole training steps, bf16 autocast, AdamW: tokens/s, MFU and peak memory."""
        shape = self.sizes.shapes[case["shape"]]
        attention, packed = case["attention"], case["packed"]
        if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
            raise Skip("the package flash-attn is not installed: pip install 'mdlm-torch[flash]'")
        if attention != "sdpa" and self.device.type != "cuda":
            raise Skip(f"training with {attention} needs a CUDA device")
        torch.compiler.reset()  # beyond some variants of a layer torch would no longer compile it
        self.forget_peak()
        torch.manual_seed(0)
        with self.device:
            model = MDLMForMaskedLM(shape.config()).train()
        model.set_attn_implementation(attention)
        if case["compiled"]:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        mask = shape.vocab - 1
        objective = Objective(
            global_batch=shape.rows, seed=0, mask_token_id=mask, num_tokens=shape.vocab, fused_head=case["fused_head"]
        )
        lengths = document_lengths(shape.seq, shape.seq // 2) if packed else [shape.seq]
        tokens = random_prompts(shape.rows, shape.seq, mask).to(self.device)
        places = torch.cat([torch.arange(n) for n in lengths]).to(self.device).expand_as(tokens)
        everything, rows = torch.ones_like(tokens, dtype=torch.bool), torch.arange(shape.rows, device=self.device)
        batch = Batch(tokens, everything, rows, position_ids=places if packed else None)

        def step() -> None:
            with torch.autocast(self.device.type, HALF):
                noised = objective.noise(batch, 0)
                loss = objective.numerator(model, noised).loss / objective.denominator(noised)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        begin = time.perf_counter()
        step()
        self.wait()
        first = time.perf_counter() - begin
        seconds = self.seconds(step)
        keys = sum(n * n for n in lengths) / shape.seq
        useful = train_flops_per_token(model.config, keys, head_share=0.5) * tokens.numel()
        return {
            "sizes": dataclasses.asdict(shape),
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "first_step_seconds": first,
            "seconds": seconds,
            "tokens_per_s": tokens.numel() / seconds,
            "mfu": useful / seconds / self.peak,
            "matmul_peak_flops": self.peak,
            "peak_bytes": self.peak_bytes(),
        }

    # sampling

    @cached_property
    def large(self) -> MDLMForMaskedLM:
        """The large model with random weights in bf16."""
        shape = self.sizes.large
        config = shape.config(self.sizes.prompt + self.sizes.new_tokens)
        torch.manual_seed(0)
        with self.device:
            model: MDLMForMaskedLM = AutoModelForMaskedLM.from_config(config, dtype=HALF)
        return model.eval()

    def sampling(self, case: Case) -> dict[str, Any]:
        """One token a step from the large model with a cache; cache `PLAIN`: a few steps of the plain loop."""
        sizes, batch = self.sizes, case["batch"]
        prompts = random_prompts(batch, sizes.prompt, sizes.large.vocab - 1).to(self.device)
        model = self.large
        self.forget_peak()
        facts: dict[str, Any] = {}
        if case["cache"] == PLAIN:
            canvas = masked_canvas(model, prompts, sizes.new_tokens)
            rate = batch / self.seconds(lambda: plain_step(model, canvas, sizes.prompt + sizes.block))
        else:

            def run(new_tokens: int) -> Any:
                return generate(
                    model,
                    None,
                    prompts,
                    strategy="confidence",
                    block_length=sizes.block,
                    max_new_tokens=new_tokens,
                    eos="ignore",
                    batch_size=batch,
                    cache=case["cache"],
                )

            run(4)
            self.wait()
            begin = time.perf_counter()
            made = run(sizes.new_tokens)
            self.wait()
            rate = batch * sizes.new_tokens / (time.perf_counter() - begin)
            facts = {name: float(getattr(made, name).double().mean()) for name in ("forwards", "tokens_fed")}
        return {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "prompt": sizes.prompt,
            "new_tokens": sizes.new_tokens,
            "block": sizes.block,
            "tokens_per_s": rate,
            **facts,
            "peak_bytes": self.peak_bytes(),
        }
