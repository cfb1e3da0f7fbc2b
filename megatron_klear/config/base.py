"""What every part of a recipe shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Config(BaseModel):
    """A frozen part of a recipe: an unknown key is an error, a default is checked like a given value."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


def tuple_of_list(value: object) -> object:
    """For `BeforeValidator`: YAML has lists; frozen settings hold tuples."""
    return tuple(value) if isinstance(value, list) else value
