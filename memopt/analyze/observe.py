"""Run one training forward, real or fake, and note every module call and every tensor that autograd saves."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from memopt.analyze.arguments import tensors_in, unseen
from memopt.analyze.checkpoints import is_inside_checkpoint
from memopt.analyze.functions import call_noted
from memopt.analyze.observation import Call, Observation, Save, Ticket
from memopt.analyze.parts import parts_noted
from memopt.analyze.storages import drop_written, note_maker, results_in, sizes_in
from memopt.operands import source_of
from memopt.operations import family_of
from memopt.tensors import cast_source, kind_of, storage_key, storage_keys


def observe(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, seen: Observation | None = None
) -> Observation:
    """Run ``model(*args, **kwargs)`` with grad and return what was noted, in `seen` if the caller brings one."""
    seen = seen if seen is not None else Observation()
    inputs = (args, kwargs)
    for tensor in (*model.parameters(), *model.buffers(), *tensors_in(inputs)):
        note_maker(seen, tensor, None)
    parameters, buffers = storage_keys(model.parameters()), storage_keys(model.buffers())
    with ExitStack() as stack:
        for fqn, module in model.named_modules():
            stack.enter_context(_call_hooks(seen, module, fqn, ignored=parameters | buffers))
            stack.enter_context(parts_noted(seen, module, ignored=parameters | buffers))
        stack.enter_context(_Functions(seen))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*_saving_hooks(seen, parameters, buffers)))
        seen.output = model(*args, **kwargs)
    drop_written(seen)
    seen.held |= storage_keys(tensors_in((inputs, seen.output)))
    return seen


@contextmanager
def _call_hooks(seen: Observation, module: nn.Module, fqn: str, *, ignored: frozenset[int]) -> Iterator[None]:
    @unseen
    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        parent = seen.active[-1].index if seen.active else None
        inputs = sizes_in(seen, (args, kwargs), parent, ignored=ignored)
        call = Call(len(seen.calls), fqn, parent, len(seen.saves), inputs, seen.flops())
        seen.calls.append(call)
        seen.active.append(call)
        if is_inside_checkpoint():
            seen.checkpointed[fqn] = None

    def end(module: nn.Module, args: Any, output: Any) -> None:
        call = seen.active.pop()
        call.end_save = len(seen.saves)
        call.outputs = results_in(seen, output, call.index, ignored=ignored)
        call.flops = seen.flops() - call.flops_before

    before = module.register_forward_pre_hook(begin, with_kwargs=True)
    after = module.register_forward_hook(end)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _saving_hooks(
    seen: Observation, parameters: frozenset[int], buffers: frozenset[int]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    @unseen
    def pack(tensor: torch.Tensor) -> Ticket | torch.Tensor:
        if tensor.layout is not torch.strided:
            seen.num_without_storage += 1
            return tensor
        ticket = Ticket(len(seen.saves))
        call = seen.active[-1].index
        kind = kind_of(tensor, parameters, buffers)
        is_operand = source_of(tensor, seen.operands) is not None
        seen.saves.append(
            Save(
                tensor.detach(),
                call,
                kind,
                tensor.requires_grad,
                weakref.ref(ticket),
                is_operand=is_operand,
                cast_of=None if (source := cast_source(tensor)) is None else seen.returned_by.get(source),
            )
        )
        note_maker(seen, tensor, call)
        return ticket

    def unpack(packed: Ticket | torch.Tensor) -> torch.Tensor:
        return seen.saves[packed.index].tensor if isinstance(packed, Ticket) else packed

    return pack, unpack


class _Functions(TorchFunctionMode):
    """Note in which module call each storage is made and in which others it is used, and the expensive functions."""

    def __init__(self, seen: Observation) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen, kwargs = self._seen, kwargs or {}
        if not seen.active:
            return func(*args, **kwargs)
        family = family_of(func, args, kwargs)
        out = func(*args, **kwargs) if family is None else call_noted(seen, family, func, args, kwargs)
        _note_flows(seen, (args, kwargs), out)
        return out


@unseen
def _note_flows(seen: Observation, arguments: Any, out: Any) -> None:
    if made := tensors_in(out):
        here = seen.active[-1].index
        for tensor in tensors_in(arguments):
            _, maker = seen.makers.get(storage_key(tensor), (None, None))
            if maker is not None and maker != here:
                seen.flows[maker, here] = None  # a dict keeps the order of first use
        for tensor in made:
            note_maker(seen, tensor, here)
