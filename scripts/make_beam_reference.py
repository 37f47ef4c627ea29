"""Make the results of beam search that tests compare with.

    python -m scripts.make_beam_reference

Run it from the repository root, with torch installed and the embedded model fetched. It lets
transformers search on PyTorch, in float32, and writes tests/data/beam_reference.json: hypotheses
and scores for tables of random logits (tests/beams.py), for some of the tiny checkpoints of
tests/zoo, and for the embedded model. Two correct implementations may part where two sums nearly
tie, so a search is left out if a little noise in the log-probabilities changes its hypotheses.
It takes about three minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.startup import eos_token_ids
from jaxpaged.text.tokenizer import load_tokenizer
from jaxpaged.weights.source import resolve_source
from tests.beam_oracle import Found, TableModel, beams, predictions, table_beams
from tests.beams import STORED, Case, Floats, Predict, places, run_search
from tests.e2e import oracle
from tests.zoo.case import all_cases, write_case

NOISE = 1e-4
"""Of the log-probabilities; float32 rounding moves them by a tenth of it at most."""
TRIALS = 3
TABLES = 60
ZOO = ("llama-theta", "gemma2", "opt", "mixtral", "deepseek-v3-one-group")
WIDTHS = (2, 4, 8, 12, 33)
PENALTIES = (1.0, 0.0, 2.0, -1.0, 0.5)
STOPPING: tuple[bool | str, ...] = (False, True, "never")
EOS = 1
"""Of the tiny checkpoints."""
QUESTIONS = (
    "What is the capital of France? Answer with one word.",
    "Is a tomato a fruit? Answer yes or no.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Write a haiku about the sea.",
    "Name an animal that begins with the letter Q.",
    "How many legs does a spider have?",
    "Who painted the Mona Lisa?",
    "Give an antonym of 'generous'.",
    "Say hello.",
)
CHATS = 6


def clear(predict: Predict, params: BeamSearchParams, prompt: list[int], eos: list[int]) -> bool:
    """True if the hypotheses stay what they are under noise."""
    rng = np.random.default_rng(0)
    results = []
    predict = remembering(predict)
    for scale in (0.0, *[NOISE] * TRIALS):

        def noisy(rows: list[list[int]], scale: float = scale) -> Floats:
            exact = predict(rows)
            return exact + rng.normal(0, scale, exact.shape).astype(np.float32)

        found = run_search(params, prompt, noisy, eos=eos)
        results.append([h.token_ids for h in found])
    return all(result == results[0] for result in results)


def remembering(predict: Predict) -> Predict:
    """Most searches under noise meet the same beams."""
    known: dict[tuple[int, ...], Floats] = {}

    def look_up(rows: list[list[int]]) -> Floats:
        new = [row for row in rows if tuple(row) not in known]
        if new:
            known.update(zip(map(tuple, new), predict(new), strict=True))
        return np.stack([known[tuple(row)] for row in rows])

    return look_up


def tables() -> Iterator[dict[str, Any]]:
    for seed in range(10 * TABLES):
        rng = np.random.default_rng(seed)
        eos = rng.choice(48, rng.integers(0, 4), replace=False).tolist()
        case = Case(
            seed=seed,
            vocab=48,
            width=WIDTHS[seed % 4],
            max_tokens=int(rng.integers(1, 25)),
            length_penalty=PENALTIES[int(rng.integers(5))],
            early_stopping=STOPPING[int(rng.integers(3))],
            eos=tuple(eos),
            endings=float(rng.integers(1, 7)),
            prompt_len=int(rng.integers(1, 6)),
        )
        model = TableModel(case)
        logprobs = model.logprobs()
        if not clear(lambda rows, a=logprobs: a[places(rows)], case.params, case.prompt, eos):  # type: ignore[misc]
            continue
        yield {"case": dataclasses.asdict(case), **told(table_beams(case, model))}


def told(found: list[Found]) -> dict[str, Any]:
    return {
        "token_ids": [tokens for tokens, _ in found],
        "scores": [round(score, 6) for _, score in found],
    }


def searched(name: str, model: Any, prompt: list[int], eos: list[int], **asked: Any) -> Any:
    """An entry of the file, or None if the result hangs by a thread."""
    params = BeamSearchParams(**asked)
    ending = sorted({*eos, *(params.stop_token_ids or ())})
    if not clear(lambda rows: predictions(model, rows), params, prompt, ending):
        return None
    found = beams(
        model,
        prompt,
        width=params.beam_width,
        max_tokens=asked["max_tokens"],
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos=ending,
    )
    return {"model": name, "prompt": prompt, "params": asked, **told(found)}


def zoo(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Each width, with the penalties and ways of stopping in turn."""
    (case,) = (case for case in all_cases() if case.name == name)
    model = oracle.from_folder(write_case(folder, case))
    settings = zip(cycle(PENALTIES), cycle(STOPPING), strict=False)
    for width, (penalty, stopping) in zip(WIDTHS * 2, settings, strict=False):
        for trial in range(40):
            rng = np.random.default_rng((width, trial))
            prompt = rng.integers(3, 512, (1, 5, 17, 40)[(width + trial) % 4]).tolist()
            asked = {
                "beam_width": width,
                "max_tokens": (20, 6)[trial % 2],
                "length_penalty": penalty,
                "early_stopping": stopping,
            }
            # Ids that beams do meet, so that some end early; never so many that few go on.
            plain = run_search(
                BeamSearchParams(**asked), prompt, lambda rows: predictions(model, rows), eos=[]
            )
            met = sorted({t for h in plain for t in h.token_ids[2:]})
            stops = rng.choice(met, min(width - 1, 4, len(met)), replace=False).tolist()
            entry = searched(name, model, prompt, [EOS], **asked, stop_token_ids=stops)
            if entry is not None and not {EOS} & set(stops):
                yield entry
                print(f"{name}: width {width}, trial {trial}", flush=True)
                break
        else:
            raise SystemExit(f"error: no clear search of width {width} with {name}.")


def chats() -> Iterator[dict[str, Any]]:
    source = resolve_source(EngineConfig())
    tokenizer = load_tokenizer(source, EngineConfig())
    model = oracle.from_gguf(source.path)
    eos = list(eos_token_ids(source, tokenizer, model.config.vocab_size))
    turns = zip(QUESTIONS, cycle((4, 8, 2, 12)), cycle(STOPPING), strict=False)
    for question, width, stopping in turns:
        prompt = tokenizer.encode_chat(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        asked = {"beam_width": width, "max_tokens": 24, "early_stopping": stopping}
        entry = searched("smollm2", model, prompt, eos, **asked)
        if entry is not None:
            yield entry
            print(f"smollm2: {question}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    networks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="jaxpaged-reference-") as folder:
        for name in ZOO:
            networks += zoo(name, Path(folder) / name)
    networks += islice(chats(), CHATS)
    made_by = {"torch": torch.__version__, "transformers": transformers.__version__}
    parts = {"tables": list(islice(tables(), TABLES)), "networks": networks}
    lines = [f'"made_by": {json.dumps(made_by)}']
    for name, entries in parts.items():
        body = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        lines.append(f'"{name}": [\n{body}\n]')
    STORED.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    counts = ", ".join(f"{len(entries)} {name}" for name, entries in parts.items())
    print(f"{STORED}: {counts}, {STORED.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
