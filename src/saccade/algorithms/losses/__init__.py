"""Policy losses, one function per file; Axis letter: N sampled tokens of a micro-batch.

    def name(logp_N, old_logp_N, adv_N, seq_N, *, settings) -> (loss_N, {statistic: values_N})

`logp_N` has a gradient; `seq_N` holds one integer per sequence. What all losses share (importance weights, the KL
penalty, the weights of an average over the batch) is in `algorithms/policy_loss.py`. `rl.loss.name` names one, or the
path of a file; `rl.loss.settings` are its keyword-only parameters.
"""
