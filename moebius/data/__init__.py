"""Prompts and their order: rows of any kind, templating, a cache, batches that resume, and request seeds.

Everything here is checked before a model is loaded, and all faulty rows are reported in one error.
"""

from moebius.data.cache import DataCache
from moebius.data.columns import normalize_label
from moebius.data.prompts import PromptOptions, encode_inputs, load_prompts
from moebius.data.sampler import PromptSampler, replica_rows, request_seed
from moebius.data.sources import Part, Row, open_source, source_names
from moebius.data.table import Prompt, Prompts

__all__ = [
    "DataCache",
    "Part",
    "Prompt",
    "PromptOptions",
    "PromptSampler",
    "Prompts",
    "Row",
    "encode_inputs",
    "load_prompts",
    "normalize_label",
    "open_source",
    "replica_rows",
    "request_seed",
    "source_names",
]
