"""gammaray, transformers and llama.cpp on the same weights and prompts; see __main__.py."""
