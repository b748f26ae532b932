import signal

import pytest

from vlarl.signals import Requests, stop_on_signals


@pytest.fixture
def hangup():
    """hangup(handler): what SIGHUP did before; put back afterwards."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_the_first_request_waits_and_the_second_one_does_not():
    with stop_on_signals() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGTERM)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_closed_terminal_is_one_request_however_often_it_is_told(hangup):
    hangup(signal.SIG_DFL)
    with stop_on_signals() as asked:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert asked()


def test_after_nohup_a_closed_terminal_asks_for_nothing(hangup):
    hangup(signal.SIG_IGN)
    with stop_on_signals() as asked:
        signal.raise_signal(signal.SIGHUP)
        assert not asked()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_handlers_are_put_back(hangup):
    hangup(signal.SIG_DFL)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(n) for n in numbers]
    with Requests() as requests:
        assert requests.count == 0
        assert [signal.getsignal(n) for n in numbers] != before
    assert [signal.getsignal(n) for n in numbers] == before
