"""Accelerators that this machine need not have: tensors that say where they are, and refuse to be mixed.

Inside `pretended()` a tensor can be put on any device that torch can name (`tensor.to("cuda:1")`, `torch.empty(...,
device="cuda:0")`, `module.to("cuda")`). Its numbers stay in main memory and are computed there; what is pretended is the
bookkeeping, by torch's own rules:

- a tensor moves by `to`, `cpu`, `cuda`, `copy_` and plain assignment, and by nothing else;
- tensors of two devices in one call are an error, but for numbers (0-dim tensors) on the CPU, and indices on the CPU;
- what is on a device is no NumPy array, and is not filled from a CPU's generator.

`Ledger` counts the bytes of the tensors that exist on pretended devices, which is what a real one must hold at least: what
a kernel takes for itself is not seen. Calls are looked at as Python makes them, one level deep: a device that is mixed up
inside a function of torch's own goes unseen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor
CPU = torch.device("cpu")

_ANYWHERE = {"__get__", "__set__", "__delete__", "copy_", "_has_compatible_shallow_copy_type", "__deepcopy__"}
"""Calls that take tensors of several devices."""

_NO_NUMBERS = {"cat", "concat", "stack"}
"""Calls that do not even take a number from the CPU."""

_MAIN_MEMORY = {"numpy", "__array__"}


class MixedDevicesError(Exception):
    """One call got tensors of several devices. No `RuntimeError`, as torch's own is: nothing is to catch it by design."""


def named(device: Any) -> torch.device:
    """A device with its number: "cuda" is the first."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def place(tensor: Tensor) -> torch.device:
    """Where a tensor is said to be."""
    return vars(tensor).get("_place", CPU)


class Ledger:
    """Bytes of the tensors on pretended devices, now and at most."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.holders: Counter[int] = Counter()
        self.peak = 0

    @property
    def now(self) -> int:
        return sum(self.sizes.values())

    def enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self.sizes[key] = max(self.sizes.get(key, 0), storage.nbytes())
        self.holders[key] += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._leave, key)

    def _leave(self, key: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key], self.sizes[key]

    def restart(self) -> None:
        self.peak = self.now


