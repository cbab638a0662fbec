"""The random generators that a forward may draw from, rewound for its replay."""

import _random
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from memopt.runtime.prediction import alike, draws, predicts, set_draws

_BITS = 1
"""Where the numbers stand in what `numpy.random.get_state` returns."""
_NUM_BYTES = 4 * 624 + 4
"""Of a Mersenne Twister: 624 numbers and a position."""


Memory = tuple[Any, ...] | None
"""What tells two states of a global generator apart; None where that is not known."""


class Access(NamedTuple):
    """How a generator's state is read and written."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class RandomStream:
    """The state of one random generator."""

    __slots__ = ("_access", "_state")

    def __init__(self, access: Access) -> None:
        self._access = access
        self._state = access.get()

    @property
    def is_of_torch(self) -> bool:
        """Whether torch's operations draw from it."""
        return isinstance(self._state, torch.Tensor | int)

    def now(self) -> Any:
        """Return its state as it is now."""
        return self._access.get()

    def has_moved(self) -> bool:
        """Tell whether something was drawn since."""
        now = self.now()
        return not (alike(now, self._state) if self.is_of_torch else _is_equal(now, self._state))

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same again for a while, and go on as before."""
        now = self.now()
        self._access.set(self._state)
        try:
            yield
        finally:
            self._access.set(now)


class _Global:
    """A global generator, Python's or numpy's, whose state is dear to read and to set: up to 30 microseconds."""

    def __init__(self, access: Access, memory: Callable[[], Memory]) -> None:
        self.access = access
        self.memory = memory
        """What tells that nothing was drawn since, nor set; None if that cannot be read."""
        self._last: tuple[Memory, Any] = (None, None)

    def now(self) -> tuple[Memory, Any]:
        """Return its memory and its state, which is read once between two draws."""
        memory, last = self.memory(), self._last
        if memory is None or memory != last[0]:
            self._last = last = memory, self.access.get()
        return last


class GlobalStream(RandomStream):
    """The state of a global generator."""

    __slots__ = ("_generator", "_memory")

    def __init__(self, generator: _Global) -> None:
        self._generator = generator
        self._access = generator.access
        self._memory, self._state = generator.now()

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same again for a while, and go on as before; set nothing that is as it should be."""
        memory, now = self._generator.now()
        if memory is None or memory != self._memory:
            with super().rewound():
                yield
            return
        try:
            yield
        finally:
            if self._generator.memory() != memory:
                self._access.set(now)


def global_streams() -> tuple[Any, ...]:
    """Return how far the global generators of torch, Python and numpy have come: to compare, not to set."""
    if predicts():
        return (draws(),)
    return _PYTHON.now()[1], _numpy_memory() if "numpy" in sys.modules else None, *_torch_streams()


def _torch_streams() -> tuple[Any, ...]:
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    if module is None or getattr(module, "is_current_stream_capturing", bool)():  # a graph's numbers are drawn later
        return (torch.get_rng_state().numpy().tobytes(),)
    generators = getattr(module, "default_generators", ())
    return torch.get_rng_state().numpy().tobytes(), *(generator.get_offset() for generator in generators)


def random_streams(devices: set[torch.device], generators: Iterable[Any]) -> list[RandomStream]:
    """Return the global generators of torch, Python and numpy, those of some devices, and the given ones."""
    if predicts():
        return [RandomStream(_DRAWS), RandomStream(_DRAWS)]  # the CPU's and the device's
    accesses = [_TORCH]
    accesses += [_of_device(device) for device in devices if device.type not in ("cpu", "meta")]
    accesses += [access for generator in generators if (access := _access_of(generator)) is not None]
    kinds = (_PYTHON, _NUMPY) if "numpy" in sys.modules else (_PYTHON,)
    return [*map(RandomStream, accesses), *map(GlobalStream, kinds)]


def is_generator(value: Any) -> bool:
    """Tell whether a value is a random generator of torch, Python or numpy."""
    return _access_of(value) is not None


