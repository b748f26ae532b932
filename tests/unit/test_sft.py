import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vlarl import dataset, run_dir, sft_data
from vlarl.config.compose import Composed, compose
from vlarl.dataset import Origin
from vlarl.distributed.world import World
from vlarl.errors import AssetMissing, ConfigError, NonFiniteLoss, SpecMismatch
from vlarl.metrics import read, strip_timing
from vlarl.policies import openvla_oft
from vlarl.policies.oft_policy import OftPolicy
from vlarl.sft import learning_rate, prepare, train_sft
from vlarl.sft_config import SftOptimSection, build
from vlarl.specs import ActionSpec, EnvSpec
from vlarl.trajectories import Trajectory

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
SPEC = EnvSpec(
    name="squares",
    action=ActionSpec(dims=4, format="delta_xyz", gripper="effort_close_positive"),
    cameras=("top",),
    frame_size=(28, 28),
    state_dims=2,
    state_format="corner",
    max_steps=9,
    control_hz=10.0,
    tasks=("left", "right"),
)
ORIGIN = Origin(
    env={"name": "squares"},
    spec=SPEC,
    teacher="expert",
    noise=0.0,
    temperature=0.0,
    seed=0,
    split="train",
    keep_failures=False,
    versions={},
)


def episode(task, trial, rng, length=5) -> Trajectory:
    """A bright square whose quadrant decides the action."""
    frames = np.full((length, 28, 28, 3), 30, np.uint8)
    corner = rng.integers(0, 2, (length, 2))
    for t, (y, x) in enumerate(corner):
        frames[t, 14 * y : 14 * y + 14, 14 * x : 14 * x + 14] = 220
    side = 1.0 if task == "right" else -1.0
    target = np.stack(
        [2.0 * corner[:, 0] - 1, 2.0 * corner[:, 1] - 1, np.full(length, side), np.zeros(length)],
        axis=1,
    ).astype(np.float32)
    return Trajectory(
        task=task,
        trial=trial,
        instruction=f"go {task}",
        frames={"top": frames},
        state=corner.astype(np.float32),
        action=target,
        target=target,
        reward=np.zeros(length, np.float32),
        success=True,
    )


@pytest.fixture
def data(tmp_path):
    made = dataset.create(tmp_path / "data", ORIGIN)
    rng = np.random.default_rng(0)
    for task in SPEC.tasks:
        for trial in range(3):
            made.add(episode(task, trial, rng))
    made.flush()
    return made.folder


TINY = {
    "image_size": 28,
    "hidden": 32,
    "mlp": 64,
    "layers": 1,
    "heads": 2,
    "vision_dim": 16,
    "vision_depth": 1,
    "vision_heads": 2,
    "vision_mlp": 32,
}


def config(folder, run, **changes):
    values = {
        "name": "toy",
        "run_dir": str(run),
        "data": [str(folder)],
        "policy": {"name": "openvla_oft", "chunk": 1, "centre_crop": False, "stop_token": False},
        "init": TINY,
        "optim": {"steps": 3, "batch": 30, "lr": 3e-3, "warmup_steps": 1},
        "validation": {"fraction": 0.0},
        "log": {"tensorboard": False},
        "log_every": 1,
    }
    for key, value in changes.items():
        section = values.get(key)
        both = isinstance(section, dict) and isinstance(value, dict)
        values[key] = {**section, **value} if both else value
    return build(Composed("toy", values, {}))


def train(cfg, **callbacks):
    folder = run_dir.create(cfg.folder)
    return train_sft(prepare(cfg), folder, WORLD, **callbacks), folder


