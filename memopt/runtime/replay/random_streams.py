"""The random generators that a forward may draw from, rewound for its replay."""

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Access = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How a generator's state is read and written."""


class RandomStream:
    """The state of one random generator."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], Any]) -> None:
        self._get = get
        self._set = set_
        self._state = get()

    @property
    def is_of_torch(self) -> bool:
        """Whether torch's operations draw from it."""
        return isinstance(self._state, torch.Tensor)

    def now(self) -> Any:
        """Return its state as it is now."""
        return self._get()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same again for a while, and go on as before."""
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


def random_streams(devices: set[torch.device], generators: Iterable[Any]) -> list[RandomStream]:
    """Return the global generators of torch, Python and numpy, those of some devices, and the given ones."""
    accesses: list[Access] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy")) is not None:
        accesses.append((numpy.random.get_state, numpy.random.set_state))
    accesses += [_of_device(device) for device in devices if device.type not in ("cpu", "meta")]
    accesses += [access for generator in generators if (access := _access_of(generator)) is not None]
    return [RandomStream(get, set_) for get, set_ in accesses]


def is_generator(value: Any) -> bool:
    """Tell whether a value is a random generator of torch, Python or numpy."""
    return _access_of(value) is not None


def _access_of(value: Any) -> Access | None:
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # that one has no state
        return value.getstate, value.setstate
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if hasattr(value, "get_state"):
            return value.get_state, value.set_state
        if bits is not None:
            return functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")
    return None


def _of_device(device: torch.device) -> Access:
    module = torch.get_device_module(device)

    def set_state(state: torch.Tensor) -> None:
        module.set_rng_state(state, device)

    return functools.partial(module.get_rng_state, device), set_state
