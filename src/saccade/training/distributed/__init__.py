"""Training in several processes: the weights are sharded over them (FSDP2), and rank 0 controls them.

torchrun ──> rank 0: event loop, rollouts ──Controller.call(method)──> TrainingWorker.method on rank 0 ─┐ collective
         └─> ranks 1, 2, …: `serve_commands` <──command (gloo)───────> TrainingWorker.method on each   ─┘ operations
"""
