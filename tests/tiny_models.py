"""Small Hugging Face models with random biases and norms, so that a wrong row or a missed norm moves the logits."""

from pathlib import Path
from typing import Any

import torch


def make_hf_model(
    family: str,
    folder: str | Path | None = None,
    *,
    tied: bool = False,
    hidden: int = 48,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 96,
    vocab: int = 151,
    dtype: torch.dtype = torch.float32,
    seed: int = 7,
) -> Any:
    """A transformers model with a weight spread of about 0.2; saved to `folder` where one is given."""
    import transformers

    transformers.logging.set_verbosity_error()
    name = {"qwen3": "Qwen3", "llama": "Llama"}[family]
    config_class: Any = getattr(transformers, f"{name}Config")
    model_class: Any = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
        initializer_range=0.2,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        architectures=[f"{name}ForCausalLM"],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype)
    if folder is not None:
        model.save_pretrained(folder)
    return model


@torch.no_grad()
def hf_log_probs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The reference answer: log-probs of the response tokens, one sequence at a time, no padding."""
    logits = model(torch.tensor([prompt + response])).logits[0].float() / temperature
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(response)[:, None])[:, 0]
