"""Process start-up: device, default process group, and the end of every rank when one fails."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from moebius import cpu


def _quiet() -> None:
    """Silences what mcore and torch say about packages and names that this program does without on purpose."""
    said = ("[Aa]pex", "[Tt]ransformer.?[Ee]ngine", "torch.distributed.*is deprecated", "full scope is", "non-leaf")
    for words in said:
        warnings.filterwarnings("ignore", message=f".*{words}")
    layer = logging.getLogger("megatron.core.transformer.transformer_layer")
    layer.addFilter(lambda record: "Unknown MLP type" not in record.getMessage())  # BlockedMLP brings its own tp_group
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def start(timeout_minutes: float = 10.0) -> torch.device:
    """Joins the processes that torchrun started; returns this rank's device.

    Args:
        timeout_minutes: how long a collective may take (--distributed-timeout-minutes).
    """
    _quiet()
    timeout = timedelta(minutes=timeout_minutes)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        return device
    cpu.install()
    if len(os.sched_getaffinity(0)) <= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def stop() -> None:
    """Leaves the process group once every rank is done."""
    dist.barrier()
    dist.destroy_process_group()


def run(main: Callable[[], None]) -> None:
    """Runs a script's main function; a ValueError becomes one message and exit code 2 on every rank.

    Rank 0 speaks for all. Another rank waits a moment first: if rank 0 failed too, the launcher ends this rank
    meanwhile, and if it did not, this rank's message is the only one.
    """
    try:
        main()
    except ValueError as error:
        rank = int(os.environ.get("RANK", "0"))
        if rank != 0:
            time.sleep(5)
        prefix = "" if rank == 0 else f"rank {rank}: "
        print(f"error: {prefix}{error}", file=sys.stderr, flush=True)
        # not sys.exit: destructors of process groups could wait for ranks that are gone
        os._exit(2)
