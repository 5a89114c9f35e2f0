"""Which reason rank 0 reports, and which rank reports that rank 0 is lost; the store is real, the ranks aren't."""

import json

import pytest
from error_cases import raises
from torch import distributed

from saccade.errors import RunError
from saccade.training.background import RankLostError
from saccade.training.distributed import controller
from saccade.training.distributed.controller import Controller, serve_commands

GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. Check the logs. GLHF!"


class Failing:
    """A worker whose methods raise an error."""

    def __init__(self, error):
        self.error = error

    def update_weights(self):
        raise self.error


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(controller, "_FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(controller, "_RECEIPT_SECONDS", 0.0)
    return distributed.HashStore()


def serve(monkeypatch, store, rank, error):
    """Run `serve_commands` on a rank, whose worker or whose connection to rank 0 (None) fails."""

    def receive(received, src, group):
        if error is None:
            raise RuntimeError(GLOO)
        received[0] = ("update_weights", (), 0)

    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "broadcast_object_list", receive)
    serve_commands(Failing(error), None, store)


def test_one_rank_reports_that_rank_0_is_lost(monkeypatch, store):
    with raises(RunError, key=None) as caught:
        serve(monkeypatch, store, 1, None)
    assert "Connection closed by peer" in str(caught.value)
    assert ".cc" not in str(caught.value)
    assert "--resume" in str(caught.value)
    for rank in (2, 3):
        with pytest.raises(SystemExit):
            serve(monkeypatch, store, rank, None)


def test_the_reason_is_that_of_the_first_rank_that_failed(monkeypatch, store):
    with pytest.raises(SystemExit):
        serve(monkeypatch, store, 3, ValueError("a loss that fails"))
    with pytest.raises(SystemExit):  # its end lets rank 0's operation fail
        serve(monkeypatch, store, 1, RuntimeError(GLOO))
    assert "a loss that fails" in json.loads(store.get("saccade/failure"))[0]

    class Lost:
        def copy_state(self):
            raise RuntimeError(GLOO)

    monkeypatch.setattr(distributed, "broadcast_object_list", lambda *args, **kwargs: None)
    own = Controller(Lost(), None, store)
    for _ in range(2):  # the second call repeats it
        with pytest.raises(RankLostError, match="rank 3 failed: a loss that fails"):
            own.call("copy_state")
    assert own.has_lost_rank
    with pytest.raises(SystemExit):  # rank 0 reports it
        serve(monkeypatch, store, 2, RuntimeError(GLOO))


def test_the_first_rank_that_has_lost_another_reports_it_if_rank_0_does_not(monkeypatch, store):
    with pytest.raises(RunError, match="rank 1 has lost another rank"):
        serve(monkeypatch, store, 1, RuntimeError(GLOO))
    with pytest.raises(SystemExit):
        serve(monkeypatch, store, 3, RuntimeError(GLOO))


def test_a_signal_that_precedes_the_end_of_a_connection_does_not_hide_the_reason(monkeypatch, store):
    with pytest.raises(SystemExit):
        serve(monkeypatch, store, 1, ValueError("a loss that fails"))
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda *args, **kwargs: None)
    with pytest.raises(RankLostError, match="rank 1 failed: a loss that fails"):
        Controller(Failing(RunError("the job was stopped (SIGTERM)")), None, store).call("update_weights")


def test_no_other_rank_reports_what_rank_0_has_reported(monkeypatch, store):
    error = Controller(None, None, store).explain(RuntimeError(GLOO))
    assert "rank 0 or its connection to another rank failed: Connection closed by peer" in str(error)
    with pytest.raises(SystemExit):
        serve(monkeypatch, store, 1, RuntimeError(GLOO))
