"""The tensors of a checkpoint folder, one at a time: find them, check them all by their headers, read, write.

Nothing here holds more than one tensor, so converting a model takes the memory of its largest matrix and loading one
the memory of its weights. Files are read by `safetensors`; they are written here, because its writer wants all tensors
of a file at once. Read next: `convert.py`.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdlm.config import MDLMConfig
from mdlm.formats import Format

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of the weights we take, by their name in a safetensors header."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_FILE_BYTES = 5_000_000_000
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and what its header says."""

    file: Path
    name: str
    shape: tuple[int, ...]
    """Of what `read` gives."""
    dtype: torch.dtype
    transposed: bool = False
    """The file holds the transpose."""
    part: tuple[int, int] = (0, 1)
    """The file's tensor holds this part (number, of how many) along the first axis of `shape`."""

    def read(self) -> Tensor:
        """The tensor, in memory of its own: the file may change or vanish afterwards."""
        number, parts = self.part
        with safe_open(self.file, framework="pt", device="cpu") as file:
            whole = file.get_tensor(self.name)
            tensor = (whole.T if self.transposed else whole).chunk(parts)[number]
            return tensor.clone(memory_format=torch.contiguous_format)


def scan_weights(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name. Raises ValueError listing files that are missing or cut off, and the like."""
    weight_map = None
    if (folder / _INDEX).is_file():
        try:
            weight_map = dict(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / _INDEX} cannot be read ({error!r}); copy it again") from error
        files = sorted({folder / name for name in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        found = f" (there is {', '.join(other)}, a format that can run code)" if other else ""
        raise ValueError(f"{folder} holds no .safetensors file{found}; weights are read from safetensors only")
    stored: dict[str, Stored] = {}
    problems = []
    for file in files:
        if not file.is_file():
            problems.append(f"{file.name} is missing")
            continue
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                for name in opened.keys():  # noqa: SIM118 - a handle, not a dict
                    piece = opened.get_slice(name)
                    code = piece.get_dtype()
                    if code not in DTYPES:
                        problems.append(f"{name} has type {code}; only {', '.join(DTYPES)} are weights we can take")
                    elif name in stored:
                        problems.append(f"{name} stands in {stored[name].file.name} and in {file.name}")
                    else:
                        stored[name] = Stored(file, name, tuple(piece.get_shape()), DTYPES[code])
        except (SafetensorError, OSError) as error:
            problems.append(f"{file.name} is damaged or was not copied to its end ({error})")
    if weight_map is not None and not problems:
        problems += [f"{name} is not in {file}, where the index has it" for name, file in weight_map.items()
                     if name not in stored or stored[name].file.name != file]  # fmt: skip
        problems += [f"{name} stands in {s.file.name} but not in the index" for name, s in stored.items()
                     if name not in weight_map]  # fmt: skip
    if problems:
        raise ValueError(f"the weights of {folder} are not whole:\n  " + "\n  ".join(problems))
    return stored


def expected_shapes(config: MDLMConfig) -> dict[str, tuple[int, ...]]:
    """Our tensors of a model of `config` as they are stored: without the head where it is the embedding."""
    from mdlm.modeling import MDLMForMaskedLM

    with torch.device("meta"):
        model = MDLMForMaskedLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def public_name(fmt: Format | None, ours: str) -> str | None:
    """What one of our tensors is called in `fmt` (None: our own format); None: the format has no such tensor."""
    if fmt is None:
        return ours
    layer = _LAYER.search(ours)
    pattern = ours if layer is None else f"{ours[: layer.start()]}.{{n}}.{ours[layer.end() :]}"
    for public, own in fmt.names.items():
        if own == pattern:
            return public if layer is None else public.replace("{n}", layer[1])
    return None


def unfold(fmt: Format | None, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a folder as the table of names of `fmt` knows them: whole names, matrices output x input, fused
    ones as their parts. Nothing is read."""
    if fmt is None:
        return dict(stored)
    bare = fmt.prefix and not any(name.startswith(fmt.prefix) for name in stored)
    unfolded = {}
    for short, found in stored.items():
        name = fmt.prefix + short if bare and short != "lm_head.weight" else short
        layer = _LAYER.search(name)
        pattern = name if layer is None else f"{name[: layer.start()]}.{{n}}.{name[layer.end() :]}"
        if pattern in fmt.conv1d and len(found.shape) == 2:
            found = replace(found, shape=found.shape[::-1], transposed=True)
        parts = fmt.fused.get(pattern, ())
        if parts and found.shape and found.shape[0] % len(parts) == 0:
            shape = (found.shape[0] // len(parts), *found.shape[1:])
            for number, part in enumerate(parts):
                unfolded[f"{name}:{part}"] = replace(found, shape=shape, part=(number, len(parts)))
        else:
            unfolded[name] = found
    return unfolded


def match_weights(fmt: Format | None, config: MDLMConfig, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The stored tensors by our names, after checking that they are exactly those of a model of `config`.

    A head stored beside a tied embedding must be equal to it, and is left out. Raises ValueError listing all missing
    and unknown tensors and all wrong shapes.
    """
    problems = []
    left = unfold(fmt, stored)
    matched: dict[str, Stored] = {}
    for ours, shape in expected_shapes(config).items():
        name = public_name(fmt, ours)
        assert name is not None, f"the table of {fmt} lacks {ours}"
        found = left.pop(name, None)
        if found is None:
            problems.append(f"{name} {list(shape)} is missing")
        elif found.shape != shape:
            problems.append(f"{name} has shape {list(found.shape)}; the configuration says {list(shape)}")
        else:
            matched[ours] = found
    head = left.pop(public_name(fmt, "lm_head.weight") or "", None) if config.tie_word_embeddings else None
    embedding = matched.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head.read(), embedding.read()):
        problems.append(f"{head.name} differs from the embedding, but the configuration says they are one (tied)")
    skipped = [re.escape(name).replace(r"\{n\}", r"\d+") for name in (() if fmt is None else fmt.skipped)]
    unknown = sorted(name for name in left if not any(re.fullmatch(pattern, name) for pattern in skipped))
    problems += [f"{name} {list(left[name].shape)} is not a tensor of this format" for name in unknown]
    if problems:
        raise ValueError("the weights do not fit the configuration:\n  " + "\n  ".join(problems))
    return matched


def write_weights(
    folder: Path,
    plan: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    read: Callable[[str], Tensor],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write tensors as safetensors, in files of at most `max_file_bytes` (or one tensor) with an index if several.

    Args:
        folder: where to.
        plan: shape and type of every tensor, in the order they are read.
        read: gives the tensor of a name; called once for each.
    """
    files: list[list[str]] = [[]]
    total = filled = 0
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in plan.items()}
    for name, size in sizes.items():
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled, total = filled + size, total + size
    weight_map = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        # wide types first, as the library does: every tensor then starts at a multiple of its item size
        ordered = sorted(names, key=lambda name: -plan[name][1].itemsize)
        _write_file(folder / file, {name: plan[name] for name in ordered}, read)
        weight_map.update(dict.fromkeys(names, file))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(
    path: Path, plan: Mapping[str, tuple[tuple[int, ...], torch.dtype]], read: Callable[[str], Tensor]
) -> None:
    """Eight bytes of header length, the header, the tensors one after the other (the safetensors format)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in plan.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name, (shape, dtype) in plan.items():
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
