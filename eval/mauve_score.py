"""MAUVE: how alike generated and human texts are, as sets, to a judge (Pillutla et al., 2102.01454).

The judge's features of all texts are clustered; the score is the area under the curve of the divergences of the two
histograms from their mixtures. It sees what perplexity cannot: samples that are each likely but all alike. It needs
hundreds of texts, and numbers made with other judges, lengths or numbers of texts are other numbers. Computed by the
package `mauve-text` (extra `mauve`; its licence is the GPL). Read next: `generative.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Mauve:
    """How alike samples and references are as sets of texts. Depends on all that stands here: compare only alike."""

    mauve: float
    """Between 0 and 1; 1 where both fall into the clusters of the judge's features alike."""
    samples: int
    references: int
    """Texts without a token are left out of both, unless the judge has a start token to see them by."""
    max_length: int
    """Tokens of each text that the judge saw, from its beginning; a difference in length counts as one of content."""
    buckets: int
    """Clusters: a tenth of the smaller set."""
    seed: int
    """Of the clustering."""


@torch.no_grad()
def features(judge: PreTrainedModel, rows: Sequence[Sequence[int]], batch: int = 8) -> Float[Tensor, "texts width"]:
    """The judge's last hidden state at the last token of each row, float32 on the CPU."""
    judge.eval()
    found: dict[int, Tensor] = {}
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    while longest_first:  # rows of one length go together, so there is no padding that a judge could see
        width = len(rows[longest_first[0]])
        group = [i for i in longest_first[:batch] if len(rows[i]) == width]
        longest_first = longest_first[len(group) :]
        ids = torch.tensor([list(rows[i]) for i in group], device=judge.device)
        states = judge(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, -1]
        found.update(zip(group, states.float().cpu()))
    return torch.stack([found[i] for i in range(len(rows))])


def mauve_of(samples: Float[Tensor, "texts width"], references: Float[Tensor, "others width"], seed: int = 0) -> float:
    """MAUVE of two sets of features, by the package `mauve-text` with its defaults.

    Raises ValueError where the package is missing, for fewer than 20 texts on a side (there would be no two clusters of
    ten), and for features that are not finite.
    """
    if min(len(samples), len(references)) < 20:
        raise ValueError(
            f"MAUVE needs at least 20 texts on each side, and hundreds to mean something; got {len(samples)} samples "
            f"and {len(references)} references"
        )
    if not bool(samples.isfinite().all()) or not bool(references.isfinite().all()):
        raise ValueError("the judge's hidden states are not finite; check its weights and precision")
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise ValueError(f"MAUVE needs the package mauve-text ({error}): pip install 'mdlm-torch[mauve]'") from error
    buckets = _buckets(len(samples), len(references))
    found = compute_mauve(
        p_features=references.numpy(), q_features=samples.numpy(), num_buckets=buckets, seed=seed, verbose=False
    )
    # The points come in order. The package's own area sorts them, which goes wrong where equal histograms make ties.
    x, y = torch.from_numpy(found.divergence_curve).T
    return float((torch.trapezoid(y, x).abs() + torch.trapezoid(x, y).abs()) / 2)


def _buckets(samples: int, references: int) -> int:
    return max(2, round(min(samples, references) / 10))


def mauve_texts(
    judge: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    references: Sequence[str],
    *,
    max_length: int | None = None,
    batch: int = 8,
    seed: int = 0,
) -> Mauve:
    """MAUVE of `texts` against `references`, on the features of a causal judge.

    `max_length`: tokens of each text that count; default 1024 or what the judge takes. Raises ValueError as `mauve_of`.
    """
    takes = int(getattr(judge.config, "max_position_embeddings", None) or 1024)
    limit = min(takes, 1024) if max_length is None else max_length
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    sides = []
    for side in (texts, references):
        rows = [[*start, *tokenizer(text, add_special_tokens=False)["input_ids"]][:limit] for text in side]
        sides.append([row for row in rows if row])
    few = min(len(side) for side in sides)
    found = [features(judge, side, batch) if few else torch.zeros(0, 1) for side in sides]
    return Mauve(
        mauve=mauve_of(found[0], found[1], seed),
        samples=len(sides[0]),
        references=len(sides[1]),
        max_length=limit,
        buckets=_buckets(len(sides[0]), len(sides[1])),
        seed=seed,
    )
