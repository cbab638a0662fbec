"""Know the values of what follows from the inputs alone: masks, positions, lengths. Models take branches on them.

A fake tensor has no values. What is computed from inputs, constants and a live model's tables of whole numbers alone,
without a weight, is therefore computed a second time for real, as long as it is small. The choices of routers are taken
to be balanced (`choices`). A question put to anything else is an error, unless a healthy run has but one answer to it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memopt.analyze.choices import balanced, healthy
from memopt.analyze.trees import tensors_in
from memopt.analyze.unset import forget_unset, is_partly_set, note_unset, write_known

MAX_ELEMENTS = 1 << 25
"""Larger values are not followed: a mask over 4096 x 4096 positions is half of this."""

_VALUE = "_memopt_value"
_ASSUMED = "_memopt_assumed"
"""Marks a value that follows from assumed choices."""
_STALE = "_memopt_stale"
"""Marks the storage of a value into which something unknown was written: all tensors on it are unknown then."""
_QUESTIONS = frozenset(
    getattr(torch.Tensor, name) for name in ("__bool__", "__float__", "__index__", "__int__", "item", "tolist")
)
_LOOKS = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("device", "dtype", "layout", "ndim", "requires_grad", "shape")
        ),
        *(
            getattr(torch.Tensor, name)
            for name in ("dim", "element_size", "is_floating_point", "numel", "size", "stride")
        ),
    }
)
"""What a tensor tells of itself without a value."""
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_WHOLE = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_SHAPED_AS = frozenset({"expand_as", "reshape_as", "view_as"})
"""Functions that ask their second operand for its shape alone."""
_FILLED_AS = frozenset({"full_like", "ones_like", "zeros_like"})
"""Functions that ask their first operand for its shape and dtype alone."""
MAX_FILLED = 1 << 20
"""Larger tensors that are shaped as an activation are not followed: they are activations too."""
_RANDOM_OR_UNSET = frozenset(
    {
        "bernoulli", "bernoulli_", "dropout", "empty", "empty_like", "empty_strided", "exponential_", "multinomial",
        "new_empty", "normal", "normal_", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
        "random_", "uniform_",
    }
)  # fmt: skip
_TYPICAL = {
    "rand": 0.5, "rand_like": 0.5,  # layerdrop: below any sensible rate no layer is dropped
    "isnan": False, "isinf": False, "isfinite": True, "_is_all_true": True,  # guards of a healthy run
}  # fmt: skip


class InputValues(TorchFunctionMode):
    """Follow the values of what follows from the inputs, and answer the questions put to them."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.asked_for_choices = False
        """Whether an answer rests on the assumption that choices are balanced."""

    def faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input as a fake tensor that keeps its value, where it is small and not trained."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._mode.from_tensor(tensor)
        if not tensor.requires_grad and tensor.numel() <= MAX_ELEMENTS:
            setattr(fake, _VALUE, tensor.detach().cpu().clone())
        return fake

    def know_tables(self, model: torch.nn.Module, twin: torch.nn.Module) -> None:
        """Let a live model's twin know the values of buffers that hold no floating-point numbers: positions, tables."""
        copies = dict(twin.named_buffers())
        for name, buffer in model.named_buffers():
            is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta
            if is_plain and buffer.dtype in (*_WHOLE, torch.bool) and buffer.numel() <= MAX_ELEMENTS and name in copies:
                setattr(copies[name], _VALUE, buffer.detach().cpu().clone())

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on fake tensors, and on the values of its operands if all of them are known."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args, kwargs))
        if func in _QUESTIONS:
            return self._answer(func, args, kwargs)
        if func in _LOOKS:
            return func(*args, **kwargs)
        if func in _INDEXING:
            args = self._with_numbers(args)
        return self._run(func, args, kwargs)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assumed = any(hasattr(operand, _ASSUMED) for operand in tensors_in((args, kwargs)))
        values = self._values(func, args, kwargs)
        try:
            out = (
                torch.ops.aten.lift_fresh(self._faked_all(values, kwargs.get("device")))
                if func is torch.tensor and values is not None
                else func(*args, **kwargs)
            )
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.asked_for_choices |= assumed
            out = self._answered(func, args, kwargs, values)
            if out is None:
                raise
        if values is None and (choices := balanced(func, args, kwargs, out)) is not None:
            values, assumed = choices, True
        _keep(tensors_in(out), _leaves(_typical(func, out, values)), assumed=assumed)
        if made := tensors_in(out):
            for operand in tensors_in((args, kwargs)):
                forget_unset(operand)  # may be viewed
            note_unset(_name(func), made)
        return out

    def _answered(self, func: Callable[..., Any], args: Any, kwargs: Any, values: Any) -> Any:
        """Return what a function gives that asks for data: by its values, in a healthy run, or with the numbers it wants."""
        if values is not None:
            operand = next(iter(tensors_in((args, kwargs))), None)
            return self._faked_all(values, kwargs.get("device", operand.device if operand is not None else None))
        if (out := healthy(func, args, kwargs)) is not None:
            return out
        numbered = tree_map_only(torch.Tensor, self._number, (args, kwargs))
        is_other = any(
            one is not other for one, other in zip(tree_leaves(numbered), tree_leaves((args, kwargs)), strict=True)
        )
        return func(*numbered[0], **numbered[1]) if is_other else None

    def _faked_all(self, values: Any, device: Any) -> Any:
        """Return computed values as fake tensors on a device whose storages are as large, as those of what was cut are."""

        def faked(value: torch.Tensor) -> torch.Tensor:
            fake = self._mode.from_tensor(value)
            fake.untyped_storage().resize_(value.untyped_storage().nbytes())
            return fake.to(device)

        return tree_map_only(torch.Tensor, faked, values)

    def _number(self, tensor: torch.Tensor) -> Any:
        """Return the number that a tensor is, if it is a whole one and known; any other tensor as it is."""
        is_number = tensor.dim() == 0 and tensor.dtype in _WHOLE and value_of(tensor) is not None
        return self._answer(torch.Tensor.item, (tensor,), {}) if is_number else tensor

    def _answer(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a question to a tensor gives; raises for one whose value is not known."""
        if value_of(args[0]) is None:
            return func(*args, **kwargs)
        self.asked_for_choices |= hasattr(args[0], _ASSUMED)
        with unset_fake_temporarily():
            return func(getattr(args[0], _VALUE), *args[1:], **kwargs)

    def _with_numbers(self, args: Any) -> Any:
        """Return arguments of an indexing with numbers for tensors of one number: torch asks for those out of sight."""

        def plain(index: Any) -> Any:
            if isinstance(index, tuple):
                return tuple(map(plain, index))
            if isinstance(index, slice):
                return slice(*map(plain, (index.start, index.stop, index.step)))
            if not isinstance(index, torch.Tensor):
                return index
            if index.dtype is torch.bool:
                self.asked_for_choices |= hasattr(index, _ASSUMED)
            return self._number(index)

        return (args[0], plain(args[1]), *args[2:])

    def _values(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args = _with_shapes(_name(func), args)
        operands = tensors_in((args, kwargs))
        if func is torch.Tensor.__setitem__ and is_partly_set(args[0]) and _all_known(operands[1:]):
            return _written(*args)
        if operands and _writes(func):
            forget_unset(operands[0])
        if not _all_known(operands) or _name(func) in _RANDOM_OR_UNSET:
            _forget_written(func, args, kwargs)
            return None
        real_args, real_kwargs = _real((args, kwargs))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = "cpu"
        try:
            with unset_fake_temporarily(), torch.no_grad():
                values = func(*real_args, **real_kwargs)
        except Exception:  # not computable here, e.g. moved to another device: then simply not known
            _forget_written(func, args, kwargs)
            return None
        return values if all(t.numel() <= MAX_ELEMENTS for t in tensors_in(values)) else None


def _keep(fakes: list[torch.Tensor], values: list[torch.Tensor | None], *, assumed: bool) -> None:
    for fake, value in zip(fakes, values, strict=False):
        if value is not None:
            setattr(fake, _VALUE, value)
            if assumed:
                setattr(fake, _ASSUMED, True)


def _with_shapes(name: str, args: Any) -> Any:
    """Return arguments with a known stand-in for the operand that a function asks for its shape alone."""
    if name in _SHAPED_AS and len(args) == 2:
        return (args[0], _empty_as(args[1]))
    if name in _FILLED_AS and args and args[0].numel() <= MAX_FILLED:
        return (_empty_as(args[0]), *args[1:])
    return args


def _empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, of which nothing is known but that, and whose value takes no memory."""
    with unset_fake_temporarily():
        shaped = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        setattr(shaped, _VALUE, shaped)
    return shaped


def _all_known(operands: list[torch.Tensor]) -> bool:
    return all(value_of(operand) is not None for operand in operands)


def _real(tree: Any) -> Any:
    """Return operands with the values of their tensors, all of which are known."""
    return tree_map_only(torch.Tensor, lambda tensor: getattr(tensor, _VALUE), tree)


def _written(fake: torch.Tensor, index: Any, value: Any) -> None:
    """Write known values to a tensor that was made unset, and know it if that was the last of it."""
    known = write_known(fake, *_real((index, value)))
    assumed = any(hasattr(operand, _ASSUMED) for operand in tensors_in((fake, index, value)))
    _keep([fake], [known], assumed=assumed)


def _typical(func: Callable[..., Any], out: Any, values: Any) -> Any:
    """Return the values that were computed, or what a function of data or chance gives in an ordinary run."""
    if values is None and _name(func) in _TYPICAL and isinstance(out, torch.Tensor):
        with unset_fake_temporarily():
            return torch.tensor(_TYPICAL[_name(func)], dtype=out.dtype).expand(out.shape)
    return values


def _leaves(values: Any) -> list[torch.Tensor | None]:
    """Return values one by one, with None where one is not known."""
    if values is None:
        return []
    return [leaf for leaf in tree_leaves(values) if leaf is None or isinstance(leaf, torch.Tensor)]


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a fake tensor, on the CPU, if it is known."""
    value: torch.Tensor | None = getattr(tensor, _VALUE, None)
    is_stale = value is not None and value.layout is torch.strided and hasattr(value.untyped_storage(), _STALE)
    return None if is_stale else value


def carry_value(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor that is another one detached be known as that one is, where no function shows it."""
    if isinstance(tensor, FakeTensor) and (value := value_of(tensor)) is not None:
        _keep([other], [value], assumed=hasattr(tensor, _ASSUMED))


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def _writes(func: Callable[..., Any]) -> bool:
    name = _name(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _forget(tensor: torch.Tensor) -> None:
    """Forget what a tensor and all that share its memory hold."""
    value = getattr(tensor, _VALUE, None)
    if value is not None:
        if value.layout is torch.strided:
            setattr(value.untyped_storage(), _STALE, True)
        delattr(tensor, _VALUE)


def _forget_written(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Forget what a function of unknown values writes to; a flag may stand for writing in place."""
    if _writes(func) or kwargs.get("inplace") or any(flag is True for flag in args):
        for tensor in tensors_in(args[:1] or kwargs)[: None if args else 1]:
            _forget(tensor)
    for tensor in tensors_in(kwargs.get("out")):
        _forget(tensor)
