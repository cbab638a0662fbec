"""Read a config.json; what is wrong with one is said in its own words, not in those of Python classes."""

import json
import re
from pathlib import Path
from typing import Any

from memopt.errors import UnreadableFileError

_COUNTS = ("hidden_size", "head_dim", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size")
"""Fields that transformers takes at zero and below, and then fails on deep inside."""

_JSON_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "NoneType": "null",
}


def read_config(path: Path) -> Any:
    """Read a config.json as transformers does; raises UnreadableFileError."""
    if not path.is_file():
        raise UnreadableFileError("model config", path, "No such file")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    facts = _read_json(path)
    if absurd := next((key for key in _COUNTS if isinstance(facts.get(key), int) and facts[key] < 1), None):
        raise UnreadableFileError("model config", path, f"{absurd} must be from 1, not {facts[absurd]}")
    names = facts.get("architectures") or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):  # not every version looks inside
        why = f"architectures must be a list or null, not {json.dumps(names)}"
        raise UnreadableFileError("model config", path, why)
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    except StrictDataclassError as error:
        raise UnreadableFileError("model config", path, _strict_fault(str(error), facts)) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = re.sub(r"module 'torch' has no attribute ('\w+')", r"dtype: torch has none called \1", str(error))
        raise UnreadableFileError("model config", path, why.strip().split("\n")[0]) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds: transformers would trip over anything else."""
    try:
        facts = json.loads(path.read_bytes())
    except OSError as error:
        raise UnreadableFileError("model config", path, error.strerror or str(error)) from None
    except ValueError as error:
        raise UnreadableFileError("model config", path, f"it is not JSON: {error}") from None
    if not isinstance(facts, dict):
        raise UnreadableFileError("model config", path, "it is not a JSON object {...}")
    return facts


def _strict_fault(text: str, facts: dict[str, Any]) -> str:
    """Return what transformers' check of the fields found, in words of JSON instead of Python classes."""
    first, _, rest = text.partition("\n")
    field = re.search(r"for field '(\w+)'", first)
    if not field:
        return rest.strip().partition(": ")[2].split("\n")[0] or first
    name = field[1]
    union = re.search(r"any type in \((.*?)\)\.", rest)
    types = re.findall(r"\w+", re.sub(r"\[.*?\]", "", union[1])) if union else re.findall(r"expected (\w+), got", rest)
    legal = " or ".join(_JSON_TYPES[type_] for type_ in types if type_ in _JSON_TYPES)
    given = f", not {json.dumps(facts[name])}" if name in facts else ""
    return f"{name} must be {legal or 'of another type'}{given}"
