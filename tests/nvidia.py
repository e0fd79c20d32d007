"""A stand-in for nvidia-smi, on machines without one."""

import shlex
from pathlib import Path


def fake_nvidia_smi(folder: Path, *lines: str, code: int = 0) -> None:
    """Put an nvidia-smi into a folder that says these lines."""
    script = folder / "nvidia-smi"
    answer = "\n".join(lines)
    script.write_text(f"#!/bin/sh\necho {shlex.quote(answer)}\nexit {code}\n")
    script.chmod(0o755)
