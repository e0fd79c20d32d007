import resource
import subprocess

import pytest
import torch

from qnmixer.engine.config import Config, override, parse
from qnmixer.engine.config.compose import compose
from qnmixer.engine.memory.advice import advice, changes
from qnmixer.engine.memory.footprint import MIB
from qnmixer.engine.memory.limits import is_out_of_memory, memory_of
from qnmixer.engine.memory.plan import Planner

TINY = [
    "data.image_size=32",
    "data.batch_size=4",
    "geometry.n_detectors=48",
    "geometry.detector_pitch=20",
    "geometry.n_views=8",
    "model.channels=16",
    "model.n_iterations=2",
]


def config_of(*overrides: str) -> Config:
    return parse(compose("train", [*TINY, *overrides]))


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(config_of())


# As they were seen in public threads (issues of pytorch, nccl, dgl, cupy and others); what differs per machine is left.
SURE = """\
CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is free.
CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated)
CUDA out of memory. Tried to allocate more than 1EB memory
CUDA error: out of memory
CUDA error: out of memorySearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/
failed to allocate 32.00M (33554432 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
Unable to find a valid cuDNN algorithm to run convolution
Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED
Error in CuDNN: CUDNN_STATUS_ALLOC_FAILED (cudnnFindConvolutionForwardAlgorithm)
CUDA error: insufficient resources when calling cusparseSpGEMM_workEstimation( handle, opA, opB, &alpha, matA)
CuSparseError: CUSPARSE_STATUS_ALLOC_FAILED
CUSPARSE_STATUS_INSUFFICIENT_RESOURCES
NCCL WARN Cuda failure 'out of memory'
NCCL WARN Failed to CUDA calloc 6291456 bytes
cuFFT error: CUFFT_ALLOC_FAILED
""".splitlines()
UNSURE = """\
cuFFT error: CUFFT_INTERNAL_ERROR
failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED
GET was unable to find an engine to execute this computation
[cudnn_frontend] Error: No execution plans support the graph.
""".splitlines()
OTHERS = """\
CUDA error: an illegal memory access was encountered
ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 1 'invalid argument'
ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 999 'unknown error'
""".splitlines()


def test_every_library_that_lacks_memory_is_understood() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert [words for words in SURE if not is_out_of_memory(RuntimeError(words), free=0.9)] == []
    # Words with several causes need little free memory.
    assert [words for words in UNSURE if not is_out_of_memory(RuntimeError(words), free=0.01)] == []
    assert [words for words in UNSURE if is_out_of_memory(RuntimeError(words), free=0.5)] == []
    assert torch.cuda.is_available() or not is_out_of_memory(RuntimeError(UNSURE[0]))
    assert [words for words in OTHERS if is_out_of_memory(RuntimeError(words), free=0.01)] == []


def test_what_the_run_has_already_is_not_advised() -> None:
    config = config_of("memory=recompute", "trainer.precision=16-mixed", "data.batch_size=1")
    assert changes(config) == ["model.n_iterations=1", "model.channels=8"]


def test_half_precision_on_a_cpu_is_bf16() -> None:
    """A CPU computes fp16 far slower than fp32."""
    config = config_of()
    assert not [change for change in changes(override(config, "trainer.accelerator=cpu")) if "=16-mixed" in change]
    assert "trainer.precision=bf16-mixed" in changes(override(config, "trainer.accelerator=cpu"))
    assert "trainer.precision=16-mixed" in changes(override(config, "trainer.accelerator=gpu"))


def test_the_mildest_that_fit_are_advised_or_the_smallest(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change is an override that makes a step smaller, with the same slices in an optimizer step."""
    monkeypatch.setattr("qnmixer.engine.memory.advice._SECONDS", 600.0)  # the machine may be busy
    config = config_of("model=learn", "model.n_iterations=2")
    needed, peaks = planner.estimate(config).peak, {}
    for change in changes(config):
        changed = override(config, change)
        peaks[change] = planner.estimate(changed).peak
        assert changed.data.batch_size * changed.trainer.accumulate_grad_batches == config.data.batch_size
    assert max(peaks.values()) < needed
    line = advice(planner, config, available=0.99 * needed / MIB)
    assert line.startswith(f"out of memory: a step of this run needs {needed / MIB:,.0f} MiB by the plan")
    mild = [change for change, peak in peaks.items() if peak <= 0.99 * needed][:3]
    assert [line.find(change) > 0 for change in mild] == [True] * 3
    line = advice(planner, config, available=0.0)
    assert f"no simple change fits, the closest are {min(peaks, key=peaks.__getitem__)} (" in line
    # By the plan it fits, and still it failed.
    assert "gaps between tensors, validation or other programs took the rest" in advice(planner, config, 1000.0)


def test_memory_of_the_host_is_at_most_the_machines() -> None:
    pages = resource.getpagesize() * int(subprocess.check_output(["getconf", "_PHYS_PAGES"]))
    assert 0 < memory_of(torch.device("cpu")) <= pages / MIB
