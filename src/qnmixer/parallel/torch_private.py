"""All uses of torch's private names. If a new version of torch breaks something, look here first.

They are why `torch<2.15` is required. What each waits for in torch (issues are those of pytorch/pytorch):

- `tree_flatten` and the other trees: a public `torch.utils.pytree` (issue 65761, pull request 175082).
- `TorchDispatchMode`, `is_traceable_wrapper_subclass_type`, `no_dispatch`: a public path. torch's notes "Extending
  PyTorch" describe the first of them, at this path.
- `fake_mode`, `fake_tensor`: a public path too. torch's page "Fake tensor" describes them, at this path.
- `tensor_without_data`, `NO_TORCH_FUNCTION`, `set_signs`, `READS_VALUE`: no public way is known.
- `storage_key`, `version_of`: no public way is known.
- `is_saved_buffer`: `named_buffers(persistent=True)` (issue 85235).
- `foreach_lerp` and the other operators on lists: a public `torch.foreach` (pull request 193607).
- `schedules_in`, `step_to`: a `step` of schedules that takes a number and is not deprecated. No issue is known.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "TorchDispatchMode",
    "TreeSpec",
    "is_traceable_wrapper_subclass_type",
    "no_dispatch",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class of tensors that leaves functions of torch as they are."""
READS_VALUE = torch.ops.aten._local_scalar_dense.default  # the operator behind .item(), float() and `if x > 0`
tensor_without_data: Any = Tensor._make_wrapper_subclass
"""A tensor of a class of one's own, which has a shape but no memory. Public functions would allocate it."""


def set_signs(tensor: Tensor, conjugate: bool, negative: bool) -> None:
    """Set whether a tensor is the conjugate of its memory, and the negative. `Tensor.conj` makes another tensor."""
    torch._C._set_conj(tensor, conjugate)
    torch._C._set_neg(tensor, negative)


@cache
def fake_mode() -> FakeTensorMode:
    """torch's fake tensors, without their cache.

    There is one mode for all operators. To make one takes as long as to ask it, since torch notes the stack of calls.
    """
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


def fake_tensor(meta: Tensor, device: torch.device) -> Tensor:
    """The fake tensor of `fake_mode` with the shape and memory of a tensor on `meta`, as if it were on this device."""
    return FakeTensor(fake_mode(), meta, device)


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that a storage has as long as it lives. `data_ptr()` is 0 for all storages without data."""
    return storage._cdata


def version_of(tensor: Tensor) -> int:
    """How often operators have changed a tensor in place."""
    return tensor._version


def is_saved_buffer(module: nn.Module, key: str) -> bool:
    """Whether a buffer of a module is in its `state_dict`. To make a `state_dict` would call the hooks of others."""
    return key not in module._non_persistent_buffers_set


foreach_add_ = torch._foreach_add_
foreach_lerp, foreach_lerp_ = torch._foreach_lerp, torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_  # one operator for all tensors of a list


def schedules_in(schedule: Any) -> list[Any]:
    """The parts of a schedule that is made of others, as `SequentialLR`; else the schedule alone."""
    return list(getattr(schedule, "_schedulers", [schedule]))


def step_to(schedule: LambdaLR, n_steps: int) -> None:
    """Put a schedule to the place after this number of steps. To take them one by one would last too long."""
    schedule.last_epoch, schedule._step_count = n_steps - 1, n_steps
    schedule.step()
