"""`mdlm eval text`: what a judge thinks of generated text, and what it cannot see.

Generative perplexity alone rewards text that repeats itself: a sampler that is wrong in the right way beats the truth
(Zheng et al., 2409.02908; Wang et al., 2602.19619). So it never comes without the entropy of the text's own tokens,
the share of different n-grams, repetition and length; and with the precision in which the samples were drawn, because
float32 Gumbel noise lowers the entropy of the text and with it the perplexity. Tokens are the judge's. With reference
texts there is MAUVE too (`mauve_score.py`). Accuracy (exact match, running code) is left to lm-evaluation-harness.
Read next: `likelihood.py`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mdlm.checkpoint import provenance
from mdlm.eval.jsonl import append
from mdlm.eval.mauve_score import Mauve, mauve_texts

UNKNOWN = "unknown"


@dataclass(frozen=True)
class TextMetrics:
    """What can be said of texts as token sequences. Means are over texts with at least one token."""

    texts: int
    empty: int
    """Texts without a token; they enter nothing else."""
    length: float
    """Mean number of tokens."""
    shortest: int
    longest: int
    unigram_entropy: float
    """Mean over texts of the entropy, nats, of the token frequencies within a text: low for text that repeats."""
    distinct_1: float
    """Number of different tokens over number of tokens, in all texts together; depends on how much text there is."""
    distinct_2: float
    distinct_3: float
    distinct_4: float
    """NaN where no text is so long (likewise for 2 and 3)."""
    repetition_4: float
    """Mean share of a text's 4-grams that it held before (seq-rep-4, Welleck et al., 1908.04319); NaN without any."""
    duplicates: float
    """Share of texts that are the same as an earlier one."""


@dataclass(frozen=True)
class GenerativeResult:
    """Perplexity under a judge with what it must be read with."""

    perplexity: float
    """exp of the nats of all scored tokens over their number."""
    nats_per_token: float
    standard_error: float | None
    """Of nats_per_token, over texts (a ratio of sums); None for one text."""
    scored_tokens: int
    first_token_scored: bool
    """Whether a beginning-of-sequence token stood before each text; if not, its first token is only a condition."""
    windows: int
    """Pieces that were scored apart, each without sight of the one before: as many as texts, unless some are longer
    than the judge takes."""
    judge: str
    judge_dtype: str
    sampling_dtype: str
    """Precision of the network that drew the samples, as its user says."""
    metrics: TextMetrics
    mauve: Mauve | None = None
    """Where reference texts were given."""


def entropy_of_counts(symbols: Sequence[Hashable]) -> float:
    """Entropy in nats of the frequencies of what a sequence holds."""
    total = len(symbols)
    return sum(-n / total * math.log(n / total) for n in Counter(symbols).values())


def ngrams(symbols: Sequence[Any], n: int) -> list[tuple[Any, ...]]:
    """All runs of n symbols, from the left."""
    return [tuple(symbols[i : i + n]) for i in range(len(symbols) - n + 1)]


def text_metrics(rows: Sequence[Sequence[int]]) -> TextMetrics:
    """The metrics of token sequences. Raises ValueError if none of them holds a token."""
    full = [list(row) for row in rows if len(row)]
    if not full:
        raise ValueError(f"there is nothing to measure: {len(rows)} texts, none of which holds a token")
    distinct = []
    for n in (1, 2, 3, 4):
        grams = [gram for row in full for gram in ngrams(row, n)]
        distinct.append(len(set(grams)) / len(grams) if grams else math.nan)
    fours = [ngrams(row, 4) for row in full if len(row) >= 4]
    repeated = [1 - len(set(grams)) / len(grams) for grams in fours]
    lengths = [len(row) for row in full]
    return TextMetrics(
        texts=len(rows),
        empty=len(rows) - len(full),
        length=sum(lengths) / len(full),
        shortest=min(lengths),
        longest=max(lengths),
        unigram_entropy=sum(map(entropy_of_counts, full)) / len(full),
        distinct_1=distinct[0],
        distinct_2=distinct[1],
        distinct_3=distinct[2],
        distinct_4=distinct[3],
        repetition_4=sum(repeated) / len(repeated) if repeated else math.nan,
        duplicates=1 - len({tuple(row) for row in full}) / len(full),
    )


@torch.no_grad()
def judge_texts(
    judge: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    name: str = UNKNOWN,
    sampling_dtype: str = UNKNOWN,
    max_length: int | None = None,
    batch: int = 8,
) -> GenerativeResult:
    """Perplexity of `texts` under a causal judge, with everything it must be read with.

    Texts longer than `max_length` tokens (default: what the judge takes) are scored in pieces. Raises ValueError for no
    text, a tokenizer that is not the judge's, and where no token can be scored.
    """
    rows = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    metrics = text_metrics(rows)
    vocab = _embeddings(judge)
    highest = max(max(row, default=0) for row in rows)
    if highest >= vocab:
        raise ValueError(
            f"the tokenizer gives the id {highest}, the judge knows 0 .. {vocab - 1}: this is another model's tokenizer"
        )
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    limit = getattr(judge.config, "max_position_embeddings", None) if max_length is None else max_length
    size = max(map(len, rows)) if limit is None else int(limit) - len(start)
    if size < 2:
        raise ValueError(f"max_length is {limit}; a judge needs at least 3 tokens")
    pieces = [
        (number, [*start, *row[i : i + size]]) for number, row in enumerate(rows) for i in range(0, len(row), size)
    ]
    nats, counts = [0.0] * len(rows), [0] * len(rows)
    judge.eval()
    # Pieces of one length go together, so there is no padding that a judge could see.
    by_length = sorted(pieces, key=lambda piece: len(piece[1]))
    while by_length:
        width = len(by_length[0][1])
        group = [piece for piece in by_length[:batch] if len(piece[1]) == width]
        by_length = by_length[len(group) :]
        if width < 2:
            continue
        ids = torch.tensor([piece for _, piece in group], device=judge.device)
        log_probs = judge(input_ids=ids).logits[:, :-1].float().log_softmax(dim=-1)
        scores = log_probs.gather(-1, ids[:, 1:, None])[..., 0].double().sum(dim=1)
        for (number, _), score in zip(group, scores.tolist()):
            nats[number] -= score
            counts[number] += width - 1
    scored = sum(counts)
    if not scored:
        raise ValueError("no token can be scored: every text is one token long and the judge has no start token")
    mean = sum(nats) / scored
    if not math.isfinite(mean):
        raise ValueError(f"the judge gives {mean} nats per token; check its weights and precision")
    kept = [(total, count) for total, count in zip(nats, counts) if count]
    error = None
    if len(kept) > 1:
        spread = sum((total - mean * count) ** 2 for total, count in kept) * len(kept) / (len(kept) - 1)
        error = math.sqrt(spread) / scored
    return GenerativeResult(
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        nats_per_token=mean,
        standard_error=error,
        scored_tokens=scored,
        first_token_scored=bool(start),
        windows=len(pieces),
        judge=name,
        judge_dtype=str(judge.dtype).removeprefix("torch."),
        sampling_dtype=sampling_dtype,
        metrics=metrics,
    )


