"""What every section of the configuration is: strict, frozen, each field with words that say what it is for."""

from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
FolderPath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """A table of the config file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_words(cls, data: Any) -> Any:
        """Turn "none" into None where the field may be empty."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            key: None if value == "none" and key in fields and NoneType in get_args(fields[key].annotation) else value
            for key, value in data.items()
        }
