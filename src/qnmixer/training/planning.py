"""What a training step will hold in the memory of each device, told without the devices and without the memory.

The step itself is run on fake tensors, which have shapes but no data, under the tracker that ships with torch. Only the
operator is real. Past the first few iterations memory is affine in T, so that two short steps give a long one (the
tests hold the two against each other). Of a pipeline each stage is run so, with one micro-batch, and the order in which
a device works through its stages gives how much of that it holds at once.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._python_dispatch import TorchDispatchMode

from qnmixer.config import (
    Config,
    DDPConfig,
    FSDPConfig,
    PipelineConfig,
    RecomputeConfig,
    UnrolledConfig,
    batch_of_replica,
    devices_per_replica,
    validate,
    with_iterations,
)
from qnmixer.models.unrolled import UnrolledNetwork
from qnmixer.parallel.memory import apply_memory_mode, offloading_loop, stays
from qnmixer.parallel.stages import Packing, Stage, actions, cut_evenly, idle_share, ranges, survey
from qnmixer.physics import FanBeamProjector
from qnmixer.reconstructor import AUTOCAST, Reconstructor, build_projector
from qnmixer.training.losses import build_loss, weighted
from qnmixer.training.optimizers import build_optimizer

MIB = 2**20

# From here on memory was seen to be affine in T.
_FEWEST_ITERATIONS = 4

ASSUMED_DEVICES = 4
"""How many there are taken to be where the config leaves it to the machine."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device when a training step holds most, by what they are; `host`: moved off it by offloading.

    `strategy`: the copies that a strategy adds (messages, receive buffers, gathered weights); 0 for single.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    operator: float
    strategy: float = 0.0
    host: float = 0.0

    @property
    def peak(self) -> float:
        """All that the device holds."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """What `peak` is the sum of."""
        return {name: value for name, value in vars(self).items() if name != "host"}

    def moved(self, steps: float, towards: "Footprint") -> "Footprint":
        """The footprint that many steps further along the line through this one and another."""
        return Footprint(*(a + steps * (b - a) for a, b in zip(astuple(self), astuple(towards), strict=True)))


@dataclass(frozen=True)
class DevicePlan:
    """What one device does and holds: the iterations of each of its stages, and most micro-batches in flight in it."""

    stages: tuple[range, ...]
    in_flight: int
    footprint: Footprint


@dataclass(frozen=True)
class Prediction:
    """The footprint of a run, on the device that holds most; bytes that each further iteration adds to it there.

    None for the latter: the network's T is fixed. `devices`: all that work on one batch, first stage first; one, unless
    the run is a pipeline.
    """

    footprint: Footprint
    per_iteration: float | None
    devices: tuple[DevicePlan, ...]


class Planner:
    """Predicts the footprint of configs that share one scan; what it has run it remembers.

    Raises ConfigError for a config that leaves the number of devices open and cannot be run on `ASSUMED_DEVICES`.
    """

    def __init__(self, config: Config, projector: FanBeamProjector | None = None) -> None:
        self.projector = projector or build_projector(config)
        self.projector.safe_step_size()  # networks ask for these numbers, which fake tensors could not give
        self.projector.operator_norm()
        self._known: dict[str, Footprint] = {}
        self._known_stages: dict[str, StageCost] = {}

    def predict(self, config: Config) -> Prediction:
        """The footprint of a run on its fullest device, from a step of all its iterations and one of some more."""
        config = counted(config)
        T, width, batch = config.model.T, _width(config), config.data.batch_size
        if isinstance(config.strategy, PipelineConfig):
            return self._predict_pipeline(config)
        footprint = self._step(config, T, batch)
        device = DevicePlan((range(T),), 1, footprint)
        if not isinstance(config.model, UnrolledConfig):
            return Prediction(footprint, None, (device,))
        growth = self._step(config, T + width, batch).peak - footprint.peak
        return Prediction(footprint, growth / width, (device,))

    def estimate(self, config: Config) -> Footprint:
        """The footprint of a run on its fullest device, from two steps of few iterations: sooner, and nearly the same.

        Of a pipeline all iterations are run, as a stage is short and the state that it gets grows.
        """
        config = counted(config)
        if isinstance(config.strategy, PipelineConfig):
            return max((plan.footprint for plan in self.devices(config)), key=lambda footprint: footprint.peak)
        T, width, batch = config.model.T, _width(config), config.data.batch_size
        first = max(_FEWEST_ITERATIONS, 2 * width)
        first += (T - first) % width
        if first + width >= T:
            return self._step(config, T, batch)
        small, larger = (self._step(config, t, batch) for t in (first, first + width))
        return small.moved((T - first) / width, larger)

    def devices(self, config: Config) -> tuple[DevicePlan, ...]:
        """What each device that works on one batch does and holds, first stage first; one, unless it is a pipeline."""
        config = counted(config)
        if not isinstance(config.strategy, PipelineConfig):
            return (DevicePlan((range(config.model.T),), 1, self.estimate(config)),)
        cut = cut_of(config)
        stages = self._stages(config, ranges(cut))
        fixed = self._fixed(config)
        return tuple(plan_device(config, cut, stages, fixed, d) for d in range(devices_per_replica(config)))

    def optimizer_state(self, config: Config) -> float:
        """Bytes that the optimizer keeps between steps, on one device."""
        config = counted(config)
        n_shards = _n_shards(config)
        with _without_data():
            module = Reconstructor(config, self.projector)
            optimizer = build_optimizer(config.optimizer, module.network)
            _make_state(optimizer)
            return _optimizer_bytes(optimizer, n_shards)

    def _predict_pipeline(self, config: Config) -> Prediction:
        """One more iteration goes to the first stage of the fullest device."""
        devices = self.devices(config)
        fullest = max(range(len(devices)), key=lambda d: devices[d].footprint.peak)
        footprint, width = devices[fullest].footprint, _width(config)
        cut = cut_of(config)
        cut[fullest] += width
        longer = with_iterations(config, config.model.T + width)
        longer = replace(longer, strategy=replace(config.strategy, cut=cut))  # type: ignore[call-arg]  # a pipeline's
        wanted = ranges(cut)[fullest :: len(devices)]
        stages = self._stages(longer, wanted)
        peak = plan_device(longer, cut, stages, self._fixed(longer), fullest).footprint.peak
        return Prediction(footprint, (peak - footprint.peak) / width, devices)

    def _fixed(self, config: Config) -> Footprint:
        """What every device of a pipeline holds whatever it does; gradients: once they are all there."""
        key = f"fixed {config.model} {config.optimizer}"
        if key not in self._known:
            with _without_data():
                module = Reconstructor(config, self.projector)
                weights, operator = _bytes(module.parameters()), _bytes(module.buffers())
            self._known[key] = Footprint(weights, weights, self.optimizer_state(config), 0, operator)
        return self._known[key]

    def _stages(self, config: Config, wanted: list[range]) -> dict[range, "StageCost"]:
        assert isinstance(config.strategy, PipelineConfig)
        dtype = AUTOCAST[config.trainer.precision]
        setting = (config.model, config.data.image_size, config.memory, config.loss, config.strategy.microbatch_size)
        keys = {iterations: f"{setting} {dtype and dtype.itemsize} {iterations}" for iterations in wanted}
        missing = [iterations for iterations, key in keys.items() if key not in self._known_stages]
        if missing:
            costs = track_stages(config, self.projector, missing)
            self._known_stages |= {keys[iterations]: cost for iterations, cost in costs.items()}
        return {iterations: self._known_stages[key] for iterations, key in keys.items()}

    def _step(self, config: Config, n_iterations: int, batch: int) -> Footprint:
        config = with_iterations(config, n_iterations)
        config = replace(config, data=replace(config.data, batch_size=batch))
        key = repr((config.model, config.data.batch_size, config.memory, config.optimizer, config.loss))
        dtype = AUTOCAST[config.trainer.precision]
        key += f"{dtype and dtype.itemsize} {config.trainer.accumulate_grad_batches > 1}"
        key += f"{config.strategy} {_n_shards(config)}"
        if key not in self._known:
            self._known[key] = track_step(config, self.projector)
        return self._known[key]


def counted(config: Config) -> Config:
    """The config with `ASSUMED_DEVICES` where a strategy leaves their number to the machine; raises ConfigError."""
    if config.strategy.name == "single" or config.trainer.devices is not None:
        return config
    config = replace(config, trainer=replace(config.trainer, devices=ASSUMED_DEVICES))
    validate(config)
    return config


def cut_of(config: Config) -> list[int]:
    """Iterations of each stage of a pipeline, evenly where they are to be measured."""
    assert isinstance(config.strategy, PipelineConfig)
    n_stages = devices_per_replica(config) * config.strategy.stages_per_device
    return list(config.strategy.cut or cut_evenly(config.model.T, n_stages))


def n_microbatches(config: Config) -> int:
    """Micro-batches of a pipeline's batch."""
    assert isinstance(config.strategy, PipelineConfig)
    return batch_of_replica(config) // config.strategy.microbatch_size


