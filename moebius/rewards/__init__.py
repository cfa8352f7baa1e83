"""Rewards of responses: the math reward or a function of the user's, computed in worker processes with a time limit."""

import symtable
from pathlib import Path

from moebius.rewards.math_reward import score_math
from moebius.rewards.pool import RewardItem, RewardPool, RewardResult, RewardSpec

__all__ = ["RewardItem", "RewardPool", "RewardResult", "RewardSpec", "make_reward_pool", "reward_spec", "score_math"]


def reward_spec(rm_type: str | None, custom_rm_path: str | None) -> RewardSpec:
    """The reward that the flags name. The user's file is read but not run.

    A math reward that fails for a sample counts 0, as no answer of a model may end a run; an exception in the user's
    function does end it.

    Raises:
        ValueError: not exactly one of the flags is given, or it names nothing that exists.
    """
    if (rm_type is None) == (custom_rm_path is None):
        raise ValueError(
            f"--rm-type {rm_type} --custom-rm-path {custom_rm_path}: exactly one of them must give the reward"
        )
    if custom_rm_path is not None:
        return RewardSpec(_checked_target(custom_rm_path), stop_on_error=True)
    if rm_type != "math":
        raise ValueError(f"--rm-type {rm_type}: must be math")
    return RewardSpec("math", stop_on_error=False)


def make_reward_pool(
    rm_type: str | None, custom_rm_path: str | None, num_workers: int, timeout_seconds: float
) -> RewardPool:
    """Starts the workers of `--rm-type` or `--custom-rm-path`; see `RewardPool`.

    Raises:
        ValueError: as `reward_spec`; or a number that is not positive.
    """
    if num_workers < 1:
        raise ValueError(f"--rm-workers {num_workers}: must be at least 1")
    if not timeout_seconds > 0:
        raise ValueError(f"--rm-timeout {timeout_seconds}: must be more than 0 seconds")
    return RewardPool(reward_spec(rm_type, custom_rm_path), num_workers, timeout_seconds)


def _checked_target(custom_rm_path: str) -> str:
    """`/absolute/file.py:function`, when the file gives that name a value."""
    flag = f"--custom-rm-path {custom_rm_path}"
    name, _, function = custom_rm_path.rpartition(":")
    if not name.endswith(".py") or not function.isidentifier():
        raise ValueError(f"{flag}: must be FILE.py:FUNCTION")
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{flag}: there is no file {path}")
    try:
        table = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {path} is not Python: {error}") from error
    if function not in table.get_identifiers() or not _is_bound(table.lookup(function)):
        raise ValueError(f"{flag}: {path} defines no {function}")
    return f"{path}:{function}"


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()
