"""mdlm: train, fine-tune, sample and evaluate masked-diffusion language models.

Names are loaded on first use, so `import mdlm` costs no more than `import transformers`. It also lets the Auto classes
of `transformers` find our checkpoints (`auto.py`). Read next: `objective.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

from mdlm import auto as _auto

__version__ = "0.1.0"

_HOME = {
    "MDLMConfig": "mdlm.config",
    "MDLMForMaskedLM": "mdlm.modeling",
    "MDLMModel": "mdlm.modeling",
    "Objective": "mdlm.objective",
    "ModelDenoiser": "mdlm.denoiser",
    "builtin": "mdlm.shipped",
    "generate": "mdlm.samplers.generate",
    "stream": "mdlm.samplers.generate",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'mdlm' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted(__all__)


_auto.register()
