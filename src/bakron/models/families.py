"""What the structure of a model does not tell: names that configurations and expert modules use."""

from __future__ import annotations

# Configuration fields that hold the number of routed experts.
EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")

# Configuration fields that hold the longest sequence the model was made for.
MAX_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)

# Path components that make a linear of a mixture-of-experts module a router.
ROUTER_NAMES = frozenset({"gate", "router", "wg", "shared_expert_gate"})

# Names of the linears of an MLP (up, down and, where there is one, gate), and of attention (query, key, value, output).
MLP_LINEARS = (("up_proj", "down_proj", "gate_proj"), ("c_fc", "c_proj"))
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")

# Names of an MLP's activation function.
ACTIVATION_NAMES = ("act_fn", "act", "activation_fn")

# Endings of the class names of causal language models, as config.json lists them under "architectures".
CAUSAL_CLASS_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
