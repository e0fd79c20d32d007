"""Muon (Jordan, 2024): a weight moves along its momentum, in which all singular values are made about equal.

`torch.optim.Muon` takes matrices only, works in bfloat16, and leaves the other weights to a second optimizer. Here
kernels of convolutions are flattened to matrices, and all weights are in one optimizer: with one state to save, one
schedule, and one step for the GradScaler to skip.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

_N_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's: steepest at 0, so that small singular values grow fast
_Decay = Annotated[float, Ge(0), Lt(1)]
_TINY = 1e-16  # a gradient of zeros stays zero; any larger number would shorten the steps of small gradients


class Muon(Optimizer):
    """Muon for the groups with `orthogonal=True`, torch's AdamW for the others.

    Args:
        params: parameter groups. Those with `orthogonal=True` have weights of two dimensions or more, [out, …].
        lr: learning rate of the groups with `orthogonal=True`.
        adamw_lr: learning rate of the other groups; None: lr. A group may have its own.
        momentum: of Muon, in Nesterov's form.
        betas: of AdamW.
    """

    takes_hidden_weights = True
    """The network's `hidden_weights` come as a group with `orthogonal=True`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        adamw_lr: Annotated[float, Gt(0)] | None = None,
        momentum: _Decay = 0.95,
        betas: tuple[_Decay, _Decay] = (0.9, 0.999),
    ) -> None:
        super().__init__(params, {"lr": None, "weight_decay": 0.0, "orthogonal": False, "momentum": momentum})
        for group in self.param_groups:
            if group["lr"] is None:
                group["lr"] = lr if group["orthogonal"] or adamw_lr is None else adamw_lr
        self._adamw = AdamW(self.param_groups, betas=betas)  # the same groups: it adds its own options to them

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all weights once. Returns the value of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["orthogonal"]:
                self._step_orthogonally(group)
        # Given again at each step, because `load_state_dict` makes new ones.
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
        self._adamw.step()
        return loss

    def _step_orthogonally(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            momentum = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            step = orthogonal_step(p.grad.lerp(momentum, group["momentum"]))
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])


def orthogonal_step(direction: Tensor) -> Tensor:
    """A direction [out, …] as a matrix of equal singular values, about as long as a step of AdamW (Moonshot's factor).

    The direction may be in shards of fsdp. Then each device computes the whole and keeps its part.
    """
    if not hasattr(direction, "full_tensor"):
        matrix = direction.flatten(1)
        return (0.2 * max(matrix.shape) ** 0.5 * orthogonalized(matrix)).view_as(direction)
    from torch.distributed.tensor import DTensor, Replicate  # late: it takes half a second, and few runs need it

    sharded: Any = direction
    mesh, step = sharded.device_mesh, orthogonal_step(sharded.full_tensor())
    return DTensor.from_local(step, mesh, [Replicate()] * mesh.ndim).redistribute(placements=sharded.placements)


def orthogonalized(matrix: Tensor) -> Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, by Newton–Schulz: its larger singular values become 0.7 to 1.2.

    In the precision of the weights. bfloat16, which others use, is slow on a CPU. Its rounding would also make several
    devices differ from one.
    """
    is_tall = len(matrix) > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the smaller Gram matrix
    with torch.autocast(x.device.type, enabled=False):
        x = x / x.norm().clamp_min(_TINY)
        for _ in range(_N_STEPS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x
