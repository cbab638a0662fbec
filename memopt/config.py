"""The user's options, as a YAML file or keywords, validated once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from memopt.errors import (
    SWAP_AND_CHECKPOINT,
    IllegalValueError,
    IncompatibleError,
    UnknownNameError,
    UnreadableFileError,
)
from memopt.ir.offload_request import check_together
from memopt.sections import ActivationOffload, Recompute, section_of

SwapMode = Literal["none", "attention"]
CheckpointMode = Literal["off", "full", "selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What to do with a model's activations; raises IllegalValueError for a value that its key does not take."""

    activation_swap: SwapMode = "none"
    """``attention`` swaps what self attention saves to pinned host memory."""
    activation_checkpoint: CheckpointMode = "off"
    """Recompute in backward instead of saving in forward: ``full`` everything in the layers, ``selective`` all but the
    results of expensive functions. Excludes swap."""
    activation_offload: ActivationOffload | None = None
    """Parts of layers that go to pinned host memory; a mapping will do."""
    recompute: Recompute | None = None
    """Parts of layers that are computed a second time in backward; a mapping will do."""
    enable_compile: bool = False
    """Whether the trainer compiles the model: what is checkpointed may then be compiled. Swap runs eagerly only."""
    pp_size: int = 1
    """The number of pipeline stages. Attention swap needs 1."""
    pp_rank: int = 0
    """Which of the pipeline stages this is; offload may keep more on later ones."""
    backend: str = "torch"
    """The framework that trains. Swap and checkpointing need ``torch``."""

    def __post_init__(self) -> None:
        for key, cls in _SECTIONS.items():
            object.__setattr__(self, key, section_of(key, cls, getattr(self, key)))
        for key, hint in get_type_hints(Config).items():
            if key not in _SECTIONS and not _takes(hint, getattr(self, key)):
                raise IllegalValueError(key, getattr(self, key), _legal(hint) + _hint(key, getattr(self, key)))
        if self.pp_size < 1:
            raise IllegalValueError("pp_size", self.pp_size, "a whole number from 1")
        if not 0 <= self.pp_rank < self.pp_size:
            raise IllegalValueError(
                "pp_rank", self.pp_rank, f"0..{self.pp_size - 1}, which pp_size={self.pp_size} sets"
            )


_SECTIONS: dict[str, Any] = {"activation_offload": ActivationOffload, "recompute": Recompute}


def parse_config(mapping: Mapping[str, Any]) -> Config:
    """Return the config that a mapping describes; raises UnknownNameError and IllegalValueError."""
    keys = [field.name for field in fields(Config)]
    for key in mapping:
        if key not in keys:
            raise UnknownNameError("config key", str(key), keys)
    return Config(**{key: _unquoted(key, value) for key, value in mapping.items()})


def load_config(path: str | Path) -> Config:
    """Read a YAML config; raises UnreadableFileError naming file and line, and as `parse_config`."""
    import yaml

    try:
        text = Path(path).read_bytes()
        _refuse_repeated_key(yaml.compose(text, Loader=yaml.SafeLoader), path)
        mapping = yaml.safe_load(text)
    except OSError as error:
        raise UnreadableFileError("config", path, error.strerror or str(error)) from None
    except yaml.YAMLError as error:
        raise UnreadableFileError("config", path, _yaml_fault(error)) from None
    if not isinstance(mapping, dict | None):
        raise UnreadableFileError("config", path, "it holds no 'key: value' lines")
    return parse_config(mapping or {})


def validate_attention_swap(config: Config) -> None:
    """Raise an IncompatibleError if attention swap is on together with what excludes it."""
    if config.activation_swap != "attention":
        return
    if config.enable_compile:
        raise IncompatibleError("activation_swap='attention' is incompatible with torch.compile")
    if config.activation_checkpoint != "off":
        raise IncompatibleError(SWAP_AND_CHECKPOINT)
    if config.pp_size != 1:
        raise IncompatibleError("activation_swap='attention' does not support pipeline parallelism")
    if config.backend != "torch":
        raise IncompatibleError(
            f"activation_swap='attention' supports only the PyTorch backend (backend='torch'), not {config.backend!r}"
        )


def validate_activation_checkpoint(config: Config) -> None:
    """Raise an IncompatibleError if checkpointing is on together with what excludes it; pipeline stages do not."""
    if config.activation_checkpoint != "off" and config.backend != "torch":
        raise IncompatibleError(
            f"activation_checkpoint={config.activation_checkpoint!r} supports only the PyTorch backend "
            f"(backend='torch'), not {config.backend!r}"
        )


