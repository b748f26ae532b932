"""One LIBERO episode at a time on the package's own classes, bit for bit as they play. Torch-free.

Facts of robosuite 1.4 and LIBERO this relies on:

* An initial state holds time, positions and velocities. Where fixtures stand (cabinets, stoves) is
  part of the model, drawn from numpy's global generator by `reset`; so is the solver's warm start.
  The state an episode starts from is therefore the one after: construct, seed, reset, set state.
* `reset` compiles the model anew. Here that happens once a task, and every episode gets back what
  it left behind: simulator state, controller goals, gripper ramp.
* The gripper's command is a ramp that `reset` forgets to rewind.
* An action is 25 physics steps. Each evaluates the forward dynamics three times before integrating,
  and each evaluation moves the solver's warm start, so all three count; but positions, velocities
  and contacts are the same in the three, and are computed once here.
* Observations are sampled in the 24th of the 25 steps, after integration; what follows from
  kinematics (frames, hand pose) then still shows the positions before it.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlarl.envs import gl, libero_install
from vlarl.envs.chunked import Step
from vlarl.envs.libero_expert import PickAndPlace
from vlarl.envs.libero_tasks import Task, init_state, task_named
from vlarl.episode import Episode
from vlarl.errors import RunFailed

if TYPE_CHECKING:
    from vlarl.envs.mujoco_render import ModelView, Quality

STATE_DIMS = 8
"""Hand position in metres, its rotation as axis times angle, two finger joints in metres."""
CONTROL_HZ = 20.0
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""Our name of a view -> the model's."""

_SUBSTEPS = 25
_OBSERVED = 23
"""Index of the physics step in which robosuite samples: its observables wait for a 50 ms period
that began with the two forced updates of reset and set state, 4 ms before the first action."""
_CANNOT_BUILD = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    SyntaxError,  # includes XML that does not parse
    RuntimeError,
)
"""What the package ends in when a problem file or an asset is not what it takes for granted."""
_COLLISION_GROUP = 0
_FAST_TEXTURE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """layout_seed: of the fixtures' places. settle_steps: actions without motion after a reset,
    with the gripper opening if reset_gripper_open, else unmoved. max_size: largest frame, (height,
    width).
    """

    layout_seed: int
    settle_steps: int
    reset_gripper_open: bool
    quality: Quality
    max_size: tuple[int, int]
    max_models: int


@dataclass(slots=True)
class _Seen:
    """What was sampled in the last action: [nq], [3], [4] xyzw, [2]."""

    qpos: np.ndarray
    hand_pos: np.ndarray
    hand_quat: np.ndarray
    fingers: np.ndarray


@dataclass(slots=True)
class _Moment:
    """Everything the next action depends on.

    physics: MuJoCo's integration state. controller: its arrays. will_look: whether the controller
    looks at the simulator before it acts; after a reset it does not, and its first torques are
    those of the reset's pose.
    """

    physics: np.ndarray
    controller: dict[str, np.ndarray]
    will_look: bool
    gripper: np.ndarray
    seen: _Seen | None = None


@dataclass(slots=True)
class _Loaded:
    """One compiled task. settled: trial -> the moment its first decision is made."""

    env: Any
    model: Any
    data: Any
    shown: Any
    view: ModelView
    after_reset: _Moment | None = None
    settled: dict[int, _Moment] = field(default_factory=dict)


def make(config: SimConfig) -> LiberoSim:
    """The simulator, with the GL driver chosen before anything imports mujoco."""
    gl.choose_backend()
    return LiberoSim(config)


