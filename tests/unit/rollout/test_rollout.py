"""`collect`: ragged episodes become one padded rollout."""

import pytest
import torch

from vlarl.algos.functional import gae
from vlarl.algos.ppo import PpoConfig, credit
from vlarl.episode import Episode
from vlarl.rollout.plan import train_plan
from vlarl.testing import ReachConfig, TokenConfig, TokenPolicy, alone, reach

RIGHT = Episode(task="reach-right", trial=8, index=0)
LEFT = Episode(task="reach-left", trial=8, index=1)


@pytest.fixture
def plan():
    trials = reach.trials(ReachConfig(), "train")
    return train_plan(trials, episodes=16, group_size=4, seed=0, step=0)


def test_a_rollout_by_hand(gather, walker):
    """Walking right: RIGHT ends at the first action of its second decision, LEFT at the horizon."""
    rollout = gather([RIGHT, LEFT], num_slots=2, policy=walker(1.5, 0.0))
    assert rollout.t.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert rollout.b.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert rollout.reward.shape == (6, 2, 2)
    assert rollout.valid[:, 0].tolist() == [[True, True], [True, False]] + [[False, False]] * 4
    assert rollout.valid[:, 1].all()
    assert rollout.terminated.nonzero().tolist() == [[1, 0, 0]]
    assert rollout.truncated.nonzero().tolist() == [[5, 1, 1]]
    assert rollout.reward.nonzero().tolist() == [[1, 0, 0]]
    assert rollout.episode_len.tolist() == [3, 12]
    assert rollout.success.tolist() == [True, False]
    assert rollout.num_clipped.tolist() == [3, 12]
    # The hand at 0.5, 0.7, 0.9 and then the wall is brightest in columns 7, 11, 14 and 15. What
    # comes after a termination is 0, after the cut it is the value of the last observation.
    assert rollout.value.shape == (7, 2, 1)
    assert rollout.value[:, 0, 0].tolist() == [7, 11, 0, 0, 0, 0, 0]
    assert rollout.value[:, 1, 0].tolist() == [7, 11, 14, 15, 15, 15, 15]
    assert rollout.episodes == (RIGHT, LEFT)
    assert rollout.group.tolist() == [-1, -1]


def test_the_advantage_of_that_rollout_by_hand(gather, walker):
    rollout = gather([RIGHT, LEFT], policy=walker(1.5, 0.0))
    cfg = PpoConfig(gamma=0.5, gae_lambda=0.5, normalize_advantage=False)
    advantage = credit(rollout, cfg, alone).advantage[..., 0]
    # RIGHT: delta = [11 / 2 - 7, 1 - 11]; A = [-1.5 - 10 / 4, -10].
    assert advantage[:, 0].tolist() == [-4.0, -10.0, 0, 0, 0, 0]
    column = torch.tensor([7.0, 11, 14, 15, 15, 15, 15])[:, None]
    done = torch.tensor([False] * 5 + [True])[:, None]
    expected = gae(
        torch.zeros(6, 1), column[:-1], column[1:], done, gamma=0.5, gae_lambda=0.5
    )  # fmt: skip
    assert advantage[5, 1].item() == 15 / 2 - 15
    torch.testing.assert_close(advantage[:, 1:], expected)


def test_a_diverged_episode_is_cut_without_a_value(gather, walker, unstable):
    rollout = gather([RIGHT, LEFT], policy=walker(1.0, 0.0), env=unstable)
    assert rollout.diverged.tolist() == [True, True]
    assert rollout.truncated.nonzero().tolist() == [[0, 0, 0], [0, 1, 0]]
    assert rollout.valid.nonzero().tolist() == [[0, 0, 0], [0, 1, 0]]
    assert rollout.value[1].tolist() == [[0.0], [0.0]]
    assert not rollout.reward.any()
    assert not rollout.success.any()


def test_nothing_is_valid_after_the_first_done_and_everything_up_to_it(gather, plan):
    rollout = gather(plan)
    assert 0 < rollout.success.sum() < 16
    done = rollout.terminated | rollout.truncated
    for b in range(16):
        flat_done = done[:, b].flatten()
        valid = rollout.valid[:, b].flatten()
        last = int(flat_done.nonzero()[0])
        assert valid.tolist() == [i <= last for i in range(len(valid))]
        assert int(flat_done.sum()) == 1
        assert rollout.episode_len[b] == last + 1
    assert not rollout.reward[~rollout.valid].any()
    assert not done[~rollout.valid].any()


