"""Apply torch.compile to the blocks of a network. Between the blocks are the physics and the latent vectors.

Blocks are compiled in place: their weights keep their names, so ddp, fsdp and recomputation work as before. All
iterations share the code of a block: a few graphs serve any T.

The whole network as one graph was tried, with torch 2.13 on a CPU. torch unrolls the T iterations, so the time to
compile grows with T, and a step is no faster than with compiled blocks. One graph cannot serve all iterations, because
each has its own weights and more pairs in H.
"""

import os
import shutil
from typing import Any

from qnmixer.errors import ConfigError
from qnmixer.models.unrolled import UnrolledNetwork


def check_compiler() -> None:
    """Raise ConfigError if there is no C++ compiler, which torch.compile needs for a GPU too."""
    compilers = [os.environ.get("CXX") or ("cl" if os.name == "nt" else "g++"), "clang++"]
    if not any(map(shutil.which, compilers)):
        raise ConfigError(
            f"compile=true needs a C++ compiler, but {compilers[0]} is not installed: install one, or leave out compile"
        )


def compile_blocks(network: UnrolledNetwork[Any]) -> None:
    """Compile the blocks of a network, each at its first call. Raises ConfigError if the network has none."""
    blocks = network.blocks()
    if not blocks:
        raise ConfigError(f"compile=true, but {network.title} has no blocks() to compile: leave it out")
    for block in blocks:
        # In place: torch.compile(block) would put `_orig_mod.` into every name of a checkpoint.
        block.compile()
