"""Who attends to whom, in every attention implementation: against the float64 reference, `eager`, and each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise, product
from typing import Any

import pytest
import reference_model as ref
import torch
from model_tools import batch, expected_logits, make_model
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flex_attention as flex_utils

from mdlm.attention import document_ids, flash_plan, token_positions, visible

MASKED = ["eager", "sdpa", "flex_attention"]
FLASH = ["flash_attention_2", "flash_attention_3"]
SCRIPT_WARNING = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"  # torch importing its own compiler


def reference_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float = 1.0, causal: bool = False,
) -> Tensor:  # fmt: skip
    """flash-attn's `flash_attn_varlen_func` by its definition: `[tokens, heads, dim]`, one softmax per document."""
    assert not causal
    assert dropout_p == 0.0
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    bounds = cu_seqlens_q.tolist()
    assert bounds[-1] == len(q) == len(k), "every token is in a document"
    assert max_seqlen_q == max_seqlen_k == max(b - a for a, b in pairwise(bounds))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    parts = []
    for a, b in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * softmax_scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[a:b]))
    return torch.cat(parts)


def reference_flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float = 1.0, causal: bool = False
) -> Tensor:
    """flash-attn's `flash_attn_func`: `[batch, seq, heads, dim]`, nothing masked."""
    ends = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    n = q.shape[1]
    rows = zip(q, k, v)
    return torch.stack(
        [reference_varlen(a, b, c, ends, ends, n, n, dropout_p, softmax_scale, causal) for a, b, c in rows]
    )


@pytest.fixture(autouse=True)
def _kernels_on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for flash-attn's functions where `transformers` loads them, and flex attention without compiling it."""
    if request.node.get_closest_marker("gpu") or "compiled_kernel" in request.node.name:
        return
    kernels = (reference_flash, reference_varlen, None, flash_utils._pad_input, flash_utils._unpad_input)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: kernels)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash_utils, name, None)

    def plain(*arguments: Any, training: bool, **options: Any) -> Any:
        return flex_utils.flex_attention(*arguments, **options)

    monkeypatch.setattr(flex_utils, "compile_friendly_flex_attention", plain)


uncompiled_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@uncompiled_flex
@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize(
    ("implementation", "block_size"), [(i, b) for i in MASKED for b in (None, 2)] + [(i, None) for i in FLASH]
)
def test_every_implementation_equals_the_reference(implementation: str, block_size: int | None, layout: str) -> None:
    model = make_model(implementation, block_size=block_size)
    arguments, real = batch(layout)
    with torch.no_grad():
        logits = model(**arguments).logits
    torch.testing.assert_close(logits[real].double(), expected_logits(model, layout)[real], rtol=1e-4, atol=1e-4)
    assert logits.isfinite().all(), "padding may hold anything finite"


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize(("implementation", "block_size"), [("sdpa", None), ("sdpa", 2), ("flash_attention_2", None)])
def test_gradients_equal_those_of_eager(implementation: str, block_size: int | None, layout: str) -> None:
    arguments, real = batch(layout)
    gradients = []
    for kind in ("eager", implementation):
        model = make_model(kind, torch.float64, block_size=block_size, qkv_bias=True, qk_norm=True)
        model(**arguments).logits[real].sin().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert len(gradients[-1]) == len(list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-8)


