"""A compiled forward of Llama-like models on one CPU core: `kernel.c` and its Python bindings."""
