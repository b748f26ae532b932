import os

import pytest

from vlarl.assets import store
from vlarl.errors import AssetMissing


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A shipped asset `duck`, cached ones `duck` and `goose`, folders `duck` and `swan` here."""
    shipped, cache, here = tmp_path / "tiny", tmp_path / "cache", tmp_path / "here"
    for folder in (shipped / "duck", cache / "duck", cache / "goose", here / "duck", here / "swan"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(store, "_shipped", lambda: shipped)
    monkeypatch.setenv("VLARL_HOME", str(cache))
    monkeypatch.chdir(here)
    return tmp_path


def test_a_word_is_a_shipped_asset_then_a_cached_one_then_a_folder(machine):
    assert store.resolve("duck") == machine / "tiny" / "duck"
    assert store.resolve("goose") == machine / "cache" / "goose"
    assert store.resolve("swan").resolve() == machine / "here" / "swan"


def test_a_path_is_a_path(machine):
    assert store.resolve("./duck").resolve() == machine / "here" / "duck"
    assert store.resolve(machine / "cache" / "duck") == machine / "cache" / "duck"


@pytest.mark.parametrize("word", ["duck", "goose", "zebra", "random", "./no/where"])
def test_names_and_what_is_not_there_are_settled_already(machine, word):
    assert store.settled(word) == word


@pytest.mark.parametrize("word", ["./duck", "swan", "../here/swan"])
def test_folders_are_settled_by_their_absolute_path(machine, word, monkeypatch):
    settled = store.settled(word)
    before = store.resolve(word).resolve()
    monkeypatch.chdir("/")
    assert store.resolve(settled).resolve() == before


def test_names_lists_each_asset_once(machine):
    (machine / "cache" / ".partial").mkdir()
    assert store.names() == ["duck", "goose"]


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("gose", "no asset or folder named 'gose'; did you mean 'goose'?", "vlarl download --list"),
        ("zebra", "no asset or folder named 'zebra'; on this machine: duck, goose", "OWNER/zebra"),
        ("org/some-model", "there is no folder 'org/some-model'", "hf download org/some-model "),
        ("./no/where", "there is no folder './no/where'", "OWNER/where"),
        ("", "there is no folder ''", "vlarl download --list"),
        ("a.json", "no asset or folder named 'a.json'", "vlarl download --list"),
        ("./a.txt", "'./a.txt' is a file; expected the folder of a checkpoint", "hf download"),
    ],
)
def test_what_is_missing_comes_with_near_names_and_a_command(machine, name, message, fix):
    (machine / "here" / "a.txt").write_text("")
    with pytest.raises(AssetMissing) as caught:
        store.resolve(name)
    assert str(caught.value).startswith(message)
    assert fix in caught.value.fix
    if fix != "vlarl download --list":
        assert str(machine / "cache") in caught.value.fix


def test_a_path_is_not_taken_for_a_name_on_a_hub(machine):
    with pytest.raises(AssetMissing) as caught:
        store.resolve("runs/first")
    assert caught.value.fix == "vlarl train --preset NAME --run-dir runs/first"
    (machine / "here" / "runs").mkdir()
    with pytest.raises(AssetMissing) as caught:
        store.resolve("runs/first")
    assert caught.value.fix == "ls runs"


def test_home_is_a_user_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("VLARL_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.home() == tmp_path / ".cache" / "vlarl"
    assert store.names() == store._folders(store._shipped())


def test_an_asset_of_the_manifest_is_fetched_by_name(machine):
    with pytest.raises(AssetMissing) as caught:
        store.resolve("wan-libero-spatial")
    assert str(caught.value) == f"asset 'wan-libero-spatial' is not in {machine / 'cache'}"
    assert caught.value.fix == "vlarl download wan-libero-spatial"


@pytest.mark.parametrize("name", ["wan-libero-spatail", "RLinf/RLinf-Wan-LIBERO-Spatial"])
def test_a_near_name_and_a_repository_lead_to_the_manifest(machine, name):
    with pytest.raises(AssetMissing) as caught:
        store.resolve(name)
    assert caught.value.fix == "vlarl download wan-libero-spatial"


def test_a_folder_made_by_hand_must_hold_what_the_manifest_names(machine):
    folder = machine / "cache" / "openpi-tokenizer"
    model = folder / "big_vision" / "paligemma_tokenizer.model"
    model.parent.mkdir(parents=True)
    for size, reason in ((None, ""), (4_264_022, r" \(4264022 of 4264023 bytes\)")):
        if size is not None:
            model.touch()
            os.truncate(model, size)
        with pytest.raises(AssetMissing, match=f"no big_vision/paligemma_tokenizer.model{reason}$"):
            store.resolve("openpi-tokenizer")
    os.truncate(model, 4_264_023)
    assert store.resolve("openpi-tokenizer") == folder
    assert store.lacking("some-other-name", machine) == []
