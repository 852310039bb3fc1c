"""What the server process imports once, so that the nodes forked from it need not."""

import torch  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

import rl_swarm.node.node  # noqa: F401