@pytest.mark.slow
def test_training_lowers_the_loss_and_memorises_the_data(data, tmp_path):
    cfg = config(
        data, tmp_path / "run", init={"layers": 2, "hidden": 64}, optim={"steps": 60}, log_every=10
    )
    checkpoint, folder = train(cfg)
    lines = read(folder.metrics)
    assert lines[0]["sft/loss"] > 1
    assert lines[-1]["sft/loss"] < 0.05
    assert lines[-1]["sft/token_accuracy"] > 0.98
    assert lines[-1]["sft/action_error"] < 0.05
    policy = openvla_oft.load(
        openvla_oft.OftConfig(checkpoint=str(checkpoint)),
        device=WORLD.device,
        needs_value=False,
        train=False,
    )
    samples = list(dataset.open_(data).read())
    right = next(t for t in samples if t.task == "right")
    from vlarl.batch import Observation

    obs = Observation(
        images={"top": torch.from_numpy(right.frames["top"])},
        state=torch.from_numpy(right.state),
        instruction=(right.instruction,) * len(right),
    )
    action = policy.act(obs, temperature=0.0).action[:, 0].numpy()
    assert np.abs(action - right.target).mean() < 0.05


def test_a_run_leaves_config_metrics_statistics_and_a_complete_checkpoint(data, tmp_path):
    seen = []
    checkpoint, folder = train(
        config(data, tmp_path / "run", validation={"fraction": 0.34, "every": 2}),
        on_progress=seen.append,
    )
    assert checkpoint == folder.ckpt / "step_000003" / "policy"
    assert run_dir.latest_checkpoint(folder) == checkpoint.parent
    stats = json.loads((checkpoint / "dataset_statistics.json").read_text())["vlarl"]
    assert stats["action"]["min"] == [-1.0, -1.0, -1.0, 0.0]
    assert stats["action"]["mask"] == [True] * 4
    assert stats["proprio"]["max"] == [1.0, 1.0]
    assert json.loads(folder.config.read_text())["config"]["optim"]["steps"] == 3
    lines = read(folder.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [p.step for p in seen] == [1, 2, 3]
    assert ["sft/val/loss" in line for line in lines] == [False, True, True]
    assert 0 <= lines[-1]["sft/val/token_accuracy"] <= 1


def test_two_runs_of_one_seed_are_the_same_and_another_seed_is_not(data, tmp_path):
    changes = {"augment": {"shift": 0.1, "brightness": 0.2}, "optim": {"batch": 7}}

    def lines(name, seed):
        _, folder = train(config(data, tmp_path / name, seed=seed, **changes))
        return [strip_timing(line) for line in read(folder.metrics)]

    first = lines("a", 1)
    assert lines("b", 1) == first
    assert lines("c", 2) != first


def test_micro_batches_change_nothing(data, tmp_path):
    chunked = {"chunk": 4}  # so that parts differ in how many actions count

    def last(name, size):
        cfg = config(data, tmp_path / name, policy=chunked, optim={"micro_batch": size})
        return read(train(cfg)[1].metrics)[-1]

    whole, parts = last("a", None), last("b", 7)
    for name in ("sft/loss", "sft/grad_norm"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-4)


def test_stopping_early_saves_what_was_learned(data, tmp_path):
    checkpoint, folder = train(config(data, tmp_path / "run"), should_stop=lambda: True)
    assert checkpoint.parent.name == "step_000001"
    assert [line["step"] for line in read(folder.metrics)] == [1]


def test_training_starts_from_a_checkpoint(data, tmp_path):
    first, _ = train(config(data, tmp_path / "a", optim={"steps": 20}))
    policy = {"checkpoint": str(first)}
    second, folder = train(config(data, tmp_path / "b", init=None, policy=policy))
    assert second.is_dir()
    start = read(run_dir.RunDir(tmp_path / "a").metrics)[0]["sft/loss"]
    assert read(folder.metrics)[0]["sft/loss"] < 0.7 * start


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        OftPolicy,
        "sft_loss",
        lambda self, *_: sum(p.sum() for p in self.param_groups()["actor"]) * float("nan"),
    )
    with pytest.raises(NonFiniteLoss, match="step 1: loss nan"):
        train(config(data, tmp_path / "run"))
    assert run_dir.latest_checkpoint(run_dir.RunDir(tmp_path / "run")) is None


