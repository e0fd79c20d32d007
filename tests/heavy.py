"""Libraries that take seconds to load, besides torch. What a command says at once, it says before it loads any of them.

A wrong key is found by the class that it is for, which needs torch.
"""

import os
from collections.abc import Collection
from pathlib import Path

LIBRARIES = ["scipy", "matplotlib", "lightning", "torchmetrics", "wandb", "pydicom", "PIL"]
LOADED = 99
"""The exit code of a process that has imported one of them."""


def path_without(folder: Path) -> str:
    """PYTHONPATH of processes that end when they import one of these libraries, after a line with its name."""
    for name in LIBRARIES:
        text = f"import os\nprint('{name} was imported', flush=True)\nos._exit({LOADED})\n"
        (folder / f"{name}.py").write_text(text)
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def path_hiding(folder: Path, packages: Collection[str]) -> str:
    """PYTHONPATH of processes in which these packages are not installed: neither imported nor found."""
    text = f"import sys\nsys.modules.update(dict.fromkeys({sorted(packages)}))\n"
    (folder / "sitecustomize.py").write_text(text)
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
