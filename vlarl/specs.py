"""What a policy emits and an env accepts, declared on both sides and compared before weights load.

Torch-free. The policy converts its outputs *to* the canonical format named here, the env converts
*from* it: one adapter each instead of one per pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vlarl.errors import ConfigError

GripperConvention = Literal["open_positive", "close_positive", "effort_close_positive", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpec:
    """One action of A numbers.

    dims: A. format: a word for the first A-1 (or A) numbers, e.g. "delta_xyz" or
    "delta_xyz_axisangle". gripper: meaning of the last number. "effort_close_positive" is
    MetaWorld's gripper effort in [-1, 1]; "close_positive" is LIBERO's -1 open, +1 closed.
    low, high: bounds the env clips to.
    """

    dims: int
    format: str
    gripper: GripperConvention
    low: float = -1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """What an env offers.

    cameras: names it can render. state_dims: S, 0 when it has no proprioception; state_format names
    it. max_steps: horizon in actions. control_hz: actions per second of simulated time.
    chunks: the only chunk lengths C it accepts, empty = any (a video world model has exactly one).
    tasks: names, in suite order. frame_size: pixels (height, width) of its frames.
    video_every: actions between two recorded video frames. trials: what decides which start state a
    trial number stands for, e.g. "goal_seed=0"; results are paired only when it agrees.
    share_trials: a training run may evaluate from states it trains on. facts: what else results
    have to say about the simulator, as JSON values. datasets: names, up to an underscore, of the
    data sets with demonstrations of its tasks; empty = not known.
    """

    name: str
    action: ActionSpec
    cameras: tuple[str, ...]
    frame_size: tuple[int, int]
    state_dims: int
    state_format: str
    max_steps: int
    control_hz: float
    tasks: tuple[str, ...]
    chunks: tuple[int, ...] = ()
    video_every: int = 1
    trials: str = ""
    share_trials: bool = False
    facts: Mapping[str, str | int] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What a policy needs and emits.

    chunk: C actions per decision. cameras: how many views it reads. state_dims: 0 when it reads no
    state. value_width: numbers per decision from the value head: 0 = none, 1 = chunk level, C =
    action level. head: a word for what actions come from, e.g. "tokens"; samples: whether they are
    drawn, so that a temperature means something. trained_on: names of the data sets its statistics
    come from (for messages). dataset: whose statistics it uses, empty when somebody has chosen
    them; dataset_is_known: its name is a published one, not one that somebody made up for a data
    set of his own.
    """

    name: str
    action: ActionSpec
    chunk: int
    cameras: int
    state_dims: int
    value_width: int = 0
    head: str = ""
    samples: bool = True
    trained_on: tuple[str, ...] = ()
    dataset: str = ""
    dataset_is_known: bool = False

    @property
    def has_value(self) -> bool:
        """Whether the policy has a value head."""
        return self.value_width > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a policy's network takes; for estimates before anything is loaded.

    Numbers: parameters, all that the network has; largest, those of its largest sharding unit;
    root, those outside of all units. Bytes: weights, what all parameters are held in; trained, the
    part of it that is trained. Bytes per decision: kept, what a forward with recomputation keeps
    for the backward pass; inside, what the unit that is being recomputed keeps besides; everything,
    what is kept without recomputation; stored, what is stored of a decision besides what was
    observed. assumes: what these rest on, as sentences.
    """

    parameters: int
    largest: int
    root: int
    weights: int
    trained: int
    kept: int
    inside: int
    everything: int
    stored: int
    assumes: tuple[str, ...] = ()


def check_temperature(policy: PolicySpec, temperature: float) -> None:
    """Raise ConfigError for a temperature where there is nothing to draw."""
    if temperature and not policy.samples:
        raise ConfigError(
            f"temperature: the checkpoint does not draw its actions (head: {policy.head}), so "
            f"none changes them, {temperature:g} neither; say so: --temperature 0"
        )


def match(policy: PolicySpec, env: EnvSpec) -> list[str]:
    """Every reason why this policy cannot act in this env, as sentences; empty when it can."""
    problems = []
    p, e = policy.action, env.action
    if p.dims != e.dims:
        problems.append(
            f"policy '{policy.name}' emits {p.dims} numbers per action but env '{env.name}' takes "
            f"{e.dims}; use a checkpoint trained for this env (this one: "
            f"{', '.join(policy.trained_on) or 'unknown data'})"
        )
    elif p.format != e.format:
        problems.append(
            f"policy '{policy.name}' emits '{p.format}' actions but env '{env.name}' takes "
            f"'{e.format}'"
        )
    if p.gripper != e.gripper:
        problems.append(
            f"policy '{policy.name}' uses gripper convention '{p.gripper}' but env '{env.name}' "
            f"uses '{e.gripper}'"
        )
    if _is_of_other_tasks(policy, env):
        problems.append(
            f"the checkpoint's statistics are those of '{policy.dataset}' but env '{env.name}' "
            f"plays tasks of {' or '.join(env.datasets)}; use a checkpoint trained on them, or say "
            f"that it is meant: policy.unnorm_key={policy.dataset}"
        )
    if env.chunks and policy.chunk not in env.chunks:
        problems.append(
            f"policy '{policy.name}' emits chunks of {policy.chunk} actions but env '{env.name}' "
            f"was built for {', '.join(map(str, env.chunks))}"
        )
    if policy.cameras > len(env.cameras):
        problems.append(
            f"policy '{policy.name}' reads {policy.cameras} cameras but env '{env.name}' renders "
            f"{len(env.cameras)}: {', '.join(env.cameras)}"
        )
    if policy.state_dims and policy.state_dims != env.state_dims:
        problems.append(
            f"policy '{policy.name}' reads {policy.state_dims} state numbers but env '{env.name}' "
            f"gives {env.state_dims} ({env.state_format})"
        )
    return problems


def _is_of_other_tasks(policy: PolicySpec, env: EnvSpec) -> bool:
    """Whether a data set is not of these tasks, by its name; a made-up name only tells when it is
    one of this benchmark's. Never so where the env names no data sets.
    """
    dataset = policy.dataset

    def names(data: str, what: str) -> bool:
        return data == what or data.startswith(f"{what}_")

    if not env.datasets or not dataset:
        return False
    if not policy.dataset_is_known and not names(dataset, env.name):
        return False
    return not any(names(dataset, known) for known in env.datasets)
