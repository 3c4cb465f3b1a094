"""The transformer from its equations, in float64, one row at a time, with loops: what `mdlm.modeling` must compute.

Shares no code with the product and does not use torch. A row is a list of tokens, each with a position and a document
number (None: padding, left out). Rotations are products of complex numbers; attention is a sum over the keys a query
sees; a shifted head reads the state of the token before. Also the batch layouts all attention tests use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Shape:
    """What the weights do not tell."""

    heads: int
    kv_heads: int
    layers: int
    theta: float = 10000.0
    eps: float = 1e-6
    block_size: int | None = None
    shift: bool = False
    placement: str = "pre"


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 1910.07467, eq. 4)."""
    return x / np.sqrt((x**2).mean() + eps) * weight


def rotate(x: Array, position: int, theta: float) -> Array:
    """Multiply the complex x[j] + i x[j + d/2] by exp(i position theta^(-2j/d)) (Su et al., 2104.09864, eq. 15)."""
    half = len(x) // 2
    frequency = theta ** (-np.arange(half) * 2.0 / len(x))
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequency)
    return np.concatenate([turned.real, turned.imag])


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def sees(query: int, key: int, positions: list[int], documents: list[int | None], block_size: int | None) -> bool:
    """May token number `query` of a row attend to token number `key`?"""
    if documents[query] != documents[key]:
        return False
    return block_size is None or positions[query] // block_size >= positions[key] // block_size


def logits(
    weights: dict[str, Array], shape: Shape, tokens: list[int], positions: list[int], documents: list[int | None]
) -> Array:
    """`[seq, vocab]` of one row; NaN on padding, where the model may answer anything finite."""
    real = [i for i in range(len(tokens)) if documents[i] is not None]
    stream = {i: weights["model.embed_tokens.weight"][tokens[i]] for i in real}
    for layer in range(shape.layers):
        w = {
            k.removeprefix(f"model.layers.{layer}."): v
            for k, v in weights.items()
            if k.startswith(f"model.layers.{layer}.")
        }
        given = stream
        if "input_layernorm.weight" in w:
            given = {i: rms_norm(stream[i], w["input_layernorm.weight"], shape.eps) for i in real}
        attended = _attention(w, shape, given, positions, documents, real)
        stream = {i: _sums(w, shape, stream[i], attended[i]) for i in real}
    final = stream
    if "model.norm.weight" in weights:
        final = {i: rms_norm(stream[i], weights["model.norm.weight"], shape.eps) for i in real}
    head = weights["lm_head.weight"]
    out = np.full((len(tokens), head.shape[0]), np.nan)
    for i in real:
        source = i
        if shape.shift:
            source = max((j for j in real if j < i and documents[j] == documents[i]), default=i)
        out[i] = head @ final[source]
    return out


def _linear(w: dict[str, Array], name: str, x: Array, eps: float) -> Array:
    """Matrix and bias; with SDD alpha * y / RMS(y) (2502.15499)."""
    y = w[f"{name}_proj.weight"] @ x + w.get(f"{name}_proj.bias", np.float64(0))
    alpha = w.get(f"{name}_scale.weight")
    return y if alpha is None else alpha * y / np.sqrt((y * y).mean() + eps)


def _mlp(w: dict[str, Array], x: Array, eps: float) -> Array:
    hidden = silu(_linear(w, "mlp.gate", x, eps)) * _linear(w, "mlp.up", x, eps)
    return _linear(w, "mlp.down", hidden, eps)


def _sums(w: dict[str, Array], shape: Shape, h: Array, attended: Array) -> Array:
    """The layer's output at one token from its input `h` and the attention's answer; see `layers.MDLMLayer`."""

    def n(name: str, x: Array) -> Array:
        return rms_norm(x, w[f"{name}_layernorm.weight"], shape.eps)

    def mlp(x: Array) -> Array:
        return _mlp(w, x, shape.eps)

    if shape.placement == "pre":
        a = h + attended
        return a + mlp(n("post_attention", a))
    if shape.placement == "peri":
        a = h + n("attention", attended)
        return a + n("mlp", mlp(n("post_attention", a)))
    if shape.placement == "post":
        a = n("post_attention", h + attended)
        return n("output", a + mlp(a))
    if shape.placement == "span":
        return n("output", h + mlp(n("post_attention", h + attended)))
    if shape.placement == "hybrid":
        a = n("post_attention", h + attended)
        return a + mlp(a)
    assert shape.placement == "deepnorm"
    c = (2.0 * shape.layers) ** 0.25
    a = n("post_attention", c * h + attended)
    return n("output", c * a + mlp(a))


def _attention(
    w: dict[str, Array],
    shape: Shape,
    x: dict[int, Array],
    positions: list[int],
    documents: list[int | None],
    real: list[int],
) -> dict[int, Array]:
    def project(name: str, i: int) -> Array:
        y = _linear(w, f"self_attn.{name}", x[i], shape.eps)
        heads = y.reshape(shape.heads if name == "q" else shape.kv_heads, -1)
        norm = w.get(f"self_attn.{name}_norm.weight")
        if norm is not None:
            heads = np.stack([rms_norm(h, norm, shape.eps) for h in heads])
        if name != "v":
            heads = np.stack([rotate(h, positions[i], shape.theta) for h in heads])
        return heads

    q, k, v = ({i: project(name, i) for i in real} for name in "qkv")
    out = {}
    for i in real:
        keys = [j for j in real if sees(i, j, positions, documents, shape.block_size)]
        per_head = []
        for head in range(shape.heads):
            shared = head // (shape.heads // shape.kv_heads)
            scores = np.array([q[i][head] @ k[j][shared] for j in keys]) / np.sqrt(len(q[i][head]))
            p = np.exp(scores - scores.max())
            per_head.append(sum(a * v[j][shared] for a, j in zip(p / p.sum(), keys)))
        out[i] = _linear(w, "self_attn.o", np.concatenate(per_head), shape.eps)
    return out


@dataclass(frozen=True)
class Layout:
    """A batch of two rows of nine tokens: a digit per token, rows apart by a blank."""

    documents: str
    positions: str
    give_mask: bool
    give_positions: bool

    def rows(self) -> list[tuple[list[int], list[int | None]]]:
        """Positions and documents of each row; None: padding."""
        return [
            ([int(p) for p in positions], [None if d == "." else int(d) for d in documents])
            for positions, documents in zip(self.positions.split(), self.documents.split())
        ]


LAYOUTS = {
    "dense": Layout("000000000 000000000", "012345678 012345678", False, False),
    "right padding": Layout("000000000 00000....", "012345678 012340000", True, False),
    "left padding": Layout("000000000 ....00000", "012345678 000001234", True, False),
    "empty row": Layout("000000000 .........", "012345678 000000000", True, False),
    "packed": Layout("000011111 001222222", "012301234 010012345", False, True),
    "packed and padded": Layout("0000111.. ...001111", "012301200 111010123", True, True),
    "padding inside a document": Layout("00..00000 000000000", "019023456 012345678", True, True),
}
"""Every way in which tokens can be kept apart. Positions of padding are arbitrary on purpose where they are given."""
