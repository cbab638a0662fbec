"""The lists, dicts and the like that modules carry, and what is in them at any depth."""

from collections import deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

from memopt.runtime.replay.arguments import copied, like
from memopt.runtime.replay.random_streams import is_generator

_CHANGEABLE = (list, dict, set, deque)
_ATOMS = (bool, int, float, str, type(None))


class Contents:
    """What containers held at one time, by reference; and the random generators in them."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.generators: list[Any] = []
        self._held: dict[int, tuple[Any, Any]] = {}
        """(container, what was in it), by the container's identity; one that is met twice is one."""
        todo = list(values)
        while todo:
            value = todo.pop()
            if type(value) in _ATOMS or id(value) in self._held:
                continue
            if isinstance(value, (*_CHANGEABLE, tuple)):
                self._held[id(value)] = value, copied(value)
                todo += (child for _, child in _items(value))
            elif is_generator(value):
                self.generators.append(value)
        self._changeable = [pair for pair in self._held.values() if not isinstance(pair[0], tuple)]

    def holds(self) -> bool:
        """Tell whether all containers hold the very same items still."""
        return all(_holds_same(container, content) for container, content in self._changeable)

    def again(self, value: Any, memo: dict[int, Any]) -> Any:
        """Return a container as it was, in copies; anything else as it is."""
        if id(value) in memo:
            return memo[id(value)]
        if id(value) not in self._held:
            return value
        _, content = self._held[id(value)]
        if isinstance(value, tuple):
            made = [self.again(child, memo) for child in value]
            return value if all(map(is_, made, value)) else like(value, made)
        memo[id(value)] = again = copied(content)
        for key, child in _items(content):
            if (made := self.again(child, memo)) is not child:
                again[key] = made
        return again


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(list(container.items() if isinstance(container, dict) else enumerate(container)))


def _holds_same(container: Any, content: Any) -> bool:
    if len(container) != len(content):
        return False
    if isinstance(content, dict):
        return all(map(is_, container, content)) and all(map(is_, container.values(), content.values()))
    return bool(container == content) if isinstance(content, set) else all(map(is_, container, content))