def idle(config: Config) -> float:
    """Share of device time that a pipeline waits, with iterations of equal cost.

    Backward is taken to cost two forwards, three where it runs them again.
    """
    assert isinstance(config.strategy, PipelineConfig)
    return idle_share(
        config.strategy.schedule,
        devices_per_replica(config),
        n_microbatches(config),
        cut_of(config),
        config.strategy.stages_per_device,
        backward=3.0 if config.memory.name == "recompute" else 2.0,
    )


def _width(config: Config) -> int:
    """Iterations by which memory grows evenly: those of a segment that is recomputed together, in whole periods."""
    segment = config.memory.segment if isinstance(config.memory, RecomputeConfig) else 1
    return math.lcm(segment, config.model.period) if isinstance(config.model, UnrolledConfig) else segment


def _n_shards(config: Config) -> int:
    """Over how many devices fsdp spreads each tensor; 1 for every other strategy."""
    sharded = isinstance(config.strategy, FSDPConfig)
    return (config.trainer.devices or 1) * config.trainer.num_nodes if sharded else 1


def track_step(config: Config, projector: FanBeamProjector) -> Footprint:
    """The footprint of the training step of a config, run whole on fake tensors; of single, ddp or fsdp.

    ddp's buckets, of which gradients are views, stay when gradients are cleared; while it accumulates, gradients are
    outside of them, and those are the copy that `strategy` counts.
    """
    n_batches = min(2, config.trainer.accumulate_grad_batches)  # from the second on, there are gradients all along
    hosted = _Hosted()
    with _without_data():
        module = Reconstructor(config, projector)
        network = module.network
        _apply_memory_mode(network, config, hosted)
        optimizer = build_optimizer(config.optimizer, network)
        _make_state(optimizer)
        buckets = _Buckets(network) if isinstance(config.strategy, DDPConfig) else None
        tracker = _PeakTracker()
        tracker.track_external(module, optimizer)
        size = config.data.image_size
        with tracker:
            for k in range(n_batches):
                image = torch.rand(config.data.batch_size, 1, size, size)
                weight = torch.ones(config.data.batch_size)
                with torch.no_grad():
                    y = projector(image)
                with _autocast(config):
                    loss = _batch_loss(config)(network(y), image, weight)
                if k == 0:
                    optimizer.zero_grad()  # where Lightning does it: those of the step before live until here
                if buckets is not None:
                    buckets.in_use = k == n_batches - 1
                loss.backward()
                del loss, y, image, weight
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        of = _by_kind(peak)
        loose = max(0, of["GRAD"] - buckets.bytes) if buckets is not None else 0
        footprint = Footprint(
            parameters=of["PARAM"],
            gradients=of["GRAD"] - loose,
            optimizer=of["OPT"],
            activations=of["ACT"] + of["TEMP"] + of["OTH"],
            operator=of["BUFFER"],
            strategy=loose,
            host=hosted.bytes,
        )
        return _sharded(footprint, config, network, optimizer) if isinstance(config.strategy, FSDPConfig) else footprint


