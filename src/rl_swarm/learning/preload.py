"""Imports what every node needs of torch and transformers."""

import torch  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401