def test_the_learning_rate_warms_up_and_follows_a_cosine():
    optim = SftOptimSection(steps=110, lr=1.0, warmup_steps=10, final_lr=0.1)
    rates = [learning_rate(optim, step) for step in (1, 5, 10, 60, 110)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    plain = SftOptimSection(steps=2, lr=1.0, warmup_steps=0, final_lr=0.0)
    assert learning_rate(plain, 1) == pytest.approx(0.5)


def test_wrong_configs_say_what_is_wrong(data, tmp_path):
    for changes, reason in (
        ({"policy": {"checkpoint": "x"}}, "init makes a fresh checkpoint but policy.checkpoint"),
        ({"compute": {"shard": "fsdp2"}}, "compute.shard"),
        ({"policy": {"name": "pi9"}}, "no policy named 'pi9'"),
        ({"optim": {"stepz": 1}}, "optim.stepz: unknown key; did you mean 'optim.steps'"),
        ({"optim": {"lr": 0.0}}, "optim.lr"),
        ({"init": None}, "policy.checkpoint: missing"),
    ):
        with pytest.raises(ConfigError, match=reason):
            config(data, tmp_path / "run", **changes)


def test_unfit_data_is_found_before_anything_is_written(data, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="name at least one folder"):
        prepare(config(data, run, data=[]))
    with pytest.raises(AssetMissing, match="no data set in"):
        prepare(config(tmp_path / "absent", run))
    empty = dataset.create(tmp_path / "empty", ORIGIN)
    with pytest.raises(ConfigError, match="has no episodes"):
        prepare(config(empty.folder, run))
    other_spec = replace(SPEC, action=replace(SPEC.action, dims=7), name="libero")
    other = dataset.create(tmp_path / "other", replace(ORIGIN, spec=other_spec))
    with pytest.raises(SpecMismatch, match="env is 'libero', but 'squares' is needed"):
        prepare(config(data, run, data=[str(data), str(other.folder)]))
    assert not run.exists()


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("init", {"hidden": 33}, r"init\.hidden: 33 is no multiple of 4.* nearest: 32 or 36"),
        ("init", {"hidden": 34}, "nearest: 32 or 36"),  # heads of 17 numbers have half a pair
        ("init", {"vision_dim": 9, "vision_heads": 16}, r"vision_dim: 9 .* nearest: 16"),
        ("optim", {"betas": [1, 0.9]}, r"optim\.betas\[0\]: .*less than 1"),
        ("optim", {"betas": [0.9, -0.1]}, r"optim\.betas\[1\]: .*greater than or equal to 0"),
    ],
)
def test_values_that_no_network_or_optimiser_takes(data, tmp_path, section, changes, says):
    with pytest.raises(ConfigError, match=says):
        config(data, tmp_path / "run", **{section: changes})


@pytest.mark.parametrize("part", ["target", "state"])
def test_episodes_of_other_widths_are_named(data, tmp_path, part):
    other = dataset.create(tmp_path / "other", ORIGIN)
    made = episode("left", 0, np.random.default_rng(0))
    wide = np.zeros((len(made), 7), np.float32)
    both = {"action": wide, "target": wide} if part == "target" else {"state": wide}
    other.add(replace(made, **both))
    other.flush()
    sets = [dataset.open_(data), dataset.open_(other.folder)]
    with pytest.raises(SpecMismatch, match=rf"other/.* of 7 numbers, but those of {data} have"):
        sft_data.load(sets, 1)


def test_a_checkpoint_for_other_actions_is_refused(data, tmp_path):
    checkpoint, _ = train(config(data, tmp_path / "a"))
    spec = replace(
        SPEC,
        action=ActionSpec(dims=7, format="delta_xyz_axisangle", gripper="close_positive"),
    )
    seven = dataset.create(tmp_path / "seven", replace(ORIGIN, spec=spec))
    trajectory = episode("left", 0, np.random.default_rng(0))
    seven.add(
        replace(
            trajectory, action=np.zeros((5, 7), np.float32), target=np.zeros((5, 7), np.float32)
        )
    )
    seven.flush()
    policy = {"checkpoint": str(checkpoint)}
    with pytest.raises(SpecMismatch, match="start a fresh one"):
        prepare(config(seven.folder, tmp_path / "b", init=None, policy=policy))


def test_the_shipped_preset_is_valid():
    cfg = build(compose("tiny_metaworld_sft"))
    assert cfg.init is not None
    assert cfg.folder.name == "tiny_metaworld_sft"
