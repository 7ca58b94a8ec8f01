"""Tools: schemas from type hints and docstrings, and the check of what a model passes."""

import enum
from typing import Annotated, Any, Literal, Optional

import pytest

from rollstream.envs.tools import BadCall, describe, tool
from rollstream.errors import EnvError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Kit:
    @tool
    def paint(
        self,
        colour: Colour,
        size: Literal["small", "large"],
        num: int = 1,
        weights: Optional[list[float]] = None,  # noqa: UP045 - the old spelling must work too
        labels: dict[str, str] | None = None,
        loud: Annotated[bool, "unused"] = False,
        extra: Any = None,
        shade: Colour = Colour.BLUE,
    ):
        """Paint a wall.

        It dries in an hour.

        Args:
            colour: which colour
            size (str): how large,
                in words
            num: how many: at least 1

        Returns:
            nothing of interest
        """
        return locals()

    @tool
    def starred(self, *walls: int):
        """Several."""

    @tool
    def odd(self, where: complex):
        """Odd."""

    @tool
    def lost(self, where: "Nowhere"):  # noqa: F821
        """Lost."""

    @staticmethod
    @tool
    def still(x: float):
        """Static."""
        return x


def paint():
    return describe("paint", Kit().paint, "Kit")


def test_hints_and_docstring_become_a_schema():
    function = paint().schema()["function"]
    assert function["name"] == "paint"
    assert function["description"] == "Paint a wall.\n\nIt dries in an hour."
    assert function["parameters"]["required"] == ["colour", "size"]
    assert function["parameters"]["properties"] == {
        "colour": {"type": "string", "enum": ["red", "blue"], "description": "which colour"},
        "size": {"type": "string", "enum": ["small", "large"], "description": "how large, in words"},
        "num": {"type": "integer", "description": "how many: at least 1", "default": 1},
        "weights": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}], "default": None},
        "labels": {"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}], "default": None},
        "loud": {"type": "boolean", "default": False},
        "extra": {"default": None},
        "shade": {"type": "string", "enum": ["red", "blue"], "default": "blue"},
    }


def test_values_arrive_as_the_hint_says():
    passed = {"colour": "red", "size": "large", "num": 2.0, "weights": [1, 0.5], "labels": {"a": "b"}, "loud": True, "extra": [None]}
    bound = paint().bind(passed)
    assert bound == {**passed, "colour": Colour.RED, "num": 2}
    assert isinstance(bound["num"], int)
    assert isinstance(bound["weights"][0], float)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "green"}, "paint: colour must be one of 'red', 'blue', not 'green'"),
        ({"size": 1}, "paint: size must be one of 'small', 'large', not 1"),
        ({"num": 1.5}, "paint: num must be an integer, not 1.5"),
        ({"num": "3"}, "paint: num must be an integer, not '3'"),
        ({"weights": [1, "x"]}, "paint: weights must be"),
        ({"weights": 10**400}, "paint: weights must be a list or null, not 1000"),
        ({"weights": [float("inf")]}, "must be a number"),
        ({"labels": {"a": 1}}, "must be text"),
        ({"loud": 1}, "paint: loud must be true or false, not 1"),
    ],
)
def test_a_wrong_value_is_said_in_one_line(change, said):
    with pytest.raises(BadCall) as caught:
        paint().bind({"colour": "red", "size": "small", **change})
    assert said in str(caught.value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(("name", "error"), [("starred", "cannot be passed by name"), ("odd", "no JSON schema is known"), ("lost", "cannot be resolved")])
def test_a_tool_without_a_schema_is_refused(name, error):
    with pytest.raises(EnvError, match=rf"tool Kit\.{name}.*{error}"):
        describe(name, getattr(Kit(), name), "Kit")


def test_a_static_method_is_a_tool_too():
    assert describe("still", Kit().still, "Kit").bind({"x": 1}) == {"x": 1.0}
