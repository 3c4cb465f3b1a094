"""The tokenizer of a public folder, without running code from it: files, special tokens, the mask.

Public folders name their special tokens in several places, or not at all. The rule here: the mask id comes from the
model's configuration (or from the user) and must be a special token of the tokenizer; for the other special tokens the
tokenizer wins, since it encodes the text, and the configuration fills what the tokenizer leaves open. Read next:
`convert.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mdlm.formats import Format
from mdlm.tokenization import MASK

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "vocab.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_CONFIG = "tokenizer_config.json"


@dataclass
class PublicTokenizer:
    """A tokenizer and the files it is made of."""

    tokenizer: PreTrainedTokenizerBase
    files: dict[str, bytes]
    settings: dict[str, Any]
    """`tokenizer_config.json` as it is in the source."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings to write besides; None: leave the setting out."""
    grown: bool = False
    """A token was added: the files have to be written anew."""

    def new_settings(self) -> dict[str, Any]:
        """`tokenizer_config.json` with the changes."""
        return _merge(self.settings, self.changes)

    def write(self, folder: Path) -> None:
        """The source's files byte by byte, except for settings that had to change."""
        if self.grown:
            self.tokenizer.save_pretrained(folder)
            return
        _write_files(folder, self.files, self.settings, self.changes)


def _merge(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**settings, **changes}
    return {name: value for name, value in merged.items() if not (name in changes and value is None)}


def _write_files(
    folder: Path, files: Mapping[str, bytes], settings: Mapping[str, Any], changes: Mapping[str, Any]
) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if changes:
        write_json(folder / _CONFIG, _merge(settings, changes))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as transformers writes JSON files, keys in the given order."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}; a JSON object is expected")
    return content


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that belong to its tokenizer."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def open_public_tokenizer(folder: Path, fmt: Format) -> PublicTokenizer | None:
    """The tokenizer of a public folder as it is; None if the folder has none.

    Raises ValueError if it exists as code only, or cannot be read.
    """
    files = tokenizer_files(folder)
    if not {"tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt"} & set(files):
        return None
    settings = read_json(folder / _CONFIG) if _CONFIG in files else {}
    changes: dict[str, Any] = {}
    name = settings.get("tokenizer_class")
    if name in fmt.tokenizers:
        changes = {"tokenizer_class": fmt.tokenizers[str(name)], "auto_map": None}
    elif "auto_map" in settings:
        raise ValueError(
            f"{folder}: its tokenizer {name} comes as code, and code from a checkpoint is not run here; put a "
            "tokenizer.json and a tokenizer_config.json without auto_map there"
        )
    elif name is None and "tokenizer.json" in files:
        changes = {"tokenizer_class": "PreTrainedTokenizerFast"}
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:  # apart from config.json, whose model_type transformers does not know
        _write_files(Path(place), files, settings, changes)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from error
    return PublicTokenizer(tokenizer, files, settings, changes)


def settle_special_tokens(opened: PublicTokenizer, ids: dict[str, int | None], place: str) -> dict[str, int | None]:
    """Give the tokenizer the special tokens it lacks, and take its own where it has them.

    Args:
        opened: changed in place.
        ids: the model's `mask_token_id`, `eos_token_id`, `pad_token_id`, `bos_token_id`.
        place: the folder, for messages.

    Returns:
        The ids to use.

    Raises:
        ValueError: the mask is not a special token of this tokenizer, or not the tokenizer's own mask; no end token.
    """
    tokenizer = opened.tokenizer
    mask = ids["mask_token_id"]
    assert mask is not None
    own = tokenizer.mask_token_id
    if own is not None and own != mask:
        raise ValueError(f"{place}: the mask token is {own} in the tokenizer and {mask} for the model")
    settled: dict[str, int | None] = {"mask_token_id": mask}
    for kind in ("mask", "eos", "pad", "bos"):
        found = getattr(tokenizer, f"{kind}_token_id")
        if found is None and kind != "bos":
            wanted = ids[f"{kind}_token_id"]
            if wanted is None and kind == "pad":
                wanted = settled["eos_token_id"]
            if wanted is None:
                raise ValueError(f"{place}: neither config.json nor the tokenizer has an {kind}_token_id")
            added = tokenizer.added_tokens_decoder.get(wanted)
            if added is None:
                text = tokenizer.convert_ids_to_tokens(wanted)
                what = "which this tokenizer has not got" if text is None else f"{text!r}, an ordinary token of text"
                raise ValueError(
                    f"{place}: {kind}_token_id is {wanted}, {what}; it must be a special token of the tokenizer"
                )
            tokenizer.add_special_tokens({f"{kind}_token": added.content})
            opened.changes[f"{kind}_token"] = added.content
            found = wanted
        settled[f"{kind}_token_id"] = ids[f"{kind}_token_id"] if found is None else found
    return settled


def add_mask(opened: PublicTokenizer, place: str) -> int:
    """Add the token `<|mask|>` as the tokenizer's mask; returns its id. Raises ValueError if there is one."""
    tokenizer = opened.tokenizer
    there = tokenizer.get_vocab().get(MASK) if tokenizer.mask_token_id is None else tokenizer.mask_token_id
    if there is not None:
        raise ValueError(
            f"{place}: the tokenizer has a token {tokenizer.convert_ids_to_tokens(there)!r} already; "
            f"name it with --mask_token_id {there} instead of adding one"
        )
    tokenizer.add_special_tokens({"mask_token": MASK})
    opened.grown = True
    return int(tokenizer.mask_token_id)
