"""`python -m mdlm.training --config recipe.yaml --optim.lr 3e-4`; also `accelerate launch -m mdlm.training ...`.

Exit status: 0 after the last step, and after a stop by SIGTERM or Ctrl-C once the state is saved; 1 for what the user
can put right before the first step, with a message; 3 if training diverged; 4 if another island was lost.
Read next: `loop.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mdlm.training.config import parse_config
from mdlm.training.links import IslandLost
from mdlm.training.loop import TrainingDiverged, start, train_to_end


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say (None: those of the command line); returns the exit status."""
    try:
        run = start(parse_config(argv))
    except (ValueError, FileNotFoundError, IslandLost) as error:
        print(f"mdlm.training: {error}", file=sys.stderr)
        return 1
    try:
        train_to_end(run)
    except TrainingDiverged as error:
        print(f"mdlm.training: {error}", file=sys.stderr)
        return 3
    except IslandLost as error:
        print(f"mdlm.training: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
