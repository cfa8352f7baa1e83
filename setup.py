"""Packaging of the three packages. The scripts, tests and launch files run from a clone and are not installed."""

import ast
from pathlib import Path

from setuptools import find_packages, setup


def read_version() -> str:
    """`__version__` of moebius/__init__.py, read without importing the package."""
    source = (Path(__file__).parent / "moebius" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise RuntimeError("moebius/__init__.py has no __version__")


setup(
    name="moebius",
    version=read_version(),
    description="RL training scripts for language models: one set of weights for Megatron-core and vLLM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["moebius*", "hybrid_engine*", "parallel_state*"]),
    python_requires=">=3.11",
    # Empty on purpose: torch, vLLM and Megatron-core only meet as the full pins of requirements/, one list a device.
    install_requires=[],
)
