"""Every name of vLLM that is not its public API, in one place (vLLM 0.25 on GPU, 0.32 on CPU).

vLLM is imported inside the functions: a checkpoint writer that re-imports a script should not pay for it.
"""

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LOAD_FORMAT = "moebius"

# (module, attribute) of everything private that this file touches; tests check that each still exists
PRIVATE_NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.distributed.parallel_state", "_WORLD"),
    ("vllm.distributed.parallel_state", "destroy_model_parallel"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.model_executor.model_loader", "register_model_loader"),
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader"),
    ("vllm.model_executor.model_loader.utils", "initialize_model"),
    ("vllm.model_executor.model_loader.utils", "process_weights_after_loading"),
    ("vllm.model_executor.models.registry", "_TEXT_GENERATION_MODELS"),
    ("vllm.utils.torch_utils", "set_default_torch_dtype"),
    ("vllm.v1.engine.core", "cleanup_dist_env_and_memory"),
)
PRIVATE_NAMES_CPU: tuple[tuple[str, str], ...] = (
    ("vllm.distributed.device_communicators.cpu_communicator", "CpuCommunicator"),
    ("vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed"),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm"),
)


def set_environment(tensors: Mapping[str, Tensor]) -> None:
    """Settings that vLLM reads at import; what the user has set stays.

    vLLM keys its compiled code by sizes, but a view's strides depend on the layout, and code compiled for one stride
    reads another wrongly without a word: each set of strides gets a cache folder of its own.
    """
    strides = repr(sorted((name, tensor.stride()) for name, tensor in tensors.items()))
    root = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/moebius/vllm")).expanduser()
    os.environ["VLLM_CACHE_ROOT"] = str(root / f"views-{hashlib.sha256(strides.encode()).hexdigest()[:12]}")
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # vLLM's own sampler is what was tested, whether FlashInfer is installed or not
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def prepare_process(architecture: str, on_cpu: bool, job: str) -> None:
    """Makes vLLM a guest of this process; before `LLM()`.

    Args:
        architecture: class name in the model's config.json, registered so that vLLM need not ask a subprocess about it.
        job: a name that no other job on this host has, and that all ranks of this one share.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    # vLLM's shutdown destroys the default process group, which is the host's
    core: Any = importlib.import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    module, name = _TEXT_GENERATION_MODELS[architecture]
    ModelRegistry.register_model(
        architecture, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    )
    if not on_cpu:
        return
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    def shared_memory_name(communicator: Any) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        return f"moebius-{job}-{communicator.unique_name}-{ranks}"

    # vLLM's own name is the same for every job that a launcher started: two at once, or one after a crash, collide
    _CPUSHMDistributed.make_group_name = staticmethod(shared_memory_name)
    # the CPU backend would pack weights into a private copy and empty the parameter: keep plain F.linear on the view
    layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear
    if len(os.sched_getaffinity(0)) < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        # the shared-memory all-reduce spins, which starves the peers it waits for when they outnumber the cores
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty` without a device makes meta tensors: vLLM's parameters get shapes, and no memory."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # by name: a wrapper may sit at torch.empty (moebius.cpu)
        if getattr(func, "__name__", "") == "empty" and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def register_loader(tensors: dict[str, Tensor]) -> None:
    """Registers the load format that binds vLLM's parameters to these tensors instead of reading a checkpoint."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    class BindingLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            bind(model, tensors)

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
            device = torch.device(vllm_config.device_config.device)
            with set_default_torch_dtype(model_config.dtype):
                with device, _EmptyOnMeta():
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                self.load_weights(model, model_config)
                process_weights_after_loading(model, model_config, device)
            return model.eval()

    register_model_loader(LOAD_FORMAT)(BindingLoader)


def bind(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replaces every parameter of the model, made on meta, by a parameter over the tensor of its name.

    Raises:
        ValueError: when names, shapes or dtypes differ.
    """
    parameters = dict(model.named_parameters())
    if set(parameters) != set(tensors):
        raise ValueError(f"vLLM's parameters and the trainer's differ in {sorted(set(parameters) ^ set(tensors))}")
    for name, old in parameters.items():
        tensor = tensors[name]
        if old.shape != tensor.shape or old.dtype != tensor.dtype:
            raise ValueError(
                f"{name}: vLLM wants {tuple(old.shape)} {old.dtype}, "
                f"the trainer has {tuple(tensor.shape)} {tensor.dtype}"
            )
        # vectors of ones (norms) are made for real; they are small and freed here
        assert old.is_meta or old.dim() == 1, f"{name} was allocated although it is to be a view"
        new = nn.Parameter(tensor, requires_grad=False)
        for key, value in vars(old).items():
            if not isinstance(getattr(type(new), key, None), property):
                setattr(new, key, value)
        for module in model.modules():  # tied weights sit in two modules
            for leaf, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[leaf] = new
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"still without memory: {left}"


def rollout_group_ranks() -> list[int]:
    """Global ranks of the TP group that vLLM made."""
    from vllm.distributed.parallel_state import get_tp_group

    return list(get_tp_group().ranks)


def engine_model(llm: Any) -> nn.Module:
    """The model that vLLM runs."""
    return _runner(llm).model


def _runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def free_kv_cache(llm: Any) -> None:
    """Gives the KV cache of an idle engine back (CPU, where vLLM has no sleep mode)."""
    runner = _runner(llm)
    runner.kv_caches.clear()
    for layer in runner.compilation_config.static_forward_context.values():
        if hasattr(layer, "kv_cache"):
            layer.kv_cache = torch.tensor([]) if isinstance(layer.kv_cache, Tensor) else []


def rebuild_kv_cache(llm: Any) -> None:
    """Allocates the KV cache again, of the same size (CPU)."""
    from vllm.config import set_current_vllm_config

    runner = _runner(llm)
    with set_current_vllm_config(llm.llm_engine.model_executor.driver_worker.worker.vllm_config):
        runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)


def shut_down(llm: Any) -> None:
    """Ends the engine and vLLM's groups; the host's default group stays."""
    from vllm.distributed import parallel_state

    llm.llm_engine.engine_core.shutdown()
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def sampling_params(**fields: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(**fields)


def make_llm(**options: Any) -> Any:
    from vllm.entrypoints.llm import LLM

    return LLM(**options)
