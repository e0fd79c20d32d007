import mmap
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qnmixer.engine.memory.usage import read_usage, reset_peak

CPU = torch.device("cpu")
MIB = 2**20
SLACK = 4 * MIB  # what the interpreter may take or give back meanwhile

linux = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
resets_peak = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="writes /proc/self/clear_refs")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def fresh(n: int) -> Tensor:
    """n float32, all pages written, straight from the system: malloc might use what earlier tests have freed."""
    pages = mmap.mmap(-1, 4 * n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)


def touched(device: torch.device = CPU) -> Tensor:
    """64 MiB, every page of them written."""
    return fresh(16 * MIB) if device.type == "cpu" else torch.ones(16 * MIB, device=device)


@linux
def test_tensors_are_allocated_and_reserved() -> None:
    before = read_usage(CPU)
    kept = touched()
    after = read_usage(CPU)
    assert after.allocated - before.allocated == pytest.approx(kept.nbytes, abs=SLACK)
    assert after.reserved - before.reserved == pytest.approx(kept.nbytes, abs=SLACK)
    assert after.device_used is None


@resets_peak
def test_what_was_freed_stays_in_the_peak_until_it_is_reset() -> None:
    reset_peak(CPU)
    before = read_usage(CPU)
    touched()
    after = read_usage(CPU)
    assert after.allocated - before.allocated < SLACK
    assert after.peak - before.peak == pytest.approx(64 * MIB, abs=SLACK)
    reset_peak(CPU)
    assert read_usage(CPU).peak - before.peak < SLACK


@cuda
def test_cuda_counts_the_same_way() -> None:
    device = torch.device("cuda")
    reset_peak(device)
    before = read_usage(device)
    kept = touched(device)
    touched(device)
    after = read_usage(device)
    assert after.allocated - before.allocated == kept.nbytes
    assert after.peak - before.allocated == 2 * kept.nbytes
    assert after.reserved >= after.allocated
    assert after.device_used is not None
    assert after.device_used >= after.reserved
    reset_peak(device)
    assert read_usage(device).peak == after.allocated
