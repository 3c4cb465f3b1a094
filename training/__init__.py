"""mdlm.training: the training loop, `python -m mdlm.training --config recipe.yaml`."""
