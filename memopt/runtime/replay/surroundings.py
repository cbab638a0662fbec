"""What a forward depends on besides its arguments and modules: random streams, autocast, kernels, defaults."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._device import DeviceContext

from memopt.runtime.replay.random_streams import random_streams


class Looks(NamedTuple):
    """What decides which kernels run, as far as it is switched on and off around a model."""

    autocasts: tuple[tuple[str, bool, torch.dtype], ...]
    caches_casts: bool
    kernels: tuple[bool, ...]
    default_dtype: torch.dtype

    @classmethod
    def now(cls) -> "Looks":
        """Return it as it is now."""
        kinds = ("cpu",) if _ACCELERATOR is None else ("cpu", _ACCELERATOR)
        return cls(
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
            torch.is_autocast_cache_enabled(),
            (
                torch._C._get_flash_sdp_enabled(),
                torch._C._get_mem_efficient_sdp_enabled(),
                torch._C._get_math_sdp_enabled(),
                torch._C._get_cudnn_sdp_enabled(),
            ),
            torch.get_default_dtype(),
        )

    @contextmanager
    def restored(self, now: "Looks") -> Iterator[None]:
        """Put it as it was for a while, and back to what it is now."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocasts:
                cached = self.caches_casts
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if self.kernels != now.kernels:
                chosen = [backend for backend, on in zip(_KERNELS, self.kernels, strict=True) if on]
                stack.enter_context(sdpa_kernel(chosen))
            stack.callback(torch.set_default_dtype, now.default_dtype)
            torch.set_default_dtype(self.default_dtype)
            yield


_KERNELS = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION,
)  # fmt: skip
_ACCELERATOR = accelerator.type if (accelerator := torch.accelerator.current_accelerator()) else None


class Surroundings:
    """The state around a region when it was entered, so that a replay finds the same."""

    def __init__(self, devices: set[torch.device], generators: Iterable[Any]) -> None:
        self._streams = random_streams(devices, generators)
        self._computes_on_cpu = all(device.type in ("cpu", "meta") for device in devices)
        self._looks = Looks.now()
        self._default_device = _default_device()

    def looks(self) -> tuple[Any, ...]:
        """Return what decides which kernels run."""
        return self._looks, torch.are_deterministic_algorithms_enabled()

    def have_moved(self) -> bool:
        """Tell whether anything was drawn since from any random stream."""
        return any(stream.has_moved() for stream in self._streams)

    def drawn(self) -> list[torch.Tensor]:
        """Return how far torch's random streams have come, of the devices that the region computes on."""
        streams = self._streams if self._computes_on_cpu else self._streams[1:]  # the CPU's is the first
        return [stream.now() for stream in streams if stream.is_of_torch]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put everything as it was for a while, and back.

        The random streams too that the forward left where it found them: it may have drawn from them and put them back,
        and a replay that ends early does not come to that.
        """
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(stream.rewound())
            stack.callback(
                torch.set_default_dtype, torch.get_default_dtype()
            )  # a replay may end in a forward that sets it
            if (now := Looks.now()) != self._looks:
                stack.enter_context(self._looks.restored(now))
            if self._default_device is not None and _default_device() != self._default_device:
                stack.enter_context(self._default_device)
            yield


def _default_device() -> DeviceContext | None:
    """Return the innermost ``with torch.device(...)`` or default device, None where there is none."""
    if not torch._C._len_torch_function_stack():
        return None
    stack = torch.overrides._get_current_function_mode_stack()
    return next((mode for mode in reversed(stack) if isinstance(mode, DeviceContext)), None)
