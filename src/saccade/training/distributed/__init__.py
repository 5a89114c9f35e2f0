"""Training in several processes: the weights are divided among them (FSDP2); rank 0 conducts.

torchrun ──> rank 0: event loop, rollouts, log ──Conductor.call(method)──> Worker.method on rank 0 ─┐ collective
         └─> ranks 1, 2, …: `follow` <───────────────order (gloo)────────> Worker.method on each   ─┘ operations
"""
