"""How fast a device computes and copies, measured or from its data sheet."""

import json
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from memopt.errors import IllegalValueError, UnreadableFileError
from memopt.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What a prediction needs to know of a device and its host."""

    name: str
    memory_bytes: int
    half_flops: float
    """Of matrix products in bfloat16 and float16, a second."""
    single_flops: float
    """In float32."""
    bytes_per_second: float
    """Of its own memory."""
    copy_out_bytes_per_second: float
    copy_in_bytes_per_second: float
    library_bytes: int
    """What torch gives to cuBLAS to work in, for forward's thread and backward's."""
    launch_us: float
    """What an operator of a training step takes of the host's time: where the device is quicker, it waits."""
    is_measured: bool
    """False where it stands in data sheets."""

    def compute_us(self, flops: int, num_bytes: int, *, is_half: bool) -> float:
        """Return how long an operator takes: to compute, or to move its operands, whichever is longer (roofline)."""
        return 1e6 * max(flops / (self.half_flops if is_half else self.single_flops), num_bytes / self.bytes_per_second)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        return asdict(self)

    def without_libraries(self) -> "DeviceProfile":
        """Return the profile for a run that takes no memory for CUDA's libraries."""
        return replace(self, library_bytes=0)


_TERA, _GIGA = 1e12, 1e9
_HOPPER_LIBRARIES, _OTHER_LIBRARIES = 65 * MIB, 17 * MIB
"""Two cuBLAS workspaces of 32 MiB (torch's default since compute capability 9), of 8 MiB before; and small ones."""

DEVICES = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="h200", memory_bytes=150_109_880_320, half_flops=790 * _TERA, single_flops=51 * _TERA,
            bytes_per_second=4240 * _GIGA, copy_out_bytes_per_second=55.3 * _GIGA, copy_in_bytes_per_second=55.5 * _GIGA,
            library_bytes=_HOPPER_LIBRARIES, launch_us=13, is_measured=True,
        ),
        DeviceProfile(
            name="h100", memory_bytes=79 * GIB, half_flops=790 * _TERA, single_flops=51 * _TERA,
            bytes_per_second=2950 * _GIGA, copy_out_bytes_per_second=55 * _GIGA, copy_in_bytes_per_second=55 * _GIGA,
            library_bytes=_HOPPER_LIBRARIES, launch_us=13, is_measured=False,
        ),
        DeviceProfile(
            name="a100", memory_bytes=79 * GIB, half_flops=250 * _TERA, single_flops=16 * _TERA,
            bytes_per_second=1790 * _GIGA, copy_out_bytes_per_second=25 * _GIGA, copy_in_bytes_per_second=25 * _GIGA,
            library_bytes=_OTHER_LIBRARIES, launch_us=13, is_measured=False,
        ),
        DeviceProfile(
            name="rtx4090", memory_bytes=23 * GIB, half_flops=150 * _TERA, single_flops=62 * _TERA,
            bytes_per_second=890 * _GIGA, copy_out_bytes_per_second=25 * _GIGA, copy_in_bytes_per_second=25 * _GIGA,
            library_bytes=_OTHER_LIBRARIES, launch_us=13, is_measured=False,
        ),
    )
}  # fmt: skip
"""The H200 as `memopt-apply --profile-out` measures it; the H100 SXM, A100 SXM 80 GB and RTX 4090 by NVIDIA's data
sheets, at the shares of them that large kernels reach on it (80 % of the products, 88 % of the memory's rate)."""


def find_device(text: str) -> DeviceProfile:
    """Return a built-in profile by its name, or one that memopt-apply --profile-out wrote; raises MemoptError."""
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    path = Path(text)
    if path.suffix != ".json" and not path.is_file():
        raise IllegalValueError(
            "device_profile", text, f"{', '.join(DEVICES)}, or a file of memopt-apply --profile-out"
        )
    try:
        return _profile_of(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UnreadableFileError("device profile", path, error.strerror or str(error)) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise UnreadableFileError("device profile", path, f"{error}; memopt-apply --profile-out writes one") from None


def _profile_of(values: Any) -> DeviceProfile:
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object {...}")
    if missing := [field.name for field in fields(DeviceProfile) if field.name not in values]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    known = {field.name for field in fields(DeviceProfile)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"it has {', '.join(unknown)}, which no profile has")
    if not isinstance(values["name"], str) or not isinstance(values["is_measured"], bool):
        raise ValueError("name must be text, and is_measured true or false")
    for name, value in values.items():
        if name in ("name", "is_measured"):
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or (value == 0 and name != "library_bytes"):
            least = "from 0" if name == "library_bytes" else "above 0"
            raise ValueError(f"{name} must be a number {least}, not {json.dumps(value)}")
    return DeviceProfile(**values)


def save_device(profile: DeviceProfile, path: Path) -> None:
    """Write a profile as JSON."""
    path.write_text(json.dumps(profile.as_dict(), indent=2) + "\n", encoding="utf-8")
