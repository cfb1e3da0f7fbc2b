"""Rotary positions of a model: one description for trainer, engines and exported folders. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatron_klear.config.base import Config, NonNegativeFloat, PositiveFloat, PositiveInt


class RopeConfig(Config):
    """Rotary positions under transformers' names (`rope_parameters` of config.json), with transformers' defaults."""

    rope_type: Literal["default", "yarn"] = "default"
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10000.0
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """YaRN: the context is this many times the original one."""
    original_max_position_embeddings: PositiveInt | None = None
    """YaRN: positions the model was trained on before."""
    attention_factor: PositiveFloat | None = None
    """YaRN: cos and sin are multiplied by it; None computes it from `factor` (and the two `mscale`)."""
    beta_fast: PositiveFloat = 32.0
    """YaRN: dimensions that turn more often than this within the original context keep their frequency."""
    beta_slow: PositiveFloat = 1.0
    """YaRN: those that turn less often are divided by `factor`; in between, a ramp."""
    truncate: bool = True
    """YaRN: round the ends of the ramp to whole dimensions."""
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.rope_type == "default":
            idle = [name for name in self._changed() if name not in ("rope_type", "rope_theta")]
            if idle:
                raise ValueError(f"{', '.join(idle)} would have no effect with rope_type default; expected yarn")
        elif self.factor is None or self.original_max_position_embeddings is None:
            raise ValueError("rope_type yarn needs factor and original_max_position_embeddings")
        elif self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast {self.beta_fast} is below beta_slow {self.beta_slow}; expected it above")
        return self

    def _changed(self) -> dict[str, Any]:
        return self.model_dump(exclude_defaults=True)

    def __str__(self) -> str:
        own = {name: value for name, value in self._changed().items() if name not in ("rope_type", "rope_theta")}
        settings = {"rope_theta": self.rope_theta, **own}
        return f"{self.rope_type} rope ({', '.join(f'{name} {value}' for name, value in settings.items())})"

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by: 1 without YaRN."""
        if self.factor is None:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return _magnitude(self.factor)

    def to_hf(self) -> dict[str, Any]:
        """The keys of config.json that say this, in both forms: readers older than transformers 5 know the second."""
        parameters = {"rope_type": self.rope_type, "rope_theta": self.rope_theta, **self._changed()}
        scaling = None if self.rope_type == "default" else parameters
        return {"rope_parameters": parameters, "rope_theta": self.rope_theta, "rope_scaling": scaling}

    def stretched(self, factor: float, original_max_position_embeddings: int) -> RopeConfig:
        """Plain YaRN with the same theta; whatever scaling this one has is replaced."""
        return RopeConfig(
            rope_type="yarn",
            rope_theta=self.rope_theta,
            factor=factor,
            original_max_position_embeddings=original_max_position_embeddings,
        )


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def gather_rope(raw: Any) -> Any:
    """A config.json with its rope in one place, the key `rope`. Raises `ValueError` if it says two different things.

    transformers 5 writes rope_parameters = {"rope_type", "rope_theta", ...}; older versions rope_theta beside
    rope_scaling (None, or a dict with `type` or `rope_type`).
    """
    if not isinstance(raw, Mapping) or "rope" in raw:
        return raw
    forms = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None}
    ropes = {key: _completed(form, raw) for key, form in forms.items()} or {"rope_theta": _completed({}, raw)}
    first, *others = ropes.values()
    if any(other != first for other in others):
        told = "; ".join(f"{key} = {forms[key]!r}" for key in forms)
        raise ValueError(f"two ropes that differ: {told}; expected the same one twice, or only one of the two keys")
    return {**raw, "rope": first}


def _completed(form: Any, raw: Mapping[str, Any]) -> Any:
    """One form of a rope with what transformers takes from its surroundings."""
    if not isinstance(form, Mapping):
        return form
    rope = dict(form)
    if "type" in rope and rope.get("rope_type", rope["type"]) == rope["type"]:
        rope["rope_type"] = rope.pop("type")
    theta = raw.get("rope_theta")
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        raise ValueError(f"rope_theta {theta} beside {form!r}, which holds another one; expected only one of them")
    if rope.get("rope_type") == "yarn" and raw.get("max_position_embeddings") is not None:
        rope.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    return rope
