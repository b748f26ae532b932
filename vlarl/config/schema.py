"""The sections of a run. Class defaults are the vetted settings; presets hold only what differs.

A plug-in's section (env, policy, algo) lives in the plug-in's own module and derives from the bases
here. Every field has a docstring: it becomes help text, docs and editor schema.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    model_validator,
)
from pydantic_core import PydanticCustomError

Int = Annotated[int, Strict()]
"""An integer; `true` and `1.0` are refused."""
Bool = Annotated[bool, Strict()]
"""A boolean; `1` and `"yes"` are refused."""


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


Float = Annotated[float, BeforeValidator(_refuse_bool)]
"""A number, also as text, which some editors write; `true` is refused."""

Beta = Annotated[Float, Field(ge=0, lt=1)]
"""Decay rate of a moment of Adam."""

_LOWEST_TEMPERATURE = 1e-3


def _check_temperature(value: float) -> float:
    if 0 < value < _LOWEST_TEMPERATURE:
        raise ValueError(
            f"{value:g} is too close to 0 to divide logits by; the lowest is "
            f"{_LOWEST_TEMPERATURE:g}, and greedy is 0, where that is allowed"
        )
    return value


Temperature = Annotated[Float, AfterValidator(_check_temperature)]
"""Sampling temperature; 0 is greedy."""


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


def _check_name(text: str) -> str:
    if not re.fullmatch(_NAME, text):
        raise ValueError(
            "a run's name is one word that can be a folder: letters, digits, '.', '_' and '-', the "
            f"first a letter or digit; got '{text}' (where the folder goes is run_dir)"
        )
    return text


RunName = Annotated[
    str, AfterValidator(_check_name), Field(json_schema_extra={"pattern": f"^{_NAME}$"})
]
"""Name of a run, and of its folder unless one is given."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, field docstrings kept."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


class EnvSection(Section):
    """What every env understands."""

    name: str
    """Registered name of the env."""
    num_slots: Annotated[Int, Field(ge=1)] = 8
    """Episodes played at once on each rank. A simulator uses one process per slot."""


class PolicySection(Section):
    """What every policy understands."""

    name: str
    """Registered name of the policy."""
    checkpoint: str
    """Directory of the checkpoint, or the name of an asset."""


class AlgoSection(Section):
    """What every algorithm understands."""

    name: str
    """Registered name of the algorithm."""

    @property
    def episodes_multiple(self) -> int:
        """`rollout.episodes` must be a multiple of this: the group size, or 1."""
        return 1

    def value_width(self, chunk: int) -> int:
        """Width V of the value head the algorithm trains: 0 = none, 1 = chunk, C = action level."""
        return 0


class RolloutSection(Section):
    """How experience is collected."""

    episodes: Annotated[Int, Field(ge=1)] = 64
    """Episodes per iteration over all ranks. With groups: number of groups times group size."""
    temperature: Annotated[Temperature, Field(gt=0)] = 1.0
    """Sampling temperature; the update scores with the same one."""
    deterministic: Bool = True
    """Act on fixed groups of slots in a fixed order, so that runs repeat bit for bit. False acts on
    whichever slots have answered."""
    stages: Annotated[Int, Field(ge=1)] = 2
    """Groups of slots that take turns, so that some simulate while the policy decides for others
    (the reference's `pipeline_stage_num`). 1 = lockstep."""


