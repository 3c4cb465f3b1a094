"""Makes `AutoConfig`, `AutoModel` and `AutoModelForMaskedLM` know the model type `mdlm` after a plain `import mdlm`.

Registering the usual way would import torch and the model, seconds of work that `mdlm --help` does not need. So we
wait: when `transformers` loads its own tables, the configuration is registered and the two model classes are entered by
name, the way `transformers` enters its own; they are imported when somebody first asks for one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"
_MODEL_CLASSES = {"MODEL_MAPPING": "MDLMModel", "MODEL_FOR_MASKED_LM_MAPPING": "MDLMForMaskedLM"}


def register() -> None:
    """Register now with what `transformers` has loaded, and later with the rest. A second call changes nothing."""
    if any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        return
    actions = {_CONFIGS: _register_config, _MODELS: _register_models}
    sys.meta_path.insert(0, _AfterImport(actions))
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])


def _register_config(configuration_auto: ModuleType) -> None:
    from mdlm.config import MDLMConfig

    configuration_auto.AutoConfig.register(MDLMConfig.model_type, MDLMConfig, exist_ok=True)


def _register_models(modeling_auto: ModuleType) -> None:
    for mapping_name, class_name in _MODEL_CLASSES.items():
        mapping = getattr(modeling_auto, mapping_name)
        mapping._reverse_config_mapping["MDLMConfig"] = "mdlm"
        mapping._model_mapping["mdlm"] = class_name
        mapping._modules["mdlm"] = sys.modules["mdlm"]  # which loads its names on first use


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action right after a module of the given name has been imported by whoever imports it."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                assert spec.loader is not None, f"{fullname} is a module, not a namespace"
                spec.loader = _LoadThen(spec.loader, self.actions[fullname])
                return spec
        return None


class _LoadThen(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # others see the module as if we had never been here
        self.loader.exec_module(module)
        self.action(module)
