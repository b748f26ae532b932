"""A scripted expert for LIBERO's pick-and-place tasks, on privileged state. Torch-free.

It sees where every body is, which no policy does; what it is for is proving the conventions of
actions and success, and demonstrations where no dataset can be reached. Closed loop: every action
follows from what is there now, so that it copes with noisy actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vlarl.errors import RunFailed

SUITES = ("libero_spatial", "libero_object")
"""What it was made and measured for: one object on, or in, another."""

_METRES = 0.05
"""Motion of the hand that an action component of 1 asks for."""
_RADIANS = 0.5
"""Likewise its rotation."""
_OPEN, _CLOSE, _HOLD = -1.0, 1.0, 0.0

_ABOVE = 0.10
"""Height over the grasp at which the hand gathers itself."""
_LIFT = 0.20
_RIM = 0.045
"""From the middle of a bowl to its rim, where the fingers straddle it."""
_RIM_DEPTH = 0.018
"""From the top of a bowl down to where its rim is held. Deeper, its wall is so thick that the
fingers slide up it, and over the rim; in a drawer, the palm would rest on the walls."""
_WIDEST = 0.075
"""What is wider than this along the fingers' motion is held at its rim."""
_TALL = 0.06
"""What is taller is held near its top."""
_STRADDLE = 0.024
"""Half the opening for a rim: a bowl in a drawer has walls close by."""
_YAWS = np.radians([0, 15, -15, 30, -30, 45, -45])
"""Turns of the hand about the vertical to try, in order of liking."""
_WIDE = 0.04
"""Half the opening otherwise: all there is."""
_FINGER = 0.012
"""Half the width of a finger, and its thickness."""
_PALM = ((-0.10, -0.07, 0.07, 0.10), (-0.02, 0.0, 0.02), 0.033)
"""Where the palm is: along the fingers' motion, across it, and over the fingertips, metres."""
_CLEAR = 0.06
"""Where to look down from: over what stands around, under the hand."""
_DROPPED = 0.12
"""From the hand to the origin of what it holds; farther, and it does not."""
_GRIP = 12
"""Actions to close the fingers and let them settle; shorter, and a rim slips."""


