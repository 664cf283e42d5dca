"""Resources: what a run needs, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainyard.errors import ConfigError, unknown

__all__ = ["Resources"]

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


class Resources:
    """What one run needs. Equal when all amounts are.

    Args:
        cpu: processor cores; fractions share one.
        gpu: GPUs; fractions share one.
        memory: bytes, or text such as ``"4GiB"``.
        custom: further amounts by name.

    Raises:
        ConfigError: an amount that is negative or no number.
    """

    __slots__ = ("cpu", "custom", "gpu", "memory")

    def __init__(
        self, cpu: float = 1, gpu: float = 0, memory: int | str = 0, custom: Mapping[str, float] | None = None
    ) -> None:
        self.cpu = _amount("cpu", cpu)
        self.gpu = _amount("gpu", gpu)
        self.memory = _bytes(memory)
        self.custom = {name: _amount(name, amount) for name, amount in (custom or {}).items()}

    @classmethod
    def parse(cls, request: Resources | Mapping[str, Any] | None, where: str = "resources") -> Resources:
        """Read a request as configs and hooks give it; None is one CPU.

        Raises:
            ConfigError: an unknown name or a bad amount, with its place.
        """
        if isinstance(request, Resources):
            return request
        if request is None:
            return cls()
        if not isinstance(request, Mapping):
            raise ConfigError(f"{where}: expected a mapping such as {{cpu: 1}}, not {request!r}")
        for name in request:
            if name not in cls.__slots__:
                raise ConfigError(
                    f"{where}: {unknown('resource', str(name), cls.__slots__)}; amounts of your own go under 'custom'"
                )
        try:
            return cls(**request)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The amounts that are not zero."""
        amounts = {"cpu": self.cpu, "gpu": self.gpu, "memory": self.memory, "custom": self.custom}
        return {name: amount for name, amount in amounts.items() if amount}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Resources) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.cpu, self.gpu, self.memory, frozenset(self.custom.items())))

    def __repr__(self) -> str:
        return f"Resources({', '.join(f'{name}={amount!r}' for name, amount in self.to_dict().items())})"


def _amount(name: str, amount: Any) -> float:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
        raise ConfigError(f"{name}: expected a number, zero or more, not {amount!r}")
    return amount


def _bytes(memory: Any) -> int:
    if isinstance(memory, str):
        found = _SIZE.fullmatch(memory.strip())
        if not found or found[2].lower() == "i":
            raise ConfigError(f"memory: expected bytes or a size such as '4GiB', not {memory!r}")
        return int(float(found[1]) * _UNITS[found[2].lower()])
    return int(_amount("memory", memory))
