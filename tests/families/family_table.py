"""What the rules of `tiny_models.py` need to be told of single families."""

from __future__ import annotations

from typing import Any

import torch

ABSENT = object()  # a field that the configuration is made without

# Decoders that are also encoders: they generate when told so.
_ENCODERS = (
    "Bert", "BertGeneration", "BigBird", "Camembert", "Data2VecText", "Electra", "Ernie", "MegatronBert", "RemBert",
    "Roberta", "RobertaPreLayerNorm", "RoCBert", "RoFormer", "XLMRoberta", "XLMRobertaXL", "Xmod", "Reformer",
)  # fmt: skip

# Arguments of the configuration from which the rules start, by the class of the model or of the configuration.
START: dict[str, dict[str, Any]] = {f"{name}Config": {"is_decoder": True} for name in _ENCODERS}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1]}
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 8}
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_ZAMBA = {
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
}
_DOTS3 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_GEMMA4 = {**_SHARED, "global_head_dim": 16}

# Fields set after the rules, by the class of the model or of the configuration.
_MINIMAX_M3 = {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "Apertus1p5Config": {
        "image_token_offset": 71,
        "audio_token_offset": 79,
        "vision_config": {"codebook_size": 8},
        "audio_config": {"codebook_size": 8},
    },
    "BambaConfig": {**_STATES, "attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 98}},
    "CohereCompassConfig": {
        "text_config": {"rope_parameters": {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS}}
    },
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _SECTIONS, "sliding_attention": _SECTIONS}},
    "Cosmos3EdgeConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekOcr2Config": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DoryConfig": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "num_experts_per_tok": 2},
    "Emu3Config": {"vocabulary_map": {"<image>": 98, "<|extra_200|>": 97}},
    "Ernie4_5_VLMoeConfig": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "FalconH1Config": {**_STATES, "mamba_d_ssm": 64},
    "Florence2Config": {
        "vision_config": {
            "depths": [1] * 4,
            "embed_dim": [32] * 4,
            "num_heads": [4] * 4,
            "num_groups": [4] * 4,
            "projection_dim": 32,
        }
    },
    "FunAsrNanoConfig": {"adaptor_config": {"intermediate_size": 8}},
    "Gemma3nTextConfig": {**_SHARED, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4},
    "Gemma4TextConfig": _GEMMA4,
    "Gemma4Config": {"text_config": _GEMMA4},
    "Gemma4UnifiedTextConfig": _GEMMA4,
    "Gemma4UnifiedConfig": {"text_config": _GEMMA4},
    "Glm4vConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "Glm46VConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "Glm4vMoeConfig": {"text_config": {"head_dim": 16, "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 0.5}}},
    "GlmImageConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "GlmOcrConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[-1, 1]],
        "spatial_target_layers": [1],
        "downsample_rate": "4/8",
        "vision_config": {"hidden_size": 64},
    },
    "Dots3NoteConfig": {"vision_config": {"num_hidden_layers": 42}, "text_config": _DOTS3},
    "Dots3NoteTextConfig": _DOTS3,
    "GraniteMoeHybridConfig": {**_STATES, "layer_types": ["linear_attention", "full_attention"]},
    "GraniteSpeechConfig": {"encoder_config": {"context_size": 16}},
    "GraniteSpeechPlusConfig": {"encoder_config": {"context_size": 16}},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "HunYuanVLConfig": {"text_config": {"head_dim": 8, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}}},
    "HYV4VLConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "Lfm2VlConfig": {"text_config": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "MiniMaxM3VLConfig": {"text_config": _MINIMAX_M3},
    "MiniMaxM3VLTextConfig": _MINIMAX_M3,
    "MinistralConfig": {"head_dim": 8},
    "Molmo2Config": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MuseSparkConfig": {"audio_config": {"hidden_sizes": [32] * 4, "depths": [1] * 4}},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "MusicgenConfig": {"decoder": {"num_codebooks": 1}},
    "MusicgenMelodyConfig": {"decoder": {"num_codebooks": 1}},
    "NemotronConfig": {"num_key_value_heads": 2},
    "PaddleOCRVLConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "Qwen2Config": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3Config": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen2VLConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "Qwen2_5_VLConfig": {"text_config": {"rope_parameters": _SECTIONS}},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 90, "text_config": {"rope_parameters": _SECTIONS}},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 90},
    "Qwen2_5OmniTalkerConfig": {"rope_parameters": _SECTIONS},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 16}},
    "Qwen3OmniMoeConfig": {
        "talker_config": {"spatial_merge_size": 2, "text_config": {"shared_expert_intermediate_size": 16}}
    },
    "Step3p7Config": {"text_config": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}},
    "ReformerConfig": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": _ZAMBA,
    "Zamba2Config": {**_ZAMBA, "n_mamba_heads": 8},
}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 200,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}
OVERRIDES["Qwen4ExpTextConfig"] = _QWEN4
OVERRIDES["Qwen4ExpConfig"] = {"text_config": _QWEN4}

