import json

import pytest
from PIL import Image

from vlarl.errors import ConfigError
from vlarl.plot import (
    Curve,
    _row_labels,
    group_runs,
    learning_curves,
    mean_curve,
    read_curve,
    success_bars,
)
from vlarl.proportions import Rate
from vlarl.results import EpisodeResult, EvalResult


def make_run(path, lines, **config):
    path.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    document = {"config": {"name": path.name, **config}, "sources": {}}
    (path / "config.json").write_text(json.dumps(document))
    return path


def evaluated(step, k, n):
    return {"step": step, "eval/success_once": k / n, "eval/num_trajectories": float(n)}


def test_a_curve_has_the_steps_with_the_metric_and_the_counts(tmp_path):
    run = make_run(tmp_path / "r", [evaluated(0, 3, 10), {"step": 1, "x": 2}, evaluated(5, 7, 10)])
    assert read_curve(run) == Curve((0, 5), (0.3, 0.7), (Rate(3, 10), Rate(7, 10)))
    assert read_curve(run, "x") == Curve((1,), (2.0,), None)


def test_an_unknown_metric_lists_the_known_ones(tmp_path):
    run = make_run(tmp_path / "r", [evaluated(0, 3, 10)])
    with pytest.raises(ConfigError, match="never recorded 'nope'; it has: eval/success_once"):
        read_curve(run, "nope")
    with pytest.raises(ConfigError, match="is it a run directory"):
        read_curve(tmp_path)


def test_runs_that_differ_in_the_seed_are_one_experiment(tmp_path):
    a = make_run(tmp_path / "grpo_s0", [], seed=0, optim={"lr": 1e-4}, run_dir="a")
    b = make_run(tmp_path / "grpo_s1", [], seed=1, optim={"lr": 1e-4}, run_dir="b")
    c = make_run(tmp_path / "grpo_s2", [], seed=0, optim={"lr": 2e-4}, run_dir="c")
    assert group_runs([a, b, c]) == {"grpo": [a, b], "grpo (2)": [c]}


def test_mean_over_seeds_with_t_interval_by_hand():
    curves = [Curve((0, 1, 2), v, None) for v in ((0.2, 0.5, 0.0), (0.4, 0.5, 0.0))]
    steps, means, bands = mean_curve(curves, bounded=False)
    assert steps == [0, 1, 2]
    assert means == pytest.approx([0.3, 0.5, 0.0])
    # n = 2: t(0.975, 1) = 12.7062, sd = 0.1414, sd / sqrt(2) = 0.1.
    assert bands[0] == pytest.approx((0.3 - 1.27062, 0.3 + 1.27062), abs=1e-5)
    assert bands[1] == pytest.approx((0.5, 0.5))
    assert mean_curve(curves, bounded=True)[2][0] == (0.0, 1.0)


def test_seeds_are_averaged_where_all_have_a_value():
    curves = [Curve((0, 5, 10), (0.0, 0.2, 0.4), None), Curve((0, 10), (0.2, 0.6), None)]
    steps, means, _ = mean_curve(curves, bounded=True)
    assert steps == [0, 10]
    assert means == pytest.approx([0.1, 0.5])
    with pytest.raises(ConfigError, match="share no iteration"):
        mean_curve([Curve((0,), (0.0,), None), Curve((1,), (0.0,), None)], bounded=True)


def drawn_pixels(path):
    """Share of pixels that are not white."""
    with Image.open(path) as picture:
        colours = picture.convert("L").histogram()
    return 1 - colours[255] / sum(colours)


@pytest.mark.parametrize("seeds", [1, 3])
def test_learning_curves_are_drawn(tmp_path, seeds):
    curves = [
        Curve((0, 10, 20), (0.2, 0.4 + i / 50, 0.7), tuple(Rate(k, 20) for k in (4, 8, 14)))
        for i in range(seeds)
    ]
    learning_curves({"GRPO": curves, "PPO": curves}, tmp_path / "c.png", title="t")
    assert 0.02 < drawn_pixels(tmp_path / "c.png") < 0.6


def test_equal_data_give_equal_files_and_nothing_is_overwritten(tmp_path):
    curves = {"a": [Curve((0, 1), (0.0, 1.0), None)]}
    for suffix in ("png", "svg"):
        one, two = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        learning_curves(curves, one)
        learning_curves(curves, two)
        assert one.read_bytes() == two.read_bytes()
        with pytest.raises(ConfigError, match="not overwritten"):
            learning_curves(curves, one)
        learning_curves(curves, one, overwrite=True)
    with pytest.raises(ConfigError, match=r"name a \.png"):
        learning_curves(curves, tmp_path / "x.gif")


def result(wins):
    episodes = tuple(
        EpisodeResult(
            task=task,
            trial=i,
            repeat=0,
            success=i < k,
            num_steps=1,
            total_reward=0.0,
            num_clipped=0,
            diverged=False,
        )
        for task, k in wins.items()
        for i in range(20)
    )
    return EvalResult(plan=tuple(e.key for e in episodes), episodes=episodes)


def test_bars_show_counts_and_the_paired_difference(tmp_path):
    results = {"before": result({"a": 4, "b": 10}), "after": result({"a": 12, "b": 16})}
    success_bars(results, tmp_path / "b.svg", title="t")
    text = (tmp_path / "b.svg").read_text()
    for words in ("4/20", "16/20", "14/40", "28/40", "+35.0 points", "40 pairs", "after"):
        assert f"<!-- {words}" in text or words in text, words


def task(place):
    return f"pick_up_the_black_bowl_{place}_and_place_it_on_the_plate"


@pytest.mark.filterwarnings("error")
def test_long_names_of_tasks_are_told_apart(tmp_path):
    places = ("on_the_stove", "in_the_top_drawer_of_the_wooden_cabinet", "next_to_the_plate")
    success_bars({"only": result({task(p): 4 for p in places})}, tmp_path / "1.svg")
    text = (tmp_path / "1.svg").read_text()
    for words in (
        "... on the stove ...",
        "... in the top drawer of the",
        "wooden cabinet ...",
        "... next to the plate ...",
        "... = pick up the black bowl ... and place it on the plate",
    ):
        assert f"<!-- {words}" in text or f" {words} -->" in text or f"\n{words}" in text, words


@pytest.mark.filterwarnings("error")
def test_ten_long_names_with_nothing_in_common_fit(tmp_path):
    names = [f"{word} " + "with many words " * 6 for word in "abcdefghij"]
    success_bars({"only": result(dict.fromkeys(names, 4))}, tmp_path / "1.png")
    assert drawn_pixels(tmp_path / "1.png") > 0.05


def test_a_name_keeps_a_word_when_another_has_all_of_its_words():
    labels, common = _row_labels([task("in"), task("in_there")])
    assert labels == ["... and ...", "... there and ..."]
    assert common == "pick up the black bowl in ... place it on the plate"
    assert _row_labels(["reach-v3", "push-v3"]) == (["reach-v3", "push-v3"], "")


def test_bars_of_one_result_and_of_different_tasks(tmp_path):
    success_bars({"only": result({"a": 4})}, tmp_path / "1.png")
    success_bars({"x": result({"a": 4}), "y": result({"b": 4})}, tmp_path / "2.svg")
    assert 0.01 < drawn_pixels(tmp_path / "1.png") < 0.6
    assert "paired" not in (tmp_path / "2.svg").read_text()