def validate_offload(config: Config) -> None:
    """Raise an IncompatibleError if parts of layers are offloaded or recomputed together with what excludes it."""
    for key in _SECTIONS:
        if getattr(config, key) is not None:
            _refuse_beside(key, config)
    if config.activation_offload and config.recompute:
        check_together(config.activation_offload.modules, config.recompute.modules)


def validate(config: Config) -> None:
    """Raise an IncompatibleError if a config asks for things that exclude each other."""
    validate_attention_swap(config)
    validate_activation_checkpoint(config)
    validate_offload(config)


def passes_for(config: Config) -> tuple[str, ...]:
    """Return the passes that a config asks for, in order and with their options; raises for what it may not ask."""
    validate(config)
    if config.activation_offload or config.recompute:
        return tuple(_part_passes(config))
    if config.activation_swap == "attention":
        return ("attention-swap", "prefetch-chain")
    if config.activation_checkpoint == "off":
        return ()
    compiles = ":compiles=true" if config.enable_compile else ""
    return (f"activation-checkpoint:mode={config.activation_checkpoint}{compiles}",)


def _refuse_beside(key: str, config: Config) -> None:
    if config.activation_checkpoint != "off":
        raise IncompatibleError(
            f"{key} is incompatible with activation_checkpoint={config.activation_checkpoint!r}, which recomputes whole "
            "layers; drop one of the two"
        )
    if config.activation_swap == "attention":
        raise IncompatibleError(
            f"{key} is incompatible with activation_swap='attention'; drop it, and name core_attn and attn_proj in "
            "activation_offload instead"
        )
    if config.enable_compile:
        raise IncompatibleError(f"{key} is incompatible with torch.compile; set enable_compile to false")
    if config.backend != "torch":
        raise IncompatibleError(f"{key} supports only the PyTorch backend (backend='torch'), not {config.backend!r}")


def _part_passes(config: Config) -> Iterator[str]:
    """Yield the passes of parts of layers: what is offloaded depends on what is recomputed."""
    if config.recompute:
        yield f"recompute-parts:modules={'+'.join(config.recompute.modules)}"
    if offload := config.activation_offload:
        modules = "+".join(offload.modules)
        changed = {f.name: value for f in fields(offload) if (value := getattr(offload, f.name)) != f.default}
        changed |= {"modules": modules} | ({"pp_rank": config.pp_rank} if config.pp_rank else {})
        yield ":".join(("fine-grained-offload", *(f"{key}={value}" for key, value in changed.items())))
        yield "prefetch-chain"


def _unquoted(key: str, value: Any) -> Any:
    """Return a YAML value as it was meant: YAML reads ``off`` as False, and ``null`` or nothing means the default.

    Raises UnknownNameError for a key of ``activation_checkpoint: {...}`` that is not ``mode``.
    """
    if key == "activation_checkpoint":
        if isinstance(value, Mapping):
            for name in value:
                if name != "mode":
                    raise UnknownNameError("key of activation_checkpoint", str(name), ["mode"])
            value = value.get("mode")
        if value is False:
            return "off"
    return Config.__dataclass_fields__[key].default if value is None else value


def _refuse_repeated_key(node: Any, path: str | Path) -> None:
    """Raise UnreadableFileError for a key that a YAML text gives twice in one place: YAML would take the last in silence."""
    pairs = node.value if getattr(node, "id", None) == "mapping" else ()
    seen: set[str] = set()
    for key, value in pairs:
        _refuse_repeated_key(value, path)
        name = str(key.value)
        if name in seen:
            raise UnreadableFileError("config", path, f"line {key.start_mark.line + 1}: key {name!r} is given twice")
        seen.add(name)


def _takes(hint: Any, value: object) -> bool:
    if legal := get_args(hint):
        return isinstance(value, str) and value in legal
    return type(value) is hint


def _hint(key: str, value: object) -> str:
    """Return what a value was probably meant to be, with the semicolon before it."""
    if key == "activation_checkpoint" and value == "attention-only":
        return "; that is a preset for code: memopt.plan(graph, passes=[ActivationCheckpoint(mode='attention-only')])"
    if key == "activation_checkpoint" and value is True:
        return "; YAML reads on, yes and true as True"
    return ""


def _legal(hint: Any) -> str:
    if legal := get_args(hint):
        return ", ".join(legal)
    return {bool: "true, false", int: "a whole number", str: "a name"}[hint]


def _yaml_fault(error: Any) -> str:
    """Return what is wrong with a YAML text and on which line, in one line."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"line {mark.line + 1}: {what}" if mark else what
