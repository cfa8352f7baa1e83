"""Moebius: RL training scripts for language models on Megatron-core and vLLM, one set of weights."""

__version__ = "0.1.0"