def _sharded(
    footprint: Footprint, config: Config, network: UnrolledNetwork[Any], optimizer: torch.optim.Optimizer
) -> Footprint:
    """The footprint of a step on one device, as fsdp would have it: by arithmetic, and rather too much than too little.

    Weights, gradients and optimizer state are cut along their first dimension, rounded up. `strategy` is what is whole
    at once: the weights of the root unit and of one block (of all, where they stay gathered), the largest unit twice
    more (as the messages in which weights are gathered and gradients reduced), and while accumulating all gradients.
    """
    assert isinstance(config.strategy, FSDPConfig)
    n_shards = _n_shards(config)
    blocks = [_bytes(block.parameters()) for block in network.blocks()]
    whole, shards = _bytes(network.parameters()), _bytes(network.parameters(), n_shards)
    root = whole - sum(blocks)
    gathered = root + (max(blocks, default=0) if config.strategy.reshard_after_forward else sum(blocks))
    messages = 2 * max([root, *blocks])
    unreduced = whole if config.trainer.accumulate_grad_batches > 1 else 0
    return replace(
        footprint,
        parameters=shards,
        gradients=footprint.gradients * shards / whole,
        optimizer=_optimizer_bytes(optimizer, n_shards),
        strategy=gathered + messages + unreduced,
    )


