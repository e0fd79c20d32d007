"""A stand-in for nvidia-smi, on machines without one."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def fake_nvidia_smi(folder: Path, *lines: str, code: int = 0, uuids: Sequence[str] = ()) -> None:
    """Put an nvidia-smi into a folder that says these lines, and these UUIDs when it is asked for them."""
    script = folder / "nvidia-smi"
    answers = ["\n".join(uuids), "\n".join(lines)]
    uuid, rest = (f"echo {shlex.quote(answer)}" for answer in answers)
    script.write_text(f'#!/bin/sh\ncase "$1" in *uuid*) {uuid};; *) {rest};; esac\nexit {code}\n')
    script.chmod(0o755)
