"""Prompts: template, special tokens, batching without a loop over tokens."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from vlarl.errors import AssetMissing, ConfigError, CorruptFile
from vlarl.models.openvla_oft.processing import Prompts
from vlarl.models.openvla_oft.tiny import train_tokenizer

CPU = torch.device("cpu")
TEXTS = ("Push the button", "open the drawer", "reach the far goal quickly")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 500)


@pytest.fixture
def prompts(tokenizer):
    return Prompts(tokenizer)


def test_template(prompts, tokenizer):
    ids = prompts.encode("Push the button")
    assert (ids[0], ids[-1]) == (1, tokenizer.token_to_id("▁"))
    text = "".join(tokenizer.id_to_token(i) for i in ids[1:])
    assert text == "▁In:▁What▁action▁should▁the▁robot▁take▁to▁push▁the▁button?\nOut:▁"


def test_a_known_word_is_one_token_and_the_template_two(prompts):
    # BOS, template, 5 words, template, space mark
    assert len(prompts.encode("reach the far goal quickly")) == 9


def test_case_does_not_matter(prompts):
    assert prompts.encode("OPEN THE DRAWER") == prompts.encode("open the drawer")


def test_any_ascii_text_can_be_written(prompts, tokenizer):
    ids = prompts.encode("grab 3 zebras (quietly), then ~wait~")
    assert tokenizer.token_to_id("<unk>") not in ids


def test_a_space_mark_that_is_there_is_not_doubled(prompts, tokenizer, monkeypatch):
    monkeypatch.setattr("vlarl.models.openvla_oft.processing.TEMPLATE", "{} ")
    ids = prompts.encode("open")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁open", "▁"]


def test_equal_lengths_need_no_mask(prompts):
    ids, keep = prompts.batch(["Push the button", "open the drawer"], CPU)
    assert keep is None
    assert ids.tolist() == [prompts.encode("push the button"), prompts.encode("open the drawer")]


def test_padding_stands_between_bos_and_the_rest(prompts):
    texts = ["open the drawer", "reach the far goal quickly", "open the drawer"]
    ids, keep = prompts.batch(texts, CPU)
    assert keep is not None
    for row, mask, text in zip(ids, keep, texts, strict=True):
        assert row[mask].tolist() == prompts.encode(text)
    assert keep[0].tolist() == [True, False, False] + [True] * 6
    assert torch.equal(ids[0], ids[2])


def test_longer_prompts_elsewhere_do_not_lengthen_a_batch(prompts):
    prompts.batch(["reach the far goal quickly"], CPU)
    ids, keep = prompts.batch(["open the drawer"], CPU)
    assert keep is None
    assert ids[0].tolist() == prompts.encode("open the drawer")


def test_each_instruction_is_tokenised_once(prompts, monkeypatch):
    calls = []
    encode = prompts.encode
    monkeypatch.setattr(prompts, "encode", lambda text: calls.append(text) or encode(text))
    for _ in range(3):
        prompts.batch(["open the drawer", "push the button", "open the drawer"], CPU)
    assert calls == ["open the drawer", "push the button"]


def test_training_is_reproducible(tokenizer):
    assert train_tokenizer(TEXTS, 500).to_str() == tokenizer.to_str()


def test_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(AssetMissing, match=r"tokenizer\.json"):
        Prompts.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CorruptFile, match=r"tokenizer\.json is not a tokenizer"):
        Prompts.from_folder(tmp_path)


def test_another_kind_of_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="Llama-style"):
        Prompts(Tokenizer(models.BPE()))
