"""Which reason a failed job reports, and which process prints it; the store is real, the ranks aren't."""

import multiprocessing
import os
import signal
import threading

import pytest
from error_cases import raises
from torch import distributed

from saccade.errors import AlarmError, RunError
from saccade.training.background import RankLostError
from saccade.training.distributed import active_controller, controller, failure_report
from saccade.training.distributed.controller import Controller, serve_commands
from saccade.training.distributed.failure_report import (
    LOST_RANK_KEY,
    FailureReport,
    announce_launcher,
    explain_exits,
    read_sentence,
)

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
    monkeypatch.setattr(failure_report, "_CLAIM_SECONDS", 0.0)
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
    monkeypatch.setattr(failure_report, "_CLAIM_SECONDS", 300.0)
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
        monkeypatch.setattr(failure_report, "_CLAIM_SECONDS", 300.0)
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
    monkeypatch.setattr(active_controller, "_controller", own)
    with pytest.raises(RunError, match="SIGTERM"):
        active_controller.handle_sigterm(signal.SIGTERM, None)
    make_report(store, 1).post("rank 1 failed: a loss that fails", "", None)
    active_controller.handle_sigterm(signal.SIGTERM, None)  # nothing: the run ends with the first
    own.is_ending = False
    with pytest.raises(RankLostError, match="rank 1 failed: a loss that fails"):
        active_controller.handle_sigterm(signal.SIGTERM, None)
    own.is_ending = False
    own.explain(RuntimeError(GLOO))
    active_controller.handle_sigterm(signal.SIGTERM, None)  # nothing: the run ends with the reason


def test_no_other_rank_reports_what_rank_0_reports(monkeypatch, store):
    error = make_controller(store).explain(RuntimeError(GLOO))
    assert "rank 0 or its connection to another rank failed: Connection closed by peer" in str(error)
    with pytest.raises(SystemExit):
        serve(monkeypatch, make_report(store, 1), RuntimeError(GLOO))


KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM


@pytest.fixture
def launched(store):
    """The store of a job that `--nproc` has started."""
    announce_launcher(store)
    return store


def lose(store, rank):
    """Post that a rank has lost another one."""
    make_report(store, rank).post(f"rank {rank} has lost another rank: Connection closed", LOST_RANK_KEY, None)


def claim(store, rank):
    """Claim the report, as a rank does that is killed before it reports anything."""
    assert make_report(store, rank).claim()


def leave_sentence(store, rank, error):
    with pytest.raises(SystemExit) as caught, make_report(store, rank).raise_on_one_rank():
        raise error
    return caught.value.code


def explain(store, exit_codes):
    """Return the sentence that `--nproc` prints."""
    error = explain_exits(store, exit_codes, "resume it with --resume")
    return None if error is None else str(error)


def test_the_launching_process_prints_the_sentence_of_the_rank_that_claims_the_report(launched):
    error = AlarmError("entropy fell; resume it with --resume")
    assert leave_sentence(launched, 0, error) == error.exit_code
    assert leave_sentence(launched, 1, RunError("another sentence")) == 1
    reason = explain_exits(launched, {0: error.exit_code, 1: 1}, "")
    assert (str(reason), reason.exit_code) == (str(error), error.exit_code)


@pytest.mark.parametrize("claimant", [None, 0, 1])
@pytest.mark.parametrize("loser", [None, 1])
@pytest.mark.parametrize(
    "exit_codes",
    [
        {2: KILLED, 0: KILLED, 1: KILLED},  # torchrun kills the others 30 seconds later
        {1: 1, 2: KILLED, 0: KILLED},  # in the same look of torchrun, rank 1 comes first
        {2: KILLED, 0: TERMINATED, 1: TERMINATED},  # while modules are imported
        {2: KILLED, 1: 1},  # rank 0 had finished
        {2: KILLED},
    ],
)
def test_a_killed_rank_is_named_whichever_rank_was_killed_before_it_printed(launched, claimant, loser, exit_codes):
    if loser is not None:
        lose(launched, loser)
    if claimant is not None:
        claim(launched, claimant)
    if exit_codes.get(claimant, 0) > 0:  # it has printed what is no SaccadeError
        assert explain(launched, exit_codes) is None
    else:
        assert explain(launched, exit_codes) == "rank 2 was ended by signal 9 (Killed); resume it with --resume"


def test_the_sentence_of_a_rank_that_only_lost_a_connection_gives_way_to_the_rank_that_was_killed(launched):
    explained = make_controller(launched).explain(RuntimeError(GLOO))
    leave_sentence(launched, 0, explained)
    assert explain(launched, {0: 1}) == str(explained)  # the other rank is on another node
    assert "rank 1 was ended by signal 9" in explain(launched, {0: 1, 1: KILLED})


def test_the_reason_of_a_rank_is_printed_though_rank_0_was_killed_before_it_reported_it(launched):
    make_report(launched, 1).post("rank 1 failed: a loss that fails", "", None)
    claim(launched, 0)
    expected = "rank 1 failed: a loss that fails; resume the training with --resume"
    assert explain(launched, {1: 1, 0: KILLED}) == expected


@pytest.mark.parametrize("exit_codes", [{0: 1}, {0: 130, 1: KILLED}])
def test_nothing_is_printed_after_a_rank_that_has_printed_an_interrupt_or_an_error_of_the_disk(launched, exit_codes):
    lose(launched, 1)
    claim(launched, 0)
    assert explain(launched, exit_codes) is None


def test_a_rank_prints_its_sentence_itself_under_torchrun_or_when_the_launching_process_is_lost(store, monkeypatch):
    with pytest.raises(RunError, match="a sentence"), make_report(store).raise_on_one_rank():
        raise RunError("a sentence")
    assert read_sentence(store) is None
    announce_launcher(store)
    report = make_report(store, is_first_of_node=True)
    monkeypatch.setattr(report, "_store", LostStore())
    with pytest.raises(RunError, match="a sentence"), report.raise_on_one_rank():
        raise RunError("a sentence")


class Blocking:
    """A worker whose method waits until the test ends."""

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def update_weights(self):
        self.has_begun.set()
        assert self.may_end.wait(300)


def test_a_stop_does_not_wait_for_a_call_of_another_thread(monkeypatch, store):
    monkeypatch.setattr(distributed, "broadcast_object_list", lambda *args, **kwargs: None)
    worker = Blocking()
    own = make_controller(store, worker)
    thread = threading.Thread(target=own.call, args=("update_weights",))
    thread.start()
    assert worker.has_begun.wait(300)
    own.stop()
    worker.may_end.set()
    thread.join()
    assert not make_report(store, 1).claim()  # rank 0 reports what the others lose with it


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the ranks")
def test_a_rank_killed_between_its_claim_and_its_sentence_leaves_one_of_the_launching_process(monkeypatch):
    """The store is that of `--nproc`; rank 0 claims what another rank posts, and never prints it."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    announce_launcher(store)

    def run_rank_0():
        report = make_report(distributed.TCPStore("127.0.0.1", store.port, is_master=False))
        monkeypatch.setattr(report, "_leave_to_launcher", lambda error: os.kill(os.getpid(), signal.SIGKILL))
        with report.raise_on_one_rank():
            raise RankLostError("rank 0 lost its connection", key=LOST_RANK_KEY)

    rank_0 = multiprocessing.get_context("fork").Process(target=run_rank_0)
    rank_0.start()
    rank_0.join(60)
    assert rank_0.exitcode == KILLED
    assert not make_report(store, 1).claim()  # the other ranks end silently
    assert explain(store, {1: KILLED, 0: rank_0.exitcode}).startswith("rank 1 was ended by signal 9")
