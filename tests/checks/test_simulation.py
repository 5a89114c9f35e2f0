"""The simulation of RL steps: conservation, monotony, queueing theory, and the rules of the group scheduler."""

import math
import random
from dataclasses import replace

import pytest
from commands import bad, fail, good, run
from error_cases import raises

from saccade.checks import scaling
from saccade.checks.estimates import PlanAssumptions
from saccade.checks.scaling import ClusterPlanner, build_cluster_tables, build_server_table, measure_run
from saccade.checks.simulation import (
    Cluster,
    Conversation,
    LogNormal,
    StageCosts,
    Workload,
    _Clock,
    _Group,
    _Request,
    _ServerPool,
    simulate,
)
from saccade.config.load import load_recipe
from saccade.errors import ConfigError, DataError

NOTHING = LogNormal(mean=0.0)
COSTS = StageCosts(
    decode_step=0.01,
    decode_step_per_reply=0.001,
    prefill_token=1e-4,
    max_replies=16,
    tool_call=LogNormal(mean=0.5, sigma=1.0),
    frame=0.02,
    score=LogNormal(mean=0.1, sigma=0.5),
    packed_token=1e-6,
    trained_token=1e-4,
    optimizer_step=0.2,
    sync_byte=1e-9,
    sync=0.1,
)
WORKLOAD = Workload(
    groups_per_round=6,
    started_per_round=6,
    rounds_per_step=1,
    group_size=4,
    prompts=[Conversation(prompt_tokens=400, num_frames=8), Conversation(prompt_tokens=900, num_frames=16)],
    reply_tokens=LogNormal(mean=80.0, sigma=1.0, maximum=400.0),
    tool_turns=1.5,
    calls_per_turn=2.0,
    tokens_per_result=30,
    sub_agent=Conversation(prompt_tokens=200, num_frames=4),
    max_staleness=0,
    is_streaming=False,
    waits_for_stale=True,
    max_running_groups=128,
    packed_tokens=20_000,
    num_updates=1,
    weight_bytes=10**9,
)
CLUSTER = Cluster(micro_step_tokens=20_000, micro_step_idle=0.0, servers=2, workers=2)
MODES = {
    "in turns": {},
    "barrier": {"max_staleness": 2},
    "streaming": {"max_staleness": 2, "is_streaming": True},
    "mask": {"max_staleness": 2, "is_streaming": True, "waits_for_stale": False},
    "over-provisioned": {"started_per_round": 9},
    "rounds": {"rounds_per_step": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_shares_ages_and_tokens_are_possible(mode):
    workload = replace(WORKLOAD, **MODES[mode])
    result = simulate(workload, COSTS, CLUSTER, num_steps=12)
    assert result == simulate(workload, COSTS, CLUSTER, num_steps=12)
    assert result != simulate(workload, COSTS, CLUSTER, num_steps=12, seed=1)
    assert all(0 <= share <= 1 for share in (result.trainer_idle, result.servers_idle, result.workers_idle))
    parts = result.wait_seconds + result.train_seconds + result.sync_seconds
    assert result.seconds_per_step == pytest.approx(parts)
    assert result.trainer_idle == pytest.approx(1 - (20_000 * 1e-4 + 0.2) / result.seconds_per_step)
    assert result.replies_per_server <= COSTS.max_replies
    if mode in ("in turns", "rounds"):  # what is in progress at the end of a step is not lost
        assert result.served_tokens == pytest.approx(result.sampled_tokens)
        assert result.max_age == 0
    elif mode == "over-provisioned":
        assert result.served_tokens > result.sampled_tokens
    if workload.waits_for_stale:
        assert result.max_age <= workload.max_staleness


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in turns", "barrier", "streaming"])
def test_faster_or_more_resources_are_never_slower(mode):
    workload = replace(WORKLOAD, **MODES[mode], reply_tokens=LogNormal(mean=80.0), tool_turns=1.0)
    costs = replace(COSTS, tool_call=LogNormal(mean=0.5), score=NOTHING)

    def run(cluster=CLUSTER, **changes):
        return simulate(workload, replace(costs, **changes), cluster, num_steps=40).seconds_per_step

    # A sync pauses the servers, which costs nothing while they are idle: if steps overlap, its moment matters.
    limit = run() + (0 if mode == "in turns" else 0.1 + 10**9 * 1e-9)
    assert run(decode_step=0.005, decode_step_per_reply=0.0005, prefill_token=5e-5) <= limit
    assert run(trained_token=5e-5) <= limit
    assert run(frame=0.01, tool_call=LogNormal(mean=0.25)) <= limit
    assert run(sync_byte=0.0, sync=0.0) <= limit
    assert run(replace(CLUSTER, servers=4, workers=4)) <= limit


def test_a_step_by_hand():
    workload = replace(
        WORKLOAD,
        group_size=2,
        groups_per_round=1,
        started_per_round=1,
        tool_turns=1.0,
        reply_tokens=LogNormal(mean=10.0),
    )
    costs = replace(COSTS, tool_call=LogNormal(mean=0.5), score=LogNormal(mean=0.1))
    cluster = replace(CLUSTER, servers=1, workers=1, threads_per_worker=8)
    result = simulate(replace(workload, prompts=WORKLOAD.prompts[:1], sub_agent=None), costs, cluster, num_steps=3)
    decode = 10 * (0.01 + 2 * 0.001)  # two replies together
    turn = 2 * 30 * 1e-4  # prefill of two results; the second episode's delays the first
    rollout = 8 * 0.02 + 400 * 1e-4 + decode + 0.5 + 2 * turn + decode + 0.1
    train = 20_000 * 1e-6 + 20_000 * 1e-4 + 0.2
    assert result.wait_seconds == pytest.approx(rollout)
    assert result.train_seconds == pytest.approx(train)
    assert result.seconds_per_step == pytest.approx(rollout + train + 0.1 + 1.0)


def test_overlap_takes_the_longer_of_sampling_and_training():
    fixed = replace(WORKLOAD, reply_tokens=LogNormal(mean=80.0), tool_turns=1.0)
    costs = replace(COSTS, tool_call=LogNormal(mean=0.5), score=NOTHING)
    turns = simulate(fixed, costs, CLUSTER, num_steps=8)
    overlapped = simulate(replace(fixed, max_staleness=2), costs, CLUSTER, num_steps=12)
    longer = max(turns.wait_seconds, turns.train_seconds + turns.sync_seconds)
    # A weight sync pauses the servers, and so delays what is sampled.
    assert longer <= overlapped.seconds_per_step * (1 + 1e-9) <= longer + turns.sync_seconds + 1e-6
    assert overlapped.seconds_per_step < turns.seconds_per_step


@pytest.mark.slow
def test_a_server_with_poisson_arrivals_is_a_queue_of_known_length():
    # M/M/c: c replies at an equal pace, exponential lengths; the mean wait is Erlang's C formula.
    rate, c, num_requests = 2.4, 3, 40_000
    clock, rng = _Clock(), random.Random(0)
    costs = replace(COSTS, decode_step=1.0, decode_step_per_reply=0.0, max_replies=c)
    server = _ServerPool(clock, costs, size=1).select()
    group, waits, arrival = _Group(number=0, version=0), list[float](), 0.0
    for _ in range(num_requests):
        arrival += rng.expovariate(rate)
        length = rng.expovariate(1.0)

        def submit(arrival=arrival, length=length):
            done = lambda: waits.append(clock.now - arrival - length)  # noqa: E731
            server.submit(_Request(prefill=0.0, num_tokens=length, group=group, on_done=done))

        clock.add(arrival, submit)
    while clock.run_next():
        pass
    erlangs = rate / 1.0
    busy = erlangs**c / math.factorial(c) * c / (c - erlangs)
    wait_probability = busy / (sum(erlangs**k / math.factorial(k) for k in range(c)) + busy)
    assert len(waits) == num_requests
    assert sum(waits) / num_requests == pytest.approx(wait_probability / (c - rate), rel=0.1)


def test_bad_amounts_are_named():
    for value in (-1.0, math.nan, math.inf):
        with raises(ConfigError, key="frame"):
            replace(COSTS, frame=value)
    with raises(ConfigError, key="max_replies", value=0):
        replace(COSTS, max_replies=0)
    with raises(ConfigError, key="sigma", value=-1):
        LogNormal(mean=1.0, sigma=-1)
    with raises(ConfigError, key="servers", value=0):
        replace(CLUSTER, servers=0)
    with raises(ConfigError, key="num_steps", value=3):
        simulate(replace(WORKLOAD, max_staleness=2), COSTS, CLUSTER, num_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_more_servers_than_are_used_change_nothing_but_their_idle_share(mode):
    """The simulation creates servers as they are used; before, it searched all of them at each request."""
    workload = replace(WORKLOAD, **MODES[mode])
    few, many = (simulate(workload, COSTS, replace(CLUSTER, servers=size), num_steps=8) for size in (200, 100_000))
    assert few.used_servers == many.used_servers < 200
    busy = (1 - few.servers_idle) * 200 / 100_000
    assert many == replace(few, servers_idle=pytest.approx(1 - busy))
    exact = simulate(workload, COSTS, replace(CLUSTER, servers=few.used_servers), num_steps=8)
    assert exact == replace(few, servers_idle=pytest.approx(1 - (1 - few.servers_idle) * 200 / few.used_servers))


def test_a_request_goes_to_the_first_of_the_servers_with_the_fewest():
    rng, clock = random.Random(0), _Clock()
    pool, group = _ServerPool(clock, COSTS, size=5), _Group(number=0, version=0)
    for number in range(200):
        server = pool.select()
        everyone = [*pool.servers, *[None] * (5 - len(pool.servers))]
        counts = [other.num_requests if other else 0 for other in everyone]
        assert server.num_requests == min(counts)
        assert pool.servers.index(server) == counts.index(min(counts))
        server.submit(_Request(prefill=0.0, num_tokens=rng.uniform(1, 9), group=group, on_done=lambda: None))
        if number % 50 == 49:
            rng.choice(pool.servers).cancel(group)
        for _ in range(rng.randrange(3)):
            clock.run_next()


# ---- recipes -------------------------------------------------------------------------------------------------------

USUAL = PlanAssumptions(reply_tokens=64, calls_per_turn=1)


@pytest.mark.slow
def test_recipes_are_simulated_only_where_they_fit():
    planner = ClusterPlanner(load_recipe("paravt/para_grpo"), USUAL, num_steps=2)
    for num_gpus in (1, 2):  # a trainer and a server, or a trainer that is too small
        assert isinstance(planner.find_best_split(num_gpus), str)
    best = planner.find_best_split(8)
    assert best.trainer_gpus + best.servers == 8
    assert not planner.find_problem(best.trainer_gpus)
    assert build_server_table(planner, 1, None).header == ("", "")
    local = ClusterPlanner(load_recipe("paravt/para_grpo", ["engine.name=local", "rl.max_staleness=0"]), USUAL)
    with raises(ConfigError, key="--servers", value=4):
        build_server_table(local, 8, 4)
    crowded = load_recipe("paravt/para_grpo", ["environment.settings.max_context_tokens=4000000"])
    planner = ClusterPlanner(crowded, PlanAssumptions(reply_tokens=2048), num_steps=2)
    assert planner.simulate(8, 2).result.replies_per_server > 0  # the context isn't used up by four replies


def test_a_run_without_costs_is_refused(tmp_path):
    fail(DataError, "recipes", "plan", "tiny/para_grpo", "--costs", tmp_path, key=str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 1, "packed_tokens": 9}\n')
    with raises(DataError, key=str(tmp_path)):
        measure_run(tmp_path, 1)


@pytest.mark.slow
def test_check_prints_the_simulation_for_gpus_alone():
    options = ("--reply-tokens", 64, "--calls-per-turn", 1)
    assert "Simulated RL steps" in good("recipes", "plan", "paravt/para_grpo", "--gpus", 8, "--servers", 2, *options)
    assert "Simulated RL steps" not in good("recipes", "plan", "paravt/para_grpo", *options)
    assert "Simulated RL steps" not in good("recipes", "plan", "tiny/para_grpo", "--gpus", 8)
    local = ("engine.name=local", "rl.max_staleness=0", "--gpus", 8, "--servers", 2)
    assert "--servers=2" in bad("recipes", "plan", "paravt/para_grpo", *local)


@pytest.mark.slow
def test_clusters_beyond_the_used_servers_are_not_simulated_again(monkeypatch):
    simulated, recipe = [], load_recipe("paravt/para_grpo", ["rl.prompts_per_step=2"])

    def record(workload, costs, cluster, **options):
        simulated.append(cluster.servers)
        return simulate(workload, costs, cluster, **options)

    monkeypatch.setattr(scaling, "simulate", record)
    planner, fresh = (ClusterPlanner(recipe, USUAL, num_steps=1) for _ in range(2))
    planner.simulate(8, 400)
    for servers in (100, 4000):
        result = fresh.simulate(8, servers).result
        fresh = ClusterPlanner(recipe, USUAL, num_steps=1)
        simulated.clear()
        assert planner.simulate(8, servers).result == replace(result, servers_idle=pytest.approx(result.servers_idle))
        assert not simulated
    assert planner.simulate(8, 1).result.used_servers == 1
    simulated.clear()
    build_cluster_tables(planner, 4096)
    assert len(simulated) < 60  # of 106 splits that are compared


def test_assumptions_that_the_plan_replaces_are_named():
    done = run(
        "recipes",
        "plan",
        "tiny/para_grpo",
        "--reply-tokens",
        99999999,
        "--calls-per-turn",
        99,
        "--video-size",
        "64x64",
    )
    assert done.exit_code == 0
    for option, limit in (
        ("--reply-tokens=99999999", "sampling.max_tokens="),
        ("--calls-per-turn=99", "max_calls_per_turn"),
        ("--video-size", "synthetic"),
    ):
        [line] = [line for line in done.stderr.splitlines() if option in line]
        assert line.startswith("tiny/para_grpo: ")
        assert limit in line
    assert not run(
        "recipes", "plan", "paravt/para_grpo", "--reply-tokens", 9, "--calls-per-turn", 1, "--video-size", "64x64"
    ).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("pyvision/video_baseline", ("--calls-per-turn", 1), "the recipe has no tools"),
        ("tiny/para_grpo", ("--servers", 2), "model.device=cpu"),
        ("tiny/para_grpo", ("--up-to", 2), "model.device=cpu"),
        ("paravt/sft", ("--up-to", 2), "the recipe has no RL"),
    ],
)
def test_options_without_effect_are_named(name, options, reason):
    done = run("recipes", "plan", name, *options)
    assert done.exit_code == 0
    [line] = done.stderr.splitlines()
    assert line.startswith(f"{name}: {options[0]} has no effect: ")
    assert reason in line


@pytest.mark.parametrize("video", ["wide", "0x9", "9x", "65536x9", f"{'9' * 5000}x9", "-1x9"])
def test_a_size_of_videos_that_is_none_is_refused(video):
    fail(ConfigError, "recipes", "plan", "tiny/base", "--video-size", video, key="--video-size", value=video)


def test_gpus_of_costs_need_costs():
    fail(ConfigError, "recipes", "plan", "tiny/base", "--costs-gpus", 2, key="--costs-gpus")
