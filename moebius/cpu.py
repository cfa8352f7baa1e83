"""Lets megatron-core run where there is no GPU.

mcore spells its device "cuda": as a literal, through `torch.cuda.current_device()` and in tensor type names.
`install()` makes that word mean "cpu" in a process without CUDA, and changes nothing where CUDA is available. mcore's
own code then runs unchanged over gloo, so that tests on a laptop exercise what a cluster runs.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

_FACTORIES = [
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "eye", "linspace"),
    *("rand", "randn", "randint", "randperm", "empty_like", "zeros_like", "ones_like", "full_like"),
]


class _Stream:
    """Stands for a CUDA stream or event; every call returns at once, since CPU work is in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_Stream"]:
        return lambda *args, **kwargs: self


def _on_cpu(function: Callable[..., Any], cpu: object) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs["device"] = cpu
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


def install() -> None:
    """Makes "cuda" mean "cpu" for mcore. Idempotent; must run before a model is built."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # mcore's jit_fuser is torch.compile, minutes on a CPU
    import torch

    # vLLM's CPU worker replaces torch.cuda.Stream too, so "installed" is read off a factory
    if torch.cuda.is_available() or hasattr(torch.empty, "__wrapped__"):
        return
    import megatron.core  # noqa: F401  before torch.cuda is patched: torch._dynamo keys its rules by these functions
    from megatron.core.tensor_parallel import random as mcore_random

    # `with torch.device("meta")` finds functions by identity in a set made at first use: make it before they change
    importlib.import_module("torch.utils._device")._device_constructors()
    _patch_devices(torch, torch.device("cpu"))
    _patch_streams(torch)
    rng = torch.default_generator
    torch.cuda.manual_seed = rng.manual_seed  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: rng.get_state()
    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: rng.set_state(state)
    quiet = logging.getLogger(mcore_random.__name__)
    quiet.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_devices(torch: Any, cpu: object) -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name), cpu))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    plain_type = torch.Tensor.type

    def type_(self: object, *args: Any, **kwargs: Any) -> Any:
        out = plain_type(self, *args, **kwargs)
        # mcore sorts gradients into buckets by names such as "torch.cuda.FloatTensor"
        if isinstance(out, str) and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            out = out.replace("torch.", "torch.cuda.", 1)
        return out

    torch.Tensor.type = type_
    torch.cuda.current_device = lambda: cpu


def _patch_streams(torch: Any) -> None:
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _Stream()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