def _access_of(value: Any) -> Access | None:
    if isinstance(value, torch.Generator):
        return Access(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # that one has no state
        return Access(value.getstate, value.setstate)
    if type(value).__module__.startswith("numpy.random"):
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if hasattr(value, "get_state"):
            return Access(value.get_state, value.set_state)
        if bits is not None:
            return Access(functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state"))
    return None


@functools.cache
def _of_device(device: torch.device) -> Access:
    module = torch.get_device_module(device)
    if (generators := getattr(module, "default_generators", None)) is not None:
        generator = generators[module.current_device() if device.index is None else device.index]
        return Access(generator.get_state, generator.set_state)
    return Access(functools.partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device))


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two states of numpy's global generator are the same; those of an unusual one count as different."""
    if not isinstance(one, tuple) or not isinstance(other, tuple):
        return False
    return one[0] == other[0] and one[2:] == other[2:] and one[_BITS].tobytes() == other[_BITS].tobytes()


def _is_equal(one: Any, other: Any) -> bool:
    """Tell whether two states of a generator that is not torch's are equal, those of numpy being full of arrays."""
    return _is_same(one, other) if isinstance(one, tuple) and isinstance(one[0], str) else repr(one) == repr(other)


def _numpy_memory() -> Memory:
    """Return the memory of numpy's global generator: its numbers, and the object with the normal that is kept back."""
    twister = _numpy_twister()
    if twister is None or not _can_read_numpy():
        return None
    numbers = ctypes.string_at(twister.ctypes.state_address, _NUM_BYTES)
    return numbers, _memory_of(sys.modules["numpy"].random.mtrand._rand)


def _numpy_twister() -> Any:
    """Return what makes the bits of numpy's global generator, None if it is not the usual one."""
    bits = sys.modules["numpy"].random.mtrand._rand._bit_generator
    return bits if type(bits).__name__ == "MT19937" else None


@functools.cache
def _can_read_numpy() -> bool:
    """Tell whether a normal that is kept back shows in the object, and shows again."""
    if sys.implementation.name != "cpython":
        return False
    generator = sys.modules["numpy"].random.RandomState(0)
    none = _memory_of(generator)
    generator.standard_normal()
    one = _memory_of(generator)
    generator.standard_normal()
    generator.seed(0)
    return one != none == _memory_of(generator)


def _memory_of(generator: Any) -> bytes:
    """Return the memory of an object beyond what all objects have."""
    return ctypes.string_at(id(generator) + object.__basicsize__, type(generator).__basicsize__ - object.__basicsize__)


def _numpy_state() -> Any:
    return sys.modules["numpy"].random.get_state(legacy=_numpy_twister() is not None)


def _set_numpy_state(state: Any) -> None:
    sys.modules["numpy"].random.set_state(state)


def _python_memory() -> Memory:
    """Return the memory of Python's global generator, and the normal that it keeps back."""
    return (_bits_of(random._inst), getattr(random._inst, "gauss_next", None)) if _CAN_READ else None


def _bits_of(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + object.__basicsize__, _PYTHON_BYTES)


def _can_read() -> bool:
    """Tell whether that memory is where it is in the Python that we know: it changes with a draw, and back."""
    if sys.implementation.name != "cpython":
        return False
    generator = random.Random(0)
    before = _bits_of(generator)
    generator.random()
    moved = _bits_of(generator)
    generator.seed(0)
    return moved != before == _bits_of(generator)


_PYTHON_BYTES = _random.Random.__basicsize__ - object.__basicsize__
_CAN_READ = _can_read()
_DRAWS = Access(draws, set_draws)
"""In a prediction, of all generators."""
_TORCH = Access(torch.default_generator.get_state, torch.default_generator.set_state)
_PYTHON = _Global(Access(random.getstate, random.setstate), _python_memory)
_NUMPY = _Global(Access(_numpy_state, _set_numpy_state), _numpy_memory)