def test_rows_are_the_real_decisions_by_episode_then_time(gather, plan):
    rollout = gather(plan, num_slots=3, stages=2)
    lengths = -(-rollout.episode_len // 2)
    expected = [(b, t) for b in range(16) for t in range(lengths[b])]
    assert list(zip(rollout.b.tolist(), rollout.t.tolist(), strict=True)) == expected
    assert rollout.num_decisions == len(rollout.obs) == len(rollout.trace["token"])
    assert rollout.episodes == tuple(plan)
    assert rollout.group.tolist() == [e.group for e in plan]
    named = [f"{rollout.episodes[b].task}" for b in rollout.b.tolist()]
    assert list(rollout.obs.instruction) == [reach.instruction(task) for task in named]


def test_a_row_s_log_prob_is_that_of_its_observation_and_trace(gather, plan):
    policy = TokenPolicy(TokenConfig(chunk=2), needs_value=True)
    rollout = gather(plan, num_slots=3, policy=policy)
    scored = policy.evaluate(rollout.obs, rollout.trace, temperature=rollout.temperature)
    torch.testing.assert_close(scored.logprob.detach(), rollout.logprob, atol=1e-6, rtol=0)
    stored = rollout.value[rollout.t, rollout.b]
    torch.testing.assert_close(scored.value.detach(), stored, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("num_slots", "stages", "deterministic"),
    [(1, 1, True), (3, 1, True), (5, 2, True), (16, 3, True), (40, 2, True), (7, 2, False)],
)
def test_a_rollout_does_not_depend_on_slots_stages_or_timing(
    gather, straggler, plan, num_slots, stages, deterministic
):
    base = gather(plan)
    other = gather(plan, env=straggler(num_slots), stages=stages, deterministic=deterministic)
    for name in ("t", "b", "reward", "valid", "terminated", "truncated", "group", "num_clipped"):
        assert torch.equal(getattr(base, name), getattr(other, name)), name
    assert torch.equal(base.trace["token"], other.trace["token"])
    assert torch.equal(base.obs.images["top"], other.obs.images["top"])
    # Matrix products of other batch sizes round differently.
    torch.testing.assert_close(base.logprob, other.logprob, atol=1e-6, rtol=0)
    torch.testing.assert_close(base.value, other.value, atol=1e-6, rtol=0)


def test_the_same_slots_repeat_bit_for_bit(gather, plan):
    one, two = (gather(plan, num_slots=5, stages=2) for _ in range(2))
    assert torch.equal(one.logprob, two.logprob)
    assert torch.equal(one.value, two.value)


def test_a_policy_without_a_value_head_gives_none(gather, plan):
    assert gather(plan, policy=TokenPolicy(TokenConfig(chunk=2))).value is None


def test_values_of_every_action_have_the_width_of_the_chunk(gather, plan):
    policy = TokenPolicy(TokenConfig(chunk=2, value="action"), needs_value=True)
    rollout = gather(plan, policy=policy)
    assert rollout.value.shape == (len(rollout.reward) + 1, 16, 2)
    ends = (-(-rollout.episode_len // 2), torch.arange(16))
    bootstrapped = (rollout.value[ends] != 0).any(dim=1)
    assert torch.equal(bootstrapped, ~rollout.success)


def test_a_stop_gives_none_and_finished_episodes_were_reported(gather, plan):
    assert gather(plan, should_stop=lambda: True) is None
    ended = []
    stopped = gather(
        plan, num_slots=5, on_episode=ended.append, should_stop=lambda: len(ended) >= 6
    )
    assert stopped is None
    assert 6 <= len(ended) < 16
    everyone = []
    assert gather(plan, on_episode=everyone.append, should_stop=lambda: False) is not None
    assert sorted(o.episode.index for o in everyone) == list(range(16))


def test_a_stop_after_the_last_episode_costs_nothing(gather, plan):
    ended = []
    whole = gather(plan, on_episode=ended.append, should_stop=lambda: len(ended) == 16)
    assert whole is not None
