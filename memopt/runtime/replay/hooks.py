"""Fire the hooks of a region's modules once. A replay calls again only those that change what is computed.

FSDP and PEFT work through such hooks (they gather weights, add adapters); a hook that counts or logs must not see a
replay. What a hook changes shows in the forward: it returns something, writes to a tensor, or sets an attribute.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from memopt.runtime.replay.arguments import version_of
from memopt.runtime.replay.captures import is_silent

Hook = Callable[..., Any]
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class _HookDict:
    """Where a hook is registered: in which dict, with which flags beside it."""

    hooks: dict[int, Hook]
    flags: tuple[dict[int, bool], ...] = ()


class HookRecord:
    """The hooks of a region's modules that changed something in one forward."""

    def __init__(self, module: nn.Module, hooks: "HookDicts | None" = None) -> None:
        self._module = module
        self._hooks = hooks or HookDicts(module)
        self._used: dict[tuple[int, int], tuple[_HookDict, int, Hook, list[bool]]] = {}

    def recording(self) -> AbstractContextManager[None]:
        """Note which hooks change something while the region's forward runs in this thread."""
        dicts = self._hooks.in_use()
        return self._recording(dicts) if dicts else _NOTHING

    @contextmanager
    def _recording(self, dicts: list[_HookDict]) -> Iterator[None]:
        with _watched(dicts), _role(self._note):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let only those be called in this thread, also if they were removed since."""
        with self._all_there(), _watched(HookDicts(self._module).in_use()), _role(self._again):
            yield

    def _note(self, hook_dict: _HookDict, key: int, hook: Hook, args: tuple[Any, ...]) -> Any:
        before = _state(args)
        result = hook(*args)
        if result is not None or _state(args) != before:
            self._used[id(hook_dict.hooks), key] = (hook_dict, key, hook, [key in flag for flag in hook_dict.flags])
        return result

    def _again(self, hook_dict: _HookDict, key: int, hook: Hook, args: tuple[Any, ...]) -> Any:
        return hook(*args) if (id(hook_dict.hooks), key) in self._used else None

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        gone = [used for used in self._used.values() if used[1] not in used[0].hooks]
        try:
            for hook_dict, key, hook, flags in gone:
                hook_dict.hooks[key] = hook
                for flag, is_set in zip(hook_dict.flags, flags, strict=True):
                    if is_set:
                        flag[key] = True
            yield
        finally:
            for hook_dict, key, *_ in gone:
                hook_dict.hooks.pop(key, None)
                for flag in hook_dict.flags:
                    flag.pop(key, None)


class _Watched:
    """A hook that is watched: what it is asked to do depends on what the calling thread is doing."""

    __slots__ = ("_hook", "_hook_dict", "_key", "__weakref__")

    def __init__(self, hook_dict: _HookDict, key: int, hook: Hook) -> None:
        self._hook_dict = hook_dict
        self._key = key
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        """Call the hook as the thread's role wants it, plainly where it has none."""
        return _thread.role(self._hook_dict, self._key, self._hook, args) if _thread.role else self._hook(*args)

    def unwatched(self) -> Hook:
        """Return the hook."""
        return self._hook


class _Thread(threading.local):
    role: Callable[..., Any] | None = None


_thread = _Thread()
_lock = threading.Lock()
_watchers: dict[int, int] = {}
"""How many threads and regions watch a dict of hooks, by its identity."""


class HookDicts:
    """Where there may be hooks that run inside a module's forward; its own run outside of it."""

    def __init__(self, module: nn.Module) -> None:
        children = [child for child in module.modules() if child is not module]
        self._before = [_HookDict(c._forward_pre_hooks, (c._forward_pre_hooks_with_kwargs,)) for c in children]
        self._after = [
            _HookDict(c._forward_hooks, (c._forward_hooks_with_kwargs, c._forward_hooks_always_called))
            for c in children
        ]
        self._all = [hook_dict.hooks for hook_dict in (*self._before, *self._after)]

    def in_use(self) -> list[_HookDict]:
        """Return those that have hooks of others than us."""
        found = [hook_dict for hook_dict in _GLOBAL if hook_dict.hooks]
        if any(self._all):
            found += [d for d in (*self._before, *self._after) if d.hooks and not all(map(is_silent, d.hooks.values()))]
        return found


_GLOBAL = (
    _HookDict(torch_module._global_forward_pre_hooks),
    _HookDict(
        torch_module._global_forward_hooks,
        (torch_module._global_forward_hooks_with_kwargs, torch_module._global_forward_hooks_always_called),
    ),
)


def has_hooks(module: nn.Module) -> bool:
    """Tell whether there are hooks that run inside a module's forward."""
    return bool(HookDicts(module).in_use())


@contextmanager
def _role(role: Callable[..., Any]) -> Iterator[None]:
    before, _thread.role = _thread.role, role
    try:
        yield
    finally:
        _thread.role = before


@contextmanager
def _watched(dicts: list[_HookDict]) -> Iterator[None]:
    """Put watchers in the place of hooks for a while; two threads may be in the same module."""
    with _lock:
        for hook_dict in dicts:
            _watchers[id(hook_dict.hooks)] = _watchers.get(id(hook_dict.hooks), 0) + 1
            for key, hook in hook_dict.hooks.items():
                if not isinstance(hook, _Watched) and not is_silent(hook):
                    hook_dict.hooks[key] = _Watched(hook_dict, key, hook)
    try:
        yield
    finally:
        with _lock:
            for hook_dict in dicts:
                _watchers[id(hook_dict.hooks)] -= 1
                if not _watchers[id(hook_dict.hooks)]:
                    del _watchers[id(hook_dict.hooks)]
                    for key, hook in hook_dict.hooks.items():
                        if isinstance(hook, _Watched):
                            hook_dict.hooks[key] = hook.unwatched()


def _state(args: tuple[Any, ...]) -> list[Any]:
    """Return what a hook could change: versions of tensors, the module's attributes, where its parameters are."""
    module = args[0]
    versions = [(id(t), version_of(t)) for t in tree_leaves(args[1:]) if isinstance(t, torch.Tensor)]
    attributes = [(key, id(value)) for key, value in module.__dict__.items()]
    parameters = [
        (id(p), p.data_ptr() if p.layout is torch.strided else 0) for p in module._parameters.values() if p is not None
    ]
    own = (*module._buffers.values(), *module._parameters.values())
    return [versions, attributes, parameters, [version_of(t) for t in own if t is not None]]
