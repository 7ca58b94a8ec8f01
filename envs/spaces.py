"""Gymnasium spaces of a conversation.

``gymnasium.spaces.Text`` excludes newlines, accents and the empty string by default, and fixes a length; these two do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from gymnasium import Space

from .messages import Message, is_message, user

_LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


class Messages(Space[tuple[Message, ...]]):
    """Observations: the tuple of *new* messages since the policy last spoke. Empty where an episode ended without a word."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """One user message of random text. There is nothing to mask."""
        _refuse_masks(self, mask, probability)
        return (user(_text(self)),)

    def contains(self, x: Any) -> bool:
        """True for a tuple of well-formed messages."""
        return isinstance(x, tuple) and all(is_message(message) for message in cast(tuple[object, ...], x))

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Inverse of ``to_jsonable``: JSON turns tuples into lists."""
        return [tuple(messages) for messages in sample_n]

    def to_jsonable(self, sample_n: Iterable[tuple[Message, ...]]) -> list[Any]:
        """Messages are JSON as they are."""
        return [list(messages) for messages in sample_n]

    @property
    def is_np_flattenable(self) -> bool:
        """Messages are not numbers."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Messages)

    def __hash__(self) -> int:
        return hash(Messages)

    def __repr__(self) -> str:
        return "Messages()"


class Assistant(Space[Message | str]):
    """Actions: what the policy says, a plain text or an assistant message with tool calls."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A random text. There is nothing to mask."""
        _refuse_masks(self, mask, probability)
        return _text(self)

    def contains(self, x: Any) -> bool:
        """True for any text and for a well-formed assistant message."""
        return isinstance(x, str) or (is_message(x) and x["role"] == "assistant")

    @property
    def is_np_flattenable(self) -> bool:
        """Text is not numbers."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assistant)

    def __hash__(self) -> int:
        return hash(Assistant)

    def __repr__(self) -> str:
        return "Assistant()"


def _text(space: Space[Any]) -> str:
    random = space.np_random
    return "".join(_LETTERS[index] for index in random.integers(len(_LETTERS), size=int(random.integers(1, 17))))


def _refuse_masks(space: Space[Any], mask: Any | None, probability: Any | None) -> None:
    if mask is not None or probability is not None:
        raise ValueError(f"{space!r} has no finite set of elements, so neither mask nor probability applies; leave both out")
