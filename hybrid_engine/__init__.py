"""One set of weights, two layouts: vLLM generates from views of the trainer's tensors."""
