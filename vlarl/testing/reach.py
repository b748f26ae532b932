"""A reaching task small enough to learn in seconds, played as one batch of tensors.

It has the shape of a batched GPU env: all slots under way are answered together, the chunk length
is fixed, there is no proprioception. The module is a whole env plug-in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vlarl.batch import EnvStep, Observation, require_finite
from vlarl.config.schema import EnvSection, Int
from vlarl.episode import Episode
from vlarl.specs import ActionSpec, EnvSpec

_SIZE = 16  # pixels
_SPEED = 0.1  # arena widths per action at full deflection
_RADIUS = 0.15  # arena widths
_DISTANCE = 0.4  # of the goals from the start, arena widths
_NUM_TRIALS = 16  # per task
_TASKS = ("reach-left", "reach-right")


class ReachConfig(EnvSection):
    """A dot in a square arena has to come close to another dot."""

    name: Literal["reach"] = "reach"
    """Registered name of the env."""
    chunk: Annotated[Int, Field(ge=1)] = 8
    """The only chunk length it accepts, as with a video world model."""
    max_steps: Annotated[Int, Field(ge=1)] = 12
    """Horizon in actions."""


class ReachEnv:
    """`num_slots` arenas as tensors on one device. Implements VecEnv.

    The hand starts in the middle and moves by 0.1 arena widths per action; coming within 0.15 of
    the goal terminates with reward 1. Trials are goals on the left or right half of a circle. In
    the image the hand is red and the goal green. It never diverges.
    """

    def __init__(
        self,
        cfg: ReachConfig,
        *,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec(cfg)
        self.num_slots = num_slots
        self._chunk = cfg.chunk
        self._max_steps = cfg.max_steps
        self._device = torch.device(device)
        self._hand = torch.zeros(num_slots, 2, device=self._device)
        self._goal = torch.zeros(num_slots, 2, device=self._device)
        self._step = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
        self._over = [True] * num_slots
        self._episode: list[Episode | None] = [None] * num_slots
        self._under_way: dict[int, Tensor | None] = {}  # slot -> its actions, None after a reset

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Put the hand in the middle and the goal where the trial has it."""
        for slot, episode in zip(slots, episodes, strict=True):
            assert slot not in self._under_way, f"slot {slot} has a message under way"
            self._episode[slot], self._over[slot] = episode, False
            self._hand[slot] = 0.5
            self._goal[slot] = torch.tensor(_goal(episode))
            self._step[slot] = 0
            self._under_way[slot] = None

    def send(self, slots: Sequence[int], action: Tensor) -> None:
        """Take one chunk of actions per slot."""
        shape = (len(slots), self._chunk, 2)
        assert action.shape == shape, f"got actions {tuple(action.shape)}, expected {shape}"
        require_finite(action, [e for slot in slots if (e := self._episode[slot]) is not None])
        for slot, chunk in zip(slots, action.to(self._device), strict=True):
            assert slot not in self._under_way, f"slot {slot} has a message under way"
            assert not self._over[slot], f"the episode in slot {slot} is over; reset it first"
            self._under_way[slot] = chunk

    def recv(self, min_slots: int, among: Sequence[int] | None = None) -> tuple[list[int], EnvStep]:
        """Play everything that is under way, in one batch."""
        slots = sorted(s for s in self._under_way if among is None or s in among)
        assert len(slots) >= min_slots, f"{min_slots} slots asked for, {len(slots)} under way"
        messages = [self._under_way.pop(slot) for slot in slots]
        first = torch.tensor([m is None for m in messages], device=self._device)
        still = torch.zeros(self._chunk, 2, device=self._device)
        action = torch.stack([still if m is None else m for m in messages])
        return slots, self._play(slots, action, first)

    def close(self) -> None:
        """Nothing to free."""

    def _play(self, slots: list[int], action: Tensor, first: Tensor) -> EnvStep:
        index = torch.tensor(slots, device=self._device)
        hand, goal, step = self._hand[index], self._goal[index], self._step[index]
        n, low, high = len(slots), self.spec.action.low, self.spec.action.high
        reward = torch.zeros(n, self._chunk, device=self._device)
        terminated = torch.zeros(n, self._chunk, dtype=torch.bool, device=self._device)
        truncated = terminated.clone()
        clipped = torch.zeros(n, dtype=torch.int32, device=self._device)
        parked = first.clone()
        film = _Film([self._episode[slot] for slot in slots])
        film.shoot(self._draw(hand, goal) if film.wanted else None, first)
        for c in range(self._chunk):
            within, moves = action[:, c].clamp(low, high), ~parked
            hand = torch.where(moves[:, None], (hand + _SPEED * within).clamp(0, 1), hand)
            step = step + moves.long()
            clipped += (moves & (within != action[:, c]).any(dim=1)).int()
            terminated[:, c] = moves & ((hand - goal).norm(dim=1) < _RADIUS)
            out_of_time = step >= self._max_steps
            truncated[:, c] = moves & ~terminated[:, c] & out_of_time
            reward[:, c] = terminated[:, c].float()
            film.shoot(self._draw(hand, goal) if film.wanted else None, moves)
            parked = parked | terminated[:, c] | truncated[:, c]
        self._hand[index], self._step[index] = hand, step
        done = (terminated | truncated).any(dim=1).tolist()
        for slot, over in zip(slots, done, strict=True):
            self._over[slot] = over
        return EnvStep(
            obs=self._observe(slots, hand, goal),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            first=first,
            num_clipped=clipped,
            diverged=torch.zeros_like(first),
            frames=film.frames(),
        )

    def _draw(self, hand: Tensor, goal: Tensor) -> Tensor:
        """[n, 16, 16, 3] uint8."""
        centre = (torch.arange(_SIZE, device=self._device) + 0.5) / _SIZE
        image = torch.zeros(len(hand), _SIZE, _SIZE, 3, device=self._device)
        for channel, position in enumerate((hand, goal)):
            x = (centre[None, None, :] - position[:, 0, None, None]) ** 2
            y = (centre[None, :, None] - position[:, 1, None, None]) ** 2
            image[..., channel] = 255 * torch.exp(-(x + y) / (2 * 0.08**2))
        return image.round().to(torch.uint8)

    def _observe(self, slots: list[int], hand: Tensor, goal: Tensor) -> Observation:
        episodes = [self._episode[slot] for slot in slots]
        return Observation(
            images={"top": self._draw(hand, goal)},
            state=torch.zeros(len(slots), 0, device=self._device),
            instruction=tuple(instruction(e.task) for e in episodes if e is not None),
        )


