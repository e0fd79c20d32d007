"""Tensors that have a shape but no data. A training step on them needs none of its memory, and little of its time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from qnmixer.parallel.torch_private import (
    NO_TORCH_FUNCTION,
    READS_VALUE,
    TorchDispatchMode,
    TreeSpec,
    fake_mode,
    fake_tensor,
    no_dispatch,
    set_signs,
    storage_key,
    tensor_without_data,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made in the block have a shape but no data. Random states are restored afterwards."""
    with torch.random.fork_rng(devices=[]), _Shapes() as _Shapes.active:
        try:
            yield
        finally:
            _Shapes.active = None


@contextmanager
def values_refused() -> Iterator[None]:
    """In the block, a value of a tensor is refused, as by .item(), float() or `if x > 0`. A network may branch by it.

    Outside of the block it is 1: optimizers ask for values, but no shape depends on them.
    """
    shapes = _Shapes.active
    assert shapes is not None
    before, shapes.refuses_values = shapes.refuses_values, True
    try:
        yield
    finally:
        shapes.refuses_values = before


def report_to(observer: Callable[[Tensor], None] | None) -> bool:
    """Call `observer` with each tensor that an operator gives. False outside of `without_data`, where nothing does."""
    if _Shapes.active is not None:
        _Shapes.active.observer = observer
    return _Shapes.active is not None


def storage_of(tensor: Tensor) -> "torch.UntypedStorage | _Bytes":
    """The memory of a tensor, real or not. It has `nbytes()`, and `key_of` names it."""
    return tensor.memory if isinstance(tensor, _Shape) else tensor.untyped_storage()


def key_of(memory: "torch.UntypedStorage | _Bytes") -> int:
    """A number that no other memory has while this one lives."""
    return id(memory) if isinstance(memory, _Bytes) else storage_key(memory)


class _Bytes:
    """The memory of a shape and of its views. It ends with the last of them, as a storage does."""

    def __init__(self, n: int) -> None:
        self._n = n

    def nbytes(self) -> int:
        return self._n


class _Shape(Tensor):
    """A tensor with a shape, strides, a type and a device, but without data."""

    memory: torch.UntypedStorage | _Bytes  # a storage if it is a view of a real tensor

    __torch_function__ = NO_TORCH_FUNCTION  # as torch's own have it

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented  # outside of `without_data`


class _Output(NamedTuple):
    """A tensor that an operator gives."""

    argument: int | None  # the argument or earlier output that it is
    source: int | None  # the argument or earlier output whose memory it shares
    n_bytes: int  # of its memory
    place: tuple[torch.Size, tuple[int, ...], int | torch.SymInt]  # shape, strides and offset in its memory
    options: dict[str, Any]  # dtype and device
    signs: tuple[bool, bool]  # whether it is the conjugate of its memory, and the negative


_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.bmm.default, _ATEN.mm.default, _ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.stack.default,
    _ATEN.cat.default, _ATEN.sum.dim_IntList,
}  # fmt: skip
"""Operators beside those on points and views whose results are those on `meta`."""


