"""Command-line flags: Megatron's spelling for training, slime's for RL; one field of `Arguments` a flag."""

from moebius.arguments.flags import Arguments
from moebius.arguments.parsing import parse_arguments, public_values, resolve, save_arguments
from moebius.arguments.validation import validate

__all__ = ["Arguments", "parse_arguments", "public_values", "resolve", "save_arguments", "validate"]