@pytest.mark.filterwarnings(SCRIPT_WARNING)
def test_compiled_kernel_of_flex_attention_equals_the_reference() -> None:
    model = make_model("flex_attention", block_size=2)
    arguments, real = batch("packed and padded")
    with torch.no_grad():
        logits = model(**arguments).logits
    expected = expected_logits(model, "packed and padded")
    torch.testing.assert_close(logits[real].double(), expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize("block_size", [None, 2])
def test_the_mask_is_the_rule_token_by_token(layout: str, block_size: int | None) -> None:
    rows = ref.LAYOUTS[layout].rows()
    arguments, real = batch(layout)
    ids, mask, given = arguments["input_ids"], arguments["attention_mask"], arguments["position_ids"]
    assert ids is not None
    got = visible(token_positions(ids, mask, given), document_ids(mask, given), block_size)
    if layout == "dense" and block_size is None:
        assert got is None, "nothing to hide: no mask, so that the fast kernels may run"
        return
    assert got is not None
    got = got.expand(2, 1, 9, 9)
    for row, query, key in product(range(2), range(9), range(9)):
        if not real[row, query] and not real[row, key]:
            continue  # among padding anything goes
        expected = ref.sees(query, key, *rows[row], block_size)
        assert bool(got[row, 0, query, key]) == expected, (row, query, key)
    assert got.any(-1).all(), "a row that sees nothing would be NaN"


PLANS = {
    "left padding": ([*range(9), *range(13, 18)], [0, 9, 14], 9),
    "packed": ([*range(18)], [0, 4, 9, 11, 12, 18], 6),
    "packed and padded": ([0, 1, 2, 3, 4, 5, 6, *range(12, 18)], [0, 4, 7, 9, 13], 4),
    "padding inside a document": ([0, 1, *range(4, 18)], [0, 7, 16], 9),
    "empty row": ([*range(9)], [0, 9], 9),
}


@pytest.mark.parametrize("layout", PLANS)
def test_flash_plan(layout: str) -> None:
    arguments, _ = batch(layout)
    documents = document_ids(arguments["attention_mask"], arguments["position_ids"])
    assert documents is not None
    plan = flash_plan(documents)
    assert (plan.tokens.tolist(), plan.cu_seq_lens.tolist(), plan.max_length) == PLANS[layout]
    assert plan.cu_seq_lens.dtype == torch.int32


@pytest.mark.parametrize("implementation", [*MASKED, *FLASH])
@uncompiled_flex
def test_a_batch_of_padding_only_is_finite(implementation: str) -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    with torch.no_grad():
        logits = make_model(implementation)(ids, attention_mask=torch.zeros(2, 4, dtype=torch.long)).logits
    assert logits.shape == (2, 4, 24)
    assert logits.isfinite().all()


def test_no_mask_and_no_lengths_reach_the_kernel_without_padding_or_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def spy(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            seen.append(options)
            return function(*arguments, **options)

        return wrapped

    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", spy(torch._C._nn.scaled_dot_product_attention)
    )
    monkeypatch.setattr(
        flash_utils, "_lazy_imports", lambda *_, **__: (spy(reference_flash), reference_varlen, None, None, None)
    )
    arguments, _ = batch("dense")
    make_model("sdpa")(**arguments)
    assert [call["attn_mask"] for call in seen] == [None, None]
    assert [call["is_causal"] for call in seen] == [False, False]
    make_model("flash_attention_2")(**arguments)
    assert len(seen) == 4, "the kernel for whole rows, not the one for documents"


@torch.library.custom_op("mdlm_tests::varlen", mutates_args=())
def opaque_varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """The stand-in as the compiler sees a real kernel: a box whose inside it does not trace."""
    return reference_varlen(q, k, v, ends, ends, longest, longest, 0.0, scale)


opaque_varlen.register_fake(lambda q, k, v, ends, longest, scale: torch.empty_like(q))


@uncompiled_flex
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # torch, tracing flex
@pytest.mark.parametrize("layout", ["dense", "left padding", "packed and padded"])
@pytest.mark.parametrize("implementation", MASKED)
def test_the_backbone_compiles_as_one_graph(implementation: str, layout: str) -> None:
    torch.compiler.reset()
    model = make_model(implementation)
    model.requires_grad_(implementation != "flex_attention")  # which has no backward on the CPU
    arguments, _ = batch(layout)
    at = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.5
    expected = model(**arguments, logits_at=at).logits
    model.model.compile(backend="eager", fullgraph=True)
    logits = model(**arguments, logits_at=at).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    if implementation != "flex_attention":
        logits.sum().backward()
        assert model.model.embed_tokens.weight.grad is not None


def test_the_backbone_compiles_as_one_graph_under_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float = 1.0, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        return opaque_varlen(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)

    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *_, **__: (reference_flash, kernel, None, None, None))
    flash_utils.lazy_import_flash_attention("flash_attention_2")  # `transformers` wants it loaded before compiling
    torch.compiler.reset()
    model = make_model("flash_attention_2", torch.bfloat16)
    layouts = ["packed and padded", "left padding", "packed"]
    with torch.no_grad():
        expected = [model(**batch(layout)[0]).logits for layout in layouts]
        model.model.compile(backend="eager", fullgraph=True)
        for layout, logits in zip(layouts, expected):  # other numbers of tokens and documents
            torch.testing.assert_close(model(**batch(layout)[0]).logits, logits)


@pytest.mark.parametrize("implementation", FLASH)
def test_flash_refuses_blocks(implementation: str) -> None:
    with pytest.raises(ValueError, match=r"no block-causal mask \(block_size=2\).*sdpa"):
        make_model(implementation, block_size=2)(torch.zeros(1, 4, dtype=torch.long))


def test_eager_returns_its_attention_and_others_say_that_they_cannot() -> None:
    arguments, _ = batch("packed and padded")
    out = make_model("eager")(**arguments, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 2
    assert out.attentions[0].shape == (2, 4, 9, 9)
    documents = document_ids(arguments["attention_mask"], arguments["position_ids"])
    assert documents is not None
    same = (documents[:, :, None] == documents[:, None])[:, None].expand_as(out.attentions[0])
    assert (out.attentions[1][~same] == 0).all()
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(2, 4, 9))
    assert [state.shape for state in out.hidden_states] == [(2, 9, 16)] * 3
    with pytest.raises(ValueError, match="does not return attention weights"):
        make_model("sdpa")(**arguments, output_attentions=True)
    with pytest.raises(ValueError, match="hidden states are not returned"):
        make_model("flash_attention_2")(**arguments, output_hidden_states=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_real_kernels_err_at_most_twice_as_much_as_sdpa(implementation: str, layout: str) -> None:
    """bf16 outputs against float64; heads of 64, the smallest all kernels take."""
    if implementation == "flash_attention_2":
        pytest.importorskip("flash_attn")
    if implementation == "flash_attention_3":
        pytest.importorskip("flash_attn_interface")
    errors = {}
    for kind in ("sdpa", implementation):
        model = make_model(kind, torch.bfloat16, head_dim=64, initializer_range=0.1)
        torch.nn.Module.cuda(model)
        arguments, real = batch(layout)
        arguments = {name: None if value is None else value.cuda() for name, value in arguments.items()}
        logits = model(**arguments).logits
        assert logits.isfinite().all()
        errors[kind] = (logits.cpu().double() - expected_logits(model, layout))[real].abs().max().item()
        logits[real.cuda()].float().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert errors[implementation] <= 2 * errors["sdpa"] + 1e-5
