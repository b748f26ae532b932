import pytest
import torch

from vlarl.errors import RunFailed
from vlarl.evaluate import checkpoint_hash, evaluate, make_protocol, versions
from vlarl.results import EpisodeKey
from vlarl.rollout.plan import eval_plan
from vlarl.testing import reach, token_policy

ENV, POLICY = reach.Config(), token_policy.Config()


def play(plan, *, slots=3, temperature=1.0, seed=0, **other):
    env = reach.make(ENV, num_slots=slots)
    policy = token_policy.load(POLICY, device="cpu", needs_value=False)
    return evaluate(env, policy, plan, temperature=temperature, seed=seed, **other)


@pytest.fixture
def plan():
    return eval_plan(reach.trials(ENV, "eval"), repeats=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outcomes_do_not_depend_on_slots(plan, temperature):
    three, seven = (play(plan, slots=n, temperature=temperature) for n in (3, 7))
    assert three.episodes == seven.episodes
    assert three.is_complete
    assert three.plan == tuple(EpisodeKey.of(e) for e in plan)


def test_sampling_depends_on_the_seed_and_greedy_does_not(plan):
    assert play(plan, seed=0).episodes != play(plan, seed=1).episodes
    greedy = [play(plan, seed=s, temperature=0.0).episodes for s in (0, 1)]
    assert greedy[0] == greedy[1]


def test_repeats_differ_when_sampling(plan):
    by_repeat = [
        [(e.success, e.num_steps) for e in play(plan).episodes if e.repeat == r] for r in (0, 1)
    ]
    assert by_repeat[0] != by_repeat[1]


class Peer:
    """One of several ranks that run one after the other; the last one sees what all found."""

    def __init__(self, rank, size, found):
        self.rank, self.size, self.found = rank, size, found

    def all_gather_object(self, thing):
        self.found[self.rank] = thing
        return [self.found.get(r, ([], True, None)) for r in range(self.size)]


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_outcomes_do_not_depend_on_ranks(plan, size):
    found = {}
    for rank in range(size):
        result = play(plan, world=Peer(rank, size, found))
    assert result.episodes == play(plan).episodes


def test_a_rank_that_lost_an_episode_is_an_error_that_names_it(plan):
    class Losing(Peer):
        def all_gather_object(self, thing):
            episodes, *rest = thing
            return [(episodes[:-1], *rest)]

    with pytest.raises(RunFailed, match="lost episodes: reach-"):
        play(plan, world=Losing(0, 1, {}))


def test_stopping_leaves_the_rest_named(plan):
    seen = []
    result = play(plan, on_episode=seen.append, should_stop=lambda: len(seen) >= 5)
    assert not result.is_complete
    assert len(result.episodes) + len(result.missing) == len(plan)
    assert len(result.episodes) == len(seen) >= 5


def test_frames_reach_the_callback_for_recorded_episodes_only():
    plan = eval_plan(reach.trials(ENV, "eval"), record=2)
    seen = []
    play(plan, on_frames=seen.append)
    assert sorted(o.episode.index for o in seen) == [e.index for e in plan if e.record]
    assert all(o.frames.dtype == torch.uint8 and len(o.frames) > 1 for o in seen)


def test_numbers_of_an_episode_are_the_env_s(plan):
    result = play(plan)
    for e in result.episodes:
        assert e.total_reward == float(e.success)
        assert 1 <= e.num_steps <= ENV.max_steps
        assert e.success or e.num_steps == ENV.max_steps


def protocol(plan, **other):
    env = reach.make(ENV, num_slots=2)
    policy = token_policy.load(POLICY, device="cpu", needs_value=False)
    arguments = {
        "env_section": ENV,
        "policy_section": POLICY,
        "temperature": 1.6,
        "seed": 3,
        "split": "eval",
        "train_trials": reach.trials(ENV, "train"),
    }
    return make_protocol(env, policy, plan, **(arguments | other))


def test_protocol_says_what_matters(plan):
    found = protocol(plan)
    assert found["sampling"] == {"temperature": 1.6, "seed": 3}
    assert found["env"]["horizon"] == ENV.max_steps
    assert found["policy"]["chunk"] == 8
    assert found["trials"] == {"env": "reach", "numbered_by": reach.spec(ENV).trials}
    assert found["plan"] == {"split": "eval", "start_from_training_trial": 0}
    assert {"vlarl", "python", "torch", "transformers", "metaworld", "mujoco", "gymnasium"} <= set(
        found["versions"]
    )
    assert "num_slots" not in found["env"]
    assert found["checkpoint"] == {"path": None, "sha256": None, "step": None}


def test_the_dtypes_in_use_are_stamped(plan):
    plain = play(plan[:2], protocol={"seed": 1}).protocol
    assert plain == {"seed": 1, "precision": {"weights": "float32", "compute": "float32"}}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert play(plan[:2]).protocol["precision"]["compute"] == "bfloat16"


@pytest.mark.parametrize("words", ["llvmpipe (LLVM 15)", None])
def test_what_drew_the_frames_is_stamped_where_it_is_known(plan, monkeypatch, words):
    monkeypatch.setattr(reach.ReachEnv, "renderer", lambda self: words, raising=False)
    compute = play(plan[:2], protocol={"compute": {"device": "cpu"}}).protocol["compute"]
    assert compute == {"device": "cpu"} | ({"renderer": words} if words else {})


def test_protocol_counts_training_trials_in_the_plan():
    train = eval_plan(reach.trials(ENV, "train"))
    assert protocol(train)["plan"]["start_from_training_trial"] == len(train)


def test_versions_name_this_torch():
    assert versions()["torch"] == torch.__version__.split("+")[0]


def test_checkpoint_hash_is_of_names_and_contents(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "config.json").write_text("{}")
    before = checkpoint_hash(tmp_path)
    (tmp_path / "README.md").write_text("words")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.json").write_text("words")
    assert checkpoint_hash(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"2")
    changed = checkpoint_hash(tmp_path)
    assert changed != before
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert checkpoint_hash(tmp_path) not in (before, changed)
