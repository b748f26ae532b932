"""`pytest --update-golden` rewrites files under tests/golden instead of comparing with them."""

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


@pytest.fixture
def check_golden(request):
    """check_golden(name, text): the text equals tests/golden/NAME, or becomes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; write it with pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed; pytest --update-golden"

    return check
