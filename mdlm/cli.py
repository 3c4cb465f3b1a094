"""The `mdlm` command: picks the sub-command, whose own module parses the rest. Nothing heavy is imported for `--help`.

Read next: the module named in `COMMANDS`.
"""

from __future__ import annotations

import difflib
import importlib
import sys

from mdlm import __version__

COMMANDS = {
    "train": (
        "mdlm.training.__main__",
        "train or fine-tune a model; the same as `accelerate launch -m mdlm.training`",
    ),
    "sample": ("mdlm.samplers.__main__", "generate text from a checkpoint with any unmasking strategy"),
    "eval": ("mdlm.eval.__main__", "validation NELBO, bits per byte and speed of a checkpoint, as JSON lines"),
    "convert": ("mdlm.convert", "turn public checkpoints (LLaDA, Dream, SDAR, ...; causal models) into ours, and back"),
    "merge": ("mdlm.adapter", "add a LoRA adapter to its base and write the plain model"),
    "plan": ("mdlm.training.plan", "predict time, utilisation and bytes of training on a slow network"),
    "demo": ("mdlm.training.demo", "train a small model on the built-in corpus, evaluate it, watch it write"),
}


def usage() -> str:
    """The text of `mdlm --help`."""
    rows = "\n".join(f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items())
    more = f"mdlm COMMAND --help lists the options of a command. Version {__version__}."
    return f"usage: mdlm COMMAND [options]\n\n{rows}\n\n{more}"


def main(argv: list[str] | None = None) -> int:
    """Run `mdlm ARGV`; returns the exit status (2: no such command)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"mdlm {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"mdlm: no command {name!r}; there are: {', '.join(COMMANDS)}.{hint}", file=sys.stderr)
        return 2
    status = importlib.import_module(COMMANDS[name][0]).main(rest)
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main())
