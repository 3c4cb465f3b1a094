"""mdlm.samplers: decoding strategies for masked-diffusion language models."""
