from dataclasses import replace

from vlarl.specs import ActionSpec, EnvSpec, PolicySpec, match

ACTION = ActionSpec(dims=4, format="delta_xyz", gripper="none")
ENV = EnvSpec(
    name="kitchen",
    action=ACTION,
    cameras=("front",),
    frame_size=(64, 64),
    state_dims=0,
    state_format="",
    max_steps=10,
    control_hz=20.0,
    tasks=("cook",),
)
POLICY = PolicySpec(name="p", action=ACTION, chunk=8, cameras=1, state_dims=0)


def test_an_env_that_names_no_data_sets_takes_those_of_any():
    for dataset in ("", "kitchen", "kitchen_50", "garage"):
        assert match(replace(POLICY, dataset=dataset), ENV) == []


def test_data_of_the_same_benchmark_but_other_tasks_are_refused():
    env = replace(ENV, datasets=("kitchen_cook",))
    for dataset in ("kitchen_cook", "kitchen_cook_v2", "garage", ""):
        assert match(replace(POLICY, dataset=dataset), env) == []
    (problem,) = match(replace(POLICY, dataset="kitchen_clean"), env)
    assert "statistics are those of 'kitchen_clean'" in problem
    assert "tasks of kitchen_cook" in problem
