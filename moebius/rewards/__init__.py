"""Rewards of responses: built-in ones and functions of the user's, weighted, in worker processes with a time limit."""

from moebius.rewards.math_reward import score_math
from moebius.rewards.pool import RewardPool, RewardResult
from moebius.rewards.specs import RewardItem, RewardSpec, reward_specs
from moebius.rewards.weighted import Rewards, Scores

__all__ = [
    "RewardItem",
    "RewardPool",
    "RewardResult",
    "RewardSpec",
    "Rewards",
    "Scores",
    "reward_specs",
    "score_math",
]
