"""Rewrite a module by swapping its class for a generated subclass, as FSDP2 does; keys, names and isinstance stay."""

import copyreg
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.errors import GraphCompileError, RewriteError
from memopt.ir import Action
from memopt.runtime.compiled import forward_for_compile
from memopt.runtime.contract import check_target
from memopt.runtime.forward import run_method, run_region
from memopt.runtime.module_state import forget_state
from memopt.runtime.region import HABITS, PREVIOUS, REGION, Habits, Region, region_of
from memopt.runtime.replay.captures import stop_watching

_BASE = "_memopt_base"
"""The class attribute by which a generated class is known: the class that it stands in front of."""


_FORWARDS: set[types.CodeType] = set()
"""The code of the functions that generated classes have for a forward; many classes share one."""


class RegionForward:
    """The forward of a rewritten module as it was when it was read; looks like the function it wraps."""

    __slots__ = ("__wrapped__", "_module")

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward inside its region."""
        return run_region(self._module, self.__wrapped__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__:  # half-built, in a copy or a pickle
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return RegionForward, (self._module, self.__wrapped__)


class _ForwardProperty:
    """``forward`` as a data descriptor: an instance-level forward (a hook, a patch) lies inside the region too."""

    def __init__(self, owner: type) -> None:
        @functools.wraps(getattr(owner, _BASE).forward)
        def unbound(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run_region(module, super(owner, module).forward, args, kwargs)

        self._owner = owner
        self._unbound = unbound
        _FORWARDS.add(unbound.__code__)  # type: ignore[attr-defined]

    def __get__(self, module: nn.Module | None, cls: type | None = None) -> Any:
        if module is None:
            if torch.fx._symbolic_trace.is_fx_symbolic_tracing():  # fx takes the class's forward apart
                raise GraphCompileError(self._owner.__name__)
            return self._unbound
        inner = module.__dict__.get("forward")
        return RegionForward(module, super(self._owner, module).forward if inner is None else inner)

    def __set__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward

    def __delete__(self, module: nn.Module) -> None:
        try:
            del module.__dict__["forward"]
        except KeyError:
            raise AttributeError("forward") from None


@functools.cache
def rewritten_class(
    base: type, compiles: bool = False, methods: tuple[str, ...] = (), has_forward: bool = True
) -> type:
    """Return the subclass of a module class whose forward runs in a region; torch.compile may have it if it `compiles`.

    So do some `methods` of it, or these only.
    """

    def get_name(self: nn.Module) -> str:
        region = region_of(self)
        return f"{base.__name__}[{region}]" if region else base.__name__

    def refuse_compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        region = region_of(self)
        raise GraphCompileError(
            region.fqn if region else base.__name__, recomputes=bool(region and region.action is Action.RECOMPUTE)
        )

    def refuse_script(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise GraphCompileError(base.__name__)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = super(made, self).__reduce_ex__(protocol)  # type: ignore[misc]
        if isinstance(reduced, tuple) and reduced[:2] == (copyreg.__newobj__, (made,)):  # type: ignore[attr-defined]
            return _new_rewritten, (base, compiles, methods, has_forward), *reduced[2:]
        return reduced

    body = {
        _BASE: base,
        "_get_name": get_name,
        "__prepare_scriptable__": refuse_script,  # torch.jit.script asks every submodule for it
        "__reduce_ex__": reduce_ex,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    body |= {} if compiles else {"compile": refuse_compile}
    body |= {name: _region_method(base, name) for name in methods}
    made = types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(body))
    if has_forward:
        made.forward = forward_for_compile(made, base) if compiles else _ForwardProperty(made)  # type: ignore[attr-defined]
        _FORWARDS.update({made.forward.__code__} if compiles else ())  # type: ignore[attr-defined]
    return made


def _region_method(base: type, name: str) -> Callable[..., Any]:
    """Return a method that runs the one of a class in a region."""
    inner = getattr(base, name)

    @functools.wraps(inner)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_method(self, name, functools.partial(inner, self), args, kwargs)

    return method


def is_rewritten(module: nn.Module) -> bool:
    """Tell whether a module has a generated class of ours in its ancestry."""
    return hasattr(type(module), _BASE)


def rewrite_module(module: nn.Module, region: Region) -> None:
    """Put our class in front of a module's class and say what its region does; raises RewriteError."""
    check_target(module)
    if region.compiles and "forward" in module.__dict__:
        raise RewriteError(
            f"{region.fqn!r} has a forward of its own beside its class, which torch.compile would not see; "
            "take it off, or plan without enable_compile"
        )
    try:
        made = rewritten_class(type(module), region.compiles, region.methods, region.has_forward)
    except Exception as error:
        raise RewriteError(
            f"{type(module).__name__} admits no subclass: {error}; rewrite the modules inside it"
        ) from error
    object.__setattr__(module, "__class__", made)
    module.__dict__[REGION] = region
    if region.action is Action.RECOMPUTE or region.methods:
        module.__dict__[HABITS] = Habits()


def restore_module(module: nn.Module) -> None:
    """Take our class out of a module's ancestry, whatever was put on top of it since, and forget its region."""
    if is_rewritten(module):
        object.__setattr__(module, "__class__", _without_ours(type(module)))
    module.__dict__.pop(REGION, None)
    module.__dict__.pop(PREVIOUS, None)
    if module.__dict__.pop(HABITS, None) is not None:
        stop_watching(module)
    forget_state(module)


@functools.cache
def _without_ours(cls: type) -> type:
    if _BASE in cls.__dict__:
        base: type = getattr(cls, _BASE)
        return base
    bases = tuple(_without_ours(base) if hasattr(base, _BASE) else base for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    body = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    if _is_wrapped_anew(cls, bases[0]):
        del body["forward"]
    return type(cls)(cls.__name__, bases, body)


def _is_wrapped_anew(cls: type, base: type) -> bool:
    """Tell whether a class has a forward only because its base wraps the forward of each class that is put on top.

    As GradientCheckpointingLayer does; a forward that somebody gave the class is another function than its base has.
    """
    forward, below = cls.__dict__.get("forward"), getattr(base, "forward", None)
    code = getattr(forward, "__code__", None)
    return _wraps_ours(forward) and code is not None and code is getattr(below, "__code__", None)


def _wraps_ours(forward: Any) -> bool:
    """Tell whether a function wraps, at any depth, one that a class of ours made to stand before its own."""
    while forward is not None:
        if getattr(forward, "__code__", None) in _FORWARDS:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _new_rewritten(base: type, *how: Any) -> nn.Module:
    """Return an instance without state, for pickle and deepcopy, which cannot find a generated class by name."""
    cls = rewritten_class(base, *how)
    made: nn.Module = cls.__new__(cls)
    return made
