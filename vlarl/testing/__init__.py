"""Contract checks for plug-ins, and the toy env and policies they are tried on.

check_env, check_policy, check_algorithm raise ContractBroken with what is wrong. The toys are
plug-in modules: vlarl.testing.reach (env), token_policy and flow_policy (policies).
"""

from vlarl.testing.check_algorithm import check_algorithm
from vlarl.testing.check_env import check_env
from vlarl.testing.check_policy import check_policy, made_up_observation
from vlarl.testing.flow_policy import FlowConfig, FlowPolicy
from vlarl.testing.learn import learning_curve
from vlarl.testing.reach import ReachConfig, ReachEnv
from vlarl.testing.require import ContractBroken
from vlarl.testing.rollouts import alone, loss_batch, made_up_rollout, on_ranks, part_of
from vlarl.testing.token_policy import TokenConfig, TokenPolicy

__all__ = [
    "ContractBroken",
    "FlowConfig",
    "FlowPolicy",
    "ReachConfig",
    "ReachEnv",
    "TokenConfig",
    "TokenPolicy",
    "alone",
    "check_algorithm",
    "check_env",
    "check_policy",
    "learning_curve",
    "loss_batch",
    "made_up_observation",
    "made_up_rollout",
    "on_ranks",
    "part_of",
]