@dataclass(frozen=True)
class StageCost:
    """Bytes that a stage holds for one micro-batch, beside what it receives; sinogram and images are not counted."""

    received: int  # the state that comes in; the gradient that goes out is of this size too
    sent: int  # the state that goes out, and the gradient that comes in
    sinogram: int
    casts: int  # weights in half precision, which all micro-batches share
    forward: int  # most during forward
    held: int  # between forward and backward
    backward: int  # most during backward, gradients of weights left out
    first_backward: int  # most during backward with those, when it is the one that makes them
    weights: dict[str, int]  # bytes of those that get a gradient
    host: int  # what offloading moves away


def track_stages(config: Config, projector: FanBeamProjector, wanted: Iterable[range]) -> dict[range, StageCost]:
    """What each of some stages of a pipeline costs, by its iterations; run on fake tensors."""
    assert isinstance(config.strategy, PipelineConfig)
    b, size = config.strategy.microbatch_size, config.data.image_size
    hosted = _Hosted()
    with _without_data():
        module = Reconstructor(config, projector)
        _apply_memory_mode(module.network, config, hosted)
        image, weight = torch.rand(b, 1, size, size), torch.ones(b)
        with torch.no_grad():
            y = projector(image)
        packings, _ = survey(module.network, y, partial(_autocast, config), timed=False)
        return {
            iterations: _track_stage(module, iterations, packings, (y, image, weight), hosted) for iterations in wanted
        }


