"""From a validated config to plug-ins that fit together; specs are matched before weights load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from vlarl import registry
from vlarl.config.schema import RunConfig
from vlarl.errors import AssetMissing, ConfigError, SpecMismatch
from vlarl.interfaces import Algorithm
from vlarl.rollout.plan import Trials
from vlarl.specs import EnvSpec, PolicySpec, match


@dataclass(frozen=True, slots=True)
class Parts:
    """The plug-ins of a run, resolved and found to fit together.

    missing: why policy_spec is what the config declares and not what the checkpoint says.
    """

    env_module: ModuleType
    policy_module: ModuleType
    algo: Algorithm
    env_spec: EnvSpec
    policy_spec: PolicySpec
    train_trials: Trials
    eval_trials: Trials
    groups: Mapping[str, tuple[str, ...]]
    missing: AssetMissing | None = None


def resolve(run: RunConfig, *, without_files: bool = False) -> Parts:
    """Look everything up and check that it fits, without loading weights or starting a simulator.

    without_files: go on with what the config declares when the checkpoint is not here, if the
    policy can.

    Raises:
        SpecMismatch: policy and env disagree; every reason is listed.
        ConfigError: no trials, or train and evaluation trials overlap where the env forbids it.
        AssetMissing: the checkpoint is not on this machine.
    """
    env_module = registry.module("env", run.env.name)
    policy_module = registry.module("policy", run.policy.name)
    algo = registry.module("algo", run.algo.name).ALGORITHM
    env_spec = env_module.spec(run.env)
    missing = None
    try:
        policy_spec = policy_module.spec(run.policy, needs_value=algo.needs_value)
    except AssetMissing as error:
        if not (without_files and hasattr(policy_module, "declared")):
            raise
        missing = error
        policy_spec = policy_module.declared(
            run.policy, needs_value=algo.needs_value, action=env_spec.action
        )
    problems = match(policy_spec, env_spec)
    if algo.needs_value and policy_spec.value_width != run.algo.value_width(policy_spec.chunk):
        problems.append(
            f"algo '{run.algo.name}' needs {run.algo.value_width(policy_spec.chunk)} values per "
            f"decision but the policy's value head gives {policy_spec.value_width}; "
            "make algo.reward_level and policy.value agree"
        )
    if problems:
        raise SpecMismatch("\n".join(problems))
    train, held_out = env_module.trials(run.env, "train"), env_module.trials(run.env, "eval")
    shared = {task: set(train[task]) & set(held_out.get(task, ())) for task in train}
    overlapping = {task: sorted(ids) for task, ids in shared.items() if ids}
    if overlapping and not env_spec.share_trials:
        task, ids = next(iter(overlapping.items()))
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        allow = ", or allow it: env.share_trials=true" if hasattr(run.env, "share_trials") else ""
        raise ConfigError(
            f"training and evaluation share trials of {len(overlapping)} tasks ({task}: "
            f"{', '.join(map(str, ids[:8]))}{more}); choose disjoint ranges in env{allow}"
        )
    return Parts(
        env_module=env_module,
        policy_module=policy_module,
        algo=algo,
        env_spec=env_spec,
        policy_spec=policy_spec,
        train_trials=train,
        eval_trials=held_out,
        groups=env_module.groups(run.env),
        missing=missing,
    )
