"""Keeps the host process as it was around calls into vLLM, which seeds generators and changes process-wide settings."""

import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def host_state_kept() -> Iterator[None]:
    """Restores torch's, CUDA's, numpy's and Python's random states, thread count, start method and LD_PRELOAD."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    start_method = multiprocessing.get_start_method(allow_none=True)
    preload = os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if multiprocessing.get_start_method(allow_none=True) != start_method:
            multiprocessing.set_start_method(start_method, force=True)
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload
