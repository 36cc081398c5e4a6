"""Stands in for the CUDA wheel `sgl_kernel`, which cannot be imported without a GPU driver.

On the import path of the CPU server processes we start, and nowhere else (`draftloop.sglang.server`).
"""

from draftloop.sglang.cpu.kernels import *  # noqa: F403
from draftloop.sglang.cpu.kernels import __version__ as __version__


def __getattr__(name: str) -> object:
    """Any other kernel is importable (SGLang imports many it never calls on a CPU) and says so when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def not_on_cpu(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU twin in draftloop")

    return not_on_cpu
