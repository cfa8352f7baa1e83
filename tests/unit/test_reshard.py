"""Plans executed on torch tensors of one process: views, local copies, and the certificate."""

import pytest
import torch

from hybrid_engine.reshard import Resharder, aliasing_certificate, buckets, engine_tensors
from hybrid_engine.reshard_plan import Kind, ParameterMeta, plan_reshard
from moebius.models.blocks import fuse
from parallel_state.layout import ParallelLayout


def test_every_byte_is_aliased_when_tp_widens() -> None:
    kinds = {
        "embed": Kind(0, (192,), 48, 0, 1, 4),
        "o": Kind(1, (128,), 48, 0, 1, 4),
        "norm": Kind(None, (48,), None, 0, 1, 4),
        "qkv": Kind(0, (128, 32, 32), 48, 16, 2, 4),
    }
    metas = [ParameterMeta(name, name, kind) for name, kind in kinds.items()]
    plans = [plan_reshard(metas, ParallelLayout(2, 1, 1, 2), rank) for rank in range(2)]
    for plan in plans:
        assert not plan.buffers and not plan.sends
    assert sum(plan.bytes_aliased for plan in plans) == 4 * (192 * 48 * 2 + 48 * 128 + 2 * 48)


def test_fewer_kv_heads_than_rollout_ranks_take_one_small_copy() -> None:
    """2 KV heads, 4 rollout ranks in one training shard: each KV head's k and v reach two ranks.

    The second of two ranks finds its queries right before k and v: a view.
    """
    heads, d = 8, 4
    q, k, v = (
        torch.arange(rows)[:, None] * 1.0 + offset for rows, offset in ((heads * d, 0), (2 * d, 1000), (2 * d, 2000))
    )
    trainer = {"q": fuse([q, k, v], 2)}
    metas = [ParameterMeta("qkv", "q", Kind(0, (heads * d, 2 * d, 2 * d), 1, d, 2, 4))]
    for rank in range(4):
        plan = plan_reshard(metas, ParallelLayout(4, 1, 1, 4), rank)
        engine = engine_tensors(plan, trainer)
        resharder = Resharder(plan, metas, 1 << 20)
        resharder.run(trainer, engine)
        head = rank // 2
        wanted = torch.cat([q[rank * 8 : rank * 8 + 8], k[head * d : (head + 1) * d], v[head * d : (head + 1) * d]])
        assert torch.equal(engine["qkv"], wanted)
        assert (plan.bytes_copied, plan.bytes_aliased) == ((64, 0) if rank % 2 == 0 else (0, 64))
        assert plan.bytes_received == 0
        before = engine["qkv"].data_ptr()
        trainer["q"] += 1
        resharder.run(trainer, engine)
        assert torch.equal(engine["qkv"], wanted + 1) and engine["qkv"].data_ptr() == before
        trainer["q"] -= 1


def test_certificate_notices_a_parameter_that_left() -> None:
    trainer = {"w": torch.randn(8, 6)}
    metas = [ParameterMeta("w", "w", Kind(1, (6,), 8, 0, 1, 4))]
    plan = plan_reshard(metas, ParallelLayout(2, 1, 1, 2), 1)
    engine = engine_tensors(plan, trainer)
    row = aliasing_certificate(plan, trainer, engine)[0]
    assert (row["kind"], row["offset"], row["stride"]) == ("view", 12, [6, 1])
    with pytest.raises(RuntimeError, match="w no longer lies"):
        aliasing_certificate(plan, trainer, {"w": engine["w"].clone()})


def test_buckets_are_cut_by_bytes() -> None:
    rows = {"a": 4, "b": 4, "c": 9, "d": 1}
    metas = [ParameterMeta(name, name, Kind(0, (n,), 2, 0, 1, 4)) for name, n in rows.items()]
    assert buckets(metas, 64) == [{"a", "b"}, {"c"}, {"d"}]
