"""Beam search as transformers does it on PyTorch. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tests.beams import FACTORS, ROWS, Case, Floats

Found = tuple[list[int], float]
"""Generated tokens, the ending one included, and score."""


class TableConfig(PreTrainedConfig):
    model_type = "beam_table"


class TableModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The table of a case, in a form that `generate` takes."""

    config_class = TableConfig

    def __init__(self, case: Case) -> None:
        super().__init__(TableConfig(vocab_size=case.vocab))
        self.unused = torch.nn.Parameter(torch.zeros(1))  # its device and dtype are asked for
        self.table = torch.from_numpy(case.table())

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> CausalLMOutput:
        last = input_ids.flip(1)[:, : len(FACTORS)]
        places = (last * torch.tensor(FACTORS[: last.shape[1]])).sum(1) % ROWS
        return CausalLMOutput(logits=self.table[places][:, None])

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        return {"input_ids": input_ids}

    def logprobs(self) -> Floats:
        """[ROWS, vocab], as `generate` computes them."""
        values: Floats = torch.log_softmax(self.table, dim=-1).numpy()
        return values


def beams(
    model: Any,
    prompt: list[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float,
    early_stopping: bool | str,
    eos: Sequence[int],
    use_cache: bool = True,
) -> list[Found]:
    """All hypotheses of `generate`, best first."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = list(eos) or None
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            use_cache=use_cache,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_scores=True,
        )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    return [
        (row[len(prompt) : len(prompt) + length].tolist(), float(score))
        for row, score, length in zip(out.sequences, out.sequences_scores, lengths, strict=True)
    ]


def table_beams(case: Case, model: TableModel | None = None) -> list[Found]:
    return beams(
        model or TableModel(case),
        case.prompt,
        width=case.width,
        max_tokens=case.max_tokens,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        eos=case.eos,
        use_cache=False,
    )


def predictions(model: Any, sequences: list[list[int]]) -> Floats:
    """Log-probabilities [sequences, vocabulary] after sequences of one length."""
    with torch.no_grad():
        logits = model(torch.tensor(sequences), use_cache=False).logits[:, -1].float()
    return np.asarray(torch.log_softmax(logits, dim=-1).numpy(), np.float32)
