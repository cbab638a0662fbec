"""What may be asked of fine-grained offload and of recomputing parts: names, numbers, and what excludes what."""

from collections.abc import Iterable, Sequence
from typing import Any

from memopt.errors import IllegalValueError, IncompatibleError, UnknownNamesError
from memopt.ir.regions import ALL_REGIONS, FUSED_GROUP_MLP, FUSED_PARTS, MODULE

RECOMPUTABLE = ("layernorm", "moe_act", "mlp_act", "mlp", "moe", "shared_expert")
"""What `recompute` takes; the first three are light, and their outputs are not kept either."""
PATTERN = f"{MODULE}PATTERN"
_WITHIN_RECOMPUTED = {
    "moe": ("router", "expert_fc1", "moe_act", "moe_fc2", FUSED_GROUP_MLP, "shared_expert"),
    "mlp": ("mlp_fc1", "mlp_act", "mlp_fc2"),
    "shared_expert": ("shared_expert",),
}
"""Regions of which nothing is saved where the whole module is recomputed."""
_RECOMPUTED_TWICE = {"moe": ("moe_act", "shared_expert"), "mlp": ("mlp_act",)}


def module_names(key: str, value: Any, *, legal: str) -> tuple[str, ...]:
    """Return the names of a list, or of a string that separates them by commas, each once; there must be one."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise IllegalValueError(key, value, f"a list of {legal}")
    names = tuple(dict.fromkeys(stripped for name in names if (stripped := name.strip())))
    if not names:
        raise IllegalValueError(key, value, f"one or more of {legal}; to switch it off leave the section out")
    return names


def offload_names(key: str, value: Any) -> tuple[str, ...]:
    """Return what is asked for offload; raises for names that are no regions, and for names that exclude others."""
    names = module_names(key, value, legal=", ".join((*ALL_REGIONS, PATTERN)))
    _refuse_unknown(key, [n for n in names if not n.startswith(MODULE)], ALL_REGIONS, also=PATTERN)
    if MODULE in names:
        raise IllegalValueError(key, MODULE, f"{PATTERN}, for example module:model.layers.*.mlp")
    if "attn_proj" in names and "core_attn" not in names:
        raise IncompatibleError(
            f"{key}: attn_proj needs core_attn, which holds the same storage for backward; add core_attn or drop attn_proj"
        )
    if FUSED_GROUP_MLP in names and (parts := [name for name in FUSED_PARTS if name in names]):
        raise IncompatibleError(
            f"{key}: {FUSED_GROUP_MLP} is the whole block of experts, {' and '.join(parts)} included; drop one or the other"
        )
    return names


def recompute_names(key: str, value: Any) -> tuple[str, ...]:
    """Return what is asked for recompute; raises for unknown names, and for parts of what is recomputed as a whole."""
    names = module_names(key, value, legal=", ".join(RECOMPUTABLE))
    _refuse_unknown(key, names, RECOMPUTABLE)
    for whole, parts in _RECOMPUTED_TWICE.items():
        if whole in names and (inside := [name for name in parts if name in names]):
            raise IncompatibleError(
                f"{key}: {whole} is recomputed as a whole, {' and '.join(inside)} included; drop one or the other"
            )
    return names


def check_together(offloaded: Iterable[str], recomputed: Iterable[str]) -> None:
    """Raise an IncompatibleError where a region is to be offloaded of which recomputing leaves nothing saved."""
    offloaded = tuple(offloaded)
    for whole in recomputed:
        if inside := [name for name in offloaded if name in _WITHIN_RECOMPUTED.get(whole, ())]:
            raise IncompatibleError(
                f"recompute of {whole} leaves nothing saved to offload in {' and '.join(inside)}; drop one or the other"
            )


def check_count(key: str, value: Any, *, legal: str = "a whole number from 0") -> None:
    """Raise an IllegalValueError unless a value is a whole number from 0."""
    if type(value) is not int or value < 0:
        raise IllegalValueError(key, value, legal)


def check_fraction(key: str, value: Any) -> None:
    """Raise an IllegalValueError unless a value is a number from 0 to 1."""
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise IllegalValueError(key, value, "a number from 0 to 1")


def check_margin(key: str, value: Any) -> None:
    """Raise an IllegalValueError unless a value is ``auto`` or a number of bytes."""
    if value != "auto":
        check_count(key, value, legal="auto, or a whole number of bytes from 0")


def check_inflight(key: str, value: Any) -> None:
    """Raise an IllegalValueError unless a value is None or a number of groups."""
    if value is not None:
        check_count(key, value, legal="null for no limit, or a whole number of layers from 0")


def _refuse_unknown(key: str, names: Iterable[str], legal: Sequence[str], *, also: str = "") -> None:
    if unknown := [name for name in names if name not in legal]:
        raise UnknownNamesError(key, unknown, legal, also=also)
