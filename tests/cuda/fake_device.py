"""A fake CUDA device: torch's CPU build accepts fake tensors on cuda:0, and Lightning trains on it.

Nothing here can be undone, so it belongs into a process of its own: `rehearsal.py`.
"""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

CUDA0 = torch.device("cuda:0")
# A device guard, and hooks that say "built with CUDA": without them .to("cuda") is refused, and fake backward aborts
# the process. The hooks go over those that torch made when it was loaded (they have no members). Torch's own guard
# that does nothing has streams without a device index, and autograd would ask it for events.
_NO_CUDA = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <new>
using c10::Device; using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};
struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  Device getDevice() const override { return Device(CUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
};
static const bool installed = [] {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
  c10::impl::registerDeviceGuard(CUDA, new Guard);
  return true;
}();
"""


def pretend_cuda() -> None:
    """Make this process's torch pass fake tensors on cuda:0 through autograd, autocast and optimizers. Needs g++."""
    torch.ops.load_library(str(_library()))
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):  # on CUDA torch takes foreach by itself, but of its own classes only
        module._foreach_supported_types.append(FakeTensor)
    torch.cuda.is_available = _yes  # autocast and GradScaler ask
    FakeTensorMode.avoid_device_init = property(_yes)  # and FakeTensorMode, for another purpose
    FakeTensor.__deepcopy__ = lambda tensor, _: tensor.detach().clone()  # metrics copy what they start from
    torch.cuda.is_bf16_supported = _yes
    torch.cuda.Event = _Event


def _library() -> Path:
    """The guard, compiled against this torch: 4 s, once for each machine."""
    key = hashlib.sha1((_NO_CUDA + torch.__version__).encode()).hexdigest()[:12]
    library, root = Path(tempfile.gettempdir()) / f"no_cuda_{os.getuid()}_{key}.so", Path(torch.__file__).parent
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            source, made = Path(folder) / "no_cuda.cpp", Path(folder) / "no_cuda.so"
            source.write_text(_NO_CUDA)
            flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root}/include", str(source), f"-L{root}/lib"]
            subprocess.run(["g++", *flags, "-ltorch_cpu", "-lc10", "-o", str(made)], check=True)
            os.replace(made, library)
    return library


def _yes(*_: Any) -> bool:
    return True


class _Event:
    """An event of a stream on which nothing is ever late."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeAccelerator(CUDAAccelerator):
    """Lightning's, of a device that is not there."""

    is_available = staticmethod(_yes)

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [CUDA0]

    def setup(self, trainer: Any) -> None:
        pass

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass


class FakeDevice(SingleDeviceStrategy):
    """Lightning's; the module was made where it is to be, as `.to` cannot move fake parameters."""

    def setup_environment(self) -> None:
        pass

    def model_to_device(self) -> None:
        pass

    def teardown(self) -> None:
        pass