class OptimSection(Section):
    """The update."""

    lr: Annotated[Float, Field(gt=0)] = 1e-4
    """AdamW learning rate of the actor."""
    critic_lr: Annotated[Float, Field(gt=0)] = 3e-3
    """AdamW learning rate of the value head."""
    warmup_steps: Annotated[Int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    critic_warmup: Annotated[Int, Field(ge=0)] = 0
    """First iterations in which only the value head is trained."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW moment decay rates."""
    eps: Annotated[Float, Field(gt=0)] = 1e-8
    """AdamW denominator offset."""
    weight_decay: Annotated[Float, Field(ge=0)] = 0.0
    """AdamW decoupled weight decay."""
    grad_clip: Annotated[Float, Field(gt=0)] = 1.0
    """Largest global L2 norm of the gradient."""
    epochs: Annotated[Int, Field(ge=1)] = 1
    """Passes over each rollout."""
    minibatches: Annotated[Int, Field(ge=1)] = 1
    """Optimizer steps per pass. Decisions are assigned to minibatches by a keyed hash, the same on
    any number of ranks."""
    micro_batch: Annotated[Int, Field(ge=1)] = 64
    """Decisions per forward and backward; changes memory and speed, never the result."""
    target_kl: Annotated[Float, Field(gt=0)] | None = None
    """Skip the rest of an iteration's optimizer steps once approx_kl of a step exceeds this."""


class EvalSection(Section):
    """Periodic evaluation on held-out trials during training, and the plan of `vlarl eval`."""

    every: Annotated[Int, Field(ge=0)] = 10
    """Iterations between evaluations; 0 evaluates only before and after."""
    ends: Bool = True
    """Evaluate before the first and after the last iteration."""
    episodes: Annotated[Int, Field(ge=1)] | None = None
    """Held-out trials per task; none means all of them."""
    temperature: Annotated[Temperature, Field(ge=0)] | None = None
    """Sampling temperature, 0 = greedy; none means the one of the rollout."""
    video: Annotated[Int, Field(ge=0)] = 4
    """Episodes recorded as video in the last evaluation of a run."""


class SaveSection(Section):
    """Checkpoints."""

    every: Annotated[Int, Field(ge=1)] = 10
    """Iterations between checkpoints; one is always written at the end."""
    keep: Annotated[Int, Field(ge=1)] = 2
    """How many of the latest checkpoints stay on disk."""


class LogSection(Section):
    """Metric backends besides metrics.jsonl, which is always written."""

    tensorboard: Bool = True
    """Write TensorBoard event files to RUN_DIR/tensorboard."""
    wandb: str | None = None
    """Weights & Biases project; needs `pip install 'vlarl[wandb]'`. Its failure never ends a
    run."""
    swanlab: str | None = None
    """SwanLab project; needs `pip install 'vlarl[swanlab]'`. Its failure never ends a run."""


class ComputeSection(Section):
    """Where and how the network runs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA when there is a device."""
    threads: Annotated[Int, Field(ge=1)] | None = None
    """Torch CPU threads per rank; none means cores divided by ranks."""
    shard: Literal["none", "fsdp2"] = "none"
    """none replicates the policy and sums gradients; fsdp2 shards parameters, gradients and
    optimizer states."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute dtype of the forward under fsdp2 and autocast. Log-probs, values and losses stay
    float32."""
    activation_checkpointing: Bool = False
    """Recompute activations of each shard unit in the backward pass."""


def runs_folder() -> Path:
    """Where runs without a `run_dir` go: $VLARL_RUNS, or ./runs."""
    return Path(os.environ.get("VLARL_RUNS") or "runs")


EnvT = TypeVar("EnvT", bound=EnvSection)
PolicyT = TypeVar("PolicyT", bound=PolicySection)
AlgoT = TypeVar("AlgoT", bound=AlgoSection)


class RunConfig(Section, Generic[EnvT, PolicyT, AlgoT]):
    """Everything a training run is made of."""

    name: RunName = "run"
    """Name of the run, a word that can be a folder; a preset's file name unless set."""
    run_dir: Path | None = None
    """Folder of the run; none means $VLARL_RUNS/NAME (default ./runs/NAME)."""
    seed: Annotated[Int, Field(ge=0)] = 0
    """Root of every random stream of the run."""
    max_steps: Annotated[Int, Field(ge=0)] = 100
    """Iterations: one rollout and its updates each."""
    patience: Annotated[Int, Field(ge=1)] = 10
    """Stop, and say why, after so many iterations in a row without any learning signal."""
    env: EnvT
    policy: PolicyT
    algo: AlgoT
    rollout: RolloutSection = RolloutSection()
    optim: OptimSection = OptimSection()
    eval: EvalSection = EvalSection()
    save: SaveSection = SaveSection()
    log: LogSection = LogSection()
    compute: ComputeSection = ComputeSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        # Where no such algorithm exists, a stand-in takes its place.
        known = isinstance(self.algo, AlgoSection)
        problems = disagreements(self.rollout, self.algo) if known else []
        if problems:
            raise ValueError("\n".join(problems))
        return self


def disagreements(rollout: RolloutSection, algo: AlgoSection) -> list[str]:
    """What two sections, each valid by itself, do not agree about."""
    multiple = algo.episodes_multiple
    if rollout.episodes % multiple == 0:
        return []
    below = rollout.episodes // multiple * multiple
    near = f"{below} or {below + multiple}" if below else f"{multiple}"
    return [
        f"rollout.episodes ({rollout.episodes}) must be a multiple of {multiple}, the group size "
        f"of algo '{algo.name}'; nearest: {near}"
    ]
