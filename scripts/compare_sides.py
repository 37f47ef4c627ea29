"""The two implementations that scripts/compare_torch.py compares."""

from __future__ import annotations

from typing import Any

import numpy as np
from compare_numbers import CompareError, Side

from jaxpaged.config import EngineConfig
from jaxpaged.weights.reader import open_reader
from jaxpaged.weights.source import ModelSource

MAX_SEQS = 8
CHUNK = 64
"""Prompt tokens in a step, so that longer prompts are computed in several."""


class Torch:
    """transformers in float32 with eager attention."""

    def __init__(self, source: ModelSource) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.model = self._load(source).eval()
        # Checkpoints bring sampling settings of their own, such as penalties.
        self.model.generation_config = transformers.GenerationConfig()
        self.states: list[Any] = []
        self._record()

    def _load(self, source: ModelSource) -> Any:
        import torch
        import transformers

        how = {
            "dtype": torch.float32,
            "attn_implementation": "eager",
            "output_loading_info": True,
        }
        if source.kind == "hf":  # its own reader is the better witness
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                str(source.path), local_files_only=True, **how
            )
        else:
            fields = dict(source.hf_config)
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            reader = open_reader(source)
            weights = {
                name: torch.from_numpy(np.array(reader.read(name), np.float32))
                for name in reader.names()
            }
            reader.close()
            kind = getattr(transformers, source.hf_config["architectures"][0])
            model, info = kind.from_pretrained(None, config=config, state_dict=weights, **how)
        wrong = [*info["missing_keys"], *info["mismatched_keys"]]
        if wrong:
            raise CompareError(
                f"{source.path}: transformers misses {len(wrong)} weights, such as {wrong[0]}."
            )
        return model

    def _record(self) -> None:
        """Keep what enters the first layer and leaves each: output_hidden_states has the last one
        after the final norm in most models, and these all before it."""
        import torch

        count = self.model.config.num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList))
        layers = next((found for found in lists if len(found) == count), None)
        if layers is None:
            raise CompareError(f"{type(self.model).__name__} has no list of {count} layers.")

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states = [args[0] if args else kwargs["hidden_states"]]

        def after(_: Any, args: Any, output: Any) -> None:
            self.states.append(output[0] if isinstance(output, tuple) else output)

        layers[0].register_forward_pre_hook(before, with_kwargs=True)
        for layer in layers:
            layer.register_forward_hook(after)

    def run(self, ids: list[int], count: int) -> Side:
        import torch

        def forward(some: list[int]) -> Any:
            return self.model(torch.tensor([some]), use_cache=False).logits[0]

        with torch.inference_mode():
            # Rotary frequencies that follow the length are kept from longer sequences before.
            forward(ids[:1])
            logits = np.asarray(forward(ids).numpy(), np.float32)
            hidden = [np.asarray(s.reshape(len(ids), -1).numpy(), np.float32) for s in self.states]
            if count == 0:
                return Side(logits, hidden, [])
            forward(ids[:1])
            made = self.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
                do_sample=False,
                max_new_tokens=count,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = made.sequences[0, len(ids) :].tolist()
        generated = np.asarray(torch.cat(made.logits).numpy(), np.float32)
        return Side(logits, hidden, tokens, generated)


def our_side(
    config: EngineConfig, source: ModelSource, prompts: list[list[int]], count: int
) -> list[Side]:
    """Logits and hidden states from one pass a prompt, tokens from the engine."""
    from jaxpaged import LLM, SamplingParams
    from jaxpaged.blueprint import use_compile_cache
    from jaxpaged.device.inspect import make_forward
    from jaxpaged.device.kv_cache import KVLayout
    from jaxpaged.device.model_loader import load_model

    use_compile_cache(config)
    loaded = load_model(config, source)
    forward = make_forward(loaded, block_size=config.block_size)
    passes = [forward(ids) for ids in prompts]
    groups = len(KVLayout.of(loaded.config).windows)
    del forward, loaded  # the engine loads its own
    tokens: list[list[int]] = [[] for _ in prompts]
    if count:
        length = max(map(len, prompts)) + count
        blocks = min(MAX_SEQS, len(prompts)) * groups * -(-length // config.block_size)
        settings = {
            **{key: getattr(config, key) for key in ("model", "dtype", "tensor_parallel_size")},
            "block_size": config.block_size,
            "skip_tokenizer_init": True,
            "max_model_len": length,
            "num_gpu_blocks_override": blocks + blocks // 50 + 2,  # the watermark too
            "max_num_seqs": MAX_SEQS,
            "max_num_batched_tokens": CHUNK,
            "decode_buckets": (MAX_SEQS,),
            "prefill_buckets": (CHUNK,),
            "enforce_eager": True,
            "disable_progress": True,
        }
        greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        with LLM(config=EngineConfig(**settings)) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
    return [Side(p.logits, p.hidden, t) for p, t in zip(passes, tokens, strict=True)]