class _Shapes(TorchDispatchMode):
    """Gives the result of each operator as a `_Shape`.

    torch's fake tensors tell its shape. They take 100 µs for each operator, and a step has 20,000. So they are asked
    once for each operator with arguments of the same shapes.
    """

    active: ClassVar["_Shapes | None"] = None
    _cache: ClassVar[dict[Any, tuple[list[Any], TreeSpec]]] = {}

    def __init__(self) -> None:
        super().__init__()
        # Gets each tensor that an operator gives. A mode of its own would take half as long again.
        self.observer: Callable[[Tensor], None] | None = None
        self.refuses_values = False  # see `values_refused`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result without data."""
        is_value = func is READS_VALUE
        if is_value and self.refuses_values and isinstance(args[0], _Shape):
            raise ValueError("the value of a tensor is read, as by .item(), float() or `if x > 0`")
        if func.namespace == "profiler":  # marks around a step of an optimizer
            return func(*args, **(kwargs or {}))
        tensors: list[Tensor] = []
        key = func, _key(args, tensors), _key(kwargs.items(), tensors) if kwargs else None
        cached = self._cache.get(key)
        if cached is None:
            if torch.Tag.inplace_view in func.tags:  # it changes the shape of its argument
                with no_dispatch():
                    return func(*args, **(kwargs or {}))
            cached = self._cache[key] = _outputs(func, args, kwargs or {}, tensors)
        leaves, structure = cached
        outputs = [self._made(leaf, tensors) if isinstance(leaf, _Output) else leaf for leaf in leaves]
        return outputs[0] if structure.is_leaf() else tree_unflatten(outputs, structure)

    def _made(self, output: _Output, tensors: list[Tensor]) -> Tensor:
        """The tensor that an operator gives for these tensors. It is added to them."""
        if output.argument is not None:
            tensor = tensors[output.argument]
        else:
            tensor = tensor_without_data(_Shape, *output.place, **output.options)
            tensor.memory = _Bytes(output.n_bytes) if output.source is None else storage_of(tensors[output.source])
            if any(output.signs):
                set_signs(tensor, *output.signs)
        tensors.append(tensor)
        if self.observer is not None:
            self.observer(tensor)
        return tensor


def _key(values: Iterable[Any], tensors: list[Tensor]) -> Any:
    """All of some arguments that the shape of a result may depend on. Their tensors are added to `tensors`."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            is_strided = value.layout is torch.strided
            place = (value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()) if is_strided else ()
            key += value.shape, place, value.dtype, value.device
        elif isinstance(value, list | tuple):
            key.append(_key(value, tensors))
        else:
            key += type(value), value  # the type too, because 1 == True == 1.0
    return tuple(key)


def _outputs(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[list[Any], TreeSpec]:
    """The leaves of an operator's result, an `_Output` for each tensor among them, and its structure."""
    if func is READS_VALUE:
        return tree_flatten(1.0)  # see `values_refused`
    # The shape of these follows from shapes alone, on any device. A fake tensor would take 20 times as long.
    is_simple = func.is_view or torch.Tag.pointwise in func.tags or func in _PRODUCTS
    is_simple &= all(isinstance(tensor, _Shape) for tensor in tensors)
    is_simple &= len({tensor.device for tensor in tensors}) == 1
    mode = nullcontext() if is_simple else fake_mode()  # without a cache: `_Shapes._cache` is the cache
    fakes = [_fake(tensor, mode) for tensor in tensors]
    with mode:
        fakes_in_order = iter(fakes)
        args, kwargs = tree_map_only(Tensor, lambda _: next(fakes_in_order), (args, kwargs))
        leaves, structure = tree_flatten(func(*args, **kwargs))
    sources = {storage_key(fake.untyped_storage()): k for k, fake in enumerate(fakes) if fake.layout is torch.strided}
    outputs = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            outputs.append(leaf)
            continue
        storage = leaf.untyped_storage()
        argument = next((k for k, fake in enumerate(fakes) if fake is leaf), None)
        source = sources.get(storage_key(storage))
        place = leaf.shape, leaf.stride(), leaf.storage_offset()
        options = {"dtype": leaf.dtype, "device": tensors[0].device if is_simple else leaf.device}
        signs = leaf.is_conj(), leaf.is_neg()
        outputs.append(_Output(argument, source, storage.nbytes(), place, options, signs))
        sources.setdefault(storage_key(storage), len(fakes))
        fakes.append(leaf)
    return outputs, structure


def _fake(tensor: Tensor, mode: Any) -> Tensor:
    """torch's fake tensor of the same shape, in a memory of the same size; without its mode one on `meta`."""
    if not isinstance(tensor, _Shape):
        return mode.from_tensor(tensor)
    memory = torch.empty(tensor.memory.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="meta")
    view = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    fake = view if isinstance(mode, nullcontext) else fake_tensor(view, tensor.device)
    set_signs(fake, tensor.is_conj(), tensor.is_neg())
    return fake
