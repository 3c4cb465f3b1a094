"""mdlm.samplers: decoding strategies for masked-diffusion language models. Start with `generate.py`."""

from mdlm.samplers.canvas import Canvas, Generation
from mdlm.samplers.constrain import Regex
from mdlm.samplers.generate import generate, stream
from mdlm.samplers.presets import PRESETS
from mdlm.samplers.strategy import Strategy

__all__ = ["PRESETS", "Canvas", "Generation", "Regex", "Strategy", "generate", "stream"]