def _track_stage(
    module: Reconstructor,
    iterations: range,
    packings: list[Packing],
    batch: tuple[Tensor, Tensor, Tensor],
    hosted: "_Hosted",
) -> StageCost:
    y, image, weight = batch
    network = module.network
    first, last = iterations.start == 0, iterations.stop == network.n_iterations
    stage = Stage(network, iterations, None if first else packings[iterations.start])
    positions = torch.arange(len(y))

    def buffer(t: int) -> Tensor:
        return torch.empty(len(y), packings[t].width, dtype=packings[t].dtype)

    def forward() -> tuple[Tensor, ...]:
        with _autocast(module.config):
            output = stage(*received, y=y)
            loss = _batch_loss(module.config)
            return (loss(output, image[positions], weight[positions]), output) if last else (output,)

    received = [] if first else [buffer(iterations.start).requires_grad_()]
    given = [] if last else [buffer(iterations.stop)]
    network.zero_grad()
    tracker = _PeakTracker()
    tracker.track_external(module, y, image, weight, positions, *received, *given)
    with tracker, torch.autocast("cpu", enabled=False):  # the outer one of a pipeline: casts outlive a micro-batch
        if module.config.trainer.precision != "32":
            forward()
        casts = tracker.active
        tracker.restart()
        host = hosted.bytes
        made = forward()
        most_forward, held = tracker.most - casts, tracker.active - casts
        tracker.restart()
        torch.autograd.backward(made[:1], given or None)
        most_backward, with_gradients = tracker.most - casts, tracker.most_with_gradients - casts
    return StageCost(
        received=_bytes(received),
        sent=_bytes(given),
        sinogram=y.nbytes,
        casts=casts,
        forward=most_forward,
        held=held,
        backward=most_backward,
        first_backward=with_gradients,
        weights={name: p.nbytes for name, p in network.named_parameters() if p.grad is not None},
        host=hosted.bytes - host,
    )


