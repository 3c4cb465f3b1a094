"""mdlm.eval: likelihood, sources with exact probabilities, speed, and pictures."""