class PickAndPlace:
    """One episode of the expert. Phases follow each other: above, down, grip, lift, carry, lower,
    release, retreat.

    env: LIBERO's task object. model, data: MuJoCo's; `data` is only read.

    Raises:
        RunFailed: the task is not to put one object on or in one thing.
    """

    def __init__(self, mujoco: Any, env: Any, model: Any, data: Any) -> None:
        goals = env.parsed_problem["goal_state"]
        if len(goals) != 1 or goals[0][0] not in ("on", "in"):
            raise RunFailed(
                f"the scripted expert puts one object on or in another; this task wants {goals}; "
                f"it plays {' and '.join(SUITES)}"
            )
        self._relation, thing, place = goals[0]
        self._mujoco, self._model, self._data = mujoco, model, data
        self._seen = mujoco.MjData(model)
        robot = env.robots[0]
        self._hand_site = robot.eef_site_id
        self._fingers = robot._ref_gripper_joint_pos_indexes
        self._thing = env.obj_body_id[thing]
        self._place_site = model.site(place).id if self._relation == "in" else None
        self._place_body = env.obj_body_id.get(place)
        self._look()
        self._held_at_start = self._seen.site_xmat[self._hand_site].reshape(3, 3).copy()
        self._sag = np.zeros(3)
        self._choose_grasp()
        self._rest_height = self._carry_height = 0.0
        self._phase: Callable[[], np.ndarray] = self._above
        self._count = 0

    def action(self) -> np.ndarray:
        """[7] float64 for the state the simulator is in: hand motion, its rotation, gripper."""
        self._look()
        self._count += 1
        action = self._phase()
        action[3:6] = self._straighten()
        return action

    def _above(self) -> np.ndarray:
        above = self._grasp_point + np.array([0, 0, _ABOVE])
        action, error = self._towards(above, self._opening())
        if abs(error[:2]).max() < 0.01 and abs(error[2]) < 0.03 and self._speed < 0.008:
            self._enter(self._down)
        return action

    def _down(self) -> np.ndarray:
        action, error = self._towards(self._grasp_point, self._opening())
        # Go down where the grasp is, not on what stands beside it.
        action[2] *= np.clip(2 - abs(error[:2]).max() / 0.006, 0.2, 1)
        near = 0.004 if self._is_tight else 0.008 if self._count < 25 else 0.02
        if abs(error[2]) < near or self._count > 50:
            self._enter(self._grip)
        return action

    def _grip(self) -> np.ndarray:
        action, _ = self._towards(self._grasp_point, _CLOSE)
        if self._count >= _GRIP:
            self._rest_height = self._thing_pos[2]
            self._carry_height = max(self._hand[2], self._place[2]) + _LIFT
            if not self._is_tight:
                self._sag = np.zeros(3)
            self._enter(self._lift)
        return action

    def _lift(self) -> np.ndarray:
        action, error = self._towards([*self._hand[:2], self._carry_height], _CLOSE)
        if abs(error[2]) < 0.03 or self._count > 20:
            held = self._thing_pos[2] > self._rest_height + _LIFT / 4
            self._sag = np.zeros(3)
            self._enter(self._carry if held else self._retreat)
        return action

    def _carry(self) -> np.ndarray:
        over = self._place - self._carried
        action, error = self._towards([*over[:2], self._carry_height], _CLOSE)
        if self._dropped:
            self._enter(self._retreat)
        elif abs(error[:2]).max() < 0.012:
            self._enter(self._lower)
        return action

    def _lower(self) -> np.ndarray:
        over = self._place - self._carried
        gap = self._thing_pos[2] - self._place[2]
        fall = 0.025 if gap < 0.08 else 0.045
        action, _ = self._towards([*over[:2], self._hand[2] - fall], _CLOSE)
        low = gap < 0.02 if self._relation == "on" else self._hand[2] - self._place[2] < 0.12
        if self._dropped:
            self._enter(self._retreat)
        elif low or self._count > 40:
            self._enter(self._release)
        return action

    def _release(self) -> np.ndarray:
        if self._count > 8:
            self._enter(self._retreat)
        return np.array([0, 0, 0, 0, 0, 0, _OPEN])

    def _retreat(self) -> np.ndarray:
        if self._count > 12:  # dropped on the way, or it fell over: once more
            self._sag = np.zeros(3)
            self._choose_grasp()
            self._enter(self._above)
        return np.array([0, 0, 0.6, 0, 0, 0, _OPEN])

    def _enter(self, phase: Callable[[], np.ndarray]) -> None:
        self._phase, self._count = phase, 0

    def _look(self) -> None:
        """Where everything is, from the joint positions alone."""
        before = self._seen.site_xpos[self._hand_site].copy()
        self._seen.qpos[:] = self._data.qpos
        self._mujoco.mj_kinematics(self._model, self._seen)
        self._hand = self._seen.site_xpos[self._hand_site]
        self._speed = abs(self._hand - before)[:2].max()
        self._thing_pos = self._seen.xpos[self._thing]
        self._place = (
            self._seen.site_xpos[self._place_site]
            if self._place_site is not None
            else self._seen.xpos[self._place_body]
        )

    @property
    def _grasp_point(self) -> np.ndarray:
        return self._thing_pos + self._grasp

    @property
    def _dropped(self) -> bool:
        return float(np.linalg.norm(self._carried)) > _DROPPED

    @property
    def _carried(self) -> np.ndarray:
        """From the hand to what it holds."""
        return self._thing_pos - self._hand

    def _towards(self, point: Any, gripper: float) -> tuple[np.ndarray, np.ndarray]:
        """The action, and how far the hand is off, [3] metres.

        Where the place matters, work against what keeps the hand off: far out, the arm sags by
        15 mm. Where it is tight, against what holds it up as well.
        """
        error = np.asarray(point) - self._hand
        if self._is_tight and abs(error).max() < 0.03:
            self._sag = np.clip(self._sag + 0.3 * error, -0.05, 0.05)
        elif self._phase in (self._down, self._carry, self._lower) and abs(error[:2]).max() < 0.02:
            self._sag[:2] = np.clip(self._sag[:2] + 0.15 * error[:2], -0.05, 0.05)
        action = np.zeros(7)
        action[:3] = np.clip((error + self._sag) / _METRES, -1, 1)
        action[6] = gripper
        return action, error

    def _straighten(self) -> np.ndarray:
        """[3] rotation towards how the hand should be held."""
        turn = self._wanted @ self._seen.site_xmat[self._hand_site].reshape(3, 3).T
        axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
        return np.clip(axis / 2 / _RADIANS, -1, 1)  # the sine of the angle stands for it

    def _opening(self) -> float:
        """Wide open, or just wide enough for a rim; a gripper's command is which way to move."""
        if not self._is_tight:
            return _OPEN
        half = self._seen.qpos[self._fingers[0]]
        if half > _STRADDLE + 0.002:
            return _CLOSE
        return _OPEN if half < _STRADDLE - 0.004 else _HOLD

    def _choose_grasp(self) -> None:
        """Where to hold the thing, [3] from its origin, how to turn the hand, and whether at a rim.

        The fingers of an unturned hand move along y.
        """
        low, high = self._box()
        size, middle = high - low, (low + high) / 2
        self._at_rim = size[1] > _WIDEST
        if self._at_rim:
            height = high[2] - _RIM_DEPTH
        elif size[2] > _TALL:
            height = max(high[2] - 0.035, low[2] + 0.01)
        else:
            height = middle[2] - 0.002
        openings = (_WIDE, _STRADDLE) if self._at_rim else (_WIDE,)
        ways = [(opening, yaw) for opening in openings for yaw in _YAWS]
        room = [self._room(self._point(middle, yaw, height), yaw, opening) for opening, yaw in ways]
        fits = [i for i, free in enumerate(room) if free > -0.002]
        opening, yaw = ways[fits[0] if fits else int(np.argmax(room))]
        self._is_tight = opening == _STRADDLE
        self._grasp = self._point(middle, yaw, height) - self._thing_pos
        c, s = np.cos(yaw), np.sin(yaw)
        self._wanted = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ self._held_at_start

    def _point(self, middle: np.ndarray, yaw: float, height: float) -> np.ndarray:
        """[3] between the fingertips of a hand turned by yaw that holds the thing."""
        aside = _RIM * _along(yaw) if self._at_rim else np.zeros(3)
        return np.array([*(middle + aside)[:2], height])

    def _room(self, grasp: np.ndarray, yaw: float, opening: float) -> float:
        """How far the hand could go on down from `grasp` until a finger or the palm rests on
        something, metres; negative when it cannot get there. The inner finger of a rim grasp is in
        the bowl. opening: half of it.
        """
        fingers = [opening, opening + _FINGER]
        if not self._at_rim:
            fingers += [-opening, -opening - _FINGER]
        parts = ((fingers, (-_FINGER, 0.0, _FINGER), 0.0), _PALM)
        return min(
            self._drop(grasp + u * _along(yaw) + v * _along(yaw - np.pi / 2) + [0, 0, up])
            for along, across, up in parts
            for u in along
            for v in across
        )

    def _drop(self, point: np.ndarray) -> float:
        """From a point down to the first surface, metres; negative if that is above it."""
        start, down = point + np.array([0, 0, _CLEAR]), np.array([0.0, 0.0, -1.0])
        hit = np.zeros(1, np.int32)
        drop = self._mujoco.mj_ray(self._model, self._seen, start, down, None, 1, -1, hit)
        return drop - _CLEAR if drop >= 0 else np.inf

    def _box(self) -> tuple[np.ndarray, np.ndarray]:
        """Corners of the upright box around what collides of the thing."""
        low, high = np.full(3, np.inf), np.full(3, -np.inf)
        for geom in range(self._model.ngeom):
            if self._model.geom_contype[geom] and self._belongs(self._model.geom_bodyid[geom]):
                centre, half = np.split(self._model.geom_aabb[geom], 2)
                turn = self._seen.geom_xmat[geom].reshape(3, 3)
                middle, reach = self._seen.geom_xpos[geom] + turn @ centre, abs(turn) @ half
                low, high = np.minimum(low, middle - reach), np.maximum(high, middle + reach)
        return low, high

    def _belongs(self, body: int) -> bool:
        while body and body != self._thing:
            body = self._model.body_parentid[body]
        return body == self._thing


def _along(yaw: float) -> np.ndarray:
    """[3] the way the fingers of a hand turned by `yaw` move."""
    return np.array([-np.sin(yaw), np.cos(yaw), 0.0])
