"""torch.compile, put on a network's blocks from outside; between them stand the physics and vectors of the latent.

A block is compiled in place, so weights keep their names, and ddp, fsdp and recomputing see the module that they know.
"""

import os
import shutil
from typing import Any

from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork


def check_compiler() -> None:
    """Raise ConfigError where there is no C++ compiler; torch needs one for a GPU too."""
    compilers = [os.environ.get("CXX") or ("cl" if os.name == "nt" else "g++"), "clang++"]
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"compile=true needs a C++ compiler, and there is no {compilers[0]}: install one, or leave it"
        )


def compile_blocks(network: UnrolledNetwork[Any]) -> None:
    """Have torch compile the blocks of a network, each when it is first called. Raises ConfigError if it has none."""
    blocks = network.blocks()
    if not blocks:
        raise ConfigError(f"compile=true, but {network.title} names no blocks() that could be compiled: leave it")
    for block in blocks:
        block.compile()
