"""Base of values that do not change: options, settings, messages, records."""

from dataclasses import dataclass, field
from typing import dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Frozen:
    """Base whose subclasses become frozen dataclasses of keywords."""

    def __init_subclass__(cls, *, eq: bool = True) -> None:
        dataclass(frozen=True, kw_only=True, eq=eq)(cls)
