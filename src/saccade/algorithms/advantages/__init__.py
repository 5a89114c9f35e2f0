"""Advantage estimators, one function per file: rewards of a group [G] and its total rewards [G] -> advantages [G].

The rewards may be one part of the total rewards; a divisor, such as the std, is computed from the total rewards.

`rl.advantage.estimator` names one, or the path of a file; `rl.advantage.settings` are its keyword-only parameters.
"""
