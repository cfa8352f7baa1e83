"""Who talks to whom: the layouts of training and rollout, and their process groups. No RL, no model."""

from parallel_state.layout import Coordinates, ParallelLayout

__all__ = ["Coordinates", "ParallelLayout"]
