"""Every private name of vLLM that the adapter touches still exists in the installed version."""

import importlib
import inspect

import pytest

from hybrid_engine import vllm_adapter

NAMES = vllm_adapter.PRIVATE_NAMES + vllm_adapter.PRIVATE_NAMES_CPU


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_private_name_exists(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"{module}.{name} is gone: hybrid_engine/vllm_adapter.py"


def test_attributes_of_private_classes_exist() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    assert hasattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name")
    assert hasattr(_CPUSHMDistributed, "make_group_name")
    assert hasattr(CPUModelRunner, "initialize_kv_cache_tensors")
    source = inspect.getsource(inspect.getmodule(CPUModelRunner.initialize_kv_cache_tensors))  # pyright: ignore[reportArgumentType]
    assert "_kernel_block_sizes" in source


ATTRIBUTES = (
    ("vllm.v1.engine.llm_engine", "self.model_executor"),
    ("vllm.v1.executor.uniproc_executor", "self.driver_worker"),
    ("vllm.v1.worker.worker_base", "self.worker"),
    ("vllm.v1.worker.gpu_worker", "self.model_runner"),
    ("vllm.v1.worker.gpu_model_runner", "self.model"),
    ("vllm.v1.worker.gpu_model_runner", "self.kv_caches"),
    ("vllm.v1.worker.gpu_model_runner", "self.kv_cache_config"),
    ("vllm.v1.worker.gpu_model_runner", "self.compilation_config"),
    ("vllm.config.compilation", "static_forward_context"),
    ("vllm.v1.engine.core_client", "def shutdown"),
)


@pytest.mark.parametrize(("module", "text"), ATTRIBUTES)
def test_private_attribute_is_still_spelled_so(module: str, text: str) -> None:
    """Attributes of live objects that the adapter walks through, by the source that sets them."""
    assert text in inspect.getsource(importlib.import_module(module)), f"{text} is gone from {module}"


def test_no_other_file_imports_vllm() -> None:
    from pathlib import Path

    root = Path(vllm_adapter.__file__).parents[1]
    for package in ("hybrid_engine", "moebius", "parallel_state"):
        for path in (root / package).rglob("*.py"):
            if path.name != "vllm_adapter.py":
                text = path.read_text()
                assert "import vllm" not in text.replace("import vllm_adapter", "") and "from vllm" not in text, path
