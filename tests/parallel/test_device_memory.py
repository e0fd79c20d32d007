"""The use of memory as the system tells it, and errors for lack of it."""

import mmap
from pathlib import Path

import pytest
import torch

from qnmixer.parallel.device_memory import is_out_of_memory, read_usage

CPU = torch.device("cpu")
MIB = 2**20
SLACK = 4 * MIB  # what the interpreter may take or give back meanwhile

linux = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")


@linux
def test_tensors_are_allocated_and_reserved() -> None:
    """64 MiB, all pages written, straight from the system: malloc might use what earlier tests have freed."""
    before = read_usage(CPU)
    pages = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kept = torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)
    after = read_usage(CPU)
    assert after.allocated - before.allocated == pytest.approx(kept.nbytes, abs=SLACK)
    assert after.reserved - before.reserved == pytest.approx(kept.nbytes, abs=SLACK)
    assert after.device_used is None


@pytest.mark.cuda
def test_cuda_counts_the_same_way() -> None:
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    before = read_usage(device)
    kept = torch.ones(16 * MIB, device=device)
    torch.ones(16 * MIB, device=device)
    after = read_usage(device)
    assert after.allocated - before.allocated == kept.nbytes
    assert after.peak - before.allocated == 2 * kept.nbytes
    assert after.reserved >= after.allocated
    assert after.device_used is not None
    assert after.device_used >= after.reserved


# As they were seen in public threads (issues of pytorch, nccl, dgl, cupy and others); what differs per machine is left.
SURE = """\
CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is free.
CUDA error: out of memory
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
Unable to find a valid cuDNN algorithm to run convolution
Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED
CUDA error: insufficient resources when calling cusparseSpGEMM_workEstimation( handle, opA, opB, &alpha, matA)
CUSPARSE_STATUS_INSUFFICIENT_RESOURCES
NCCL WARN Failed to CUDA calloc 6291456 bytes
cuFFT error: CUFFT_ALLOC_FAILED
""".splitlines()
OTHERS = """\
CUDA error: an illegal memory access was encountered
cuFFT error: CUFFT_INTERNAL_ERROR
ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 1 'invalid argument'
""".splitlines()


def test_every_library_that_lacks_memory_is_understood() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert [words for words in SURE if not is_out_of_memory(RuntimeError(words))] == []
    assert [words for words in OTHERS if is_out_of_memory(RuntimeError(words))] == []
