"""Greedy unmasking of one row with stored keys and values, in float64, from the rules of the papers, with loops.

Shares no code with the product and does not use torch. The store is a dict per layer, position -> (keys, values); a
forward feeds a set of positions, overwrites their entries and attends to every entry there is. Which positions are fed
is written out once per cache: Fast-dLLM's prefix and dual cache, dKV-Cache-Decode, the intervals of dLLM-Cache, and the
exact cache of block-causal models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from reference_model import Array, Shape, rms_norm, rotate, silu

Store = list[dict[int, tuple[Array, Array]]]


def feed(
    weights: dict[str, Array],
    shape: Shape,
    tokens: list[int],
    fed: set[int],
    store: Store,
    alike: dict[int, float] | None = None,
) -> dict[int, Array]:
    """Logits of the fed positions: the predictions of their own tokens.

    In `alike` each fed position gets the cosine of its new and its stored values, summed over layers; 0 at first.
    """
    order = sorted(fed)
    stream = {i: weights["model.embed_tokens.weight"][tokens[i]] for i in order}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        queries = {}
        for i in order:
            x = rms_norm(stream[i], w["input_layernorm.weight"], shape.eps)
            q, k, v = ((w[f"self_attn.{name}_proj.weight"] @ x) for name in "qkv")
            queries[i] = [rotate(head, i, shape.theta) for head in q.reshape(shape.heads, -1)]
            turned = np.stack([rotate(head, i, shape.theta) for head in k.reshape(shape.kv_heads, -1)])
            if alike is not None:
                old = store[layer][i][1].ravel() if i in store[layer] else np.zeros(v.shape)
                size = np.linalg.norm(old) * np.linalg.norm(v)
                alike[i] = (alike[i] if layer else 0.0) + (float(old @ v) / size if size else 0.0)
            store[layer][i] = turned, v.reshape(shape.kv_heads, -1)
        for i in order:
            block = shape.block_size
            seen = [j for j in sorted(store[layer]) if block is None or j // block <= i // block]
            heads = []
            for head, query in enumerate(queries[i]):
                shared = head * shape.kv_heads // shape.heads
                scores = np.array([query @ store[layer][j][0][shared] for j in seen]) / np.sqrt(len(query))
                p = np.exp(scores - scores.max())
                heads.append(sum(a * store[layer][j][1][shared] for a, j in zip(p / p.sum(), seen)))
            stream[i] = stream[i] + w["self_attn.o_proj.weight"] @ np.concatenate(heads)
            x = rms_norm(stream[i], w["post_attention_layernorm.weight"], shape.eps)
            hidden = silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
            stream[i] = stream[i] + w["mlp.down_proj.weight"] @ hidden
    final = {i: weights["lm_head.weight"] @ rms_norm(stream[i], weights["model.norm.weight"], shape.eps) for i in order}
    if not shape.shift:
        return final
    return {i: final[max(i - 1, 0)] for i in order if max(i - 1, 0) in final}


@dataclass
class Unmasked:
    """What became of a row."""

    tokens: list[int]
    log_probs: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    tokens_fed: int = 0
    forwards: int = 0


def unmask(
    weights: dict[str, Array],
    shape: Shape,
    tokens: list[int],
    editable: list[int],
    mask: int,
    num_tokens: int,
    block: int,
    threshold: float,
    cache: str,
    every: tuple[int, int] = (10**9, 10**9),
    from_row_start: bool = False,
    ratio: float = 0.0,
) -> Unmasked:
    """Fill `editable` in blocks of `block` positions (from the first of them), all tokens at least `threshold` sure.

    `every`: the intervals of the cache that has some: (prompt, answer) or (refresh, unused). `ratio`: of the answer's
    tokens, those whose values changed most when they were last fed are fed as well.
    """
    row = Unmasked([mask if i in editable else t for i, t in enumerate(tokens)])
    everything, left = set(range(len(tokens))), set(editable)
    origin = 0 if from_row_start else min(editable)
    store: Store = [{} for _ in range(shape.layers)]
    written: set[int] = set()
    before, since = None, 0
    stored_blocks = 0
    alike: dict[int, float] = {}
    while left:
        number = (min(left) - origin) // block
        window = {i for i in editable if (i - origin) // block == number}
        asked = window & left
        fresh = number != before
        if cache == "none" or (row.forwards == 0 and cache != "block"):
            fed = everything
        elif cache == "prefix":
            fed = everything if fresh or since == every[0] else {i for i in everything if i >= min(window)}
        elif cache == "dual":
            fed = everything if fresh or since == every[0] else window
        elif cache == "delayed":
            fed = everything if since == every[0] else left | written
        elif cache == "interval":
            fed = asked | written
            fed = fed | (everything - set(editable) if row.forwards % every[0] == 0 else set())
            fed = fed | (set(editable) if row.forwards % every[1] == 0 else set())
            fed = fed | set(sorted(editable, key=lambda i: (alike.get(i, 0.0), i))[: int(ratio * len(editable))])
        else:
            assert cache == "block"
            assert shape.block_size == block
            fed = {i for i in everything if stored_blocks <= i // block <= number}
            stored_blocks = number  # all before the current one are now stored as they will stay
        if shape.shift:
            fed = fed | {max(i - 1, 0) for i in asked}
        since = 1 if fed == everything else since + 1
        before = number
        logits = feed(weights, shape, row.tokens, fed, store, alike)
        row.tokens_fed, row.forwards = row.tokens_fed + len(fed), row.forwards + 1
        sure, choice = {}, {}
        for i in asked:
            x = np.array([-np.inf if t == mask else logits[i][t] for t in range(num_tokens)])
            log_p = x - x.max() - np.log(np.exp(x - x.max()).sum())
            choice[i], sure[i] = int(log_p.argmax()), float(log_p.max())
        written = {i for i in asked if sure[i] >= np.log(threshold)} or {max(sorted(asked), key=lambda i: sure[i])}
        for i in written:
            row.tokens[i], row.log_probs[i], row.steps[i] = choice[i], sure[i], row.forwards - 1
        left -= written
    return row
