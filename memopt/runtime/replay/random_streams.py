"""The random generators that a forward may draw from, rewound for its replay."""

import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BITS, _HAS_GAUSS = 1, 3
"""Where the numbers, and whether a normal is kept back, stand in what `numpy.random.get_state` returns."""
_NUM_BYTES = 4 * 624 + 4
"""Of a Mersenne Twister: 624 numbers and a position."""

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

    def has_moved(self) -> bool:
        """Tell whether something was drawn since."""
        now = self._get()
        return not (torch.equal(now, self._state) if self.is_of_torch else _is_equal(now, self._state))

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same again for a while, and go on as before."""
        now = self._get()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)


class NumpyStream(RandomStream):
    """The state of numpy's global generator, which is dear to read and to set: 30 microseconds each."""

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same again for a while, and go on as before; set nothing that is as it should be."""
        now = self._get()
        if not _is_same(now, self._state):
            with super().rewound():
                yield
            return
        before = _numpy_bits()
        try:
            yield
        finally:
            if before is None or now[_HAS_GAUSS] or _numpy_bits() != before:  # a normal that is kept back moves no bits
                self._set(now)


def global_streams() -> tuple[Any, ...]:
    """Return how far the global generators of torch, Python and numpy have come: to compare, not to set."""
    return random.getstate(), _numpy_bits() if "numpy" in sys.modules else None, *_torch_streams()


def _torch_streams() -> tuple[Any, ...]:
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    if module is None or getattr(module, "is_current_stream_capturing", bool)():  # a graph's numbers are drawn later
        return (torch.get_rng_state().numpy().tobytes(),)
    generators = getattr(module, "default_generators", ())
    return torch.get_rng_state().numpy().tobytes(), *(generator.get_offset() for generator in generators)


def random_streams(devices: set[torch.device], generators: Iterable[Any]) -> list[RandomStream]:
    """Return the global generators of torch, Python and numpy, those of some devices, and the given ones."""
    accesses: list[Access] = [(torch.get_rng_state, torch.set_rng_state), (random.getstate, random.setstate)]
    accesses += [_of_device(device) for device in devices if device.type not in ("cpu", "meta")]
    accesses += [access for generator in generators if (access := _access_of(generator)) is not None]
    streams = [RandomStream(get, set_) for get, set_ in accesses]
    if (numpy := sys.modules.get("numpy")) is not None:
        streams.append(NumpyStream(numpy.random.get_state, numpy.random.set_state))
    return streams


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


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two states of numpy's global generator are the same; those of an unusual one count as different."""
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return False
    return one[0] == other[0] and one[2:] == other[2:] and one[_BITS].tobytes() == other[_BITS].tobytes()


def _is_equal(one: Any, other: Any) -> bool:
    """Tell whether two states of a generator that is not torch's are equal, those of numpy being full of arrays."""
    return _is_same(one, other) if isinstance(one, tuple) and isinstance(one[0], str) else repr(one) == repr(other)


def _numpy_bits() -> bytes | None:
    """Return the memory of numpy's global generator: a few hundred numbers, and which is next."""
    find = getattr(sys.modules["numpy"].random, "get_bit_generator", None)  # numpy 1.24
    bits: Any = find() if find is not None else None
    if type(bits).__name__ != "MT19937":
        return None
    return ctypes.string_at(bits.ctypes.state_address, _NUM_BYTES)
