"""The random generators that a forward may draw from, rewound for its replay."""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomStream:
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


def random_streams(devices: set[torch.device]) -> list[RandomStream]:
    """Return the generators of torch on the CPU and on these devices, of Python, and of numpy where it is imported."""
    streams = [RandomStream(torch.get_rng_state, torch.set_rng_state), RandomStream(random.getstate, random.setstate)]
    for device in devices:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            streams.append(
                RandomStream(
                    functools.partial(module.get_rng_state, device), functools.partial(_set_state, module, device)
                )
            )
    if (numpy := sys.modules.get("numpy")) is not None:
        streams.append(RandomStream(numpy.random.get_state, numpy.random.set_state))
    return streams


def _set_state(module: Any, device: torch.device, state: torch.Tensor) -> None:
    module.set_rng_state(state, device)


def _same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal; numpy's and Python's are tuples of few items, one of them long."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all((a == b).all() if hasattr(a, "shape") else a == b for a, b in zip(one, other, strict=True))
