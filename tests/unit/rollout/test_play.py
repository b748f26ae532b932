import math
from dataclasses import replace

import pytest
import torch

from vlarl.episode import Episode
from vlarl.rollout.plan import train_plan
from vlarl.rollout.play import Decisions, play
from vlarl.testing import ReachConfig, ReachEnv, TokenConfig, TokenPolicy, reach

RIGHT = Episode(task="reach-right", trial=8, index=0)  # three steps to the right reach its goal
LEFT = Episode(task="reach-left", trial=8, index=1)  # walking to the right never does


@pytest.fixture
def plan():
    trials = reach.trials(ReachConfig(), "train")
    return train_plan(trials, episodes=16, group_size=4, seed=0, step=0)


def played(plan, *, slots=5, policy=None, env=None, **other):
    env = env or ReachEnv(ReachConfig(chunk=2), num_slots=slots)
    policy = policy or TokenPolicy(TokenConfig(chunk=2))
    return list(play(env, policy, plan, **{"temperature": 1.0, "noise": (0, "act", 0)} | other))


def fates(outcomes):
    return {
        o.episode.index: (o.success, o.num_steps, o.total_reward, o.num_clipped, o.diverged)
        for o in outcomes
    }


@pytest.mark.parametrize("slots", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_episode_is_played_once_and_its_fate_is_its_own(plan, slots, stages):
    outcomes = played(plan, slots=slots, stages=stages)
    assert sorted(o.episode.index for o in outcomes) == list(range(16))
    assert fates(outcomes) == fates(played(plan, slots=16, stages=1))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fates_do_not_depend_on_who_answers_first(plan, straggler, seed):
    late = played(plan, env=straggler(seed=seed), deterministic=False, stages=2)
    assert fates(late) == fates(played(plan))


def test_the_toys_leave_room_for_differences(plan):
    rate = [o.success for o in played(plan)]
    assert 0 < sum(rate) < len(rate)
    assert len({o.num_steps for o in played(plan)}) > 2


def test_noise_belongs_to_the_path_and_to_member_and_group(plan):
    base = fates(played(plan))
    assert fates(played(plan, noise=(0, "act", 1))) != base
    assert fates(played(plan, noise=(1, "act", 0))) != base
    groups = [{base[i] for i in range(4 * g, 4 * g + 4)} for g in range(4)]
    assert max(map(len, groups)) > 1, "members of a group start alike but act on their own"


def test_every_decision_has_noise_of_its_own(plan, walker):
    seen = []

    class Listener(walker):
        def act(self, obs, *, temperature, keys=None):
            seen.extend(keys.tolist())
            return super().act(obs, temperature=temperature, keys=keys)

    outcomes = played(plan, policy=Listener(1.0, 0.0))
    assert len(set(seen)) == len(seen) == sum(math.ceil(o.num_steps / 2) for o in outcomes)


def test_the_position_in_the_plan_is_no_part_of_the_noise(plan):
    backwards = [replace(e, index=15 - e.index) for e in plan[::-1]]
    moved = {15 - index: fate for index, fate in fates(played(backwards, slots=3)).items()}
    assert moved == fates(played(plan))


def test_temperature_zero_needs_no_noise(plan):
    greedy = fates(played(plan, temperature=0.0, noise=()))
    assert greedy == fates(played(plan, temperature=0.0, noise=(9, "other")))
    by_start = {}
    for e in plan:
        by_start.setdefault((e.task, e.trial), set()).add(greedy[e.index])
    assert all(len(one) == 1 for one in by_start.values())


@pytest.mark.parametrize(("slots", "stages"), [(1, 1), (5, 2), (16, 1)])
def test_no_forward_is_spent_on_a_finished_episode(plan, walker, slots, stages):
    policy = walker(1.0, 0.0)
    outcomes = played(plan, slots=slots, stages=stages, policy=policy)
    assert sum(policy.acted) == sum(math.ceil(o.num_steps / 2) for o in outcomes)


def test_a_full_stage_is_one_forward(walker):
    policy = walker(1.0, 0.0)
    played([LEFT] * 4, slots=4, stages=2, policy=policy)
    assert policy.acted == [2] * 12  # two stages of two slots, six decisions each


def test_a_free_slot_takes_the_next_episode_at_once(walker):
    policy = walker(1.0, 0.0)
    played([RIGHT, LEFT, RIGHT, RIGHT], slots=2, stages=1, policy=policy)
    # RIGHT takes two decisions and a reset, LEFT six: three RIGHTs pass through one slot. The
    # answer to a reset comes in the round after the episode ended.
    assert policy.acted == [2, 2, 1, 2, 2, 1, 1, 1]


def test_values_are_asked_for_where_the_horizon_cut_and_only_when_stored(walker):
    policy = walker(1.0, 0.0)
    played([RIGHT, LEFT], policy=policy)
    assert policy.valued == []
    outcomes = played([RIGHT, LEFT], policy=policy, store=Decisions())
    assert policy.valued == [1]
    last = {o.episode.index: o.last_value for o in outcomes}
    assert last[0] is None
    assert last[1].tolist() == [15.0]


def test_nothing_is_kept_unless_a_store_is_given(plan):
    assert all(o.rows == () for o in played(plan))
    store = Decisions()
    outcomes = played(plan, store=store)
    assert sorted(row for o in outcomes for row in o.rows) == list(range(store.count))


def test_steps_reward_and_clipped_actions_of_a_walk(walker):
    done, cut = played([RIGHT, LEFT], slots=1, policy=walker(1.5, 0.0))
    assert (done.success, done.num_steps, done.total_reward) == (True, 3, 1.0)
    assert (cut.success, cut.num_steps, cut.total_reward) == (False, 12, 0.0)
    assert (done.num_clipped, cut.num_clipped) == (3, 12)
    assert done.terminated.nonzero().tolist() == [[1, 0]]
    assert cut.truncated.nonzero().tolist() == [[5, 1]]


def test_a_diverged_episode_ends_without_reward_or_value(walker, unstable):
    policy = walker(1.0, 0.0)
    (outcome,) = played([RIGHT], policy=policy, store=Decisions(), env=unstable)
    assert outcome.diverged
    assert not outcome.success
    assert outcome.num_steps == 1
    assert outcome.last_value is None
    assert policy.valued == []


def test_frames_are_those_of_recorded_episodes(walker):
    film = Episode(task="reach-left", trial=8, index=2, record=True)
    outcomes = played([RIGHT, film], slots=2, policy=walker(1.0, 0.0))
    frames = {o.episode.index: o.frames for o in outcomes}
    assert frames[0] is None
    assert len(frames[2]) == 13  # the start and twelve actions
    column = frames[2][:, :, :, 0].amax(dim=1).int().argmax(dim=1)
    assert column.diff().min() >= 0, "frames are in order of time"


def test_stopping_sends_nothing_more(plan, straggler):
    for asked in range(12):
        env, count = straggler(), iter(range(1000))
        outcomes = played(
            plan, env=env, stages=1, should_stop=lambda count=count, at=asked: next(count) >= at
        )
        assert env.sent <= asked
        assert len(outcomes) < 16
        # Only five slots: what was never started was never played.
        assert {o.episode.index for o in outcomes} <= {e.index for e in env.started}
    everything = played(plan, should_stop=lambda: False)
    assert len(everything) == 16


def test_more_slots_than_episodes_and_no_episodes_at_all(plan):
    assert len(played(plan[:2], slots=7, stages=3)) == 2
    assert played([]) == []


def test_stored_decisions_are_copies_on_the_cpu(plan):
    store = Decisions()
    played(plan[:3], store=store)
    assert sum(len(o) for o in store.obs) == store.count
    assert {s.logprob.device for s in store.steps} == {torch.device("cpu")}
    assert [len(s.action) for s in store.steps] == [len(o) for o in store.obs]


def test_observations_are_taken_out_in_any_order_and_only_once(plan):
    store = Decisions()
    played(plan[:3], store=store, slots=2)
    images = {name: torch.cat([o.images[name] for o in store.obs]) for name in store.obs[0].images}
    state = torch.cat([o.state for o in store.obs])
    texts = [text for o in store.obs for text in o.instruction]
    order = torch.randperm(store.count, generator=torch.Generator().manual_seed(0))
    taken = store.take_obs(order)
    assert images, "there are frames to look at"
    for name, frames in images.items():
        assert torch.equal(taken.images[name], frames[order])
    assert torch.equal(taken.state, state[order])
    assert taken.instruction == tuple(texts[i] for i in order.tolist())
    assert store.obs == []


class Listening(ReachEnv):
    """Notes which slot was given which task."""

    def reset(self, slots, episodes):
        self.given = [*getattr(self, "given", []), *zip(slots, episodes, strict=True)]
        super().reset(slots, episodes)


def given(episodes, *, slots):
    env = Listening(ReachConfig(chunk=2), num_slots=slots)
    played(episodes, env=env, slots=slots)
    tasks = {slot: [] for slot in range(slots)}
    for slot, episode in env.given:
        tasks[slot].append(episode.task)
    return tasks, [episode for _, episode in env.given]


def mixed(left, right):
    """Episodes of two tasks, in turn where there are both."""
    pairs = [("reach-left", k) for k in range(left)], [("reach-right", k) for k in range(right)]
    names = sorted((*pairs[0], *pairs[1]), key=lambda pair: (pair[1], pair[0]))
    return [Episode(task=t, trial=k, index=i) for i, (t, k) in enumerate(names)]


def test_a_slot_keeps_its_task_while_episodes_of_it_are_left():
    tasks, order = given(mixed(6, 6), slots=2)
    home = ReachEnv(ReachConfig(), num_slots=2).spec.tasks
    assert set(tasks[0][:4]) == {home[0]}
    assert set(tasks[1][:4]) == {home[1]}
    for task in home:
        trials = [e.trial for e in order if e.task == task]
        assert trials == sorted(trials), "in the order of the plan"


def test_slots_without_a_task_of_their_own_help_where_most_are_waiting():
    tasks, _ = given(mixed(2, 9), slots=5)
    assert [tasks[slot][0] for slot in (2, 3, 4)] == ["reach-right"] * 3


def test_one_task_fills_all_slots():
    tasks, order = given(mixed(7, 0), slots=3)
    assert all(tasks.values())
    assert sorted(e.trial for e in order) == list(range(7))
