"""Which reason rank 0 reports, and which rank reports it if rank 0 is lost; the store is real, the ranks aren't."""

import signal

import pytest
from error_cases import raises
from torch import distributed

from saccade.errors import RunError
from saccade.training.background import RankLostError
from saccade.training.distributed import controller, launch
from saccade.training.distributed.controller import Controller, FailureReport, serve_commands

GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. Check the logs. GLHF!"


class Failing:
    """A worker whose methods raise an error."""

    def __init__(self, error):
        self.error = error

    def update_weights(self):
        raise self.error


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(controller, "_FAILURE_SECONDS", 0.0)
    monkeypatch.setattr(controller, "_CLAIM_SECONDS", 0.0)
    return distributed.HashStore()


def make_report(store, rank=0, *, is_first_of_node=False):
    return FailureReport(store, rank, is_first_of_node=is_first_of_node)


def make_controller(store, worker=None):
    return Controller(worker, None, make_report(store))


def serve(monkeypatch, report, error):
    """Run `serve_commands` on a rank, whose worker or whose connection to the sender of commands (None) fails."""

    def receive(received, src, group):
        if error is None:
            raise RuntimeError(GLOO)
        received[0] = ("update_weights", (), 0)

    monkeypatch.setattr(distributed, "broadcast_object_list", receive)
    serve_commands(Failing(error), None, report)


@pytest.mark.parametrize("error", [None, RuntimeError(GLOO), ValueError("a loss that fails")])
def test_one_rank_reports_a_failure_if_rank_0_does_not_respond(monkeypatch, store, error):
    with raises(RunError, key=None) as caught:
        serve(monkeypatch, make_report(store, 1), error)
    message = str(caught.value)
    assert ("a loss that fails" if isinstance(error, ValueError) else "Connection closed by peer") in message
    assert ".cc" not in message
    assert "rank 0 doesn't respond" in message
    assert "--resume" in message
    for rank in (2, 3):
        with pytest.raises(SystemExit):
            serve(monkeypatch, make_report(store, rank), RuntimeError(GLOO))
    assert not make_report(store).claim()  # a rank 0 that was only slow prints nothing


def test_rank_0_claims_the_report_while_its_main_thread_works(monkeypatch):
    monkeypatch.setattr(controller, "_CLAIM_SECONDS", 300.0)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)
    reports = [make_report(store, rank) for rank in range(3)]
    for report in reports:
        report.watch()
    with pytest.raises(SystemExit):
        serve(monkeypatch, reports[2], ValueError("a loss that fails"))
    assert [report.claim() for report in reports] == [True, False, False]


class LostStore:
    """A store whose server is lost."""

    def __getattr__(self, name):
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(("is_first_of_node", "is_claimed"), [(True, False), (True, True), (False, False)])
def test_without_a_store_the_first_rank_of_a_node_reports_a_failure_that_no_rank_has(
    monkeypatch, store, is_first_of_node, is_claimed
):
    report = make_report(store, 4, is_first_of_node=is_first_of_node)
    if is_claimed:
        monkeypatch.setattr(controller, "_CLAIM_SECONDS", 300.0)
        report.watch()
        assert make_report(store).claim()
        assert report.wait_for_claim()
    monkeypatch.setattr(report, "_store", LostStore())
    with pytest.raises(RunError if is_first_of_node and not is_claimed else SystemExit):
        serve(monkeypatch, report, RuntimeError(GLOO))


def test_the_reason_is_that_of_the_first_rank_that_failed(monkeypatch, store):
    assert make_report(store).claim()  # as its thread does
    with pytest.raises(SystemExit):
        serve(monkeypatch, make_report(store, 3), ValueError("a loss that fails"))
    with pytest.raises(SystemExit):
        serve(monkeypatch, make_report(store, 1), RuntimeError(GLOO))

    class Lost:
        def copy_state(self):
            raise RuntimeError(GLOO)

    monkeypatch.setattr(distributed, "broadcast_object_list", lambda *args, **kwargs: None)
    own = make_controller(store, Lost())
    for _ in range(2):  # the second call repeats it
        with pytest.raises(RankLostError, match="rank 3 failed: a loss that fails"):
            own.call("copy_state")
    assert own.has_lost_rank


def test_a_signal_that_precedes_the_end_of_a_connection_does_not_hide_the_reason(monkeypatch, store):
    make_report(store, 1).post("rank 1 failed: a loss that fails", "", None)
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda *args, **kwargs: None)
    stopped = RunError("the job was stopped (SIGTERM)")
    with pytest.raises(RankLostError, match="rank 1 failed: a loss that fails"):
        make_controller(store, Failing(stopped)).call("update_weights")


def test_a_signal_between_two_calls_raises_the_reason_once(monkeypatch, store):
    own = make_controller(store)
    monkeypatch.setattr(launch, "_controller", own)
    with pytest.raises(RunError, match="SIGTERM"):
        launch.handle_sigterm(signal.SIGTERM, None)
    make_report(store, 1).post("rank 1 failed: a loss that fails", "", None)
    with pytest.raises(RankLostError, match="rank 1 failed: a loss that fails"):
        launch.handle_sigterm(signal.SIGTERM, None)
    own.explain(RuntimeError(GLOO))
    launch.handle_sigterm(signal.SIGTERM, None)  # nothing: the run ends with the reason


def test_no_other_rank_reports_what_rank_0_reports(monkeypatch, store):
    error = make_controller(store).explain(RuntimeError(GLOO))
    assert "rank 0 or its connection to another rank failed: Connection closed by peer" in str(error)
    with pytest.raises(SystemExit):
        serve(monkeypatch, make_report(store, 1), RuntimeError(GLOO))
