import pytest

from vlarl.config.compose import build, compose
from vlarl.config.explain import keys, validate
from vlarl.config.schema import AlgoSection, EnvSection, OptimSection, PolicySection, RunConfig
from vlarl.errors import ConfigError

RUN = "env: {name: pond}\npolicy: {name: duck, checkpoint: quack}\nalgo: {name: herd}\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean 'optim.lr'? (cli)"),
        ("optm.lr=1", "optm: unknown key; did you mean 'optim'? (cli)"),
        ("group_size=4", "group_size: unknown key; did you mean 'algo.group_size'? (cli)"),
        ("save.zzz=1", "save.zzz: unknown key; there are: every, keep (cli)"),
        ("env.dpeth=1", "env.dpeth: unknown key; did you mean 'env.depth'? (cli)"),
        (
            "policy.adapter.rnk=1",
            "policy.adapter.rnk: unknown key; did you mean 'policy.adapter.rank'? (cli)",
        ),
        (
            "policy.adapter.rank=0",
            "policy.adapter.rank: should be greater than or equal to 1; got 0 (cli)",
        ),
        (
            "optim.lr=fast",
            "optim.lr: should be a valid number, unable to parse string as a number; "
            "got 'fast' (cli)",
        ),
        ("optim.lr=true", "optim.lr: should be a valid number; got True (cli)"),
        ("optim.lr=-1", "optim.lr: should be greater than 0; got -1 (cli)"),
        ("optim.epochs=true", "optim.epochs: should be a valid integer; got True (cli)"),
        ("log.tensorboard=yes", "log.tensorboard: should be a valid boolean; got 'yes' (cli)"),
        (
            "compute.device=tpu",
            "compute.device: should be 'auto', 'cpu' or 'cuda'; got 'tpu' (cli)",
        ),
        (
            "optim.betas=[0.9, x]",
            "optim.betas[1]: should be a valid number, unable to parse string as a number; "
            "got 'x' (cli)",
        ),
        ("optim.betas=[0.9, 1]", "optim.betas[1]: should be less than 1; got 1 (cli)"),
        ("optim.betas=0.9", "optim.betas: should be a list, such as [a, b]; got 0.9 (cli)"),
        ("algo.name=hrd", "algo.name: no algo named 'hrd'; did you mean 'herd'? (cli)"),
        (
            "rollout.temperature=1e-320",
            "rollout.temperature: 9.99989e-321 is too close to 0 to divide logits by; the lowest "
            "is 0.001, and greedy is 0, where that is allowed (cli)",
        ),
        ("optim=", "optim: should be a section of keys and values; got None (cli)"),
        ("env.depth=60", "env.depth: 60 m is an ocean (cli)"),
        ("env.tasks=fly", "env.tasks: no task 'fly'; there are: swim, dive (cli)"),
        (
            "env.tasks=3",
            "env.tasks: should be a valid string; got 3; or should be a valid list; got 3 (cli)",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(write, override, message):
    with pytest.raises(ConfigError) as caught:
        build(compose(write("a.yaml", RUN), [override]))
    assert str(caught.value) == message


def test_long_values_are_cut():
    with pytest.raises(ConfigError) as caught:
        validate(OptimSection, {"lr": "x" * 500})
    assert len(str(caught.value)) < 160


def test_problems_of_the_caller_alone_are_an_error():
    with pytest.raises(ConfigError, match=r"^no$"):
        validate(OptimSection, {}, problems=["no"])
    assert validate(OptimSection, {"lr": 1}).lr == 1.0


def test_keys_lists_the_leaves_of_every_section():
    found = list(keys(RunConfig[EnvSection, PolicySection, AlgoSection]))
    assert {"name", "optim.lr", "rollout.episodes", "env.num_slots"} <= set(found)
    assert len(found) == len(set(found))
