"""Between the `config.json` of a public format and an `MDLMConfig`, by the tables of `formats.py`.

Reading lists everything that is wrong at once: unknown keys, missing keys, features our model has not got. Writing
starts from a whole public configuration, changes only the keys whose option differs from what that configuration
said, and reads the result again: a format that cannot say what the model is refuses it, and a round trip gives back
every key as it was. Read next: `public_weights.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from mdlm.config import ROPE_TYPES, MDLMConfig
from mdlm.formats import BY_MODEL_TYPE, COMMON_INERT, FORMATS, REQUIRED, UNHOSTED, Format, Key, Only

_ROTARY_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_ROTARY_SETTINGS = {
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings", "truncate",
}  # fmt: skip
SAYABLE = ("mask_token_id", "shift_logits", "block_size")
"""Options that the user says where a configuration does not."""
_OF_THE_TOKENIZER = {"num_tokens", "eos_token_id", "pad_token_id", "bos_token_id"}


def option_names() -> list[str]:
    """The options of `MDLMConfig`."""
    return [name for name in inspect.signature(MDLMConfig.__init__).parameters if name not in ("self", "kwargs")]


def options_of(config: MDLMConfig) -> dict[str, Any]:
    """What `config` is made of; `MDLMConfig(**options_of(config)) == config`."""
    return {name: copy.deepcopy(getattr(config, name)) for name in option_names()}


def format_of(public: Mapping[str, Any], place: str) -> Format:
    """The format of a public configuration, by its `model_type`. Raises ValueError for one not known or not hosted."""
    model_type = public.get("model_type")
    experts = [key for key in ("num_experts", "n_routed_experts", "num_local_experts") if public.get(key)]
    reason = UNHOSTED.get(str(model_type))
    if experts:
        reason = f"a mixture of experts ({experts[0]}={public[experts[0]]})"
    if model_type == "mdlm" and "cond_dim" in public:  # the authors' own checkpoints bear our name
        reason = UNHOSTED["mdlm_dit"]
    if reason is not None:
        use = "with its own code use mdlm.load.load_remote(path, trust_remote_code=True)"
        if "cond_dim" in public:
            use = "use mdlm.dit.load_dit(path, mask_token_id=...)"
        raise ValueError(
            f"{place}: model_type {model_type!r} is {reason}, which this package's transformer cannot host; to sample "
            f"it {use}"
        )
    if model_type not in BY_MODEL_TYPE:
        known = ", ".join(f"{entry.model_type} ({entry.about})" for entry in FORMATS.values())
        raise ValueError(f"{place}: model_type {model_type!r} is not a format known here; known: mdlm, {known}")
    return FORMATS[BY_MODEL_TYPE[model_type]]


def read_config(
    fmt: Format, public: Mapping[str, Any], said: Mapping[str, Any] | None = None, place: str = "config.json"
) -> MDLMConfig:
    """The `MDLMConfig` that a public configuration describes.

    Args:
        fmt: its format.
        public: the content of its `config.json`.
        said: what the user said about options the configuration may leave open (`mask_token_id`, `shift_logits`,
            `block_size`). It may not contradict the configuration.
        place: where it stands, for messages.

    Raises:
        ValueError: lists unknown keys, missing keys, and keys whose value our model cannot follow.
    """
    said = dict(said or {})
    options, problems = _read_keys(fmt, public, said)
    if not problems:
        problems = _take_said(fmt, options, said)
    if problems:
        raise ValueError(f"{place} ({fmt.about}):\n  " + "\n  ".join(problems))
    try:
        return MDLMConfig(**options)
    except ValueError as error:
        raise ValueError(f"{place} ({fmt.about}): {error}") from error


def unsaid_keys(fmt: Format, public: Mapping[str, Any]) -> dict[str, str]:
    """Options the user may say because this configuration leaves them out -> the key that would say them."""
    return {
        meaning.option: name
        for name, meaning in fmt.keys.items()
        if isinstance(meaning, Key) and meaning.option in SAYABLE and public.get(name) is None
    }


def _read_keys(fmt: Format, public: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    options = {**fmt.said, **fmt.fixed}
    problems = []
    known = {*fmt.keys, *fmt.inert, *COMMON_INERT, *(_ROTARY_KEYS if fmt.rotary else ())}
    for name in sorted(set(public) - known):
        problems.append(f"{name}={public[name]!r} is not a key of this format known here; it may change the model")
    for name, meaning in fmt.keys.items():
        if isinstance(meaning, Only):
            value = public.get(name, meaning.absent)
            parts = value if isinstance(value, list) else [value]
            if not (value is None and meaning.absent is None) and any(part not in meaning.allowed for part in parts):
                allowed = " or ".join(repr(a) for a in meaning.allowed)
                where = "" if name in public else " (the format's value where the key is missing)"
                problems.append(f"{name}={value!r}{where}: our model can only host {name}={allowed}")
            continue
        value = public.get(name, meaning.absent)
        if name in public and value is None:
            value = meaning.null
        if value is REQUIRED and meaning.option in SAYABLE and said.get(meaning.option) is not None:
            value = said[meaning.option]
        if value is REQUIRED:
            hint = f"; say it with --{meaning.option}" if meaning.option in SAYABLE else ""
            problems.append(f"{name} is {'null' if name in public else 'missing'}{hint}")
        else:
            options[meaning.option] = value
    if isinstance(options.get("eos_token_id"), list):  # several ends: the first; the tokenizer's wins later
        options["eos_token_id"] = options["eos_token_id"][0] if options["eos_token_id"] else None
    if options.get("vocab_size", 0) is None:
        options["vocab_size"] = options.get("num_tokens")
    if fmt.rotary:
        rotary, wrong = _read_rotary(public)
        options["rope_parameters"] = rotary
        problems += wrong
    return options, problems


def _read_rotary(public: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`rope_theta` with `rope_scaling` (transformers 4) or `rope_parameters` (5) as the latter."""
    key = "rope_parameters" if public.get("rope_parameters") is not None else "rope_scaling"
    given = public.get(key) or {}
    if not isinstance(given, Mapping):
        return {}, [f"{key}={given!r}: a table of settings is expected"]
    unknown = sorted(set(given) - _ROTARY_SETTINGS)
    problems = [f"{key}: setting {name}={given[name]!r} is not one our model can host" for name in unknown]
    rotary = {name: value for name, value in given.items() if name not in ("type", "rope_type")}
    rotary["rope_type"] = given.get("rope_type", given.get("type", "default"))
    if "rope_theta" not in rotary:
        rotary["rope_theta"] = public.get("rope_theta", 10000.0)
    elif public.get("rope_theta", rotary["rope_theta"]) != rotary["rope_theta"]:
        problems.append(f"rope_theta={public['rope_theta']} contradicts {key}")
    if rotary["rope_type"] not in ROPE_TYPES:
        problems.append(
            f"{key}: rope_type {rotary['rope_type']!r} is not one our model can host ({', '.join(ROPE_TYPES)})"
        )
    return rotary, problems


