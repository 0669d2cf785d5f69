"""A Hugging Face model rebuilt as Megatron-core's GPTModel, or this process's stage and shard of it.

Layers are Megatron's own, by its local modules: no TransformerEngine. Attention is ours (node/attention.py), because a
row is a trie of tokens, which none of Megatron's kernels has a mask for; so are positions, which are depths in the
trie, and the log-probabilities, which need no logits of other tokens (node/logprobs.py).
"""

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from node.attention import Attending, PackedAttention
from node.batching import Packed
from node.logprobs import Vocabulary
from node.models import ModelBundle
from node.routing import Routing
from node.training.files import rows_of
from node.training.megatron_checks import experts_of
from node.training.megatron_weights import Heads, Piece, pieces
from node.training.recompute import recomputed


class TrieAttention(torch.nn.Module):
    """Megatron's `core_attention`: what it is given as a mask computes the attention."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer, self.scaling = layer_number - 1, config.kv_channels**-0.5

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Attending, **_: Any
    ) -> torch.Tensor:
        """query [T, 1, H, d], key and value [T, 1, K, d] -> [T, 1, H d]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return attention_mask.attend(self.layer, query, key, value, self.scaling).transpose(0, 1).flatten(2)


class Router(TopKRouter):
    """Chooses experts as transformers does, or those it is told (node/routing.py).

    Megatron-core 0.16.1 cannot compute its own router's logits without TransformerEngine.
    """

    replay: Routing | None = None
    normed = True
    """Whether the weights of the chosen experts add up to 1."""

    def forward(self, states: torch.Tensor, _: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, 1, D] -> weights [T, experts], 0 where an expert is not chosen, and which ones are, bool."""
        logits = torch.nn.functional.linear(states.flatten(0, 1).float(), self.weight.float())
        experts = logits.topk(self.topk).indices
        if self.replay is not None and self.replay.told is not None:
            told = self.replay.told[:, self.layer_number - 1]
            experts = torch.where(told >= 0, told, experts)
        chosen = torch.softmax(logits, -1).gather(-1, experts)
        if self.normed:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weights = torch.zeros_like(logits).scatter(-1, experts, chosen)
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)


class MegatronModel:
    """This process's part of a model, and what is known of the whole. The process groups are up."""

    def __init__(self, bundle: ModelBundle, device: torch.device, dtype: torch.dtype) -> None:
        """`bundle`: the whole model on the meta device, checked; `dtype`: the compute type."""
        whole = bundle.model
        self.config, self.generation_config, self.device = whole.config, whole.generation_config, device
        self.shapes: dict[str, torch.Size] = {name: weight.shape for name, weight in whole.named_parameters()}
        self.heads = Heads(
            whole.config.num_attention_heads,
            whole.config.num_key_value_heads,
            whole.base_model.layers[0].self_attn.head_dim,
        )
        part, parts = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        rows = [rows_of(whole.config.vocab_size, at, parts) for at in (0, part)]
        self._tokens = rows[1].stop - rows[1].start
        group = parallel_state.get_tensor_model_parallel_group()
        self._vocabulary = Vocabulary(rows[1].start, rows[0].stop, group) if parts > 1 else None
        # transformers' own frequencies, whatever the kind of scaling; the module is not used beyond that
        rotary = type(whole.base_model.rotary_emb)(whole.config)
        self._frequencies = torch.cat([rotary.inv_freq] * 2).to(device, torch.float32)
        self.gpt = _gpt(whole, self.heads.width, rows[0].stop * parts, device, dtype)
        self._first_layer = self.gpt.decoder.layers[0].layer_number - 1
        for module in self.gpt.modules():
            if isinstance(module, Router):
                module.replay = bundle.routing
                module.normed = getattr(whole.config, "norm_topk_prob", True)  # mixtral has no such setting

    def eval(self) -> "MegatronModel":
        self.gpt.eval()
        return self

    def modules(self) -> list[torch.nn.Module]:
        return list(self.gpt.modules())

    def pieces(self, name: str, tensor: torch.Tensor) -> list[Piece]:
        """What a parameter of this process, or its gradient, is made of."""
        return pieces(name, tensor, self.heads, self._first_layer, self._tokens)

    def parts(self) -> dict[str, list[Piece]]:
        """Hugging Face's names of the tensors that this process has a part of, and where that lies in Megatron's."""
        found: dict[str, list[Piece]] = {}
        for name, parameter in self.gpt.named_parameters():
            for piece in self.pieces(name, parameter.detach()):
                found.setdefault(piece.name, []).append(piece)
        return found

    def forward(self, packed: Packed, routing: Routing | None, *, recompute: bool) -> torch.Tensor:
        """States [T, 1, D] behind this stage's layers; before them, the first stage embeds and others have received.

        `routing` is what its routers are told by, where they are.
        """
        gpt = self.gpt
        embedded = gpt.embedding(packed.token_ids[None], packed.positions[None]) if gpt.pre_process else None
        angles = packed.positions[:, None].float() * self._frequencies
        with recomputed(gpt.decoder.layers, routing) if recompute else nullcontext():
            states: torch.Tensor = gpt.decoder(
                hidden_states=embedded,
                attention_mask=PackedAttention(packed.blocks),
                rotary_pos_emb=angles[:, None, None],
            )
        return states

    def output(self) -> tuple[torch.Tensor, Vocabulary | None]:
        """Of the last stage: this process's rows of the output embedding, and which ones they are."""
        gpt = self.gpt
        weight = gpt.output_layer.weight
        return (gpt.shared_embedding_or_output_weight() if weight is None else weight)[: self._tokens], self._vocabulary


def _gpt(whole: Any, width: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> GPTModel:
    """`width`: of a head; `vocabulary`: rows of the embedding, with padding. Its weights are not initialised."""
    config, experts = whole.config, experts_of(whole.config)
    attention = whole.base_model.layers[0].self_attn
    of_experts: dict[str, Any] = {}
    if experts:
        of_experts = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "moe_router_topk": config.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": 1,
        }
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=width,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=attention.q_proj.bias is not None,
        qk_layernorm=hasattr(attention, "q_norm"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,  # gradients are moved to float32 masters as they come
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the other one wants micro-batches of one length
        calculate_per_token_loss=True,  # the loss is scaled by what weighs its tokens, and by nothing else
        **of_experts,
    )
    pipeline = settings.pipeline_model_parallel_size
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layer = _layer(settings)
    gpt = GPTModel(
        settings,
        TransformerBlockSubmodules([layer] * (settings.num_layers // pipeline), layer_norm=WrappedTorchNorm),
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        pre_process=stage == 0,
        post_process=stage == pipeline - 1,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="none",
    )
    return gpt.to(device=device, dtype=dtype)


def _layer(settings: TransformerConfig) -> ModuleSpec:
    norm = WrappedTorchNorm if settings.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=TrieAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = ModuleSpec(module=MLP, submodules=linear)
    if settings.num_moe_experts:
        experts = ModuleSpec(module=SequentialMLP, submodules=linear)
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.arbitrary}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
