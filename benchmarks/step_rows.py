# ruff: noqa: E501
"""Training steps to measure: models of five families, each run in several ways."""

from __future__ import annotations

from typing import Any

_SEQUENCE, _CAUSAL = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
_SEQ2SEQ, _IMAGE = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"
_QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
# Name -> (class, configuration or factory, task, vocabulary)
MODELS: dict[str, tuple[str | None, Any, str, int]] = {
    "bert-base": (_SEQUENCE, {"model_type": "bert"}, "sequence-classification", 30522),
    "distilbert": (_SEQUENCE, {"model_type": "distilbert"}, "sequence-classification", 30522),
    "electra-small": (_SEQUENCE, {"model_type": "electra"}, "sequence-classification", 30522),
    "deberta-v2": (
        _SEQUENCE,
        {"model_type": "deberta-v2", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"intermediate_size": 3072, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
        | {"position_buckets": 256, "vocab_size": 30522},
        "sequence-classification",
        30522,
    ),
    "modernbert": (_SEQUENCE, {"model_type": "modernbert"}, "sequence-classification", 50000),
    "albert": (_SEQUENCE, {"model_type": "albert", "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}, "sequence-classification", 30000),
    "gpt2": (_CAUSAL, {"model_type": "gpt2"}, "causal-lm", 50257),
    "opt-125m": (_CAUSAL, {"model_type": "opt"}, "causal-lm", 50272),
    "qwen2-0.5b": (_CAUSAL, {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 4096} | _QWEN, "causal-lm", 151936),
    "llama-1b-lora": (_CAUSAL, {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 4096} | _LLAMA, "causal-lm", 128256),
    "t5-small": (_SEQ2SEQ, {"model_type": "t5", "decoder_start_token_id": 0}, "seq2seq-lm", 32128),
    "bart-base": (_SEQ2SEQ, {"model_type": "bart", "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12}, "seq2seq-lm", 50265),
    "vit-base": (_IMAGE, {"model_type": "vit"}, "image-classification", 0),
    "swin-tiny": (_IMAGE, {"model_type": "swin"}, "image-classification", 0),
    "resnet50": (_IMAGE, {"model_type": "resnet"}, "image-classification", 0),
    "convnext-tiny": (_IMAGE, {"model_type": "convnext"}, "image-classification", 0),
    "mobilenet-v2": (_IMAGE, {"model_type": "mobilenet_v2"}, "image-classification", 0),
    "efficientnet": (_IMAGE, {"model_type": "efficientnet"}, "image-classification", 0),
    "lstm": (None, "step_models.py:LSTM", "sequence-classification", 30522),
    "gru": (None, "step_models.py:GRU", "sequence-classification", 30522),
    "cnn": (None, "step_models.py:CNN", "image-classification", 0),
}  # fmt: skip
_LORA = {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_LORA |= {"base_dtype": "float16", "adapter_dtype": "float32"}
_FUSED, _FOREACH, _SGD, _ADAFACTOR = "adamw-fused", "adamw-foreach", "sgd-momentum", "adafactor"
_GROWING = "expandable_segments:True"


def _row(number: int, model: str, *how: Any) -> dict[str, Any]:
    micro_batch, length, precision, layers, optimizer, *rest = how
    accumulation, attention = (*rest, *(1, "memory-efficient")[len(rest) :])
    auto, build, task, vocabulary = MODELS[model]
    return {
        "id": f"{number:03d}",
        "model": model,
        "build": {"factory": build} if auto is None else {"auto": auto, "config": build},
        "lora": _LORA if model.endswith("lora") else None,
        "task": task,
        "vocab_size": vocabulary,
        "micro_batch": micro_batch,
        "length": length,
        "precision": precision,
        "checkpointed_layers": layers,
        "optimizer": optimizer,
        "accumulation": accumulation,
        "clip_grad_norm": 1.0 if optimizer == _FUSED else None,
        "steps": 4,
        "attention": attention,
        "allocator": "",
    }


_HOW: list[tuple[Any, ...]] = [
    ("bert-base", 8, 128, "fp32", 0, _FOREACH),
    ("bert-base", 16, 128, "fp16", 0, _FUSED),
    ("bert-base", 64, 128, "fp32", "all", _FOREACH),
    ("bert-base", 32, 128, "fp16", "all", _SGD),
    ("bert-base", 16, 384, "fp16", 0, _FUSED, 2, "default"),
    ("resnet50", 8, 224, "fp32", 0, _SGD),
    ("resnet50", 64, 224, "fp32", 0, _SGD),
    ("resnet50", 64, 224, "fp16", 0, _SGD),
    ("lstm", 32, 128, "fp32", 0, _FUSED),
    ("lstm", 64, 200, "fp16", 0, _FUSED),
    ("gru", 32, 128, "fp32", 0, _FOREACH),
    ("cnn", 32, 64, "fp32", 0, _SGD),
    ("cnn", 64, 128, "fp16", 0, _FUSED),
    ("gpt2", 1, 512, "fp16", "all", _FOREACH),
    ("gpt2", 4, 512, "fp32", 0, _FUSED),
    ("t5-small", 8, 256, "fp32", 0, _FUSED),
    ("t5-small", 32, 128, "fp32", 0, _ADAFACTOR),
    ("t5-small", 8, 256, "bf16", 0, _FUSED),
    ("vit-base", 32, 224, "fp16", 0, _FUSED),
    ("distilbert", 64, 128, "fp32", 0, _FOREACH),
    ("qwen2-0.5b", 1, 512, "fp32", "all", _FOREACH),
    ("qwen2-0.5b", 4, 512, "fp16", 0, _FOREACH),
    ("llama-1b-lora", 4, 512, "fp16", "all", _FOREACH),
    ("llama-1b-lora", 4, 512, "fp16", 0, _FUSED, 1, "default"),
    ("bart-base", 8, 256, "fp16", 0, _FUSED),
    ("convnext-tiny", 16, 224, "fp32", 0, _FUSED),
    ("convnext-tiny", 32, 224, "fp16", 0, _FUSED),
    ("mobilenet-v2", 32, 224, "fp32", 0, _SGD),
    ("efficientnet", 16, 224, "fp16", 0, _FUSED),
    ("swin-tiny", 16, 224, "fp16", 0, _FUSED),
    ("electra-small", 32, 128, "fp16", 0, _FUSED),
    ("albert", 16, 256, "fp32", 0, _FUSED),
    ("deberta-v2", 8, 256, "fp16", 0, _FUSED),
    ("modernbert", 8, 512, "fp16", 0, _FUSED),
    ("opt-125m", 4, 512, "fp16", "all", _FUSED, 2),
]
ROWS = [_row(number, *how) for number, how in enumerate(_HOW)]
