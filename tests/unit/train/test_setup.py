import pytest

from vlarl.config import resolved
from vlarl.config.compose import build
from vlarl.errors import AssetMissing, ConfigError, SpecMismatch
from vlarl.testing import reach, token_policy
from vlarl.train.setup import resolve


@pytest.fixture
def parts(toy_run):
    """parts("env.chunk=4", ...) -> Parts of the toy run."""
    return lambda *overrides: resolve(build(resolved.load(toy_run(*overrides).config)))


def test_the_plug_ins_of_a_run(parts):
    found = parts()
    assert found.env_module is reach
    assert found.algo.name == "grpo"
    assert found.env_spec.chunks == (2,)
    assert found.policy_spec.value_width == 0
    assert {task: len(ids) for task, ids in found.train_trials.items()} == {
        "reach-left": 8,
        "reach-right": 8,
    }
    assert all(
        not set(ids) & set(found.eval_trials[task]) for task, ids in found.train_trials.items()
    )


def test_the_algorithm_decides_about_the_value_head(parts):
    assert parts("algo={name: ppo}").policy_spec.value_width == 1
    by_action = parts("algo={name: ppo, reward_level: action}", "policy.value=action")
    assert by_action.policy_spec.value_width == 2


def test_a_value_head_of_another_width_is_named_before_anything_starts(parts):
    with pytest.raises(SpecMismatch, match=r"needs 2 values .* gives 1; make algo\.reward_level"):
        parts("algo={name: ppo, reward_level: action}")


def test_everything_that_does_not_fit_is_listed_at_once(parts):
    with pytest.raises(SpecMismatch) as caught:
        parts("policy.chunk=3", "policy.dims=5", "algo={name: ppo, reward_level: action}")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("chunk" in line for line in lines)
    assert any("5" in line for line in lines)
    assert any("needs 3 values" in line for line in lines)


def test_shared_trials_are_refused(parts, monkeypatch):
    def trials(cfg, split):
        return {"reach-left": (1, 2, 3), "reach-right": (4, 5) if split == "eval" else (6, 4)}

    monkeypatch.setattr(reach, "trials", trials)
    with pytest.raises(ConfigError, match=r"share trials of 2 tasks \(reach-left: 1, 2, 3\)"):
        parts()


def test_a_task_that_is_only_trained_on_is_fine(parts, monkeypatch):
    def trials(cfg, split):
        return {"reach-left": (0,)} if split == "eval" else {"reach-right": (0,)}

    monkeypatch.setattr(reach, "trials", trials)
    assert parts().eval_trials == {"reach-left": (0,)}


def test_without_its_files_a_policy_is_what_the_config_declares(toy_run, parts, monkeypatch):
    run = build(resolved.load(toy_run().config))
    known = parts().policy_spec

    def spec(cfg, *, needs_value=False):
        raise AssetMissing("not here", fix="get it")

    monkeypatch.setattr(token_policy, "spec", spec)
    with pytest.raises(AssetMissing):  # the toy declares nothing
        resolve(run, without_files=True)
    monkeypatch.setattr(token_policy, "declared", lambda cfg, **_: known, raising=False)
    found = resolve(run, without_files=True)
    assert found.policy_spec is known
    assert str(found.missing) == "not here"
    with pytest.raises(AssetMissing):
        resolve(run)