def plan_device(
    config: Config, cut: list[int], costs: dict[range, StageCost], fixed: Footprint, device: int
) -> DevicePlan:
    """What one device of a pipeline holds, going through its actions in order.

    Beside the stages: the whole batch, as every device gets it; the buffers of torch's pipelining for states and
    gradients received, one for each micro-batch; input gradients sent, until torch lets go of them; and, when all that
    is over, the message in which gradients are summed.
    """
    assert isinstance(config.strategy, PipelineConfig)
    schedule, n_devices, n = config.strategy.schedule, devices_per_replica(config), n_microbatches(config)
    own = [costs[iterations] for iterations in ranges(cut)[device::n_devices]]
    at_once = 1 if schedule == "sequential" else n  # micro-batches of one call of torch's schedule
    buffers = at_once * sum(stage.received + stage.sent for stage in own)
    images = batch_of_replica(config) * 4 * (config.data.image_size**2 + 1)
    batch = images + n * own[0].sinogram + max(stage.casts for stage in own)

    gradients: dict[str, int] = {}
    if config.trainer.accumulate_grad_batches > 1:  # those of the batch before
        gradients = {name: size for stage in own for name, size in stage.weights.items()}
    held = sent = in_flight = most_in_flight = host = most_host = 0
    most = (0, 0)  # activations, gradients
    for kind, index, _ in actions(schedule, device, n_devices, n, config.strategy.stages_per_device):
        stage = own[index // n_devices]
        if kind == "F":
            most = max(most, (held + sent + stage.forward, sum(gradients.values())), key=sum)
            held, host, in_flight = held + stage.held, host + stage.host, in_flight + 1
            most_in_flight, most_host = max(most_in_flight, in_flight), max(most_host, host)
            continue
        held, host, in_flight = held - stage.held, host - stage.host, in_flight - 1
        first = not gradients
        gradients |= stage.weights
        made = stage.first_backward - stage.backward if first else sum(gradients.values())
        most = max(most, (held + sent + stage.backward, made), key=sum)
        sent = 0 if schedule == "sequential" else stage.received + (0 if schedule == "1f1b" else sent)
    step = replace(fixed, activations=most[0] + batch, gradients=most[1], strategy=buffers, host=float(most_host))
    summing = replace(fixed, activations=images, strategy=buffers + fixed.parameters, host=float(most_host))
    footprint = max(step, summing, key=lambda footprint: footprint.peak)
    return DevicePlan(tuple(ranges(cut)[device::n_devices]), most_in_flight, footprint)


def _apply_memory_mode(network: UnrolledNetwork[Any], config: Config, hosted: "_Hosted") -> None:
    apply_memory_mode(network, config.memory)
    if config.memory.name == "offload":
        network.loop = partial(offloading_loop, pack=hosted.pack, unpack=hosted.unpack)


def _batch_loss(config: Config) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Loss of images, truths and weights as training has it."""
    return partial(weighted, build_loss(config.loss), batch=batch_of_replica(config))


def _autocast(config: Config) -> torch.autocast:
    dtype = AUTOCAST[config.trainer.precision]
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _bytes(tensors: Iterable[Tensor], n_shards: int = 1) -> int:
    """Bytes of some tensors, or of one shard of each, cut along the first dimension."""
    return sum(-(-len(t) // n_shards) * (t.nbytes // len(t)) if t.ndim else t.nbytes for t in tensors)


def _optimizer_bytes(optimizer: torch.optim.Optimizer, n_shards: int) -> float:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return _bytes((value for value in states if isinstance(value, Tensor)), n_shards)


def _by_kind(snapshot: dict[Any, int]) -> dict[str, int]:
    return {str(kind).rpartition(".")[2]: n for kind, n in snapshot.items()}


@contextmanager
def _without_data() -> Iterator[None]:
    """Tensors made inside have a shape and no data; random numbers are as they were afterwards."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True), _AnyNumber():
        yield


class _PeakTracker(MemTracker):
    """Torch's tracker without its figures by module, whose hooks keep graphs alive, and with peaks that start again.

    `most` bytes of activations and temporary memory since then; the same with gradients of weights counted.
    """

    most = most_with_gradients = 0

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()

    def track_external(self, *external: Any) -> None:
        """Count these from the start; of modules the gradients too, those to come included."""
        super().track_external(*external)
        for module in external:
            if isinstance(module, nn.Module):
                self._track_module_params_and_buffers(module, install_grad_hooks=True)

    @property
    def active(self) -> int:
        """Bytes of activations and temporary memory now."""
        return sum(of[_MemRefType.ACT] + of[_MemRefType.TEMP] for of in self._curr_mem_snap.values())

    def restart(self) -> None:
        """Let the peaks start from what there is now."""
        self.most = self.most_with_gradients = 0
        self._note()

    def _note(self) -> None:
        active = self.active
        gradients = sum(of[_MemRefType.GRAD] for of in self._curr_mem_snap.values())
        self.most = max(self.most, active)
        self.most_with_gradients = max(self.most_with_gradients, active + gradients)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        self._note()


class _NoModules(ModTracker):
    """Sees no module; still knows forward from backward."""

    def __enter__(self) -> "_NoModules":
        return self

    def __exit__(self, *args: object) -> None: ...


class _AnyNumber(TorchDispatchMode):
    """Where an optimizer asks a fake tensor for its value, any will do: no shape depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


class _Buckets:
    """ddp's buckets, made of the gradients there are; while `in_use`, each gradient that backward made goes there."""

    def __init__(self, network: UnrolledNetwork[Any]) -> None:
        self.in_use = True
        self._of = {p: p.grad for p in network.parameters() if p.grad is not None}
        self.bytes = _bytes(self._of.values())
        for p in self._of:
            p.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        own = self._of[parameter]  # type: ignore[index]  # a parameter
        if self.in_use and parameter.grad is not own:
            own.copy_(parameter.grad)  # type: ignore[arg-type]  # there is one
            parameter.grad = own


class _Hosted:
    """Saved tensors that offloading moves to the host: shapes only, so that the tracker sees them leave."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        if stays(tensor):
            return lambda: tensor
        self.bytes += tensor.nbytes
        return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype)

    @staticmethod
    def unpack(make: Callable[[], Tensor]) -> Tensor:
        return make()


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """What an optimizer keeps from its first step on, and the gradients of that step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