class LiberoSim:
    """Implements vlarl.envs.chunked.Sim. Keeps the `max_models` tasks played last compiled.

    Success while settling does not count: the first executed action after which the goal holds ends
    the episode.
    """

    def __init__(self, config: SimConfig) -> None:
        # Here and not above: whoever only plans or validates a run must not pay for the simulator.
        self._mujoco = mujoco = gl.import_mujoco()
        self._config = config
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._expert: PickAndPlace | None = None
        self._integration = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._velocity = int(mujoco.mjtStage.mjSTAGE_VEL)
        gl.keep_quiet(mujoco)
        self._control_env = libero_install.import_control_env()

    def reset(self, episode: Episode) -> None:
        """Bring about (task, trial): what `reset` left behind, the initial state, settling."""
        self._task = self._load(task_named(episode.task))
        self._expert = None
        if episode.trial not in self._task.settled:
            self._start(self._task, episode)
            still = np.zeros(7)
            still[6] = -1.0 if self._config.reset_gripper_open else 0.0
            for _ in range(self._config.settle_steps):
                self._settle(still, episode)
            self._task.settled[episode.trial] = self._capture(self._task)
        self._restore(self._task, self._task.settled[episode.trial])
        self._task.env._post_process()

    def _settle(self, still: np.ndarray, episode: Episode) -> None:
        """An action without motion. RunFailed when the physics does not survive it."""
        with contextlib.suppress(np.linalg.LinAlgError):  # numbers that are not finite
            self._advance(still)
            if not self._blew_up():
                return
        raise RunFailed(
            f"the physics of {episode.task}, trial {episode.trial}, diverges while it settles: its "
            f"initial state in {task_named(episode.task).init_states} is damaged"
        )

    def _blew_up(self) -> bool:
        data = self._task.data
        warned = gl.blew_up(self._mujoco, data)
        return warned or not (np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all())

    def step(self, action: np.ndarray) -> Step:
        """Play one action: six deltas of the hand's pose in [-1, 1] and the gripper, +1 closes."""
        try:
            self._advance(action.astype(np.float64))
        except np.linalg.LinAlgError:  # the controller inverts a matrix of non-finite numbers
            return Step(False, diverged=True)
        if self._blew_up():
            return Step(False, diverged=True)
        return Step(bool(self._task.env._check_success()), diverged=False)

    def state(self) -> np.ndarray:
        """[8] float32: hand position, axis-angle, finger joints."""
        seen = self._seen
        turn = axis_angle(seen.hand_quat)
        return np.concatenate([seen.hand_pos, turn, seen.fingers]).astype(np.float32)

    def render(self, camera: str, size: tuple[int, int]) -> np.ndarray:
        """[H, W, 3] uint8, contiguous: robosuite's image rotated by 180 degrees."""
        task, mujoco = self._task, self._mujoco
        task.shown.qpos[:] = self._seen.qpos
        mujoco.mj_kinematics(task.model, task.shown)
        mujoco.mj_comPos(task.model, task.shown)
        mujoco.mj_camlight(task.model, task.shown)
        pixels = task.view.frame(task.shown, CAMERAS[camera], size)
        return np.ascontiguousarray(pixels[::-1, ::-1])

    def expert(self) -> np.ndarray:
        """[7] what the scripted expert would do now; see vlarl.envs.libero_expert."""
        if self._expert is None:
            task = self._task
            self._expert = PickAndPlace(self._mujoco, task.env, task.model, task.data)
        return self._expert.action()

    def renderer(self) -> str | None:
        """What draws the frames; None before a task is compiled."""
        return next((loaded.view.driver for loaded in self._loaded.values()), None)

    def _advance(self, action: np.ndarray) -> None:
        """One action, exactly as robosuite's `step`, less what its result does not depend on."""
        mujoco, task = self._mujoco, self._task
        env, model, data = task.env, task.model, task.data
        # What follows the state without acting on it, such as a lit burner; the package does it at
        # the end of an action, after that action's frame.
        env._post_process()
        for i in range(_SUBSTEPS):
            mujoco.mj_step1(model, data)
            mujoco.mj_forwardSkip(model, data, self._velocity, 1)
            mujoco.mj_forwardSkip(model, data, self._velocity, 1)
            env._pre_action(action, policy_step=i == 0)
            if i == _OBSERVED:
                before = data.qpos.copy()
                pose = self._hand_pose(task)
            mujoco.mj_step2(model, data)
            if i == _OBSERVED:
                self._seen = _Seen(before, *pose, self._fingers(task))

    def _start(self, task: _Loaded, episode: Episode) -> None:
        """Set an initial state on top of what `reset` left behind."""
        model, data = task.model, task.data
        state = init_state(episode.task, episode.trial)
        if len(state) != 1 + model.nq + model.nv:
            raise RunFailed(
                f"{task_named(episode.task).init_states}: initial states of task '{episode.task}' "
                f"have {len(state)} numbers, its model needs {1 + model.nq + model.nv}: problem, "
                "asset and init files are of different versions; "
                f"run: {libero_install.installed().repair('init_states')}"
            )
        assert task.after_reset is not None
        self._restore(task, task.after_reset)
        data.time = state[0]
        data.qpos[:] = state[1 : 1 + model.nq]
        data.qvel[:] = state[1 + model.nq :]
        self._mujoco.mj_forward(model, data)
        self._seen = _Seen(data.qpos.copy(), *self._hand_pose(task), self._fingers(task))

    def _capture(self, task: _Loaded, *, seen: bool = True) -> _Moment:
        mujoco, model = self._mujoco, task.model
        physics = np.empty(mujoco.mj_stateSize(model, self._integration))
        mujoco.mj_getState(model, task.data, physics, self._integration)
        robot = task.env.robots[0]
        return _Moment(
            physics=physics,
            controller=_arrays(robot.controller),
            will_look=robot.controller.new_update,
            gripper=np.array(robot.gripper.current_action),
            seen=self._seen if seen else None,
        )

    def _restore(self, task: _Loaded, moment: _Moment) -> None:
        mujoco, model, data = self._mujoco, task.model, task.data
        mujoco.mj_resetData(model, data)
        mujoco.mj_setState(model, data, moment.physics, self._integration)
        robot = task.env.robots[0]
        for name, value in moment.controller.items():
            setattr(robot.controller, name, value.copy())
        robot.controller.new_update = moment.will_look
        robot.gripper.current_action = moment.gripper.copy()
        if moment.seen is not None:
            self._seen = moment.seen

    def _hand_pose(self, task: _Loaded) -> tuple[np.ndarray, np.ndarray]:
        """Position [3] and rotation [4] (x, y, z, w) of the hand."""
        robot = task.env.robots[0]
        w, x, y, z = task.data.body(robot.robot_model.eef_name).xquat
        return task.data.site_xpos[robot.eef_site_id].copy(), np.array([x, y, z, w])

    def _fingers(self, task: _Loaded) -> np.ndarray:
        return task.data.qpos[task.env.robots[0]._ref_gripper_joint_pos_indexes].copy()

    def _load(self, task: Task) -> _Loaded:
        if task.name in self._loaded:
            self._loaded.move_to_end(task.name)
            return self._loaded[task.name]
        if len(self._loaded) == self._config.max_models:
            _, oldest = self._loaded.popitem(last=False)
            oldest.view.close()
            oldest.env.close()
        self._loaded[task.name] = self._compile(task)
        return self._loaded[task.name]

    def _build(self, task: Task) -> Any:
        """The package's env after its reset. RunFailed when the package cannot make it."""
        try:
            env = self._control_env(
                bddl_file_name=str(task.bddl), use_camera_obs=False, has_offscreen_renderer=False
            ).env
            np.random.seed(self._config.layout_seed)  # noqa: NPY002 - what the package draws from
            env.reset()
            env._check_success()  # predicates that the package does not know show here
        except (*_CANNOT_BUILD, self._mujoco.FatalError) as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            found = libero_install.installed()
            key = "bddl_files" if "bddl_files" in found.overridden else "assets"
            raise RunFailed(
                f"LIBERO cannot build task '{task.name}' from {task.bddl} and "
                f"{found.folders['assets']} ({words}); one of them is damaged or incomplete; run: "
                f"{found.repair(key)}"
            ) from error
        return env

    def _compile(self, task: Task) -> _Loaded:
        from vlarl.envs.mujoco_render import ModelView  # noqa: PLC0415

        env = self._build(task)
        model, data = env.sim.model._model, env.sim.data._data
        loaded = _Loaded(
            env,
            model,
            data,
            self._mujoco.MjData(model),
            ModelView(
                model,
                quality=self._config.quality,
                max_size=self._config.max_size,
                hidden_group=_COLLISION_GROUP,
                max_texture=_FAST_TEXTURE if self._config.quality == "fast" else None,
            ),
        )
        loaded.after_reset = self._capture(loaded, seen=False)
        # The controller's own forward passes are those of `_advance`.
        controller = env.robots[0].controller
        controller.sim = SimpleNamespace(
            model=controller.sim.model, data=controller.sim.data, forward=lambda: None
        )
        return loaded


def axis_angle(quat: np.ndarray) -> np.ndarray:
    """[3] axis times angle of a unit quaternion [4] (x, y, z, w), as robosuite's quat2axisangle.

    The angle is 2 acos(w), in [0, 2 pi]: q and -q, the same rotation, give different numbers, and
    training data are made of these.
    """
    w = min(max(float(quat[3]), -1.0), 1.0)
    length = math.sqrt(1.0 - w * w)
    if length == 0.0:
        return np.zeros(3)
    return np.asarray(quat[:3]) * 2.0 * math.acos(w) / length


def _arrays(thing: object) -> dict[str, np.ndarray]:
    """Copies of the arrays among an object's attributes."""
    return {name: x.copy() for name, x in vars(thing).items() if isinstance(x, np.ndarray)}
