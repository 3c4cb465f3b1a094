"""A long likelihood evaluation: on several processes, written down batch by batch, and taken up again after a stop.

Finished batches are JSON lines, appended and flushed: the rows' numbers with their nats, tokens and bytes. The first
line names all that the numbers depend on (protocol, text, weights, precision), and a file that names something else is
refused. Rows are independent and floats survive JSON, so a resumed evaluation gives the number of one that was never
stopped, in every bit if the batch size is the same, on any number of processes. Read next: `__main__.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from mdlm.data import Batch
from mdlm.denoiser import Denoiser
from mdlm.eval.jsonl import append, drop_torn_line
from mdlm.eval.likelihood import Likelihood, LikelihoodSums, NelboProtocol, batch_sums
from mdlm.eval.likelihood_text import EvaluationRows

Record = dict[str, Any]


@contextmanager
def launched_processes() -> Iterator[tuple[int, int]]:
    """Rank and number of the processes that `accelerate launch` or `torchrun` started; (0, 1) without a launcher.

    They are joined (gloo) within the block, unless they are already.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0, 1
        return
    joined = distributed.is_initialized()
    if not joined:
        distributed.init_process_group("gloo")
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        if not joined:
            distributed.destroy_process_group()


def own_device(device: str) -> str:
    """`auto` as this process's own GPU where there are some; anything else as it is."""
    if device != "auto" or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def weights_digest(model: nn.Module) -> str:
    """A short fingerprint of a model's weights: of every tensor's sum and its first values."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()
        some = torch.cat([values[:16].double(), values.sum(dtype=torch.float64)[None]])
        digest.update(name.encode() + some.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def evaluate_rows(
    denoiser: Denoiser,
    text: EvaluationRows,
    protocol: NelboProtocol,
    batch: int,
    *,
    identity: Record,
    progress: Path | None = None,
    resume: bool = False,
    rank: int = 0,
    world: int = 1,
) -> tuple[Likelihood, float | None]:
    """The NELBO of all rows, the same on every process, and bits per byte of their unigram baseline (None: unknown).

    Args:
        batch: rows per forward.
        identity: what the numbers depend on; the first line of `progress`.
        progress: file of finished batches; process k > 0 writes to its own, NAME.k.SUFFIX.
        resume: go on with `progress`, if it is there.

    Raises ValueError for a `progress` that is there without `resume`, or that has another identity.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be 1 or more")
    if resume and progress is None:
        raise ValueError("resume needs the file that was written: give --progress")
    stored: list[Any] = [None, None]
    if rank == 0 and progress is not None:
        try:
            stored[0] = _stored(progress, identity, resume)
        except ValueError as error:
            stored[1] = str(error)
    if world > 1:
        distributed.broadcast_object_list(stored)
    if stored[1] is not None:
        raise ValueError(stored[1])
    done: list[Record] = stored[0] or []
    new: list[Record] = []
    path = None if progress is None else own_file(progress, rank)
    if path is not None and not path.exists():
        append(path, [{"kind": "identity", **identity}])
    for record in _evaluate(denoiser, text, protocol, batch, done, rank, world):
        new.append(record)
        if path is not None:
            append(path, [record])
    gathered: list[Any] = [new]
    if world > 1:
        gathered = [None] * world
        distributed.all_gather_object(gathered, new)
    return _summed([*done, *(record for part in gathered for record in part)], text, protocol)


def _evaluate(
    denoiser: Denoiser,
    text: EvaluationRows,
    protocol: NelboProtocol,
    size: int,
    done: list[Record],
    rank: int,
    world: int,
) -> Iterator[Record]:
    finished = {number for record in done for number in record["rows"]}
    at_work: list[Batch] = []

    def batches() -> Iterator[Batch]:
        for batch in text.batches(size, rank, world, finished):
            at_work[:] = [batch]
            yield batch

    for sums in batch_sums(denoiser, batches(), protocol, token_bytes=text.token_bytes):
        assert sums.bytes is not None
        real = sums.rows < text.count
        yield {
            "kind": "rows",
            "rows": sums.rows[real].tolist(),
            "nats": sums.nats[real].tolist(),
            "tokens": sums.tokens[real].tolist(),
            "bytes": sums.bytes[real].tolist(),
            "unigram": None if text.unigram is None else _unigram(at_work[0], text.unigram)[real].tolist(),
            "precision": sums.precision,
        }


def _unigram(batch: Batch, log_probs: Tensor) -> Tensor:
    """Nats of each row's counted tokens under the frequencies of the reference text."""
    return -(log_probs[batch.input_ids] * batch.maskable).sum(dim=1)


def _summed(records: list[Record], text: EvaluationRows, protocol: NelboProtocol) -> tuple[Likelihood, float | None]:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for record in records for value in record[name]], dtype=dtype)

    precisions = sorted({record["precision"] for record in records})
    by_table = column("bytes", torch.int64)
    sums = LikelihoodSums(
        protocol=protocol,
        rows=column("rows", torch.int64),
        nats=column("nats", torch.float64),
        tokens=column("tokens", torch.int64),
        bytes=by_table if text.bytes_are_exact else None,
        context_length=text.seq_len,
        precision="+".join(precisions),
    )
    total = round(int(by_table.sum()) * text.scale)
    if len(sums.rows) != text.count:
        raise ValueError(f"{len(sums.rows)} rows were evaluated, the text has {text.count}: was it changed meanwhile?")
    result = sums.result(None if text.bytes_are_exact else total)
    if text.unigram is None or not total:
        return result, None
    nats = column("unigram", torch.float64)[sums.rows.argsort()].sum()
    return result, float(nats) / float(np.log(2.0)) / total


def own_file(progress: Path, rank: int) -> Path:
    """Where a process writes: NAME.SUFFIX, or NAME.rank.SUFFIX."""
    return progress if rank == 0 else progress.with_name(f"{progress.stem}.{rank}{progress.suffix}")


def _files(progress: Path) -> list[Path]:
    """All files of an evaluation that are there."""
    name = re.compile(rf"{re.escape(progress.stem)}\.\d+{re.escape(progress.suffix)}")
    others = sorted(progress.parent.glob("*")) if progress.parent.is_dir() else []
    return [path for path in others if path == progress or name.fullmatch(path.name)]


def _stored(progress: Path, identity: Record, resume: bool) -> list[Record]:
    """The finished batches in the files; a half-written last line is dropped."""
    found = _files(progress)
    if found and not resume:
        raise ValueError(f"{found[0]} exists; give another --progress, or --resume true to go on with it")
    records: list[Record] = []
    wanted = json.loads(json.dumps(identity))
    for path in found:
        drop_torn_line(path)
        whole = path.read_text(encoding="utf-8")
        if not whole:
            path.unlink()
            continue
        try:
            first, *rest = (json.loads(line) for line in whole.splitlines())
            kind = first.pop("kind")
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} was not written by an evaluation: {error}") from error
        if kind != "identity" or first != wanted:
            differs = [key for key in wanted if first.get(key) != wanted[key]]
            raise ValueError(
                f"{path} was written under another {' and '.join(differs) or 'kind of evaluation'}; give another "
                "--progress"
            )
        records += rest
    return records
