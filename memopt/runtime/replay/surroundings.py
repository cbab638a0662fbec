"""What a forward depends on besides its arguments and modules: random streams, autocast, kernels, defaults."""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils._device import DeviceContext

_Autocast = tuple[str, bool, torch.dtype, bool]


class Surroundings:
    """The state around a region when it was entered, so that a replay finds the same."""

    def __init__(self, devices: set[torch.device]) -> None:
        self._streams = [_RandomStream(*functions) for functions in _random_streams(devices)]
        cached = torch.is_autocast_cache_enabled()
        self._autocasts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in {"cpu", *(device.type for device in devices)}
        ]
        self._backends = _cur_sdpa_kernel_backends()
        self._default_dtype = torch.get_default_dtype()
        self._default_device = _default_device()

    def close(self) -> None:
        """Let go of the random streams that the region did not draw from."""
        self._streams = [stream for stream in self._streams if stream.has_moved()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything as it was for a while, and back."""
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(stream.rewound())
            for kind, enabled, dtype, cached in self._autocasts:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if _cur_sdpa_kernel_backends() != self._backends:
                stack.enter_context(sdpa_kernel(self._backends))
            if torch.get_default_dtype() is not self._default_dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
            if self._default_device is not None and _default_device() != self._default_device:
                stack.enter_context(self._default_device)
            yield


class _RandomStream:
    """The state of one random generator."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], None]) -> None:
        self._get = get
        self._set = set_
        self._state = get()

    def has_moved(self) -> bool:
        """Tell whether anybody drew from it since."""
        return not _same(self._state, self._get())

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same again for a while, and go on as before."""
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


def _random_streams(devices: set[torch.device]) -> Iterator[tuple[Callable[[], Any], Callable[[Any], None]]]:
    yield torch.get_rng_state, torch.set_rng_state
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            yield functools.partial(module.get_rng_state, device), functools.partial(_set_state, module, device)
    yield random.getstate, random.setstate
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.get_state, numpy.random.set_state


def _set_state(module: Any, device: torch.device, state: torch.Tensor) -> None:
    module.set_rng_state(state, device)


def _same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal; numpy's and Python's are tuples of few items, one of them long."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all((a == b).all() if hasattr(a, "shape") else a == b for a, b in zip(one, other, strict=True))


def _default_device() -> DeviceContext | None:
    """Return the innermost ``with torch.device(...)`` or default device, None where there is none."""
    if not torch._C._len_torch_function_stack():
        return None
    stack = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(stack) if isinstance(mode, DeviceContext)), None)
