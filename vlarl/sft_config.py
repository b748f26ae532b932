"""The sections of a supervised run, and its composition from a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Generic, cast

from pydantic import Field, model_validator
from typing_extensions import Self

from vlarl import registry
from vlarl.config.compose import Composed, require_command
from vlarl.config.explain import validate
from vlarl.config.schema import (
    Beta,
    ComputeSection,
    Float,
    Int,
    LogSection,
    PolicyT,
    RunName,
    Section,
    runs_folder,
)
from vlarl.errors import ConfigError

FRESH = "fresh"
"""Value of `policy.checkpoint` when `init` makes a new one."""


class InitSection(Section):
    """A fresh, tiny OpenVLA-OFT network; its action statistics come from the data."""

    seed: Annotated[Int, Field(ge=0)] = 0
    """Of the weights."""
    statistics_key: str = "vlarl"
    """Name of the data set in the checkpoint's statistics."""
    image_size: Annotated[Int, Field(ge=14, multiple_of=14)] = 56
    """Pixels per side that the network sees."""
    hidden: Annotated[Int, Field(ge=8)] = 128
    """Width of the language model."""
    mlp: Annotated[Int, Field(ge=8)] = 256
    """Inner width of its MLPs."""
    layers: Annotated[Int, Field(ge=1)] = 4
    """Its depth; the shipped `tiny-oft-metaworld` has 4."""
    heads: Annotated[Int, Field(ge=1)] = 4
    """Its attention heads."""
    vision_dim: Annotated[Int, Field(ge=8)] = 64
    """Width of each vision tower."""
    vision_depth: Annotated[Int, Field(ge=1)] = 2
    """Depth of each vision tower."""
    vision_heads: Annotated[Int, Field(ge=1)] = 4
    """Attention heads of each vision tower."""
    vision_mlp: Annotated[Int, Field(ge=8)] = 192
    """Inner width of the vision MLPs."""

    @model_validator(mode="after")
    def _heads_share_widths(self) -> Self:
        # Positions turn pairs of numbers in each head of the language model.
        for name, unit, what in (
            ("hidden", 2 * self.heads, "twice the heads"),
            ("vision_dim", self.vision_heads, "the vision_heads"),
        ):
            got = getattr(self, name)
            if got % unit:
                below = got - got % unit
                near = [str(n) for n in (below, below + unit) if n >= 8]
                raise ValueError(
                    f"{name}: {got} is no multiple of {unit}, {what}; nearest: {' or '.join(near)}"
                )
        return self


class SftOptimSection(Section):
    """The update."""

    steps: Annotated[Int, Field(ge=1)] = 1000
    """Optimizer steps."""
    batch: Annotated[Int, Field(ge=1)] = 64
    """Samples per optimizer step."""
    micro_batch: Annotated[Int, Field(ge=1)] | None = None
    """Samples per forward and backward, none means the batch; changes memory and speed, never the
    result."""
    lr: Annotated[Float, Field(gt=0)] = 5e-4
    """Highest AdamW learning rate."""
    warmup_steps: Annotated[Int, Field(ge=0)] = 50
    """Steps of linear warm-up."""
    final_lr: Annotated[Float, Field(ge=0, le=1)] = 0.05
    """Learning rate at the end, as a fraction of the highest; reached along a cosine."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW moment decay rates."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.01
    """AdamW decoupled weight decay of matrices; vectors (norms, biases) have none."""
    grad_clip: Annotated[Float, Field(gt=0)] = 1.0
    """Largest global L2 norm of the gradient."""


class AugmentSection(Section):
    """Random changes of the training frames; 0 switches one off."""

    shift: Annotated[Float, Field(ge=0, lt=0.5)] = 0.0
    """Move by up to this fraction of the side. With a centre crop in the policy, 0.026 is the
    random 90 % crop of the published recipe."""
    brightness: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Multiply by a factor from [1 - x, 1 + x]."""
    contrast: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Stretch about the frame's mean by a factor from [1 - x, 1 + x]."""


class ValidationSection(Section):
    """Held-out episodes."""

    fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.1
    """Of each task's episodes; 0 for none."""
    every: Annotated[Int, Field(ge=1)] = 100
    """Optimizer steps between validations; one is always made at the end."""
    samples: Annotated[Int, Field(ge=1)] = 512
    """At most so many held-out samples, spread evenly, the same ones every time."""


class SftConfig(Section, Generic[PolicyT]):
    """Everything a supervised run is made of."""

    name: RunName = "sft"
    """Name of the run, a word that can be a folder; a preset's file name unless set."""
    run_dir: Path | None = None
    """Folder of the run; none means $VLARL_RUNS/NAME (default ./runs/NAME)."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Root of every random stream of the run."""
    data: tuple[Path, ...]
    """Folders written by `vlarl collect`."""
    policy: PolicyT
    init: InitSection | None = None
    """Make a fresh tiny checkpoint and start there; none starts from `policy.checkpoint`."""
    optim: SftOptimSection = SftOptimSection()
    augment: AugmentSection = AugmentSection()
    validation: ValidationSection = ValidationSection()
    log_every: Annotated[Int, Field(ge=1)] = 10
    """Optimizer steps per metrics line, which holds means over them."""
    log: LogSection = LogSection()
    compute: ComputeSection = ComputeSection()

    @property
    def folder(self) -> Path:
        """Where the run goes."""
        return (self.run_dir or runs_folder() / self.name).expanduser()


def build(composed: Composed) -> SftConfig:
    """The validated run.

    Raises ConfigError with every problem, one a line.
    """
    require_command(composed, "sft")
    values = dict(composed.values)
    section = values.get("policy")
    if not isinstance(section, dict) or "name" not in section:
        raise ConfigError("policy.name: missing; e.g. policy.name=openvla_oft")
    if values.get("init") is not None:
        given = section.get("checkpoint", FRESH)
        if given != FRESH:
            raise ConfigError(
                f"init makes a fresh checkpoint but policy.checkpoint is '{given}'; "
                f"set one of them to null"
            )
        values["policy"] = {**section, "checkpoint": FRESH}
    policy = registry.module("policy", section["name"]).Config
    model = cast("type[SftConfig]", SftConfig.__class_getitem__(policy))
    cfg = validate(model, values, composed.sources)
    if cfg.compute.shard != "none":
        raise ConfigError("compute.shard: supervised training runs on one device; set it to none")
    if cfg.init is not None and section["name"] != "openvla_oft":
        raise ConfigError(f"init: there is no fresh network for policy '{section['name']}'")
    return cfg
