import pytest
from huggingface_hub import constants

from vlarl.assets import hub


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://huggingface.co", "https://huggingface.co"),
        ("http://user:secret@127.0.0.1:9", "http://127.0.0.1:9"),
        ("notaurl", "notaurl"),
    ],
)
def test_messages_name_the_hub_without_a_password(monkeypatch, address, shown):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert hub.endpoint() == shown
