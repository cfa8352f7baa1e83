"""Small Hugging Face models with random biases and norms, so that a wrong row or a missed norm moves the logits."""

from pathlib import Path
from typing import Any

import torch

NAMES = {
    "llama": "Llama",
    "llama-3.1": "Llama",
    "mistral": "Mistral",
    "opt": "OPT",
    "opt-350m": "OPT",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2-kv2": "Qwen2",
    "qwen3-kv2": "Qwen3",
}
# positions of the tests lie on all three sides: pairs that keep their frequency, slow ones, and those between
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OPT_350M = {"do_layer_norm_before": False, "word_embed_proj_dim": 32, "init_std": 0.12}
# where gradients are compared: post-norm makes those of q and k in later layers a small rest of large numbers
TRAINED_LAYERS = {"opt-350m": 2}


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
    """A transformers model with a weight spread of 0.05 to 0.2; saved to `folder` where one is given.

    Families whose head_dim is hidden / heads are wider than `hidden`: vLLM has no attention for narrow heads.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    name = NAMES[family]
    if family.endswith("-kv2"):  # fewer KV heads than TP ranks
        family, kv_heads = family.removesuffix("-kv2"), 2
    config_class: Any = getattr(transformers, f"{name}Config")
    model_class: Any = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
        "tie_word_embeddings": tied,
        "architectures": [f"{name}ForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family.startswith("opt"):
        sizes |= {"ffn_dim": ffn, "init_std": 0.08, "hidden_size": heads * head_dim}
        sizes |= OPT_350M if family == "opt-350m" else {}
    else:
        sizes |= {
            "intermediate_size": ffn,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.2,
            "rope_parameters": LLAMA_3_ROPE if family == "llama-3.1" else {"rope_type": "default", "rope_theta": 1e6},
        }
    if family == "mistral":
        sizes["sliding_window"] = None
    if family == "qwen2":  # its q, k and v rows follow hidden / heads in vLLM
        sizes |= {"hidden_size": heads * head_dim, "initializer_range": 0.1}
        del sizes["head_dim"]
    model = model_class(config_class(**sizes)).eval()
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
