"""Answer a few chat prompts at once with the embedded model; scripts/quickstart.sh runs this.

    python scripts/quickstart.py [prompt ...]

The model is small (135 million parameters): it shows how the engine works, not what is true.
"""

from __future__ import annotations

import logging
import sys
import time

from jaxpaged import LLM, SamplingParams
from jaxpaged.batch import summary
from jaxpaged.errors import JaxpagedError

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "Name three uses of a paper clip.",
    "Give me a short recipe for pancakes.",
    "Translate 'good morning' into Spanish.",
)


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("jaxpaged").setLevel(logging.INFO)
    prompts = sys.argv[1:] or list(PROMPTS)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    # Small limits: fewer programs to compile, so the first answer comes sooner.
    with LLM(max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=256) as llm:
        start = time.perf_counter()
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=96))
        seconds = time.perf_counter() - start
        stats = llm.stats()
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {prompt}\n{output.outputs[0].text.strip()}")
    print(f"\n{summary(outputs, stats, seconds)}")


if __name__ == "__main__":
    try:
        main()
    except JaxpagedError as error:
        sys.exit(f"error: {error}")
