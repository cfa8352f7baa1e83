"""What config.json files of the model families mean, and what in them is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import LLAMA_3_ROPE, NAMES, make_hf_model

from moebius.models.families import num_parameters, read_shape, weights
from moebius.models.hf_reader import HFReader, check_names
from moebius.models.rope import inverse_frequencies
from moebius.models.shape import RopeScaling

LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "head_dim": 128,
    "attention_bias": False,
    "use_sliding_window": False,
}
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "dropout": 0.1,
    "layerdrop": 0.0,
    "prefix": "</s>",
}


def sizes(hidden: int, layers: int, heads: int, groups: int, ffn: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def opt(hidden: int, layers: int, heads: int, **more: object) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden,
        "do_layer_norm_before": True,
        **more,
    }


# published config.json files, in the fields that matter here
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | sizes(1024, 28, 16, 8, 3072, 151936, True),
    "Qwen3-4B": _QWEN3 | sizes(2560, 36, 32, 8, 9728, 151936, True),
    "Qwen3-8B": _QWEN3 | sizes(4096, 36, 32, 8, 12288, 151936, False),
    "Qwen3-32B": _QWEN3 | sizes(5120, 64, 64, 8, 25600, 151936, False),
    "Qwen2.5-0.5B": _QWEN2 | sizes(896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-7B": _QWEN2 | sizes(3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-72B": _QWEN2 | sizes(8192, 80, 64, 8, 29568, 152064, False),
    "Llama-2-7b": _LLAMA | sizes(4096, 32, 32, 32, 11008, 32000, False) | {"pretraining_tp": 1},
    "Llama-3.1-8B": _LLAMA | sizes(4096, 32, 32, 8, 14336, 128256, False) | {"rope_scaling": LLAMA_31},
    "Llama-3.2-1B": _LLAMA
    | sizes(2048, 16, 32, 8, 8192, 128256, True)
    | {"rope_scaling": {**LLAMA_31, "factor": 32.0}},
    "Llama-3.1-405B": _LLAMA | sizes(16384, 126, 128, 8, 53248, 128256, False) | {"rope_scaling": LLAMA_31},
    "Mistral-7B-v0.3": _MISTRAL | sizes(4096, 32, 32, 8, 14336, 32768, False),
    "Mistral-Nemo": _MISTRAL | sizes(5120, 40, 32, 8, 14336, 131072, False) | {"head_dim": 128},
    "opt-125m": _OPT | opt(768, 12, 12),
    "opt-350m": _OPT | opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-6.7b": _OPT | opt(4096, 32, 32),
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_shapes_have_the_parameters_of_hugging_faces_models(tmp_path: Path, name: str) -> None:
    """Names, sizes and number of every parameter, against the model that transformers builds (without memory)."""
    import transformers

    shape = read_shape(write(tmp_path, PUBLISHED[name]))
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = {key: tuple(value.shape) for key, value in model.named_parameters()}
    ours = {
        key: (rows,) if weight.columns is None else (rows, weight.columns)
        for weight in weights(shape)
        for key, rows in zip(weight.hf, weight.rows, strict=True)
    }
    assert ours == theirs
    assert num_parameters(shape) == sum(value.numel() for value in model.parameters())


def test_llama_3_frequencies_are_those_of_hugging_face(tmp_path: Path) -> None:
    import transformers

    config = {**PUBLISHED["Llama-3.1-8B"], "rope_scaling": LLAMA_31, "rope_theta": 5e5}
    shape = read_shape(write(tmp_path, config))
    assert shape.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192) and shape.rope_theta == 5e5
    auto: Any = transformers.AutoConfig
    rotary: Any = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(auto.from_pretrained(tmp_path))
    found = inverse_frequencies(shape)
    assert ((found - rotary.inv_freq).abs() / rotary.inv_freq).max() <= 1e-6
    plain = 1 / 5e5 ** (torch.arange(0, 128, 2) / 128)
    share = found / plain
    assert share[0] == 1 and abs(share[-1] * 8 - 1) < 1e-6 and ((share > 0.126) & (share < 0.999)).any()


def test_defaults_that_are_left_out_are_the_familys(tmp_path: Path) -> None:
    """Qwen3 without head_dim means 128, not hidden / heads; Mistral without sliding_window means one of 4096."""
    config = {key: value for key, value in PUBLISHED["Qwen3-0.6B"].items() if key != "head_dim"}
    assert read_shape(write(tmp_path, config)).head_dim == 128
    config = {key: value for key, value in PUBLISHED["Mistral-7B-v0.3"].items() if key != "sliding_window"}
    with pytest.raises(ValueError, match=r"--ref-load .*sliding_window is 4096"):
        read_shape(write(tmp_path, config), "--ref-load")


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "window of Mistral": ("Mistral-7B-v0.3", {"sliding_window": 4096}, "sliding_window is 4096"),
    "window of Qwen2": ("Qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window is True"),
    "windows by layer": ("Qwen2.5-0.5B", {"layer_types": ["sliding_attention"] * 24}, "layer_types"),
    "yarn": ("Qwen2.5-7B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    "linear": ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    "half of llama3": ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "partial rotary": ("Llama-3.1-8B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor to 0.5"),
    "quantised": ("Qwen3-8B", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "bias of Llama": ("Llama-2-7b", {"attention_bias": True}, "attention_bias"),
    "gelu": ("opt-125m", {"activation_function": "gelu"}, "activation_function is 'gelu'"),
    "OPT without bias": ("opt-125m", {"enable_bias": False}, "enable_bias"),
    "an unknown field": ("Qwen3-8B", {"residual_multiplier": 0.5}, "residual_multiplier to 0.5"),
    "a text for a number": ("Qwen3-8B", {"hidden_size": "4096"}, "hidden_size"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_field_that_is_not_understood_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model, changes, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as error:
        read_shape(write(tmp_path, {**PUBLISHED[model], **changes}))
    assert f"--hf-checkpoint {tmp_path}" in str(error.value)


@pytest.mark.parametrize("family", list(NAMES))
@pytest.mark.parametrize("form", ["safetensors", "bin", "bin in parts", "without head"])
def test_checkpoints_are_read_in_every_form(tmp_path: Path, family: str, form: str) -> None:
    """safetensors, pytorch_model.bin (in parts too), and a checkpoint of the model without its head."""
    model = make_hf_model(family, tmp_path / "hf", tied=True, layers=2, kv_heads=4)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    folder = tmp_path / "hf"
    if form != "safetensors":
        (folder / "model.safetensors").unlink()
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif form == "without head":
        torch.save({name.removeprefix("model."): value for name, value in state.items()}, folder / "pytorch_model.bin")
    elif form == "bin in parts":
        names = list(state)
        halves = {"a.bin": names[:9], "b.bin": names[9:]}
        for file, part in halves.items():
            torch.save({name: state[name] for name in part}, folder / file)
        index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    reader, shape = HFReader(folder), read_shape(folder)
    check_names(reader, shape)
    for name, value in state.items():
        rows, columns = (0, len(value)), None if value.dim() == 1 else (1, value.shape[1])
        assert torch.equal(reader.read(name, rows, columns), value if columns is None else value[:, 1:]), name


CALLED: list[str] = []


class Code:
    """Unpickled without care, it calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CALLED.append, ("called",)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    make_hf_model("opt", tmp_path, tied=True, layers=2)
    (tmp_path / "model.safetensors").unlink()
    for content in (Code(), 3.0):
        torch.save({"model.x": content}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"--hf-checkpoint .*pytorch_model.bin cannot be read"):
            HFReader(tmp_path)
    assert not CALLED


def test_test_models_turn_on_all_sides_of_the_scaling(tmp_path: Path) -> None:
    """The tiny Llama 3.1 of the parity tests has kept, interpolated and slowed pairs."""
    make_hf_model("llama-3.1", tmp_path, layers=2)
    shape = read_shape(tmp_path)
    plain = 1 / LLAMA_3_ROPE["rope_theta"] ** (torch.arange(0, 32, 2) / 32)  # pyright: ignore[reportOperatorIssue]
    share = inverse_frequencies(shape) / plain
    assert share.max() == 1 and share.min() < 0.126 and ((share > 0.2) & (share < 0.9)).any()
