"""Answers to a few prompts, under a budget that leaves part of the weights on disk.

.venv/bin/python examples/generate.py
"""

from shadowlane import LLM, SamplingParams
from shadowlane.models import resolve_model

PROMPTS = ["The capital of France is", "Water boils at", "The opposite of cold is"]


def main() -> None:
    params = SamplingParams(max_tokens=16)
    with LLM(resolve_model("smollm2"), ram="64MiB") as llm:
        for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            print(f"{prompt}{completion.text}  [{completion.finish_reason}]")
        stats = llm.stats()
    print(f"{stats['decode_tok_per_s']:.1f} tok/s, bottleneck {stats['bottleneck']}")


if __name__ == "__main__":
    main()