class _Pretended(TorchFunctionMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        name = getattr(func, "__name__", "")
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        here = _where(tensors, name)
        if name in _MAIN_MEMORY and here != CPU:
            raise TypeError(f"a tensor on {here} is no NumPy array; copy it to the CPU first")
        there = here
        if kwargs.get("device") is not None:
            there, kwargs["device"] = named(kwargs["device"]), CPU
            if kwargs.get("generator") is not None and there != CPU:
                raise RuntimeError(f"Expected a {there.type!r} device type for generator but found 'cpu'")
        return self.put(func(*args, **kwargs), there, tensors)

    def put(self, result: Any, where: torch.device, known: list[Tensor]) -> Any:
        """Say of all new tensors in a result where they are."""
        if isinstance(result, Tensor) and any(result is tensor for tensor in known) and place(result) != where:
            result = result.clone() if where != CPU or place(result) != CPU else result
        for tensor in _tensors((result,)):
            if not any(tensor is old for old in known):
                self.label(tensor, where)
        return result

    def label(self, tensor: Tensor, where: torch.device) -> None:
        old = place(tensor)
        vars(tensor)["_place"] = where
        if where != CPU and old == CPU:
            self.ledger.enter(tensor)

    def move(self, tensor: Tensor, where: torch.device, call: Callable[[], Tensor]) -> Tensor:
        """What `call` makes of a tensor, on another device; a copy where it has to be."""
        result = call()
        if result is tensor and place(tensor) != where:
            result = tensor.clone()
        if result is not tensor:
            self.label(result, where)
        return result


def _tensors(things: Any) -> Iterator[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, (list, tuple)):
            yield from _tensors(thing)


def _where(tensors: list[Tensor], name: str) -> torch.device:
    """The device that a call runs on."""
    places = [place(tensor) for tensor in tensors]
    if name in _ANYWHERE:
        return places[0] if places else CPU
    kept = {
        where
        for tensor, where in zip(tensors, places, strict=True)
        if where != CPU or tensor.ndim or name in _NO_NUMBERS
    }
    if len(kept) > 1:
        raise MixedDevicesError(
            f"Expected all tensors to be on the same device, but {name} got {sorted(map(str, places))}"
        )
    return next(iter(kept), CPU)


# --- Calls with rules of their own -------------------------------------------------------------------------------


def _device(_: Any, func: Any, args: Any, kwargs: Any) -> torch.device:
    return place(args[0])


def _is_cuda(_: Any, func: Any, args: Any, kwargs: Any) -> bool:
    return place(args[0]).type == "cuda"


def _is_cpu(_: Any, func: Any, args: Any, kwargs: Any) -> bool:
    return place(args[0]) == CPU


def _device_named(_: Any, func: Any, args: Any, kwargs: Any) -> torch.device:
    return named(args[0]) if args and isinstance(args[0], int) else func(*args, **kwargs)


def _to(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, *rest = args
    where, dtype = place(tensor), tensor.dtype
    for item in (*rest, kwargs.get("other"), kwargs.get("device"), kwargs.get("dtype")):
        if isinstance(item, Tensor):
            where, dtype = place(item), item.dtype
        elif isinstance(item, torch.dtype):
            dtype = item
        elif isinstance(item, (str, int, torch.device)) and not isinstance(item, bool):
            where = named(item)
    flags = [item for item in rest if isinstance(item, bool)]  # non_blocking, copy
    copy = kwargs.get("copy", len(flags) > 1 and flags[1])
    return mode.move(tensor, where, lambda: func(tensor, dtype, copy=copy))


def _cpu(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Tensor:
    return mode.move(args[0], CPU, lambda: func(*args, **kwargs))


def _cuda(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Tensor:
    where = named(kwargs.get("device", args[1] if len(args) > 1 else "cuda"))
    return mode.move(args[0], where, lambda: args[0])


def _type_as(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Tensor:
    return mode.move(args[0], place(args[1]), lambda: func(*args, **kwargs))


def _check_index(tensor: Tensor, index: Any) -> list[Tensor]:
    parts = list(_tensors((index,)))
    if any(place(part) not in (CPU, place(tensor)) for part in parts):
        raise MixedDevicesError(f"indices should be either on cpu or on the indexed tensor's device ({place(tensor)})")
    return parts


def _getitem(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Tensor:
    parts = _check_index(*args)
    return mode.put(func(*args, **kwargs), place(args[0]), [args[0], *parts])


def _setitem(_: Any, func: Any, args: Any, kwargs: Any) -> None:
    tensor, index, value = args
    if _check_index(tensor, index) and isinstance(value, Tensor):  # a plain assignment copies from anywhere
        _where([tensor, value], "__setitem__")
    func(*args, **kwargs)


def _iter(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    return iter(mode.put(args[0].unbind(0), place(args[0]), [args[0]]))


def _set_data(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)
    mode.label(args[0], place(args[1]))


def _grad(mode: _Pretended, func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
    for tensor, of in zip(result, [inputs] if isinstance(inputs, Tensor) else inputs, strict=True):
        if tensor is not None:
            mode.label(tensor, place(of))
    return result


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_RULES: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    torch.device: _device_named,
    _getter("device"): _device,
    _getter("is_cuda"): _is_cuda,
    _getter("is_cpu"): _is_cpu,
    torch.Tensor.data.__set__: _set_data,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.type_as: _type_as,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.__iter__: _iter,
    torch.autograd.grad: _grad,
}


def _gpus(ledger: Ledger) -> dict[str, Callable[..., Any]]:
    """What `torch.cuda` says of two GPUs of 1 GB each, of which nothing but the ledger's tensors is taken."""
    size = 10**9
    return {
        "device_count": lambda: 2,
        "get_device_properties": lambda _=None: SimpleNamespace(total_memory=size),
        "mem_get_info": lambda _=None: (size - ledger.now, size),
        "memory_allocated": lambda _=None: ledger.now,
        "memory_reserved": lambda _=None: ledger.now,
        "max_memory_allocated": lambda _=None: ledger.peak,
        "reset_peak_memory_stats": lambda _=None: ledger.restart(),
        "synchronize": lambda _=None: None,
    }


@contextmanager
def pretended() -> Iterator[Ledger]:
    """Pretend that there is any device that a tensor is put on, and that `torch.cuda` knows two."""
    ledger = Ledger()
    mode, plain = _Pretended(ledger), torch.nn.Parameter.__new__

    def parameter(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        made = plain(cls, data, *args, **kwargs)
        if isinstance(data, Tensor) and made is not data:
            mode.label(made, place(data))
        return made

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(torch.nn.Parameter, "__new__", parameter)  # torch asks no mode about it
        for name, stand_in in _gpus(ledger).items():
            patch.setattr(torch.cuda, name, stand_in)
        yield ledger