# Functions that make the whole configuration, by the class of the model.
CONFIGURATIONS: dict[str, Any] = {}


def random(*shape: int) -> Any:
    """The same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


# Models that no call of the settings fits, and why.
_PARTS = "its generate method calls that of its parts"
_ENCODED = "it takes an image with every call; the language model in it is a family of its own"
NOT_RUN = {
    "BarkModel": _PARTS,
    "BlipForConditionalGeneration": f"{_PARTS}: BlipTextLMHeadModel",
    "BlipForQuestionAnswering": f"{_PARTS}: BlipTextLMHeadModel",
    "Blip2ForConditionalGeneration": _ENCODED,
    "ClvpModelForConditionalGeneration": f"{_PARTS}: ClvpForCausalLM",
    "CsmDepthDecoderForCausalLM": "it decodes the codebooks of a single audio frame",
    "Gemma4AssistantForCausalLM": "it reads the keys of the model that it assists",
    "Gemma4UnifiedAssistantForCausalLM": "it reads the keys of the model that it assists",
    "InstructBlipForConditionalGeneration": _ENCODED,
    "InstructBlipVideoForConditionalGeneration": _ENCODED,
    "Kosmos2ForConditionalGeneration": f"{_PARTS}: Kosmos2TextForCausalLM",
    "Llama4ForConditionalGeneration": "its forward fails without an image; it contains Llama4ForCausalLM",
    "MoshiDepthDecoder": "it decodes the codebooks of a single audio frame",
    "MoshiForConditionalGeneration": f"{_PARTS}: MoshiForCausalLM, MoshiDepthDecoder",
    "Qwen2_5OmniForConditionalGeneration": f"{_PARTS}: the thinker and the talker",
    "Qwen2_5OmniTalkerForConditionalGeneration": "it takes hidden states of the thinker",
    "Qwen3OmniMoeForConditionalGeneration": f"{_PARTS}: the thinker and the talker",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": "it decodes the codebooks of a single audio frame",
    "Qwen3OmniMoeTalkerForConditionalGeneration": "it takes hidden states of the thinker",
    "RagTokenForGeneration": "it takes documents that were retrieved; the generator in it is a family of its own",
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": "it computes all units at once",
    "VoxtralRealtimeForConditionalGeneration": "it takes a piece of speech with every token",
}

# Models whose forward takes all tokens each time, and leaves out those that the cache holds.
WHOLE = {"CpmAntForCausalLM", "FlaubertWithLMHeadModel", "XLMWithLMHeadModel"}

# What is given beside tokens: with each call, or with the first one alone, by the class of the model. A function makes
# it of the tokens.
_BATCH = 3
ALWAYS: dict[str, Any] = {
    "IdeficsForVisionText2Text": lambda config: {
        "image_encoder_embeddings": random(_BATCH, 1, 5, 32),
        "image_attention_mask": lambda tokens: torch.ones(*tokens.shape, 1),
    },
    "MllamaForCausalLM": lambda config: {"cross_attention_states": random(_BATCH, 5, 32)},
}
FIRST: dict[str, Any] = {}


# Tokens that stand for several: the number of channels, by the class of the model.
CHANNELS: dict[str, Any] = {
    "DiaForConditionalGeneration": lambda config: config.decoder_config.num_channels,
    "CsmForConditionalGeneration": lambda config: config.num_codebooks,
    "KyutaiSpeechToTextForConditionalGeneration": lambda config: config.num_codebooks + 1,
}


def token_shape(model: Any, rows: int, tokens: int) -> tuple[int, ...]:
    """The shape of so many tokens."""
    channels = CHANNELS.get(type(model).__name__)
    return (rows, tokens, channels(model.config)) if channels else (rows, tokens)
