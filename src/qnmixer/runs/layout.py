"""Where files are in the folder of a run. It needs nothing but Python."""

from pathlib import Path


def checkpoint_in(run: Path, name: str) -> Path:
    """The path of the checkpoint `best` or `last` of a run folder."""
    return run / "checkpoints" / f"{name}.ckpt"
