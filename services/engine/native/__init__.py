"""A forward of Llama-like models on one CPU core, compiled: `kernel.c` and what feeds it."""
