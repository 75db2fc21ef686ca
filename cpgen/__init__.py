"""cpgen: readable, context-parallel model packages generated from diffusers transformers."""

__version__ = "0.1.0"
