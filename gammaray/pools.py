"""How many workers a pool has: a fixed number, or bounds between which it scales."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import core_schema

__all__ = ["MAX_WORKERS", "PoolSize"]

MAX_WORKERS = 64

_FORM = re.compile(r"(\d+)(?::(\d+))?")


class PoolSize:
    """Bounds of the number of workers, written `N` or `MIN:MAX`.

    Args:
        minimum: Workers that are always there, in [0, 64].
        maximum: Workers that there may be, in [minimum, 64] and at least 1 where they differ; by default
            `minimum`.

    Raises:
        ValueError: Says what was got and what is allowed.
    """

    # NOTE: no dataclass: pydantic-settings would read those from the environment as JSON.
    __slots__ = ("maximum", "minimum")

    def __init__(self, minimum: int, maximum: int | None = None) -> None:
        most = minimum if maximum is None else maximum
        if not 0 <= minimum <= most <= MAX_WORKERS:
            raise ValueError(f"got {minimum}:{most}, allowed: 0 <= MIN <= MAX <= {MAX_WORKERS}")
        self.minimum, self.maximum = minimum, most

    @classmethod
    def parse(cls, value: object) -> PoolSize:
        """Return the size that a number or a text stands for.

        Raises:
            ValueError: It is none.
        """
        if isinstance(value, PoolSize):
            return value
        match = _FORM.fullmatch(str(value))
        if match is None or isinstance(value, bool):
            raise ValueError(f"got {value!r}, allowed: N or MIN:MAX, each 0 to {MAX_WORKERS}")
        return cls(int(match[1]), int(match[2]) if match[2] else None)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.minimum < self.maximum

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolSize) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash((self.minimum, self.maximum))

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}" if self.is_elastic else str(self.minimum)

    def __repr__(self) -> str:
        return f"PoolSize({self})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        # Settings classes take the text of an option or a variable; they give text back.
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )
