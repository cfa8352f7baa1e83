"""Reshard plans of random pairs of layouts, executed on numpy arrays: every byte right, once, and none too many."""

import random
import subprocess
import sys
from math import lcm
from typing import Any

import numpy as np
import pytest

from hybrid_engine.reshard_plan import (
    Kind,
    ParameterMeta,
    ReshardPlan,
    Segment,
    engine_segments,
    lower_bound,
    plan_reshard,
    training_segments,
)
from parallel_state.layout import ParallelLayout
from parallel_state.placement import block_size

CASES = 500


def model(layout: ParallelLayout, rng: random.Random, layers: int) -> list[ParameterMeta]:
    """Parameters of a small model: fused qkv with bias, row- and column-parallel weights, norms, a tied embedding."""
    t, g, p = layout.tensor_model_parallel_size, layout.rollout_tp, layout.pipeline_model_parallel_size
    both, k = lcm(t, g), layout.blocks
    kv = rng.choice([n for n in range(t, both + 1, t) if both % n == 0 and (n % g == 0 or g % n == 0)] or [both])
    d, hidden = rng.choice([1, 2]), rng.choice([2, 3])
    heads = lcm(kv, both) * rng.choice([1, 2])
    qkv_blocks, ffn = min(k, kv // t), both * rng.choice([1, 2])
    qkv = (heads * d, kv * d, kv * d)
    kinds: dict[str, Kind] = {
        "norm": Kind(None, (hidden,), None, 0, 1, 2),
        "qkv": Kind(0, qkv, hidden, d, qkv_blocks, 2),
        "qkv_bias": Kind(0, qkv, None, d, qkv_blocks, 2),
        "o": Kind(1, (heads * d,), hidden, 0, 1, 2),
        "gate_up": Kind(0, (ffn, ffn), hidden, 0, k, 2),
        "down": Kind(1, (ffn,), hidden, 0, 1, 2),
    }
    if qkv_blocks < k and k % qkv_blocks:
        kinds["qkv"] = kinds["gate_up"]
        del kinds["qkv_bias"]
    metas = []
    for layer in range(layers):
        stage = (layer * p // layers,)
        metas += [ParameterMeta(f"{layer}.{n}", f"{layer}.{n}", kind, stage) for n, kind in kinds.items()]
    words = Kind(0, (both * rng.choice([1, 3]),), hidden, 0, 1, 2)
    return [ParameterMeta("embed", "embed", words, (0, p - 1) if p > 1 else (0,)), *metas]


def arrays(metas: list[ParameterMeta], rng: np.random.Generator) -> dict[str, list[np.ndarray]]:
    """Canonical parts of every parameter."""
    made = {}
    for meta in metas:
        kind = meta.kind
        shapes = [
            (size,) if kind.other is None else (kind.other, size) if kind.cut == 1 else (size, kind.other)
            for size in kind.parts
        ]
        made[meta.engine] = [rng.standard_normal(shape) for shape in shapes]
    return made


def sharded(kind: Kind, parts: list[np.ndarray], segments: list[Segment]) -> np.ndarray:
    axis = kind.cut or 0
    return np.concatenate(
        [np.take(parts[s.part], range(s.start, s.start + s.length), axis=axis) for s in segments], axis=axis
    )


def executed(
    plan: ReshardPlan, rank: int, training: dict[tuple[int, str], np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Engine tensors of one rank as the plan makes them, and how often each element was written."""
    made, written = {}, {}
    for view in plan.views:
        whole = training[rank, view.meta.trainer]
        axis = view.dim or 0
        made[view.meta.engine] = np.take(whole, range(view.start, view.start + view.length), axis=axis)
    for buffer in plan.buffers:
        axis = buffer.meta.kind.cut or 0
        out, count = np.full(buffer.shape, np.nan), np.zeros(buffer.length, dtype=int)
        moves = [(rank, *piece[1:]) for piece in buffer.copies] + [transfer[1:] for transfer in buffer.receives]
        for source_rank, source, dest, length in moves:
            taken = np.take(training[source_rank, buffer.meta.trainer], range(source, source + length), axis=axis)
            place: list[Any] = [slice(None)] * out.ndim
            place[axis] = slice(dest, dest + length)
            out[tuple(place)] = taken
            count[dest : dest + length] += 1
        made[buffer.meta.engine], written[buffer.meta.engine] = out, count
    return made, written


def channels(moves: list[tuple[Any, ...]]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """(sender, receiver) -> what passes between them, in order."""
    found: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
    for sender, receiver, *rest in moves:
        found.setdefault((sender, receiver), []).append(tuple(rest))
    return found


@pytest.fixture(scope="module")
def layouts() -> list[tuple[ParallelLayout, int]]:
    rng, found = random.Random(5), []
    while len(found) < CASES:
        t, p, g = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 6, 8])
        world = block_size(t, p, g) * rng.choice([1, 1, 2])
        if 2 <= world <= 64:
            node = rng.choice([2, 4, 8])
            found.append((ParallelLayout(world, t, p, g, local_world_size=node), p * rng.choice([1, 2])))
    return found


def test_plans_of_random_pairs_of_layouts(layouts: list[tuple[ParallelLayout, int]]) -> None:
    """Bit-equal to direct sharding, bytes = lower bound, each byte written once, sends match receives."""
    moved = 0
    for case, (layout, layers) in enumerate(layouts):
        metas = model(layout, random.Random(case), layers)
        parts = arrays(metas, np.random.default_rng(case))
        at = [layout.coordinates(rank) for rank in range(layout.world_size)]
        training = {
            (rank, meta.trainer): sharded(
                meta.kind,
                parts[meta.engine],
                training_segments(meta.kind, layout.tensor_model_parallel_size, at[rank].tp),
            )
            for rank in range(layout.world_size)
            for meta in metas
            if at[rank].pp in meta.stages
        }
        sent, received = [], []
        for rank in range(layout.world_size):
            plan = plan_reshard(metas, layout, rank)
            assert plan.bytes_received == lower_bound(metas, layout, rank), (layout, rank)
            made, written = executed(plan, rank, training)
            assert made.keys() == {meta.engine for meta in metas}
            for meta in metas:
                wanted = engine_segments(meta.kind, layout.rollout_tp, at[rank].rollout_tp)
                assert np.array_equal(made[meta.engine], sharded(meta.kind, parts[meta.engine], wanted)), (layout, meta)
            assert all((count == 1).all() for count in written.values())
            sent += [(rank, t.peer, t.meta.engine, *t[2:]) for t in plan.sends]
            received += [(t.peer, rank, t.meta.engine, *t[2:]) for b in plan.buffers for t in b.receives]
            moved += plan.bytes_received
        assert channels(sent) == channels(received), "both ends of a channel must agree on what comes when"
    assert moved > 0


def test_equal_holders_share_the_load(layouts: list[tuple[ParallelLayout, int]]) -> None:
    """Among the holders of one tensor's shard in one node: largest sender minus smallest <= one slice."""
    shared = 0
    for case, (layout, layers) in enumerate(layouts[:200]):
        if layout.local_world_size < layout.world_size:
            continue
        for meta in model(layout, random.Random(case), layers):
            lengths: dict[tuple[int, int], dict[int, int]] = {}
            largest = 0
            for rank in range(layout.block_size):
                at = layout.coordinates(rank)
                if at.pp not in meta.stages:
                    continue
                sends = plan_reshard([meta], layout, rank).sends
                key = (0 if meta.kind.cut is None else at.tp, 0)
                lengths.setdefault(key, {})[rank] = sum(t.length for t in sends)
                largest = max([largest, *(t.length for t in sends)])
            for loads in lengths.values():
                assert max(loads.values()) - min(loads.values()) <= largest, (layout, meta.engine, loads)
                shared += len(loads) > 1 and max(loads.values()) > 0
    assert shared > 20


@pytest.mark.parametrize(
    ("world", "t", "p", "g", "share"),
    [
        (4, 1, 1, 4, 0),
        (8, 2, 1, 4, 0),
        (4, 2, 2, 4, 1 / 8),  # a stage's half of the layers, of which each rank lacks a quarter
        (2, 1, 2, 2, 1 / 4),
        (4, 2, 1, 1, 1 / 2),
        (4, 4, 1, 4, 0),
    ],
)
def test_share_of_the_model_that_each_rank_receives(world: int, t: int, p: int, g: int, share: float) -> None:
    layout = ParallelLayout(world, t, p, g)
    kind = Kind(0, (64,), 4, 0, 1, 2)
    metas = [ParameterMeta(str(stage), str(stage), kind, (stage,)) for stage in range(p)]
    whole = p * 64 * kind.unit_bytes
    for rank in range(world):
        assert plan_reshard(metas, layout, rank).bytes_received == share * whole


def test_case_1_08_layers_have_global_numbers() -> None:
    """case 1.08: with two stages each layer comes from the stage that holds it, none twice, none missing."""
    layout = ParallelLayout(2, 1, 2, 2)
    kind = Kind(None, (6,), None, 0, 1, 4)
    metas = [ParameterMeta(f"layers.{i}.norm", f"layers.{i}.norm", kind, (i // 2,)) for i in range(4)]
    for rank in range(2):
        plan = plan_reshard(metas, layout, rank)
        sources = {view.meta.engine: rank for view in plan.views}
        sources |= {b.meta.engine: b.receives[0].peer for b in plan.buffers}
        stage = {i: next(r for r in range(2) if layout.coordinates(r).pp == i // 2) for i in range(4)}
        assert sources == {f"layers.{i}.norm": stage[i] for i in range(4)}


def test_planning_imports_neither_torch_nor_megatron_nor_vllm() -> None:
    code = "import sys, hybrid_engine.reshard_plan, moebius.models.metas, parallel_state.layout; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "megatron", "vllm", "numpy"} & set(loaded)
