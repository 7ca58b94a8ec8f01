"""The base of every section of the configuration, and the types of its numbers."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Union, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0.001, le=2_592_000)]
"""Of a time-out: from a millisecond to a month."""
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d{1,3})?)$")]
MAX_VERSIONS = 1_000_000_000
"""Versions are kept as int32 in the stream."""
MAX_TOKENS = 10_000_000
"""Of one episode: beyond every context there is, below what an int32 offset holds."""


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no infinities, truth values are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_numbers(cls, values: Any) -> Any:
        """YAML's ``true`` would pass for 1: it is most often a slip of the key."""
        found: list[InitErrorDetails] = []
        for name, value in cast("dict[str, Any]", values if isinstance(values, dict) else {}).items():
            field = cls.model_fields.get(name)
            if field is None or _takes_truth(field.annotation):
                continue
            items = list(enumerate(cast("list[Any]", value))) if isinstance(value, list) else []
            places = [(name,)] if isinstance(value, bool) else [(name, place) for place, item in items if isinstance(item, bool)]
            found += [InitErrorDetails(type=PydanticCustomError("truth_value", "true and false mean nothing here"), loc=loc, input=value) for loc in places]
        if found:
            raise ValidationError.from_exception_data(cls.__name__, found)
        return values


def _takes_truth(annotation: Any) -> bool:
    """Whether ``annotation`` names ``bool``, or anything at all."""
    origin = typing.get_origin(annotation)
    if origin in (Annotated, Union, types.UnionType, tuple):
        return any(_takes_truth(member) for member in typing.get_args(annotation))
    return annotation is bool or annotation is Any or annotation is object
