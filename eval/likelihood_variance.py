"""`mdlm eval variance`: how noisy the estimators of a likelihood are, against what they cost.

All estimators have the same expectation, the NELBO; what differs is the spread of one sequence's estimate after so many
evaluations of the denoiser. It is measured as the standard deviation over repeats with the text held fixed, on sources
whose oracle gives the exact likelihood to compare with, and on a model that was trained on one. Read first:
`likelihood.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from mdlm.checkpoint import provenance
from mdlm.data import Batch
from mdlm.denoiser import Denoiser
from mdlm.eval.likelihood import NelboProtocol, accumulate
from mdlm.eval.sources import ExactSource
from mdlm.eval.sources_text import SourceModel
from mdlm.eval.sources_zoo import build_source
from mdlm.load import load_model
from mdlm.rng import counter_uniform

ESTIMATORS: dict[str, dict[str, Any]] = {
    "free times, independent masks": {"sampling": "uniform", "masking": "independent"},
    "antithetic times, independent masks": {"sampling": "antithetic", "masking": "independent"},
    "stratified times, independent masks": {"sampling": "stratified", "masking": "independent"},
    "free counts": {"sampling": "uniform", "masking": "count"},
    "stratified counts": {"sampling": "stratified", "masking": "count"},
    "evenly spread counts": {"sampling": "low_discrepancy", "masking": "count"},
}
"""Name -> options of `NelboProtocol`. Times or counts are stratified over the draws of one sequence."""
ORDER = "chain rule along one order"
"""The exact conditionals of all tokens one after the other, in a random order: as many evaluations as tokens."""
_ORDER = 0x4F524452  # stream tag, see mdlm/schedule.py


def variance(
    sources: list[str] | None = None,
    output: str | None = None,
    model: str | None = None,
    length: int = 32,
    nfe: list[int] | None = None,
    sequences: int = 32,
    repeats: int = 12,
    seed: int = 0,
    source_seed: int = 0,
) -> dict[str, Any]:
    """Spread of each estimator after so many evaluations per sequence, in nats per token.

    Args:
        sources: names in `mdlm.eval.sources_zoo.SOURCES`; default: markov, noisy_copy, parity.
        output: folder for variance.jsonl and variance.md; default: only printed.
        model: checkpoint of a model trained on the one source named (`python -m mdlm.training.layer_b`); default: the
            sources' own oracles.
        length: of all sequences.
        nfe: evaluations per sequence; default: 1, 2, 4, 8, 16, 32.
        sequences: drawn from each source, the same for every estimator.
        repeats: estimates of each.
        seed: of the noise.
        source_seed: of random sources.

    Raises:
        ValueError: unknown names, counts below 1 (repeats: 2), or a model that does not fit its source.
    """
    names = ["markov", "noisy_copy", "parity"] if sources is None else sources
    costs = [1, 2, 4, 8, 16, 32] if nfe is None else nfe
    if not names or not costs or min(*costs, sequences, repeats - 1) < 1:
        raise ValueError("variance needs a source, evaluations and sequences of 1 or more, and 2 or more repeats")
    if model is not None and len(names) != 1:
        raise ValueError(f"a model belongs to one source, got {len(names)}")
    records = []
    for name in names:
        source = build_source(name, length, source_seed)
        denoiser: Denoiser = source
        if model is not None:
            denoiser = SourceModel(*load_model(model, "float32", "cpu"), source)
        about = {"source": name, "model": model, "length": source.length, "sequences": sequences, "repeats": repeats}
        for found in spreads(source, denoiser, costs, sequences, repeats, seed):
            records.append({**about, **found})
    if output is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"kind": "variance", "seed": seed, "source_seed": source_seed, **provenance()}, *records]
        (folder / "variance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (folder / "variance.md").write_text(as_markdown(records), encoding="utf-8")
    return {"records": records}


def spreads(
    source: ExactSource, denoiser: Denoiser, costs: Sequence[int], sequences: int, repeats: int, seed: int
) -> Iterator[dict[str, Any]]:
    """One record per estimator and cost.

    `spread` is the standard deviation over repeats, nats per token, root mean square over sequences; with the source's
    own oracle, `bias` is the mean minus the exact value and `bias_error` its standard error.
    """
    x = source.sample(sequences, torch.Generator(source.device).manual_seed(seed)).repeat(repeats, 1)
    exact = -source.log_prob(x) / source.length
    names: list[tuple[str, dict[str, Any] | None]] = [*ESTIMATORS.items(), (ORDER, None)]
    for name, options in names:
        for cost in costs:
            if options is None:
                if cost % source.length:
                    continue
                values = _orders(denoiser, x, cost // source.length, seed)
            else:
                batch = Batch(x, torch.ones_like(x, dtype=torch.bool), torch.arange(len(x)))
                protocol = NelboProtocol(**options, strata_rows=1, samples=cost, seed=seed)
                values = accumulate(denoiser, [batch], protocol).nats
            each = (values / source.length).view(repeats, sequences)
            off = (each - exact.view(repeats, sequences)).mean(dim=1)
            known = denoiser is source
            yield {
                "estimator": name,
                "nfe": cost,
                "spread": float(each.var(dim=0).mean().sqrt()),
                "bias": float(off.mean()) if known else None,
                "bias_error": float(off.std()) / math.sqrt(repeats) if known else None,
            }


def _orders(denoiser: Denoiser, x: Int64[Tensor, "rows length"], orders: int, seed: int) -> Float64[Tensor, "rows"]:
    """Mean over random orders of -log p by the chain rule."""
    total = torch.zeros(len(x), dtype=torch.float64)
    positions = torch.arange(x.shape[1])
    for number in range(orders):
        u = counter_uniform(seed, _ORDER, torch.arange(len(x))[:, None] * orders + number, positions)
        rank = u.argsort(dim=1).argsort(dim=1)
        for step in range(x.shape[1]):
            at = rank == step
            log_probs = denoiser(x.masked_fill(rank >= step, denoiser.mask_token_id), at=at)
            total -= log_probs.gather(1, x[at][:, None])[:, 0].double()
    return total / orders


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """A table per source: estimators by evaluations; the least spread of each column in bold."""
    parts = []
    for source in dict.fromkeys(record["source"] for record in records):
        of_it = [record for record in records if record["source"] == source]
        costs = list(dict.fromkeys(record["nfe"] for record in of_it))
        least = {cost: min(record["spread"] for record in of_it if record["nfe"] == cost) for cost in costs}
        who = "its oracle" if of_it[0]["model"] is None else "a trained model"
        lines = [
            f"### {source} (length {of_it[0]['length']}), {who}",
            "",
            f"| estimator | {' | '.join(f'{cost}' for cost in costs)} |",
            "|---" * (len(costs) + 1) + "|",
        ]
        for name in dict.fromkeys(record["estimator"] for record in of_it):
            spread = {record["nfe"]: record["spread"] for record in of_it if record["estimator"] == name}
            lines.append(f"| {name} | {' | '.join(_cell(spread.get(cost), least[cost]) for cost in costs)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(value: float | None, least: float) -> str:
    if value is None:
        return "–"
    return f"**{value:.3f}**" if f"{value:.3f}" == f"{least:.3f}" else f"{value:.3f}"


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval variance`."""
    from mdlm.command import run_command

    return run_command(
        variance,
        argv,
        prog="mdlm eval variance",
        report=lambda found: [as_markdown(found["records"])],
    )
