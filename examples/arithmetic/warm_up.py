"""Makes the demo's small Qwen3-shaped model and teaches it a little addition by supervised steps.

    torchrun --nproc-per-node 2 examples/arithmetic/warm_up.py DATA_DIR TOKENIZER_DIR OUT_DIR

The steps go through the same training path as GRPO (moebius.train_step), with the likelihood of the worked responses as
the loss. OUT_DIR is then an ordinary Hugging Face folder.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebius import runtime
from moebius.actor import Actor, build_actor
from moebius.batches import Sample
from moebius.losses import sft_loss
from moebius.metrics import progress
from moebius.models.families import read_shape
from moebius.models.hf_io import save_hf
from moebius.tokenizer import load_tokenizer, tokenizer_files
from moebius.train_step import Batching, train_step
from parallel_state.groups import make_parallel_state
from parallel_state.layout import ParallelLayout

HEAD_DIM = 32  # the smallest that vLLM's attention takes
KV_HEADS = 2


def write_config(folder: Path, tokenizer: Any, num_layers: int = 3, hidden_size: int = 128) -> None:
    """The config.json of a Qwen3-shaped model for this tokenizer; 0.45 M parameters by default.

    Raises ValueError when the attention heads, one for each 32 of the hidden size, do not share 2 key-value heads.
    """
    heads, rest = divmod(hidden_size, HEAD_DIM)
    if rest or heads < 1 or heads % KV_HEADS:
        raise ValueError(f"--hidden-size {hidden_size}: it must be a multiple of {HEAD_DIM * KV_HEADS}")
    if num_layers < 1:
        raise ValueError(f"--num-layers {num_layers}: it must be at least 1")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def read_samples(path: Path, tokenizer: Any) -> list[Sample]:
    """Worked problems as prompt and response ids, the end token included."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Sample(
            tokenizer(row["prompt"])["input_ids"], [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        )
        for row in rows
    ]


def negative_log_likelihood(
    log_probs: Tensor, _entropy: Tensor, fields: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of supervised steps, summed over response tokens."""
    return sft_loss(log_probs, fields["loss_mask"]), {}


def teach(actor: Actor, samples: list[Sample], steps: int, batch_size: int, seed: int) -> float:
    """Supervised steps over random batches, each data-parallel rank taking its share; returns the last loss."""
    rng = np.random.default_rng(seed)
    at, size = actor.state.at.dp, actor.state.layout.data_parallel_size
    batching = Batching(micro_batch_size=None, max_tokens_per_gpu=4096)
    loss = float("nan")
    for _ in progress(range(steps), steps, "warm-up"):
        rows = rng.choice(len(samples), batch_size, replace=False)
        loss = train_step(actor, [samples[i] for i in rows[at::size]], negative_log_likelihood, batching)["loss"]
    return loss


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Warm up the demo's model.")
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("tokenizer_dir", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--bf16", action="store_true", help="bf16 weights with fp32 master weights, instead of fp32")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=128, help="problems of one step over all processes")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Make the model, teach it and write it; rank 0 says how it went."""
    options = read_options()
    device = runtime.start()
    state = make_parallel_state(ParallelLayout(torch.distributed.get_world_size()))
    tokenizer = load_tokenizer(str(options.tokenizer_dir))
    samples = read_samples(options.data_dir / "warmup.jsonl", tokenizer)
    if not 1 <= options.batch_size <= len(samples):
        raise ValueError(
            f"--batch-size {options.batch_size}: it must lie in 1 to {len(samples)}, the problems there are"
        )
    shape_dir = options.out_dir.with_name(options.out_dir.name + ".shape")
    if state.rank == 0:
        write_config(shape_dir, tokenizer, options.num_layers, options.hidden_size)
    torch.distributed.barrier()
    actor = build_actor(
        read_shape(shape_dir),
        state,
        None,
        torch.bfloat16 if options.bf16 else torch.float32,
        device,
        lr=options.lr,
        lr_decay_iters=options.steps,
        lr_warmup_iters=50,
        lr_decay_style="cosine",
        seed=options.seed,
        # At the usual 0.02 a model this small takes hundreds of steps longer to find the digits that belong together.
        init_method_std=0.08,
    )
    loss = teach(actor, samples, options.steps, options.batch_size, options.seed)
    save_hf(actor.model, actor.shape, state, shape_dir, options.out_dir, tokenizer_files(options.tokenizer_dir))
    if state.rank == 0:
        shutil.rmtree(shape_dir)
        print(f"warm-up: {options.steps} supervised steps, loss {loss:.3f} nats a token, model in {options.out_dir}")
    runtime.stop()


if __name__ == "__main__":
    runtime.run(main)