def _embeddings(judge: PreTrainedModel) -> int:
    weight = judge.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def read_texts(path: Path, column: str = "text") -> tuple[list[str], set[str]]:
    """The texts of a JSON-lines file (as `mdlm sample --json` prints it), and the `dtype`s that its lines name.

    Raises ValueError for a line that is no JSON object with this key, and for no line at all.
    """
    texts, dtypes = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); give one object per line") from error
        if not isinstance(record, dict) or not isinstance(record.get(column), str):
            keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{path}, line {number} has no text under {column!r} (it has: {keys}); give --column")
        texts.append(record[column])
        if isinstance(record.get("dtype"), str):
            dtypes.add(record["dtype"])
    if not texts:
        raise ValueError(f"{path} holds no samples")
    return texts, dtypes


def load_judge(path: str, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer from a folder or a hub name. Raises ValueError if it is none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        judge = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is no causal language model with its tokenizer: {reason}") from error
    if not len(tokenizer):
        raise ValueError(f"{path} holds a causal language model, but no tokenizer: save the judge's own beside it")
    judge.to(torch.device(device))  # type: ignore[arg-type]
    return judge.eval(), tokenizer


def text(
    file: str | None = None,
    judge: str | None = None,
    column: str = "text",
    sampling_dtype: str | None = None,
    max_length: int | None = None,
    batch: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    results: str | None = None,
    references: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Generative perplexity of samples, with unigram entropy, distinct n-grams, repetition and length beside it.

    Args:
        file: samples as JSON lines, for example what `mdlm sample --json` prints.
        judge: folder or name of a causal language model with its tokenizer.
        column: key of the text in each line.
        sampling_dtype: precision the samples were drawn in; default: the lines' own `dtype`, else unknown.
        max_length: tokens per piece that the judge sees; default: as many as it takes.
        batch: texts per forward of the judge.
        dtype: precision of the judge: float32, bfloat16 or float16.
        device: cpu, cuda, ...
        results: file to append the JSON line to.
        references: texts as JSON lines, under the same key; adds MAUVE of the samples against them (extra `mauve`).
        seed: of MAUVE's clustering.
    """
    if file is None or judge is None:
        raise ValueError("give --file, samples as JSON lines, and --judge, a causal language model")
    if batch < 1:
        raise ValueError(f"--batch is {batch}; it must be 1 or more")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is {dtype!r}; it must be float32, bfloat16 or float16")
    texts, named = read_texts(Path(file), column)
    precision = sampling_dtype or ("+".join(sorted(named)) if named else UNKNOWN)
    model, tokenizer = load_judge(judge, dtype, device)
    result = judge_texts(
        model, tokenizer, texts, name=judge, sampling_dtype=precision, max_length=max_length, batch=batch
    )
    if references is not None:
        others, _ = read_texts(Path(references), column)
        score = mauve_texts(model, tokenizer, texts, others, max_length=max_length, batch=batch, seed=seed)
        result = replace(result, mauve=score)
    record = {"kind": "generative", "file": file, "references": references, **finite(asdict(result)), **provenance()}
    if results is not None:
        append(Path(results), [record])
    return record


def finite(value: Any) -> Any:
    """The same for JSON, which knows neither NaN nor infinity: None instead."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(record: dict[str, Any]) -> str:
    """The result in one line for the eye; the perplexity never stands alone."""
    metrics = record["metrics"]

    def shown(value: float | None, places: int) -> str:
        return "–" if value is None else f"{value:.{places}f}"

    likeness = record.get("mauve")
    beside = "" if likeness is None else f", MAUVE {likeness['mauve']:.3f} against {likeness['references']} references"
    return (
        f"perplexity {shown(record['perplexity'], 1)} under {record['judge']}, unigram entropy "
        f"{metrics['unigram_entropy']:.2f} nats, distinct-4 {shown(metrics['distinct_4'], 3)}, repetition-4 "
        f"{shown(metrics['repetition_4'], 3)}, {metrics['texts']} texts of {metrics['length']:.0f} tokens, sampled in "
        f"{record['sampling_dtype']}{beside}"
    )


def main(argv: list[str] | None = None) -> int:
    """Entry of `mdlm eval text`."""
    from mdlm.command import run_command

    return run_command(text, argv, "mdlm eval text", lambda record: [json.dumps(record), summary(record)])
