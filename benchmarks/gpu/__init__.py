"""vLLM and gammaray on one GPU, within minutes and without a network."""
