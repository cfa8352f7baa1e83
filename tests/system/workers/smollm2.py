"""SmolLM2's real weights in trainer, engine and transformers, over training TP1 x DP3 and rollout TP3, in fp32.

    smollm2.py OUT.json MODEL_FOLDER QUESTION ...

Every question is answered twice, greedily and sampled; each rank scores its share of the sampled answers.
"""

import sys
from typing import Any

import torch
from harness import record
from tiny_models import hf_log_probs
from transformers import AutoModelForCausalLM

from hybrid_engine.engine import EngineOptions, HybridEngine, Request
from moebius import runtime
from moebius.actor import build_actor
from moebius.batches import Sample
from moebius.data import PromptOptions, encode_inputs
from moebius.models.binding import engine_parameters
from moebius.models.families import read_shape
from moebius.tokenizer import load_tokenizer, stop_token_ids
from moebius.train_step import Batching, compute_log_probs
from parallel_state.groups import make_parallel_state
from parallel_state.layout import ParallelLayout

CPU = torch.device("cpu")


def largest_gap(log_probs: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(log_probs, others, strict=True))


def main() -> None:
    out, folder, *questions = sys.argv[1:]
    runtime.start(5)
    state = make_parallel_state(ParallelLayout(3, rollout_tensor_model_parallel_size=3))
    shape, tokenizer = read_shape(folder), load_tokenizer(folder)
    actor = build_actor(shape, state, folder, torch.float32, CPU, lr=0.0, lr_decay_iters=1)
    metas, trainer = engine_parameters(actor.model, shape, state)
    options = EngineOptions(max_model_len=192, max_num_seqs=16, kv_cache_bytes=128 << 20)
    engine = HybridEngine(folder, state, metas, trainer, actor.sync_parameters, options, CPU)

    stop = stop_token_ids(tokenizer, folder)
    templated = PromptOptions("question", "answer", 256, apply_chat_template=True)
    prompts = [tuple(ids) for ids, _ in encode_inputs(tokenizer, questions, templated)]
    requests = [
        Request(prompt, seed=i, max_tokens=40, temperature=temperature, stop_token_ids=stop)
        for i, prompt in enumerate(prompts)
        for temperature in (0.0, 1.0)
    ]
    with engine.rollout():
        made = engine.generate(requests)
    sampled = [
        Sample(request.prompt_ids, generation.token_ids, generation.log_probs)
        for request, generation in zip(requests, made, strict=True)
        if request.temperature == 1.0
    ][state.at.dp :: 3]
    mine = compute_log_probs(actor, sampled, Batching(None, 512))
    assert mine is not None
    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    switch = engine.records[-1]
    figures = {
        "greedy": [tokenizer.decode(g.token_ids, skip_special_tokens=True) for g in made[::2]],
        "tokens": sum(len(s.response_ids) for s in sampled),
        "hf_gap": largest_gap(mine, [hf_log_probs(hf, list(s.prompt_ids), list(s.response_ids)) for s in sampled]),
        "engine_gap": largest_gap(mine, [torch.tensor(s.rollout_log_probs) for s in sampled]),
        "views": len(engine.plan.views),
        "bytes": [switch.bytes_moved, switch.bytes_aliased, switch.bytes_copied],
    }
    engine.close()
    record(figures, out)
    runtime.stop()


if __name__ == "__main__":
    main()
