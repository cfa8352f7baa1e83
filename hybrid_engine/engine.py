"""HybridEngine: a vLLM engine over the trainer's own weights, awake only inside `with engine.rollout()`."""

import gc
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from hybrid_engine import vllm_adapter as vllm
from hybrid_engine.host_state import host_state_kept
from hybrid_engine.reshard import Resharder, aliasing_certificate, engine_tensors
from hybrid_engine.reshard_plan import ParameterMeta, plan_reshard
from hybrid_engine.verify import verify_engine
from parallel_state.groups import ParallelState


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine. `kv_cache_bytes` None takes a share of what is free when the engine is built."""

    max_model_len: int
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    enforce_eager: bool = False
    seed: int = 0
    reshard_bucket_bytes: int = 512 << 20
    verify_first_switch: bool = True


@dataclass(frozen=True)
class Request:
    """One sequence to generate. Every field that shapes sampling is here: nothing comes from the model's folder."""

    prompt_ids: Sequence[int]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Generation:
    """What the engine made of one request.

    Attributes:
        token_ids: as sampled, the end token included.
        log_probs: of each sampled token under the distribution that it was sampled from (after temperature).
        finished: False where `max_tokens` cut it off.
        prompt_tokens_computed: prompt tokens that were not found in the prefix cache.
    """

    token_ids: list[int]
    log_probs: list[float]
    finished: bool
    prompt_tokens_computed: int


@dataclass
class SwitchRecord:
    """One wake-up and the sleep after it: seconds, bytes of weights, and device memory in use (bytes) afterwards.

    Every byte of vLLM's live parameters is aliased (a view of the trainer's memory), copied (from this rank's own
    training shard) or moved (received from another rank).
    """

    wake_seconds: float = 0.0
    sleep_seconds: float = 0.0
    bytes_moved: int = 0
    bytes_aliased: int = 0
    bytes_copied: int = 0
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.wake_seconds + self.sleep_seconds


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: of the whole device on a GPU (a sleeping cache does not count), of this process on a CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    import psutil

    return psutil.Process().memory_info().rss


