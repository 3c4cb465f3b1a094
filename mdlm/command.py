"""How a function becomes a command: jsonargparse parses its signature, ValueErrors and Ctrl-C end as one line."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def run_command(
    function: Callable[..., Any],
    argv: list[str] | None,
    prog: str,
    report: Callable[[Any], list[str]] | None = None,
) -> int:
    """Parse `argv` for `function`, call it, print `report(result)`: the first line to stdout, the others to stderr.

    Returns the exit status: 0, 1 where the function raised ValueError or an OSError about the user's files, or 130
    where it was interrupted; then a function with an argument `resume` has kept what it wrote. Arguments that cannot be
    parsed exit with status 2, as command lines do.
    """
    from jsonargparse import auto_cli

    try:
        result = auto_cli(function, args=sys.argv[1:] if argv is None else argv, prog=prog)
    except (ValueError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = "; what is on disk is kept, --resume true goes on with it"
        resumable = "resume" in inspect.signature(function).parameters
        print(f"{prog}: interrupted{kept if resumable else ''}", file=sys.stderr)
        return 130
    for number, line in enumerate(report(result) if report else []):
        print(line, file=sys.stderr if number else sys.stdout, flush=True)
    return 0
