"""Advantage estimators, one function per file: rewards of a group [G] and its total rewards [G] -> advantages [G].

    def name(rewards_G, total_rewards_G, *, settings) -> advantages_G

The rewards may lack the credits of some spans, which the total rewards include; a divisor, such as the std, is computed
from the total rewards. An estimator that needs more names it as a keyword-only parameter:

    correct_G: NDArray[np.float64]      correctness of each episode, shaped like the rewards
    greedy_baseline_reward: float       reward of a greedy episode of the same prompt; naming it makes rollouts sample
                                        one per group, which is not trained on and not in the group
    whiten: str                         the recipe's `rl.advantage.whiten`

`rl.advantage.estimator` names one, or the path of a file; `rl.advantage.settings` are its other keyword-only
parameters. There is no GAE (arXiv 1506.02438): it needs a critic, a second model that predicts the return of every
token.
"""