class _Film:
    """The frames of one message, for the episodes that asked to be recorded."""

    def __init__(self, episodes: Sequence[Episode | None]) -> None:
        self._asked = [e is not None and e.record for e in episodes]
        self._shots: list[list[Tensor]] = [[] for _ in episodes]
        self.wanted = any(self._asked)

    def shoot(self, image: Tensor | None, running: Tensor) -> None:
        """Keep row i of image ([n, H, W, 3]) where the episode runs and asked for it."""
        if image is not None:
            for i, runs in enumerate(running.tolist()):
                if runs and self._asked[i]:
                    self._shots[i].append(image[i])

    def frames(self) -> tuple[Tensor, ...] | None:
        """Per slot [F, H, W, 3]; None when nobody asked."""
        if not self.wanted:
            return None
        nothing = torch.zeros(0, _SIZE, _SIZE, 3, dtype=torch.uint8)
        return tuple(torch.stack(shots) if shots else nothing for shots in self._shots)


def _goal(episode: Episode) -> tuple[float, float]:
    assert episode.task in _TASKS, f"no task '{episode.task}'; there are {_TASKS}"
    assert 0 <= episode.trial < _NUM_TRIALS, f"trial {episode.trial} of {_NUM_TRIALS}"
    angle = math.pi * ((episode.trial + 0.5) / _NUM_TRIALS - 0.5)
    side = 1 if episode.task == "reach-right" else -1
    return 0.5 + side * _DISTANCE * math.cos(angle), 0.5 + _DISTANCE * math.sin(angle)


def make(cfg: ReachConfig, *, num_slots: int, final_frames: bool = True) -> ReachEnv:
    """The env on the CPU. Its last observation is the true one, whatever final_frames says."""
    return ReachEnv(cfg, num_slots=num_slots)


def spec(cfg: ReachConfig) -> EnvSpec:
    """What the env offers."""
    return EnvSpec(
        name="reach",
        action=ActionSpec(dims=2, format="delta_xy", gripper="none"),
        cameras=("top",),
        frame_size=(_SIZE, _SIZE),
        state_dims=0,
        state_format="none",
        max_steps=cfg.max_steps,
        control_hz=10.0,
        tasks=_TASKS,
        chunks=(cfg.chunk,),
        trials="sixteen goals per task",
    )


def trials(cfg: ReachConfig, split: Literal["train", "eval"]) -> dict[str, tuple[int, ...]]:
    """Task -> its goals: the even ones for training, the odd ones held out."""
    return {task: tuple(range(int(split == "eval"), _NUM_TRIALS, 2)) for task in _TASKS}


def suites() -> tuple[str, ...]:
    """There is one suite."""
    return ("reach",)


def instruction(task: str) -> str:
    """What the policy is told to do."""
    return task.replace("-", " the dot on the ")


def groups(cfg: ReachConfig) -> dict[str, tuple[str, ...]]:
    """No averages over parts of the suite."""
    return {}


Config = ReachConfig
