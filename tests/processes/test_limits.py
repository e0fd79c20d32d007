"""Limits as the files of a control group give them, of version 2."""

import math
import os
from pathlib import Path

import pytest
import torch

from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.limits import memory_of
from qnmixer.engine.parallel.devices import choose_device
from qnmixer.engine.processes import limits
from qnmixer.engine.processes.cores import n_cores
from qnmixer.engine.processes.limits import cpu_limit, memory_limit

SLURM = "0::/slurm/job_7/step_0\n"
V1 = "4:memory:/docker/ab\n"


@pytest.mark.parametrize(
    ("groups", "files", "cores", "memory"),
    [
        (None, {}, math.inf, math.inf),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, math.inf, math.inf),
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": "1048576\n"}, 1.5, MIB),
        (SLURM, {"slurm/job_7/memory.max": "1048576\n", "slurm/job_7/step_0/memory.max": "max\n"}, math.inf, MIB),
        (V1, {"memory/memory.limit_in_bytes": "1048576"}, math.inf, math.inf),
    ],
    ids=["no Linux", "no limit", "docker", "slurm", "version 1"],
)  # fmt: skip
def test_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str | None,
    files: dict[str, str],
    cores: float,
    memory: float,
) -> None:
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (cpu_limit(), memory_limit()) == (cores, memory)
    if math.isfinite(cores):
        assert n_cores() == 1
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(4)
            choose_device("cpu")
            assert torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)
    if math.isfinite(memory):
        assert memory_of(torch.device("cpu")) * MIB <= memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