def _take_said(fmt: Format, options: dict[str, Any], said: dict[str, Any]) -> list[str]:
    problems = []
    for name, value in said.items():
        if value is None:
            continue
        if name in fmt.said or (options.get(name) is None and name not in fmt.fixed):
            options[name] = value
        elif options[name] != value:
            problems.append(f"{name}={value} was asked for, but the checkpoint says {name}={options[name]}")
    return problems


def write_config(
    fmt: Format, config: MDLMConfig, base: Mapping[str, Any], before: MDLMConfig | None = None
) -> dict[str, Any]:
    """The public configuration of a model: `base` with the keys changed whose option is another now.

    Args:
        fmt: format of `base`.
        config: the model's.
        base: a whole public configuration, of the checkpoint the model came from or `fmt.template`.
        before: what `base` was read as; None: read it.

    Raises:
        ValueError: the format cannot say what the model is; names the options.
    """
    if before is None:
        before = read_config(
            fmt, base, {"block_size": config.block_size} if "block_size" in unsaid_keys(fmt, base) else {}
        )
    public = copy.deepcopy(dict(base))
    changed = {name for name in option_names() if getattr(config, name) != getattr(before, name)}
    if "vocab_size" not in changed:  # how many rows have a token is the tokenizer's affair
        changed.discard("num_tokens")
    for name, meaning in fmt.keys.items():
        if isinstance(meaning, Key) and meaning.option in changed:
            public[name] = getattr(config, meaning.option)
    if fmt.rotary and "rope_parameters" in changed:
        public.update(_write_rotary(config, public))
    if "layer_types" in public and isinstance(public["layer_types"], list):
        public["layer_types"] = ["full_attention"] * config.num_hidden_layers
    left_open = {"mask_token_id", *fmt.said, *unsaid_keys(fmt, public)}
    again = read_config(fmt, public, {name: getattr(config, name) for name in left_open})
    lost = {n: getattr(config, n) for n in option_names() if getattr(again, n) != getattr(config, n)}
    lost = {name: value for name, value in lost.items() if name not in _OF_THE_TOKENIZER}
    if lost:
        told = ", ".join(f"{name}={value!r}" for name, value in lost.items())
        raise ValueError(f"the format {fmt.model_type} ({fmt.about}) has no place for {told} of this model")
    return public


def _write_rotary(config: MDLMConfig, public: Mapping[str, Any]) -> dict[str, Any]:
    rotary = dict(config.rope_parameters)
    if public.get("rope_parameters") is not None:
        return {"rope_parameters": rotary}
    theta = rotary.pop("rope_theta")
    return {"rope_theta": theta, "rope_scaling": None if rotary["rope_type"] == "default" else rotary}
