"""Muon (Jordan, 2024): a weight moves along its momentum, in which all singular values are made about equal.

`torch.optim.Muon` takes matrices only, works in bfloat16, and leaves the other weights to a second optimizer. Here
kernels of convolutions are flattened to matrices, and all weights are in one optimizer: with one state to save, one
schedule, and one step for the GradScaler to skip.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from qnmixer.parallel.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_

_N_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's: steepest at 0, so that small singular values grow fast
_Decay = Annotated[float, Ge(0), Lt(1)]
_TINY = 1e-16  # a gradient of zeros stays zero; any larger number would shorten the steps of small gradients


class Muon(Optimizer):
    """Muon for the groups with `orthogonal=True`, torch's AdamW for the others.

    Args:
        params: parameter groups. Those with `orthogonal=True` have weights of two dimensions or more, [out, …].
        lr: of matrices and kernels inside the network, the groups with `orthogonal=True`: about 4 times that of AdamW.
        adamw_lr: learning rate of all other weights, which AdamW changes. None: lr. A group may have its own.
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
        # Fused: one operator for all weights of a group. Elsewhere torch chooses.
        fused = all(p.device.type in ("cpu", "cuda") for group in self.param_groups for p in group["params"]) or None
        self._adamw = AdamW(self.param_groups, betas=betas, fused=fused)  # the same groups: it adds its own options

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
        """Change weights of equal shape together."""
        shapes: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for p in group["params"]:
            if p.grad is not None:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                shapes.setdefault(p.shape, []).append((p, p.grad, self.state[p]["momentum"]))
        for triples in shapes.values():
            parameters, gradients, momenta = zip(*triples, strict=True)
            foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            steps = orthogonal_steps(foreach_lerp(gradients, momenta, group["momentum"]))
            foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            foreach_add_(parameters, steps, alpha=-group["lr"])


def orthogonal_steps(directions: Sequence[Tensor]) -> list[Tensor]:
    """Directions of one shape [out, …] as matrices of equal singular values, about as long as steps of AdamW.

    The factor of the length is Moonshot's. Directions may be in shards of fsdp. Then each device computes the whole and
    keeps its part.
    """
    wholes = torch.stack([d.full_tensor() if isinstance(d, DTensor) else d for d in directions])
    matrices = wholes.flatten(2)
    steps = orthogonalized(matrices).mul_(0.2 * max(matrices.shape[1:]) ** 0.5).view_as(wholes).unbind()
    return [_in_shards_of(d, step) for d, step in zip(directions, steps, strict=True)]


def _in_shards_of(direction: Tensor, step: Tensor) -> Tensor:
    if not isinstance(direction, DTensor):
        return step
    mesh = direction.device_mesh
    return DTensor.from_local(step, mesh, [Replicate()] * mesh.ndim).redistribute(placements=direction.placements)


def orthogonalized(matrices: Tensor) -> Tensor:
    """About U Vᵀ of each matrix U S Vᵀ of [n, rows, columns], by Newton–Schulz: its larger values become 0.7 to 1.2.

    In the precision of the weights. bfloat16, which others use, is slow on a CPU. Its rounding would also make several
    devices differ from one.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # the smaller Gram matrix
    with torch.autocast(x.device.type, enabled=False):
        x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(_TINY)
        for _ in range(_N_STEPS):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x