class _LateBar(tqdm):
    """vLLM's progress bar, for generations that take longer than 2 seconds; twice a minute in a log file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        slow = 0.1 if sys.stderr.isatty() else 30.0
        super().__init__(*args, leave=False, delay=2, mininterval=slow, **kwargs)

    def refresh(self, *args: Any, **kwargs: Any) -> Any:
        # tqdm's own refreshes name their locks; vLLM's by hand would show a bar that `close` does not know of
        return super().refresh(*args, **kwargs) if kwargs else None


def _kv_cache_bytes(wanted: int | None, device: torch.device) -> tuple[int, float]:
    """(bytes of KV cache, share of device memory to declare). Collective: ranks agree on the smallest."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        room = int(free * 0.75)
        # vLLM compares this share with what is free even when the cache's size is given
        share = max(0.01, 0.9 * free / total)
    else:
        import psutil

        room, share = min(1 << 30, psutil.virtual_memory().available // (8 * dist.get_world_size())), 0.5
    agreed = torch.tensor([wanted or room, int(share * 1000)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed[0]), int(agreed[1]) / 1000


class HybridEngine:
    """The rollout side of the program. Build it after DDP and optimizer: they place the weights for good.

    Building and `rollout()` are collective over the world; `generate` is collective over one rollout group, whose
    ranks pass the same requests in the same order.

    Args:
        model_folder: Hugging Face folder, read for its config.json only.
        parameters: the engine's parameters as metadata (see ParameterMeta).
        trainer: the trainer's parameters by trainer name.
        sync_parameters: makes the trainer's parameters current; called before each rollout.
    """

    def __init__(
        self,
        model_folder: str | Path,
        state: ParallelState,
        parameters: Sequence[ParameterMeta],
        trainer: Mapping[str, Tensor],
        sync_parameters: Callable[[], None],
        options: EngineOptions,
        device: torch.device,
    ) -> None:
        self.device = device
        self.plan = plan_reshard(parameters, state.layout, state.rank)
        self._resharder = Resharder(self.plan, parameters, options.reshard_bucket_bytes)
        self.records: list[SwitchRecord] = []
        self._verify_next = options.verify_first_switch
        self._trainer = trainer
        self._sync = sync_parameters
        self._parameters = parameters
        self._state = state
        self._tensors = engine_tensors(self.plan, trainer)
        self._started_as = aliasing_certificate(self.plan, trainer, self._tensors)
        with host_state_kept():
            self._llm = _start_vllm(Path(model_folder), state, self._tensors, options, device)
        made, wanted = vllm.rollout_group_ranks(), state.layout.rollout_tensor_parallel_ranks()[state.at.rollout_dp]
        assert made == wanted, f"vLLM's TP group is {made}, the layout says {wanted}"
        self.certify()
        needed = sum(parameter.nbytes for parameter in self.model.parameters())
        planned = self.plan.bytes_aliased + self.plan.bytes_copied + self.plan.bytes_received
        assert needed == planned, f"vLLM's parameters hold {needed} bytes, the plan accounts for {planned}"
        self._sleep()

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's model, whose parameters are views of the trainer's."""
        return vllm.engine_model(self._llm)

    @contextmanager
    def rollout(self) -> Iterator["HybridEngine"]:
        """The engine is awake inside: weights current, KV cache allocated, prefix cache empty."""
        record = SwitchRecord(
            bytes_moved=self.plan.bytes_received,
            bytes_aliased=self.plan.bytes_aliased,
            bytes_copied=self.plan.bytes_copied,
        )
        record.memory["before_wake"] = memory_in_use(self.device)
        record.wake_seconds = self._timed(self._wake)
        if self._verify_next:
            self.verify()
            self._verify_next = False
        record.memory["rollout"] = memory_in_use(self.device)
        self.records.append(record)
        yield self
        record.sleep_seconds = self._timed(self._sleep)
        record.memory["asleep"] = memory_in_use(self.device)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generates every request; results in the order of the requests."""
        if not requests:
            return []
        params = [
            vllm.sampling_params(
                n=1,
                temperature=r.temperature,
                top_p=r.top_p,
                top_k=r.top_k,
                min_p=0.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                repetition_penalty=1.0,
                seed=r.seed,
                max_tokens=r.max_tokens,
                min_tokens=0,
                stop_token_ids=list(r.stop_token_ids),
                ignore_eos=True,  # the end ids are in stop_token_ids, all of them
                logprobs=0,
                detokenize=False,
            )
            for r in requests
        ]
        prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
        with host_state_kept():
            outputs = self._llm.generate(prompts, params, use_tqdm=_LateBar if self._state.rank == 0 else False)
        return [_generation(output) for output in outputs]

    def verify(self) -> None:
        """Compares every byte of vLLM's live parameters with the trainer's, by checksums. Collective over the world.

        Raises:
            RuntimeError: on every rank, naming the parameters that differ.
        """
        verify_engine(self._parameters, self._state, self._trainer, dict(self.model.named_parameters()))

    def certify(self) -> list[dict[str, Any]]:
        """The aliasing certificate of this rank, read off vLLM's live parameters.

        Raises:
            RuntimeError: when a parameter has left the trainer's memory since the start.
        """
        live: dict[str, Tensor] = dict(self.model.named_parameters())
        rows = aliasing_certificate(self.plan, self._trainer, live)
        if rows != self._started_as:
            changed = [new["engine"] for new, old in zip(rows, self._started_as, strict=True) if new != old]
            raise RuntimeError(f"engine parameters have moved inside the trainer's memory since the start: {changed}")
        return rows

    def write_certificate(self, folder: str | Path) -> None:
        """Writes this rank's certificate to `folder`/rank-00000.json."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rank-{self._state.rank:05}.json").write_text(json.dumps(self.certify(), indent=1))

    def close(self) -> None:
        """Checks the certificate a last time and ends the engine; training may go on."""
        self.certify()
        vllm.shut_down(self._llm)
        del self._llm
        gc.collect()

    def _timed(self, switch: Callable[[], None]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        switch()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _wake(self) -> None:
        self._sync()
        self._resharder.run(self._trainer, self._tensors)
        if self.device.type == "cuda":
            # blocks that the trainer's allocator caches would be missing for the KV cache
            torch.cuda.empty_cache()
            self._llm.wake_up()
        else:
            vllm.rebuild_kv_cache(self._llm)
        # keys and values of the old weights must not be found again
        reset = self._llm.reset_prefix_cache()
        assert reset, "the engine still holds blocks of unfinished requests"

    def _sleep(self) -> None:
        if self.device.type == "cuda":
            self._llm.sleep(level=1)
        else:
            reset = self._llm.reset_prefix_cache()
            assert reset, "the engine still holds blocks of unfinished requests"
            vllm.free_kv_cache(self._llm)


def _start_vllm(
    folder: Path, state: ParallelState, tensors: dict[str, Tensor], options: EngineOptions, device: torch.device
) -> Any:
    on_cpu = device.type == "cpu"
    vllm.set_environment(tensors)
    job = [uuid.uuid4().hex]
    dist.broadcast_object_list(job, src=0)
    vllm.prepare_process(json.loads((folder / "config.json").read_text())["architectures"][0], on_cpu, job[0])
    vllm.register_loader(tensors)
    kv_cache_bytes, share = _kv_cache_bytes(options.kv_cache_bytes, device)
    by_device: dict[str, Any] = (
        # a prompt cut into chunks cannot use a seeded generator on CPU
        {
            "enforce_eager": True,
            "block_size": 32,  # the CPU backend takes multiples of 32
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(options.max_model_len, 8192),
        }
        if on_cpu
        else {
            "enforce_eager": options.enforce_eager,
            "enable_sleep_mode": True,
            "gpu_memory_utilization": share,
        }
    )
    return vllm.make_llm(
        model=str(folder),
        load_format=vllm.LOAD_FORMAT,
        dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        tensor_parallel_size=state.layout.rollout_tp,
        distributed_executor_backend="external_launcher",
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory_bytes=kv_cache_bytes,
        seed=options.seed,
        skip_tokenizer_init=True,
        generation_config="vllm",  # the model folder's sampling defaults are not ours
        logprobs_mode="processed_logprobs",  # after temperature: of the distribution that was sampled from
        enable_prefix_caching=True,
        disable_log_stats=True,
        **by_device,
    )


def _generation(output: Any) -> Generation:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    return Generation(
        token_ids=tokens,
        log_probs=[chosen[token].logprob for chosen, token in zip(completion.logprobs, tokens, strict=True)],
        finished=completion.finish_reason == "stop",
        prompt_tokens_computed=len(output.prompt_token_ids) - (output.num_cached_tokens or 0),
    )
